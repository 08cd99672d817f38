"""What an experiment will take, from a rehearsal of its rounds.

Server loop, sampling, mixing, records and checkpoints are those of a run, so client steps and bytes
of any algorithm are what it counts itself. Clients train a few steps of each kind of block only;
the time of all others follows from these.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from flray.columns import (
    BYTES_DOWN,
    BYTES_UP,
    CLIENT_STEPS,
    SECONDS,
    SECONDS_EVALUATE,
    SECONDS_PROBE,
    SECONDS_TRAIN,
)
from flray.config.experiment import Experiment
from flray.errors import ExperimentError
from flray.execution.cohort import cohort_size
from flray.execution.executor import Inline
from flray.forecast.sampling import Rate, Sampling
from flray.measures.settings import Evaluation
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import assemble, build_federation, open_directory, start_executor
from flray.runs.preparing import Prepared, load_of, prepare
from flray.server.evaluation import RoundRow

REHEARSED_S = 10.0  # Time for rounds without training; those left are taken to be like the last
ROUND_TRIP_S = 0.02  # Time that a block on a client actor takes beside its training


@dataclass(frozen=True)
class Forecast:
    """What a run will take: totals over all rounds, and seconds by what takes them.

    Client steps and bytes are exact if all rounds were rehearsed and clusters do not depend on
    training; seconds are predictions.

    >>> seconds = {"start": 1.0, "training": 5.0, "evaluation": 2.0}
    >>> run = Forecast(rounds=10, client_steps=500, bytes_down=80, bytes_up=40, processes=1,
    ...                memory_per_process=10**9, seconds=seconds, rates={}, is_rehearsed=True)
    >>> run.total_s, run.binding
    (8.0, 'training')
    """

    rounds: int
    client_steps: int
    bytes_down: int
    bytes_up: int
    memory_per_process: int  # Bytes per training process: data, models of a block, libraries
    processes: int  # Processes that train at a time
    seconds: Mapping[str, float]  # by start, training, evaluation, server and transfer
    rates: Mapping[str, Rate]  # by kind of block
    is_rehearsed: bool  # True if all rounds were; later ones are else taken to be like those

    @property
    def total_s(self) -> float:
        """Seconds of the whole run, as if what takes them did not overlap."""
        return sum(self.seconds.values())

    @property
    def binding(self) -> str:
        """What takes most of the time: a key of `seconds`, for which there is advice."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def forecast(
    experiment: Experiment,
    processes: int | None = None,
    rates: Mapping[str, Rate] | None = None,
    budget_s: float = REHEARSED_S,
) -> Forecast:
    """Rehearse an experiment in this process and compute what the run will take.

    Writes to a temporary folder only. Takes about `budget_s`, the time to load the data and, for
    each kind of block, about a second of training.

    Args:
        processes: Client actors that train at a time; None: as many as the experiment asks for.
        rates: Rates of another machine by kind of block; nothing is measured here then.
        budget_s: Seconds of rounds after which the rehearsal ends.

    Raises:
        ExperimentError: The run would be refused, or `rates` lack a kind of block that it has.
    """
    settings, begin = experiment.settings, perf_counter()
    planned = prepare(experiment, settings.execution.actors)
    parts = planned.in_process()
    executor = start_executor(parts)
    assert isinstance(executor, Inline)
    starting = perf_counter() - begin
    measured = executor.host.engine if rates is None else _UnknownKinds(tuple(rates))
    engine = Sampling(measured, dict(rates or {}))
    executor = replace(executor, host=replace(executor.host, engine=engine))
    rounds, num_evaluations = _rehearsed(experiment, parts, executor, budget_s)
    if processes is None:
        processes = planned.plan.num_actors if planned.plan else 1
    split = parts.payload.timeline.at(1)
    num_sampled = cohort_size(len(split.clients), settings.participation)
    blocks_per_round = max(len(engine.blocks) / len(rounds), 1.0)
    at_work = min(processes, blocks_per_round)
    seconds = {
        "start": starting,
        "training": settings.rounds / len(rounds) * sum(engine.blocks) / at_work,
        "evaluation": _last(rounds, SECONDS_EVALUATE) * num_evaluations,
        "server": _server_seconds(rounds, settings.rounds),
    }
    if planned.plan:
        seconds["transfer"] = settings.rounds * ROUND_TRIP_S * blocks_per_round / at_work
    load = load_of(parts.payload, settings.train.batch_size, num_sampled, processes)
    return Forecast(
        rounds=settings.rounds,
        client_steps=_total(rounds, f"^{CLIENT_STEPS}", settings.rounds),
        bytes_down=_total(rounds, f"^{BYTES_DOWN}_", settings.rounds),
        bytes_up=_total(rounds, f"^{BYTES_UP}_", settings.rounds),
        memory_per_process=load.of_actor(),
        processes=processes,
        seconds=seconds,
        rates=engine.rates,
        is_rehearsed=len(rounds) == settings.rounds,
    )


def _rehearsed(
    experiment: Experiment, parts: Prepared, executor: Inline, budget_s: float
) -> tuple[pd.DataFrame, int]:
    """The rows of the rounds that were rehearsed, and how many rounds the run will evaluate."""
    num_rounds, evaluation = experiment.settings.rounds, experiment.settings.evaluate
    rows: list[RoundRow] = []
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        directory = RunDirectory(Path(scratch) / "run")
        fed = build_federation(experiment, parts, executor)
        open_directory(experiment, parts, directory)
        server = replace(
            assemble(experiment, parts, fed, directory),
            evaluation=replace(evaluation, every=num_rounds, also=()),
            on_round=rows.append,
            stop=None,  # the longest that the run can take
            should_stop=lambda: len(rows) > 1 and perf_counter() - begin > budget_s,
        )
        if not server.run():  # one more round, to measure its evaluation
            replace(server, num_rounds=len(rows) + 1).run()
        clusterings = directory.clustering_rounds()
        return directory.rounds(), len(evaluated_rounds(num_rounds, evaluation, clusterings))


def evaluated_rounds(num_rounds: int, evaluation: Evaluation, clusterings: list[int]) -> set[int]:
    """Rounds that a run with these clusterings evaluates.

    >>> sorted(evaluated_rounds(10, Evaluation(every=4), [2, 3]))
    [2, 3, 4, 8, 10]
    """
    rounds, clusters_in = range(1, num_rounds + 1), set(clusterings).__contains__
    return {t for t in rounds if evaluation.is_due(t, num_rounds, clusters_in)}


def _server_seconds(rounds: pd.DataFrame, num_rounds: int) -> float:
    """Time of rounds without training, which was measured apart, and without evaluation."""
    apart = rounds.filter([SECONDS_TRAIN, SECONDS_PROBE, SECONDS_EVALUATE]).fillna(0.0)
    return _whole(rounds[SECONDS] - apart.sum(axis=1), num_rounds)


def _total(rounds: pd.DataFrame, columns: str, num_rounds: int) -> int:
    """The sum of the columns that match a regular expression, over all rounds."""
    return round(_whole(rounds.filter(regex=columns).fillna(0).sum(axis=1), num_rounds))


def _whole(values: pd.Series, num_rounds: int) -> float:
    """The sum over all rounds; those not rehearsed are like the second half of those that were."""
    later = values.iloc[len(values) // 2 :]
    return float(values.sum() + later.mean() * (num_rounds - len(values)))


def _last(rounds: pd.DataFrame, column: str) -> float:
    """The last value of a column that not every round has; 0 if none has it."""
    values = rounds[column].dropna() if column in rounds else pd.Series(dtype=float)
    return float(values.iloc[-1]) if len(values) else 0.0


@dataclass(frozen=True)
class _UnknownKinds:
    """Stands in for an engine if nothing may be measured: refuses kinds that a profile lacks."""

    known: tuple[str, ...]

    def train(self, block: Any, training: Any, gradient: Any) -> Any:  # Any: never used
        """Refuse the block; only kinds without a rate get here."""
        raise ExperimentError(
            "the profile has no blocks of this kind, it knows: " + "; ".join(self.known)
        )

"""What an experiment will take, from a rehearsal of its rounds.

Server loop, sampling, mixing, records and checkpoints are those of a run, so client steps and bytes
of any algorithm are what it counts itself; clients train a few steps of each kind of block only,
which foretell the others.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from flray.columns import (
    BYTES_DOWN,
    BYTES_UP,
    CLIENT_STEPS,
    SECONDS,
    SECONDS_EVALUATE,
    SECONDS_PROBE,
    SECONDS_TRAIN,
)
from flray.config.experiment import Experiment, parse_experiment
from flray.errors import ExperimentError
from flray.execution.executor import Inline
from flray.execution.federation import cohort_size
from flray.forecast.sampling import Rate, Sampling
from flray.measures.settings import Evaluation
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import assemble, build_federation, open_directory, start_executor
from flray.runs.preparing import load_of, prepare
from flray.server.evaluation import RoundRow

REHEARSED_S = 10.0  # of rounds without training; those left are like the last ones
ROUND_TRIP_S = 0.02  # of a block on a client actor, beside its training


@dataclass(frozen=True)
class Forecast:
    rounds: int
    client_steps: int
    bytes_down: int
    bytes_up: int
    memory_per_process: int  # bytes of a process that trains: data, models of a block, libraries
    processes: int  # that train at a time
    seconds: Mapping[str, float]  # by what takes them
    rates: Mapping[str, Rate]
    is_rehearsed: bool  # all rounds, or were later ones taken to be like those before?

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def binding(self) -> str:
        """What takes most of the time."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def forecast(
    experiment: Experiment,
    processes: int | None = None,
    rates: Mapping[str, Rate] | None = None,
    budget_s: float = REHEARSED_S,
) -> Forecast:
    """Rehearse an experiment in this process.

    Args:
        processes: client actors that train at a time; None: as many as the experiment asks for.
        rates: known from another machine; nothing is measured then.
    """
    begin = perf_counter()
    here = _in_process(experiment)
    parts = prepare(here)
    executor = start_executor(parts)
    assert isinstance(executor, Inline)
    starting = perf_counter() - begin
    engine = Sampling(executor.host.engine, dict(rates or {}))
    if rates is not None:
        engine = replace(engine, engine=_Unknown(tuple(rates)))
    executor = replace(executor, host=replace(executor.host, engine=engine))
    with tempfile.TemporaryDirectory() as scratch:
        rounds, clusterings = _rehearsed(here, executor, Path(scratch) / "run", budget_s)
    num_rounds, settings = experiment.settings.rounds, experiment.settings
    num_evaluations = len(evaluated_rounds(num_rounds, settings.evaluate, clusterings))
    scale = num_rounds / len(rounds)
    blocks_per_round = max(len(engine.blocks) / len(rounds), 1.0)
    split = parts.payload.timeline.at(1)
    if processes is None:
        on_actors = settings.execution.executor == "ray"
        processes = settings.execution.actors.number(split.num_clients) if on_actors else 1
    num_heard = cohort_size(len(split.clients), settings.participation)
    load = load_of(parts.payload, settings.train.batch_size, num_heard, processes)
    at_work = min(processes, blocks_per_round)
    # Measuring took place within training, which no run has.
    server = rounds[SECONDS] - rounds.filter([SECONDS_TRAIN, SECONDS_PROBE]).sum(axis=1)
    server -= rounds.filter([SECONDS_EVALUATE]).fillna(0.0).sum(axis=1)
    seconds = {
        "start": starting,
        "training": scale * sum(engine.blocks) / at_work,
        "evaluation": _last(rounds, SECONDS_EVALUATE) * num_evaluations,
        "server": _whole(server, num_rounds),
    }
    if settings.execution.executor == "ray":
        seconds["transfer"] = num_rounds * ROUND_TRIP_S * blocks_per_round / at_work
    return Forecast(
        rounds=num_rounds,
        client_steps=round(_whole(_columns(rounds, CLIENT_STEPS), num_rounds)),
        bytes_down=round(_whole(_columns(rounds, f"{BYTES_DOWN}_"), num_rounds)),
        bytes_up=round(_whole(_columns(rounds, f"{BYTES_UP}_"), num_rounds)),
        memory_per_process=load.of_actor(),
        processes=processes,
        seconds=seconds,
        rates=engine.rates,
        is_rehearsed=len(rounds) == num_rounds,
    )


def _in_process(experiment: Experiment) -> Experiment:
    """The experiment with the blocks and the kind of device it would have on its actors."""
    asked = experiment.settings.execution
    host = prepare(experiment, asked.actors).payload.settings
    chosen = {"executor": "inline", "block": host.num_slots}
    if asked.executor == "ray":
        chosen["device"] = host.device if torch.cuda.is_available() else "cpu"
    execution = {**experiment.plain["execution"], **chosen}
    return parse_experiment({**experiment.plain, "execution": execution})


def _rehearsed(
    experiment: Experiment, executor: Inline, path: Path, budget_s: float
) -> tuple[pd.DataFrame, list[int]]:
    """The rows of the rounds that were rehearsed, and the rounds after which it clustered."""
    directory = RunDirectory(path)
    parts = prepare(experiment)
    fed = build_federation(experiment, parts, executor)
    open_directory(experiment, parts, directory)
    num_rounds = experiment.settings.rounds
    rarely = replace(experiment.settings.evaluate, every=num_rounds, also=())
    rows: list[RoundRow] = []
    begin = perf_counter()
    server = replace(
        assemble(experiment, parts, fed, directory),
        evaluation=rarely,
        on_round=rows.append,
        should_stop=lambda: len(rows) > 1 and perf_counter() - begin > budget_s,
    )
    if not server.run():  # one more round, to measure its evaluation
        replace(server, num_rounds=len(rows) + 1).run()
    return directory.rounds(), directory.clustering_rounds()


def evaluated_rounds(num_rounds: int, evaluation: Evaluation, clusterings: list[int]) -> set[int]:
    """Rounds that a run with these clusterings evaluates.

    >>> sorted(evaluated_rounds(10, Evaluation(every=4), [2, 3]))
    [2, 3, 4, 8, 10]
    """
    rounds, clusters_in = range(1, num_rounds + 1), set(clusterings).__contains__
    return {t for t in rounds if evaluation.is_due(t, num_rounds, clusters_in)}


def _columns(rounds: pd.DataFrame, prefix: str) -> pd.Series:
    names = [name for name in rounds.columns if name.startswith(prefix)]
    return rounds[names].fillna(0).sum(axis=1)


def _whole(each: pd.Series, num_rounds: int) -> float:
    """The sum over all rounds; those not rehearsed are like the second half of those that were."""
    later = each.iloc[len(each) // 2 :]
    return float(each.sum() + later.mean() * (num_rounds - len(each)))


def _last(rounds: pd.DataFrame, column: str) -> float:
    found = rounds[column].dropna() if column in rounds else pd.Series(dtype=float)
    return float(found.iloc[-1]) if len(found) else 0.0


@dataclass(frozen=True)
class _Unknown:
    """In the place of an engine where nothing may be measured."""

    known: tuple[str, ...]

    def train(self, block: Any, training: Any, gradient: Any) -> Any:  # Any: never used
        raise ExperimentError(
            "the profile has no blocks of this kind, it knows: " + "; ".join(self.known)
        )

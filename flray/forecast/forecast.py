"""What an experiment will take, from a rehearsal of its rounds.

Server loop, sampling, mixing, records and checkpoints are those of a run, so client steps and bytes
of any algorithm are what it counts itself. Clients train a few steps of each kind of block only;
the time of all others follows from these.
"""

import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from flray.clustering.encoder import encoders_of, with_encoders
from flray.columns import (
    BYTES_DOWN,
    BYTES_UP,
    CLIENT_STEPS,
    FINE_TUNING_STEPS,
    ROUND,
    SECONDS,
    SECONDS_EVALUATE,
    SECONDS_PROBE,
    SECONDS_TRAIN,
)
from flray.config.experiment import Experiment
from flray.errors import ExperimentError
from flray.execution.cohort import cohort_size
from flray.execution.executor import Inline
from flray.forecast.clusters import with_assumed_clusters
from flray.forecast.encoders import EncoderTime, rate_of, times_of_encoders, untrained
from flray.forecast.evaluating import rehearsed_evaluation
from flray.forecast.sampling import Rate, Sampling, Seconds
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

    Client steps and bytes are exact if all rounds were rehearsed and no clusters were assumed;
    seconds are predictions.

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
    # Bytes per training process: in this process the most that the rehearsal had, on client actors
    # an estimate from data, models of a block and libraries
    memory_per_process: int
    processes: int  # Processes that train at a time
    seconds: Mapping[str, float]  # by start, training, evaluation, server and transfer
    rates: Mapping[str, Rate]  # by kind of block
    is_rehearsed: bool  # True if all rounds were; later ones are else taken to be like those
    clusters: int | None = None  # Clusters assumed after training; None: nothing was assumed
    encoders: Sequence[EncoderTime] = ()  # Encoders that are trained first, and then kept

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
    clusters: int | None = None,
) -> Forecast:
    """Rehearse an experiment in this process and compute what the run will take.

    Writes to a temporary folder only. Takes about `REHEARSED_S` for rounds and as long for
    evaluations of some clients, the time to load the data and, for each kind of block, about a
    second of training.

    Args:
        processes: Client actors that train at a time; None: as many as the experiment asks for.
        rates: Rates of another machine by kind of block; nothing is measured here then, but for
            encoders that it lacks.
        clusters: Clusters of equal size that a clustering finds. None: as many as the split has
            groups, where the rehearsal cannot tell because clients would be trained for it.

    Raises:
        ExperimentError: The run would be refused, `rates` lack a kind of block that it has, or
            there are fewer clients than clusters.
    """
    settings, begin = experiment.settings, perf_counter()
    _reset_peak_memory()
    planned = prepare(experiment, settings.execution.actors)
    parts = planned.in_process()
    executor = start_executor(parts)
    assert isinstance(executor, Inline)
    starting = perf_counter() - begin
    measured = executor.host.engine if rates is None else _UnknownKinds(tuple(rates))
    engine = Sampling(measured, dict(rates or {}))
    executor = replace(executor, host=replace(executor.host, engine=engine))
    rehearsal = _rehearsed(experiment, parts, executor, clusters)
    if processes is None:
        processes = planned.plan.num_actors if planned.plan else 1
    seconds = {
        "start": starting,
        "training": rehearsal.training_seconds(processes),
        "evaluation": rehearsal.evaluation_seconds(settings.evaluate),
        "server": rehearsal.server_seconds,
    }
    encoders = times_of_encoders([experiment], engine.rates)
    if encoders:
        seconds["encoder"] = sum(time.seconds for time in encoders)
    if num_steps := rehearsal.total(f"^{FINE_TUNING_STEPS}$"):
        (encoder,) = encoders_of(experiment.algorithm.build())
        seconds["fine-tuning"] = rate_of(encoder, engine.rates).of(num_steps)
    if planned.plan:
        seconds["transfer"] = ROUND_TRIP_S * rehearsal.blocks_in_turn(processes)
    split = parts.payload.timeline.at(1)
    num_sampled = cohort_size(len(split.clients), settings.participation)
    load = load_of(parts.payload, settings.train.batch_size, num_sampled, processes)
    is_alike = planned.plan is None and parts.device == planned.device and rates is None
    return Forecast(
        rounds=settings.rounds,
        client_steps=rehearsal.total(f"^{CLIENT_STEPS}$"),
        bytes_down=rehearsal.total(f"^{BYTES_DOWN}_"),
        bytes_up=rehearsal.total(f"^{BYTES_UP}_"),
        memory_per_process=_peak_memory() if is_alike else load.of_actor(),
        processes=processes,
        seconds=seconds,
        rates=engine.rates,
        is_rehearsed=len(rehearsal.rounds) == settings.rounds,
        clusters=rehearsal.assumed[-1] if rehearsal.assumed else None,
        encoders=encoders,
    )


def _rehearsed(
    experiment: Experiment, parts: Prepared, executor: Inline, clusters: int | None
) -> "Rehearsal":
    """Rehearse rounds up to the clustering at least, then evaluations."""
    num_rounds = experiment.settings.rounds
    blocks: list[list[Seconds]] = []
    engine = executor.host.engine
    assert isinstance(engine, Sampling)

    def note_blocks(_row: RoundRow) -> None:
        blocks.append(engine.blocks.copy())
        engine.blocks.clear()

    begin = perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        directory = RunDirectory(Path(scratch) / "run")
        fed = build_federation(experiment, parts, executor)
        open_directory(experiment, parts, directory)
        settings = with_encoders(experiment.settings, untrained)
        server = assemble(replace(experiment, settings=settings), parts, fed, directory)
        algorithm, assumed = with_assumed_clusters(
            with_encoders(server.algorithm, untrained),
            server.timeline.at(1),
            clusters,
            lambda: bool(blocks or engine.blocks),
        )
        server = replace(server, algorithm=algorithm)
        fewest = max(2, server.stop_after)
        rounds_only = replace(
            server,
            evaluation=_of_one_client(server.evaluation, num_rounds),
            on_round=note_blocks,
            stop=None,  # the longest that the run can take
            should_stop=lambda: len(blocks) >= fewest and perf_counter() - begin > REHEARSED_S,
        )
        rounds_only.run()
        seconds = perf_counter() - begin
        evaluation = rehearsed_evaluation(server, engine, REHEARSED_S)
        usual_s, last_s = (  # of a run of two rounds
            evaluation.of(len(fed.scored(server.evaluation.sample_size(t, num_rounds=2))))
            for t in (1, 2)
        )
        return Rehearsal(
            rounds=directory.rounds(),
            blocks=blocks,
            clusterings=directory.clustering_rounds(),
            num_rounds=num_rounds,
            seconds=seconds,
            assumed=assumed,
            usual_evaluation_s=usual_s,
            last_evaluation_s=last_s,
        )


@dataclass(frozen=True)
class Rehearsal:
    """Rounds of a run that were rehearsed, from which the others follow.

    >>> rounds = pd.DataFrame({"round": [1, 2, 3], "client_steps": [10, 90, 10]})
    >>> Rehearsal(rounds, [], clusterings=[2], num_rounds=5, seconds=1.0).total("client_steps")
    130
    """

    rounds: pd.DataFrame  # their rows
    blocks: list[list[Seconds]]  # blocks that were trained, by round
    clusterings: list[int]  # rounds in which clients were clustered
    num_rounds: int  # of the run
    seconds: float  # from building the server to the end of these rounds
    assumed: Sequence[int] = ()  # clusters assumed in clusterings
    usual_evaluation_s: float = 0.0  # seconds of an evaluation before the last one
    last_evaluation_s: float = 0.0

    def whole(self, values: pd.Series) -> float:
        """The sum over all rounds of the run.

        Those not rehearsed are like the second half of those that were, without a clustering if
        there was one only.
        """
        once = self.clusterings if len(self.clusterings) == 1 else []
        usual = values[~self.rounds[ROUND].isin(once)]
        num_left = self.num_rounds - len(values)
        later = float(usual.iloc[len(usual) // 2 :].mean()) * num_left if num_left else 0.0
        return float(values.sum()) + later

    def total(self, columns: str) -> int:
        """The sum of the columns that match a regular expression, over all rounds."""
        return round(self.whole(self.rounds.filter(regex=columns).fillna(0).sum(axis=1)))

    def _in_turn(self, processes: int) -> pd.Series:
        """Blocks that one of so many processes trains in each round, at least a part of one."""
        return pd.Series([max(1.0, len(b) / processes) if b else 0.0 for b in self.blocks])

    def blocks_in_turn(self, processes: int) -> float:
        """Blocks that a process trains one after another in the run."""
        return self.whole(self._in_turn(processes))

    def training_seconds(self, processes: int) -> float:
        """Seconds of training by so many processes, with what hosts do before and after it."""
        predicted, rehearsed = (
            pd.Series([sum(block[k] for block in blocks) for blocks in self.blocks], dtype=float)
            for k in range(2)
        )
        beside = self._phases(SECONDS_TRAIN, SECONDS_PROBE) - rehearsed
        share = self._in_turn(processes) / pd.Series([max(1, len(b)) for b in self.blocks])
        return self.whole((predicted + beside.clip(lower=0.0)) * share)

    def evaluation_seconds(self, evaluation: Evaluation) -> float:
        """Seconds of all evaluations; the last one may be of more clients than the others.

        What a rehearsed round scored itself are the models that clients trained last.
        """
        num_others = len(evaluated_rounds(self.num_rounds, evaluation, self.clusterings)) - 1
        in_rounds = self.whole(self._phases(SECONDS_EVALUATE))
        return in_rounds + self.last_evaluation_s + self.usual_evaluation_s * num_others

    @property
    def server_seconds(self) -> float:
        """Seconds of everything but training and evaluation, from building the server on."""
        apart = self._phases(SECONDS_TRAIN, SECONDS_PROBE, SECONDS_EVALUATE)
        in_rounds = self.rounds[SECONDS] - apart
        return self.whole(in_rounds) - float(in_rounds.sum()) + self.seconds - float(apart.sum())

    def _phases(self, *columns: str) -> pd.Series:
        """Seconds of these phases in each round."""
        return self.rounds.filter(columns).fillna(0.0).sum(axis=1)


def _of_one_client(evaluation: Evaluation, num_rounds: int) -> Evaluation:
    """As little evaluation as there can be: after a clustering, and in the last round."""
    few = replace(evaluation, every=num_rounds, also=(), clients=1, clients_at_end=1)
    return replace(few, fine_tune=None, on="local")


def evaluated_rounds(num_rounds: int, evaluation: Evaluation, clusterings: list[int]) -> set[int]:
    """Rounds that a run with these clusterings evaluates.

    >>> sorted(evaluated_rounds(10, Evaluation(every=4), [2, 3]))
    [2, 3, 4, 8, 10]
    """
    rounds, clusters_in = range(1, num_rounds + 1), set(clusterings).__contains__
    return {t for t in rounds if evaluation.is_due(t, num_rounds, clusters_in)}


def _reset_peak_memory() -> None:
    """Forget the memory that this process has used before, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    """The most bytes of memory that this process has used."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class _UnknownKinds:
    """Stands in for an engine if nothing may be measured: refuses kinds that a profile lacks."""

    known: tuple[str, ...]

    def train(self, block: Any, training: Any, gradient: Any) -> Any:  # Any: never used
        """Refuse the block; only kinds without a rate get here."""
        raise ExperimentError(
            "the profile has no blocks of this kind, it knows: " + "; ".join(self.known)
        )

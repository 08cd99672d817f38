"""The round loop: cohort, round, evaluation, record, checkpoint; the only one in the project."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flray.algorithms.algorithm import Algorithm, Outcome
from flray.columns import (
    COHORT_SIZE,
    PARAMS_CHANGE,
    ROUND,
    SECONDS,
)
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.execution.federation import Cohort, Federation, Meter
from flray.execution.trained import Trained
from flray.measures.measure import ClusteringContext, Measurement
from flray.measures.settings import Evaluation
from flray.models.bank import ModelBank, squared_changes
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.records.writer import RoundWriter
from flray.server.clusterings import clustering_row, record_clusterings
from flray.server.evaluation import RoundRow, evaluate, evaluation_row, score_clients
from flray.server.summary import summarise_run


def ignore(row: RoundRow) -> None:
    """Show nothing of a round."""


def never() -> bool:
    return False


DEPLOYED_AT_ONCE = 200  # clients whose models before a round are compared with those after it


class PartRecorder(Protocol):
    """Keeps the records of a run that trains a part of the clients, in the place of a summary."""

    def truncate(self, after_round: int) -> None:
        """Drop what was kept of later rounds."""
        ...

    def round(self, t: int, moved: NDArray[np.float64] | None) -> None:
        """Keep what round t gave.

        Args:
            moved: (M,) ||w_i^t - w_i^(t-1)||^2, where the round was evaluated.
        """
        ...

    def finish(self, bank: ModelBank) -> None:
        """Keep the final models, after the last round."""
        ...


@dataclass(frozen=True)
class Server:
    """Owns the loop; everything that outlives a round is in the run directory."""

    algorithm: Algorithm[Any]  # Any: the state is the algorithm's own
    fed: Federation  # as it is in round 1
    timeline: Timeline
    evaluation: Evaluation
    num_rounds: int
    directory: RunDirectory
    facts: dict[str, str | int]  # names for the summary: algorithm, dataset, ...
    device: str
    on_round: Callable[[RoundRow], None] = ignore
    is_written_first: bool = False  # each round, before `on_round` is called with its row
    should_stop: Callable[[], bool] = never
    stop_after: int | None = None  # a round after which to leave the run unfinished
    recorder: PartRecorder | None = None  # None: the run is whole and ends in its summary
    measurements: Sequence[Measurement] = ()  # what is measured of clusterings

    def run(self) -> bool:
        """Go on from the last checkpoint, or from the start; True when all rounds are done."""
        store = self.directory.store(packages_of(self.algorithm))
        found = store.load_latest(self.device)
        if found is None:
            found = self.begin(store)
        else:
            self.directory.truncate(found.round)
            if self.recorder is not None:
                self.recorder.truncate(found.round)
            self.fed.meter.counts.update(found.extra.get("counts", {}))
        last = min(self.num_rounds, self.stop_after or self.num_rounds)
        with RoundWriter(self.directory, store) as writer:
            state, done = self._rounds(found, last, writer)
        if done < self.num_rounds:
            return False
        store.check_last()
        self._finish(self.deployed(state, self.num_rounds))
        return True

    def _rounds(self, found: Checkpoint, last: int, writer: RoundWriter) -> tuple[Any, int]:
        """The rounds after a checkpoint; the state after them and the number of the last."""
        state, before = found.state, found.extra.get("row", {})
        begin, t = perf_counter(), found.round
        for t in range(found.round + 1, last + 1):
            state, row, records = self._round(state, t)
            row, before = before | row, {}
            # A row's seconds hold what the round before it spent on its checkpoint.
            row |= self.fed.meter.read_and_reset() | {SECONDS: perf_counter() - begin}
            begin = perf_counter()
            with self.fed.meter.phase("checkpoint"):
                # Branches of a sweep go on from either of the last two rounds.
                writer.add(row, records, state, at_once=t >= last - 1)
                if self.is_written_first:
                    writer.flush()
            self.on_round(row)
            if t < self.num_rounds and self.should_stop():
                break
        return state, t

    def begin(self, store: CheckpointStore) -> Checkpoint:
        """The state before round 1, saved: an init may have cost an encoder and a clustering.

        What it counted and found belongs in the row of round 1, which may be another process's.
        """
        begun = self.algorithm.init(self.fed)
        self.directory.truncate(0)
        row = begun.metrics | self._record_clusterings(0, begun)
        if self.evaluation.last_trained:
            self._score_trained(0, self.fed.initial_bank(), self.fed.clients)()
        saved = Checkpoint(0, begun.state, {"row": row, "counts": dict(self.fed.meter.counts)})
        store.save(saved.round, saved.state, saved.extra)
        return saved

    def _round(self, state: Any, t: int) -> tuple[Any, RoundRow, list[Callable[[], None]]]:
        """The state after round t, its row, and what else is to be written of it."""
        split = self.timeline.at(t)
        fed = self.fed.during(t)
        records: list[Callable[[], None]] = []
        if self.evaluation.last_trained:
            keep = lambda found: records.append(self._trained(t, found))  # noqa: E731
            fed = replace(fed, on_trained=keep)
        cohort = self.algorithm.cohort(state, t, fed)
        outcome = self.algorithm.round(state, cohort, fed)
        new = outcome.state
        row: RoundRow = {ROUND: t, COHORT_SIZE: len(cohort.clients), **outcome.metrics}
        row |= self._record_clusterings(t, outcome)
        moved: NDArray[np.float64] | None = None
        if self._is_evaluated(t):
            with self.fed.meter.phase("evaluate"):
                bank = self.deployed(new, t)
                scored, writes = self._evaluate(bank, self.algorithm.partition(new), fed, t)
                row |= scored
                records += writes
                moved = self._changes(bank, state, t)
                row[PARAMS_CHANGE] = float(moved[split.clients].sum())
        if self.recorder is not None:
            self.recorder.round(t, moved)
        return new, row, records

    def _changes(self, bank: ModelBank, before: Any, t: int) -> NDArray[np.float64]:
        """(M,) how far round t moved each client's model, squared.

        Models before it are deployed for some clients at a time: all of them may be as large as the
        bank.
        """
        uncounted = replace(self, fed=replace(self.fed, meter=Meter()))
        everybody = np.arange(self.fed.num_clients)
        parts = np.split(everybody, range(DEPLOYED_AT_ONCE, len(everybody), DEPLOYED_AT_ONCE))
        moved = [
            squared_changes(bank, uncounted.deployed(before, t - 1, some), some) for some in parts
        ]
        return np.concatenate(moved)

    def _is_evaluated(self, t: int) -> bool:
        return self.evaluation.is_due(t, self.num_rounds, self.directory.has_clustering)

    def _record_clusterings(self, t: int, outcome: Outcome[Any]) -> RoundRow:
        """Write the clusterings after round t; the columns of the last one."""
        record_clusterings(self.directory, self.timeline, t, outcome.clusterings)
        if not outcome.clusterings:
            return {}
        split, fed = self.timeline.at(max(t, 1)), self.fed.during(max(t, 1))
        clustering = outcome.clusterings[-1]
        context = ClusteringContext(clustering, split, fed, self.algorithm, outcome.state)
        return clustering_row(context, self.measurements)

    def _trained(self, t: int, trained: Trained) -> Callable[[], None]:
        """Score the models that clients have just trained; what is to be written of them."""
        owner = np.zeros(self.fed.num_clients, np.int64)
        owner[trained.clients] = np.arange(len(trained.clients))
        return self._score_trained(t, ModelBank(trained.params, owner), trained.clients)

    def _score_trained(self, t: int, bank: ModelBank, clients: Ids) -> Callable[[], None]:
        split, fed = self.timeline.at(max(t, 1)), self.fed.during(max(t, 1))
        with self.fed.meter.phase("evaluate"):
            found = score_clients(fed, bank, clients, split.test)
        append = self.directory.append_clients
        return partial(append, t, "last_trained", found, bank.owner, split.groups)

    def deployed(self, state: Any, t: int, clients: Ids | None = None) -> ModelBank:
        """The models of clients in the state after round t, in the federation of that round.

        None: of all clients.
        """
        fed = self.fed.during(max(t, 1))
        asked = np.arange(fed.num_clients) if clients is None else clients
        return self.algorithm.deploy(state, asked, fed)

    def _evaluate(
        self, bank: ModelBank, partition: Ids, fed: Federation, t: int
    ) -> tuple[RoundRow, list[Callable[[], None]]]:
        """Metrics of the round's row, holdout clients on their own, and the writes of rows."""
        split = self.timeline.at(t)
        cohort = Cohort(t, fed.scored())
        scores = evaluate(fed, bank.of_some(cohort.clients), cohort, split, self.evaluation)
        append = self.directory.append_clients
        records: list[Callable[[], None]] = [
            partial(append, t, part, found, bank.owner, split.groups)
            for part, found in scores.items()
        ]
        return evaluation_row(scores, partition, split, self.evaluation.target), records

    def _finish(self, bank: ModelBank) -> None:
        if self.recorder is not None:
            return self.recorder.finish(bank)
        found = summarise_run(self.directory, self.timeline, self.evaluation.target, bank.sha256())
        return self.directory.finish({**self.facts, **found})


def packages_of(component: object) -> set[str]:
    """The packages of the classes that an algorithm and its stages are made of."""
    package = type(component).__module__.partition(".")[0]
    found = set() if package == "builtins" else {package}
    if is_dataclass(component):
        for each in fields(component):
            found |= packages_of(getattr(component, each.name))
    return found

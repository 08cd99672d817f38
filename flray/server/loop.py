"""The round loop: cohort, round, evaluation, record, checkpoint; the only one in the project.

Everything else that happens in a run is called from here, or wraps it (`flray.runs`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Algorithm, Outcome
from flray.columns import COHORT_SIZE, ENDED_BY, ROUND, SECONDS
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.data.split import Split
from flray.errors import located
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.measures.measure import ClusteringContext, Measurement
from flray.measures.settings import Evaluation
from flray.measures.stopping import Stop
from flray.models.bank import ModelBank
from flray.models.client_table import ClientTable
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.records.writer import RoundWriter, Write
from flray.server.clusterings import clustering_row, record_clusterings
from flray.server.evaluation import RoundRow, evaluate, evaluation_row, score_clients
from flray.server.returned import (
    require_bank,
    require_cohort,
    require_outcome,
    require_partition,
    unchanged,
)
from flray.server.summary import summarise_run


def ignore(row: RoundRow) -> None:
    """Show nothing of a round; the default of `on_round` everywhere."""


def never() -> bool:
    """Never stop a run early; the default of `should_stop` everywhere."""
    return False


@dataclass
class LastTrained:
    """The model that each client trained last in a round; some methods train several."""

    models: ClientTable  # whole models, of the clients that have trained in the round

    def add(self, trained: Trained) -> None:
        """Take these models in the place of those that the clients trained before."""
        leaves = trained.leaves(list(self.models.default))
        self.models = self.models.updated(trained.clients, leaves)


class Callbacks:
    """Hooks of the round loop, for a caller that does more than follow a run.

    The methods here do nothing, which is an ordinary run. A caller inherits from this class and
    overrides what it needs: a sweep stops FedAvg's shared rounds after the last that rows need, and
    keeps records of groups of clients. Results do not depend on callbacks.
    """

    def after_round(self, t: int) -> None:
        """Called when round t was computed, before it is written."""

    def while_writing(self, t: int, writer: RoundWriter) -> None:
        """Called when round t was given to the writer, before `on_round`.

        `writer.flush()` waits until the round is on disk.
        """

    def finish(self, bank: ModelBank) -> bool:
        """Called with the final models. True: the caller ends the run, without a summary.

        After the last round alone, not when the run is stopped before.
        """
        return False


@dataclass(frozen=True)
class Server:
    """Runs the rounds of an experiment and records them in its run directory.

    A round asks the algorithm for a cohort and for the state after the cohort has trained, then
    evaluates the models if the round is due. Row, scores and state go to a writer thread, so the
    next round does not wait for the disk. Everything that outlives a round is in the run directory:
    a server built from the same experiment continues from the last checkpoint to the same bits.

    `runs.assemble.build_server` builds one from an experiment; `run` is all that a caller needs.
    """

    algorithm: Algorithm[Any]  # Any: the state is the algorithm's own
    fed: Federation  # as it is in round 1
    timeline: Timeline  # the split of each round
    evaluation: Evaluation
    num_rounds: int
    directory: RunDirectory
    facts: dict[str, str | int]  # names for the summary: algorithm, dataset, ...
    device: str  # device on which the state is kept
    on_round: Callable[[RoundRow], None] = ignore  # called with the row of each round
    should_stop: Callable[[], bool] = never  # asked after each round but the last
    callbacks: Callbacks = field(default_factory=Callbacks)
    measurements: Sequence[Measurement] = ()  # what is measured of clusterings
    stop: Stop | None = None  # when the run ends before its last round
    stop_after: int = 0  # rounds that `stop` does not look at, up to the clustering
    # Shortest time between two writes, in seconds; 0: as often as the disk allows
    write_every_s: float = 0.0

    def run(self) -> bool:
        """Continue from the last checkpoint, or from the start; True when the run is finished.

        It is finished when all rounds are done, or those after which `stop` ends it. Returns False
        if `should_stop` ended it early; rounds so far are then on disk and a later call goes on.
        Records of rounds that no checkpoint covers are dropped and computed again.
        """
        store = self.directory.store(packages_of(self.algorithm))
        checkpoint = store.load_latest(self.device)
        if checkpoint is None:
            checkpoint = self.begin(store)
        else:
            self.directory.truncate(checkpoint.round)
            self.fed.meter.counts.update(checkpoint.extra.get("counts", {}))
        with RoundWriter(self.directory, store, self.write_every_s) as writer:
            state, bank, last, reason = self._rounds(checkpoint, writer)
        if last < self.num_rounds and reason is None:
            return False
        store.check_last()
        bank = self.deployed(state, last) if bank is None else bank
        if not self.callbacks.finish(bank):
            target, sha256 = self.evaluation.target, bank.sha256()
            summary = summarise_run(self.directory, self.timeline, target, sha256)
            ended = {ENDED_BY: reason} if last < self.num_rounds else {}
            self.directory.finish({**self.facts, **summary, **ended})
        return True

    def begin(self, store: CheckpointStore) -> Checkpoint:
        """Save and return the state before round 1, because `init` may take long (FLT's encoder).

        Its counts and metrics are saved too: they belong in the row of round 1, which another
        process may compute.
        """
        with located(self._name("init")):
            outcome = self.algorithm.init(self.fed)
        require_outcome(outcome, self._name("init"), self.evaluation.score_columns)
        self.directory.truncate(0)
        row = outcome.metrics | self._record_clusterings(0, outcome)
        if self.evaluation.last_trained:
            self._score_trained(0, self.fed.initial_bank(), self.fed.clients)()
        extra = {"row": row, "counts": dict(self.fed.meter.counts)}
        store.save(0, outcome.state, extra)
        return Checkpoint(0, outcome.state, extra)

    def _rounds(
        self, checkpoint: Checkpoint, writer: RoundWriter
    ) -> tuple[Any, ModelBank | None, int, str | None]:
        """The rounds after a checkpoint.

        Returns the state after them, the models of all clients if the last round evaluated them,
        the number of that round, and the rule that ended the run there.
        """
        bank: ModelBank | None = None
        state, row_before = checkpoint.state, checkpoint.extra.get("row", {})
        begin, t = perf_counter(), checkpoint.round
        scores = self._scores_of(self.directory.rows()) if self.stop else []
        reason = self._reason(scores)
        for t in range(checkpoint.round + 1, self.num_rounds + 1) if reason is None else ():
            bank = None  # its memory is free during the round
            state, bank, row, writes = self._round(state, t)
            row, row_before = row_before | row, {}
            # A row's seconds include what the round before it spent on its checkpoint.
            row |= self.fed.meter.read_and_reset() | {SECONDS: perf_counter() - begin}
            begin = perf_counter()
            with self.fed.meter.phase("checkpoint"):
                # The last two rounds have checkpoints of their own, in case one is damaged.
                at_once = not self.write_every_s and t >= self.num_rounds - 1
                writer.add(row, writes, state, at_once)
                self.callbacks.while_writing(t, writer)
            self.on_round(row)
            scores += self._scores_of([row])
            reason = self._reason(scores)
            if reason is not None or (t < self.num_rounds and self.should_stop()):
                break
        return state, bank, t, reason

    def _reason(self, scores: Sequence[float]) -> str | None:
        """The rule of `stop` that ends the run after evaluations with these scores."""
        return self.stop.reason(scores, self.evaluation.score_columns[0]) if self.stop else None

    def _scores_of(self, rows: Sequence[RoundRow]) -> list[float]:
        """What `stop` decides by: the validation scores of these rounds."""
        column = self.evaluation.score_columns[0].validation
        return [row[column] for row in rows if column in row and row[ROUND] > self.stop_after]

    def _round(self, before: Any, t: int) -> tuple[Any, ModelBank | None, RoundRow, list[Write]]:
        """Compute and evaluate round t.

        Returns the state after it, the models of all clients if they were evaluated, the row of the
        round, and what else is to be written of it.
        """
        fed = self.fed.during(t)
        writes: list[Write] = []
        of_all: ModelBank | None = None
        last: LastTrained | None = None
        if self.evaluation.last_trained:
            last = LastTrained(ClientTable.empty(fed.initial, fed.num_clients))
            fed = replace(fed, on_trained=last.add)
        with located(self._name("cohort")):
            cohort = self.algorithm.cohort(before, t, fed)
        require_cohort(cohort, self._name("cohort"))
        with located(self._name("round")), unchanged(before, self._name("round")):
            outcome = self.algorithm.round(before, cohort, fed)
        require_outcome(outcome, self._name("round"), self.evaluation.score_columns)
        if last is not None and len(clients := last.models.clients):
            writes.append(self._score_trained(t, last.models.bank(clients), clients))
        row: RoundRow = {ROUND: t, COHORT_SIZE: len(cohort.clients), **outcome.metrics}
        row |= self._record_clusterings(t, outcome)
        if self.evaluation.is_due(t, self.num_rounds, self.directory.has_clustering):
            with self.fed.meter.phase("evaluate"):
                size = self.evaluation.sample_size(t, self.num_rounds)
                asked = None if size is None else self._during(t)[1].scored(size)
                bank = self.deployed(outcome.state, t, asked)
                of_all = bank if asked is None else None
                scores, score_writes = self.evaluate(bank, outcome.state, t)
                row |= scores
                writes += score_writes
        self.callbacks.after_round(t)
        return outcome.state, of_all, row, writes

    def evaluate(self, bank: ModelBank, state: Any, t: int) -> tuple[RoundRow, list[Write]]:
        """The metrics of round t, and writes of the scores of each client.

        Args:
            bank: The models that clients use after the round; only those that are evaluated count.
            state: The state after the round.
        """
        split, fed = self._during(t)
        size = self.evaluation.sample_size(t, self.num_rounds)
        cohort = Cohort(t, fed.scored(size))
        scores = evaluate(fed, bank.of_some(cohort.clients), cohort, split, self.evaluation)
        append = self.directory.append_clients
        writes: list[Write] = [
            partial(append, t, part, client_scores, bank.owner, split.groups)
            for part, client_scores in scores.items()
        ]
        with located(self._name("partition")):
            partition = self.algorithm.partition(state)
        require_partition(partition, fed.num_clients, self._name("partition"))
        return evaluation_row(scores, partition, split, self.evaluation.target, size), writes

    def _record_clusterings(self, t: int, outcome: Outcome[Any]) -> RoundRow:
        """Write the clusterings after round t; the columns of the last one."""
        record_clusterings(self.directory, self.timeline, t, outcome.clusterings)
        if not outcome.clusterings:
            return {}
        split, fed = self._during(t)
        clustering = outcome.clusterings[-1]
        context = ClusteringContext(clustering, split, fed, self.algorithm, outcome.state)
        return clustering_row(context, self.measurements)

    def _score_trained(self, t: int, bank: ModelBank, clients: Ids) -> Write:
        """Score the models that clients have just trained; the write of these scores."""
        split, fed = self._during(t)
        with self.fed.meter.phase("evaluate"):
            scores = score_clients(fed, bank, clients, split.test, self.evaluation.computed)
        append = self.directory.append_clients
        return partial(append, t, "last_trained", scores, bank.owner, split.groups)

    def deployed(self, state: Any, t: int, clients: Ids | None = None) -> ModelBank:
        """The models that clients use in the state after round t; None: all clients.

        Args:
            t: The round that led to it; 0: the state before round 1.
            clients: Ids of the clients whose models are needed; rows of others are undefined.
        """
        fed = self._during(t)[1]
        asked = np.arange(fed.num_clients) if clients is None else clients
        with located(self._name("deploy")), unchanged(state, self._name("deploy")):
            bank = self.algorithm.deploy(state, asked, fed)
        require_bank(bank, self._name("deploy"))
        return bank

    def _name(self, method: str) -> str:
        """A method of the algorithm, for messages."""
        return f"{type(self.algorithm).__name__}.{method}"

    def _during(self, t: int) -> tuple[Split, Federation]:
        """Split and federation of round t; of round 1 for t = 0, before the first round."""
        t = max(t, 1)
        return self.timeline.at(t), self.fed.during(t)


def packages_of(component: object) -> set[str]:
    """The packages of the classes that an algorithm and its stages are made of, and inherit from.

    A checkpoint may contain objects of these packages and no others.

    >>> from flray.algorithms.fedavg import FedAvg
    >>> packages_of(FedAvg())
    {'flray'}
    """
    packages = {base.__module__.partition(".")[0] for base in type(component).__mro__}
    packages -= sys.stdlib_module_names
    if is_dataclass(component):
        for attribute in fields(component):
            packages |= packages_of(getattr(component, attribute.name))
    return packages

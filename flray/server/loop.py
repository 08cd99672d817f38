"""The round loop: cohort, round, evaluation, record, checkpoint; the only one in the project."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from flray.algorithms.algorithm import Algorithm, Outcome
from flray.clustering.pipeline import Clustering
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.execution.federation import Cohort, Federation, Meter
from flray.models.bank import ModelBank, squared_changes
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.scores import overlap_errors, partition_scores
from flray.server.clusterings import label_row, robustness_row
from flray.server.evaluation import Evaluation, Row, evaluate, evaluation_row
from flray.server.summary import summarise_run


def ignore(row: Row) -> None:
    """Show nothing of a round."""


def never() -> bool:
    return False


Banks = tuple[ModelBank, ModelBank]  # the models that clients use after a round, and before it


class PartRecorder(Protocol):
    """Keeps the records of a run that trains a part of the clients, in the place of a summary."""

    def truncate(self, after_round: int) -> None:
        """Drop what was kept of later rounds."""
        ...

    def round(self, t: int, banks: Banks | None, partition: Ids) -> None:
        """Keep what round t gave; banks only where it was evaluated."""
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
    on_round: Callable[[Row], None] = ignore
    should_stop: Callable[[], bool] = never
    recorder: PartRecorder | None = None  # None: the run is whole and ends in its summary

    def run(self) -> bool:
        """Go on from the last checkpoint, or from the start; True when all rounds are done."""
        store = CheckpointStore(self.directory.checkpoints, packages_of(self.algorithm))
        found = store.load_latest(self.device)
        if found is None:
            found = self.begin(store)
        else:
            self.directory.truncate(found.round)
            if self.recorder is not None:
                self.recorder.truncate(found.round)
            self.fed.meter.counts.update(found.extra.get("counts", {}))
        state, before = found.state, found.extra.get("row", {})
        begin = perf_counter()
        for t in range(found.round + 1, self.num_rounds + 1):
            state, row = self._round(state, t)
            row, before = before | row, {}
            # Records come before the checkpoint, which commits the round: a resumed run drops
            # rows that have no checkpoint. So a row's seconds hold the checkpoint before it.
            row |= self.fed.meter.read_and_reset() | {"seconds": perf_counter() - begin}
            begin = perf_counter()
            self.directory.append_round(row)
            with self.fed.meter.phase("checkpoint"):
                store.save(t, state)
            self.on_round(row)
            if t < self.num_rounds and self.should_stop():
                return False
        self._finish(self.deployed(state, self.num_rounds))
        return True

    def begin(self, store: CheckpointStore) -> Checkpoint:
        """The state before round 1, saved: an init may have cost an encoder and a clustering.

        What it counted and found belongs in the row of round 1, which may be another process's.
        """
        begun = self.algorithm.init(self.fed)
        self.directory.truncate(0)
        row = begun.metrics | self._record_clusterings(0, begun.clusterings)
        row |= self._measure_clustering(0, begun)
        saved = Checkpoint(0, begun.state, {"row": row, "counts": dict(self.fed.meter.counts)})
        store.save(saved.round, saved.state, saved.extra)
        return saved

    def _round(self, state: Any, t: int) -> tuple[Any, Row]:
        split = self.timeline.at(t)
        fed = self.fed.during(self.timeline, t)
        cohort = self.algorithm.cohort(state, t, fed)
        outcome = self.algorithm.round(state, cohort, fed)
        new = outcome.state
        row: Row = {"round": t, "cohort_size": len(cohort.clients), **outcome.metrics}
        row |= self._record_clusterings(t, outcome.clusterings)
        row |= self._measure_clustering(t, outcome)
        banks = None
        if self._is_evaluated(t):
            with self.fed.meter.phase("evaluate"):
                uncounted = replace(self, fed=replace(self.fed, meter=Meter()))
                banks = self.deployed(new, t), uncounted.deployed(state, t - 1)
                row |= self._evaluate(banks[0], self.algorithm.partition(new), fed, t)
                row["params_change_sq"] = float(squared_changes(*banks)[split.clients].sum())
        if self.recorder is not None:
            self.recorder.round(t, banks, self.algorithm.partition(new))
        return new, row

    def _is_evaluated(self, t: int) -> bool:
        """The round of a clustering and the one after it always are: papers report them.

        Of clusterings in consecutive rounds that is so for the first: FLIS (DC) clusters in all.
        """
        return (
            t % self.evaluation.every == 0
            or t == self.num_rounds
            or t in self.evaluation.also
            or self._begins_clustering(t)
            or self._begins_clustering(t - 1)
        )

    def _begins_clustering(self, t: int) -> bool:
        return self.directory.has_clustering(t) and not self.directory.has_clustering(t - 1)

    def _record_clusterings(self, t: int, clusterings: Sequence[Clustering]) -> Row:
        """Keep what clusterings after round t were decided by; scores of the last by the truth."""
        split = self.timeline.at(max(t, 1))
        row: Row = {}
        for number, found in enumerate(clusterings):
            arrays = found.evidence()
            scores = overlap_errors(found.together, split.label_counts(found.clients))
            if split.groups is not None:
                arrays |= {"groups": split.groups[found.clients]}
                scores |= partition_scores(found.labels, arrays["groups"])
            row = {"clustering_clusters": len(np.unique(found.labels))}
            row |= {f"clustering_{name}": value for name, value in scores.items()}
            self.directory.append_clustering(t, arrays, len(clusterings) - 1 - number)
        return row

    def _measure_clustering(self, t: int, outcome: Outcome[Any]) -> Row:
        """What `evaluate` asks for beside of the last clustering after round t."""
        if not outcome.clusterings:
            return {}
        found = outcome.clusterings[-1]
        row: Row = {}
        split, fed = self.timeline.at(max(t, 1)), self.fed.during(self.timeline, max(t, 1))
        if self.evaluation.similarity:
            row |= label_row(found, split, fed)
        if self.evaluation.robustness is not None:
            options = self.evaluation.robustness
            row |= robustness_row(self.algorithm, outcome.state, found, fed, split, options)
        return {f"clustering_{name}": value for name, value in row.items()}

    def deployed(self, state: Any, t: int) -> ModelBank:
        """The model of each client in the state after round t, in the federation of that round."""
        fed = self.fed.during(self.timeline, max(t, 1))
        return self.algorithm.deploy(state, np.arange(fed.num_clients), fed)

    def _evaluate(self, bank: ModelBank, partition: Ids, fed: Federation, t: int) -> Row:
        """Metrics of the round's row, holdout clients apart; keeps a row per client and part."""
        split = self.timeline.at(t)
        cohort = Cohort(t, fed.scored())
        scores = evaluate(fed, bank.of_some(cohort.clients), cohort, split, self.evaluation)
        for part, found in scores.items():
            self.directory.append_clients(t, part, found, bank.owner, split.groups)
        return evaluation_row(scores, partition, split, self.evaluation.target)

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

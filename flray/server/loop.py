"""The round loop: cohort, round, evaluation, record, checkpoint; the only one in the project."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Algorithm, Metrics, Outcome
from flray.clustering.pipeline import Clustering
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation, Meter
from flray.models.bank import ModelBank, squared_changes
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.records.strands import METRICS, Strands
from flray.scores import overlap_errors, partition_scores
from flray.server.clusterings import label_row, robustness_row
from flray.server.evaluation import Evaluation, Row, evaluate, evaluation_row
from flray.server.summary import summarise_run


def ignore(row: Row) -> None:
    """Show nothing of a round."""


def never() -> bool:
    return False


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

    def run(self) -> bool:
        """Go on from the last checkpoint, or from the start; True when all rounds are done."""
        store = CheckpointStore(self.directory.checkpoints, packages_of(self.algorithm))
        found = store.load_latest(self.device)
        if found is None:
            found = self.begin(store)
        else:
            self.directory.truncate(found.round)
            Strands(self.directory.path).truncate(found.round)
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
        self._finish(self._deployed(state, self.num_rounds))
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
        if self.fed.only is not None:
            _require_known(outcome.metrics, t)
        row: Row = {"round": t, "cohort_size": len(cohort.clients), **outcome.metrics}
        row |= self._record_clusterings(t, outcome.clusterings)
        row |= self._measure_clustering(t, outcome)
        banks = None
        if self._is_evaluated(t):
            with self.fed.meter.phase("evaluate"):
                uncounted = replace(self, fed=replace(self.fed, meter=Meter()))
                banks = self._deployed(new, t), uncounted._deployed(state, t - 1)
                row |= self._evaluate(banks[0], self.algorithm.partition(new), fed, t)
                row["params_change_sq"] = float(squared_changes(*banks)[split.clients].sum())
        self._record_strands(t, banks, self.algorithm.partition(new))
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

    def _deployed(self, state: Any, t: int) -> ModelBank:
        """The model of each client in the state after round t, in the federation of that round."""
        fed = self.fed.during(self.timeline, max(t, 1))
        return self.algorithm.deploy(state, np.arange(fed.num_clients), fed)

    def _evaluate(self, bank: ModelBank, partition: Ids, fed: Federation, t: int) -> Row:
        """Metrics of the round's row, holdout clients apart; keeps a row per client and part."""
        split = self.timeline.at(t)
        present = np.setdiff1d(np.arange(split.num_clients), split.absent)
        scored = bank
        if fed.only is not None:
            present = np.intersect1d(present, fed.only)
            scored = bank.of_some(present)
        scores = evaluate(fed, scored, Cohort(t, present), split, self.evaluation)
        for part, found in scores.items():
            self.directory.append_clients(t, part, found, bank.owner, split.groups)
        return evaluation_row(scores, partition, split, self.evaluation.target)

    def _record_strands(
        self, t: int, banks: tuple[ModelBank, ModelBank] | None, partition: Ids
    ) -> None:
        """Keep what other runs with the same strands will need of this round."""
        only = self.fed.only
        if only is None:
            return
        heard = sorted(self.fed.heard, key=lambda each: each.client)
        self.fed.heard.clear()
        steps = self.fed.meter.counts["client_steps"]  # of a clustering before round 1 too
        arrays = {
            "other_steps": np.array(steps - sum(each.num_steps for each in heard)),
            "clients": np.array([each.client for each in heard], dtype=np.int64),
            "loss": np.array([each.loss for each in heard], dtype=np.float64),
            "steps": np.array([each.num_steps for each in heard], dtype=np.int64),
        }
        if banks is not None:
            arrays |= {"owner": banks[0].owner, "partition": partition}
            arrays |= {"moved": squared_changes(*banks)[only]}
        Strands(self.directory.path).append(t, arrays)

    def _finish(self, bank: ModelBank) -> None:
        only = self.fed.only
        if only is None:
            found = summarise_run(
                self.directory, self.timeline, self.evaluation.target, bank.sha256()
            )
            return self.directory.finish({**self.facts, **found})
        digests = dict(zip(map(int, only), bank.digests(only), strict=True))
        return Strands(self.directory.path).finish(self.directory.clients(), digests)


def packages_of(component: object) -> set[str]:
    """The packages of the classes that an algorithm and its stages are made of."""
    package = type(component).__module__.partition(".")[0]
    found = set() if package == "builtins" else {package}
    if is_dataclass(component):
        for each in fields(component):
            found |= packages_of(getattr(component, each.name))
    return found


def _require_known(metrics: Metrics, t: int) -> None:
    """Refuse a metric that cannot be put together from what strands keep of each client."""
    for name in metrics.keys() - METRICS:
        raise ExperimentError(
            f"round {t} returned the metric {name!r}, but this run trains only a part of the "
            "clients, for rows of a sweep that share them: return the metric in every round, so "
            "that the sweep runs such rows whole"
        )

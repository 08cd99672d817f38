"""The round loop: cohort, round, evaluation, record, checkpoint; the only one in the project."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from flray.algorithms.algorithm import Algorithm
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.data.split import Split
from flray.execution.federation import Federation
from flray.models.bank import ModelBank, squared_change
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.scores import ClientScores, partition_scores, rounds_to_target, summarise
from flray.server.evaluation import Evaluation, score_clients

Row = dict[str, Any]  # Any: one value a column, numbers mostly


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
        store = CheckpointStore(self.directory.checkpoints)
        found = store.load_latest(self.device)
        if found is None:
            found = self.begin(store)
        else:
            self.directory.truncate(found.round)
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
        self.directory.finish(self._summary(self._deployed(state)))
        return True

    def begin(self, store: CheckpointStore) -> Checkpoint:
        """The state before round 1, saved: an init may have cost an encoder and a clustering.

        What it counted and found belongs in the row of round 1, which may be another process's.
        """
        state = self.algorithm.init(self.fed)
        self.directory.truncate(0)
        row = self._record_clustering(0)
        saved = Checkpoint(0, state, {"row": row, "counts": dict(self.fed.meter.counts)})
        store.save(saved.round, saved.state, saved.extra)
        return saved

    def _round(self, state: Any, t: int) -> tuple[Any, Row]:
        split = self.timeline.at(t)
        fed = self.fed.during(self.timeline, t)
        cohort = self.algorithm.cohort(state, t, fed)
        new, metrics = self.algorithm.round(state, cohort, fed)
        row: Row = {"round": t, "cohort_size": len(cohort.clients), **metrics}
        row |= self._record_clustering(t)
        if self._is_evaluated(t):
            with self.fed.meter.phase("evaluate"):
                bank = self._deployed(new)
                row |= self._evaluate(bank, split, t)
                row["params_change_sq"] = squared_change(bank, self._deployed(state))
        return new, row

    def _is_evaluated(self, t: int) -> bool:
        """The round of a clustering and the one after it always are: papers report them."""
        return (
            t % self.evaluation.every == 0
            or t == self.num_rounds
            or t in self.evaluation.also
            or self.directory.has_clustering(t)
            or self.directory.has_clustering(t - 1)
        )

    def _record_clustering(self, t: int) -> Row:
        """Keep what the clustering after round t was decided by; its scores where groups exist."""
        if not self.fed.evidence:
            return {}
        arrays = self.fed.evidence[-1]
        self.fed.evidence.clear()
        clients, labels = arrays["clients"], arrays["labels"]
        row: Row = {"clustering_clusters": len(np.unique(labels))}
        groups = self.timeline.at(max(t, 1)).groups
        if groups is not None:
            arrays = arrays | {"groups": groups[clients]}
            scores = partition_scores(labels, groups[clients])
            row |= {f"clustering_{name}": value for name, value in scores.items()}
        self.directory.append_clustering(t, arrays)
        return row

    def _deployed(self, state: Any) -> ModelBank:
        return self.algorithm.deploy(state, np.arange(self.fed.num_clients), self.fed)

    def _evaluate(self, bank: ModelBank, split: Split, t: int) -> Row:
        """Test metrics, validation metrics beside them, holdout clients apart; a row a client."""
        clients = split.clients
        row: Row = {"clusters": len(np.unique(bank.owner[clients]))}
        present = np.setdiff1d(np.arange(split.num_clients), split.absent)
        holdout = np.setdiff1d(split.holdout, split.absent)
        for name, prefix, part in (
            ("test", "", split.test),
            ("validation", "validation_", split.validation),
        ):
            scores = score_clients(self.fed, bank, present, part)
            self.directory.append_clients(t, name, scores, bank.owner, split.groups)
            row |= self._summarised(prefix, scores.of(clients), split, part)
            if name == "test":
                row |= self._summarised("holdout_", scores.of(holdout), split, part)
        if split.groups is not None:
            row |= partition_scores(bank.owner[clients], split.groups[clients])
        return row

    def _summarised(
        self, prefix: str, scores: ClientScores, split: Split, part: tuple[Ids, ...]
    ) -> Row:
        if not len(scores.clients):
            return {}
        images = np.unique(split.image_ids[np.concatenate([part[i] for i in scores.clients])])
        found = summarise(scores, len(images), self.evaluation.target)
        return {prefix + key: value for key, value in found.items()}

    def _summary(self, bank: ModelBank) -> Row:
        rounds = self.directory.rounds()
        last: Row = rounds.to_dict("records")[-1]  # type: ignore[assignment]  # columns are str
        totals = {
            name: int(rounds.filter(regex=pattern).sum().sum())
            for name, pattern in (
                ("bytes_up", "^bytes_up"),
                ("bytes_down", "^bytes_down"),
                ("client_steps", "^client_steps$"),
                ("clients_dropped", "^clients_dropped$"),
            )
        }
        target = self.evaluation.target
        reached = rounds["round"].to_numpy(), rounds["accuracy_mean"].to_numpy()
        return {
            **self.facts,
            "rounds": self.num_rounds,
            "clients": len(self.timeline.at(self.num_rounds).clients),
            "ari": None,  # where no groups were planted
            "nmi": None,
            **{key: value for key, value in last.items() if not of_one_round(key)},
            "clusters": int(last["clusters"]),
            "rounds_to_target": None if target is None else rounds_to_target(*reached, target),
            **self._after_clustering(rounds),
            **totals,
            "seconds": float(rounds["seconds"].sum()),
            "split_sha256": self.timeline.digest(),
            "params_sha256": bank.sha256(),
        }

    def _after_clustering(self, rounds: pd.DataFrame) -> Row:
        """FL+HC reports the round after the (first) clustering beside the last one."""
        clustered = self.directory.clustering_rounds()
        after = rounds[rounds["round"] == clustered[0] + 1] if clustered else rounds[:0]
        if after.empty:
            return {}
        row: Row = after.to_dict("records")[0]  # type: ignore[assignment]  # columns are str
        reported = ("accuracy_mean", "clients_reaching_target", "validation_accuracy_mean")
        return {"round_after_clustering": row["round"]} | {
            f"{name}_after_clustering": row[name] for name in reported if name in row
        }


def of_one_round(column: str) -> bool:
    """Columns that mean something for a round and nothing for the run."""
    prefixes = ("round", "seconds", "bytes", "client_steps", "cohort_size", "clustering")
    return column.startswith(prefixes)

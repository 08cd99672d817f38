"""Independent groups: clients that hear each other and nobody else after a clustering.

After the clustering of FL+HC a cluster samples, trains and averages its own clients, so it
continues alike in every partition that has it. A run trains the groups that nobody else has trained
and stores their records in the cache, one entry for each group (`GroupRecorder`); then it puts its
own records together from those of all its groups (`Assembly`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.sparse.csgraph import connected_components

from flray.algorithms.algorithm import Branching
from flray.columns import (
    CLIENT,
    CLIENT_STEPS,
    CLIENT_STEPS_EVALUATION,
    LOSS,
    MODEL,
    PART,
    ROUND,
    TRAIN_LOSS,
)
from flray.config.experiment import Experiment
from flray.data.dataset import Ids
from flray.engines.plan import num_local_steps
from flray.execution.federation import Share, nobody
from flray.models.bank import ModelBank, sha256_of
from flray.records import tables
from flray.records.recorded import PART_FOLDER
from flray.records.run_directory import RunDirectory
from flray.records.score_files import PARTS, scores_in
from flray.runs.assemble import facts_of
from flray.runs.preparing import Prepared
from flray.server.evaluation import RoundRow, evaluation_row
from flray.server.loop import Callbacks
from flray.server.summary import summarise_run
from flray.sweeps.branching import Branch
from flray.sweeps.cache import Cache

KIND = "group"  # kind of cache entry
TABLES = ("rounds", "scores", "models")  # files of an entry
STEPS, SHA256 = "steps", "sha256"  # columns of them beside those of run directories
ENTRIES_KEPT = 256  # entries that a process keeps after reading them

Frames = Mapping[str, pd.DataFrame]  # by name, of TABLES
Groups = Mapping[str, Ids]  # the clients of each group, by key


def independent_groups(algorithm: Branching[Any], state: Any) -> list[tuple[Ids, object]]:
    """The groups of clients, each with the strengths by which they hear each other.

    Groups are disjoint and contain every client. Strengths are None if each member hears all others
    alike, else the (g, g) rows of the relation as lists, for the key of the group. Empty if the
    algorithm does not promise that clients hear only those whom the state relates, or if a client
    has no cluster yet.

    Args:
        algorithm: The algorithm of the row.
        state: Its state after the clustering; Any: the state is the algorithm's own.
    """
    labels = algorithm.partition(state)
    if algorithm.spent_fields is None or (labels < 0).any():
        return []
    relation = getattr(state, "relation", None)
    if relation is None:
        return [(np.flatnonzero(labels == label), None) for label in np.unique(labels)]
    strengths = relation.matrix()
    _, group = connected_components(strengths, directed=True, connection="weak")
    members = [np.flatnonzero(group == number) for number in np.unique(group)]
    return [(clients, strengths[np.ix_(clients, clients)].tolist()) for clients in members]


@dataclass(frozen=True)
class GroupRecorder(Callbacks):
    """Records what the clients of a share train; at the end, writes an entry for each group.

    `part/round_000012.parquet` of the run directory has loss and steps of the clients that trained
    in round 12.
    """

    share: Share
    directory: RunDirectory
    cache: Cache
    groups: Groups  # groups that are trained here

    def after_round(self, t: int) -> None:
        """Write loss and steps of the clients that trained."""
        parts = [
            {CLIENT: training.clients, LOSS: training.loss, STEPS: training.num_steps}
            for training in self.share.trained
        ]
        self.share.trained.clear()
        if parts and t > self.share.after:
            folder = self.directory.path / PART_FOLDER
            folder.mkdir(exist_ok=True)
            columns = ({ROUND: np.full(len(part[CLIENT]), t), **part} for part in parts)
            table = tables.join([pa.table(part) for part in columns])
            tables.write(folder / f"round_{t:06d}.parquet", table)

    def finish(self, bank: ModelBank) -> bool:
        """Write an entry for each group that has none; True: the run ends without a summary."""
        clients, scores = self.share.clients, self.directory.clients()
        frames = {
            "rounds": self._rounds(),
            "scores": scores[scores[ROUND] > self.share.after].drop(columns=MODEL),
            "models": pd.DataFrame({CLIENT: clients, SHA256: bank.digests(clients)}),
        }
        for key, members in self.groups.items():
            if not self.cache.path(KIND, key).exists():
                of_group = {
                    name: frame[frame[CLIENT].isin(members)] for name, frame in frames.items()
                }
                self.cache.publish(KIND, key, partial(_write, of_group))
        return True

    def _rounds(self) -> pd.DataFrame:
        files = tables.files_of_rounds(self.directory.path / PART_FOLDER, "parquet")
        joined = tables.join([pa.table({ROUND: nobody()}), *map(tables.read, files)])
        frame: pd.DataFrame = joined.to_pandas()
        return frame.reindex(columns=[ROUND, CLIENT, LOSS, STEPS])


def _write(frames: Frames, folder: Path) -> int:
    for name, frame in frames.items():
        frame.to_parquet(folder / f"{name}.parquet")
    return int(frames["rounds"][STEPS].sum())


@lru_cache(maxsize=ENTRIES_KEPT)
def _read(folder: Path) -> Frames:
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}


def records_of(cache: Cache, groups: Groups) -> Frames:
    """The records of groups, whichever run trained them, in the order of their clients.

    Args:
        cache: The cache, which has an entry for each of the groups.
        groups: The clients of each group by key.

    Returns:
        `rounds`, `scores` and `models`, each sorted by client.
    """
    entries = [_read(cache.path(KIND, key)) for key in groups]
    joined = {name: pd.concat([entry[name] for entry in entries]) for name in TABLES}
    return {
        name: table.sort_values(CLIENT, kind="stable", ignore_index=True)
        for name, table in joined.items()
    }


@dataclass(frozen=True)
class Assembly:
    """Gives a run directory that trained some of its clients the records of all of them.

    They are equal to the last bit to those of a run that trained everybody: numbers of clients are
    taken over, means over clients are computed again.
    """

    directory: RunDirectory
    experiment: Experiment
    parts: Prepared
    branch: Branch
    bank: ModelBank  # models that clients use after the clustering

    @property
    def begin(self) -> int:
        """The round after which groups were trained: that of the clustering."""
        return self.branch.algorithm.rounds_before

    def put_together(self, records: Frames) -> None:
        """Write the records of all clients; may be cut short and done again.

        Args:
            records: The records of all groups, as `records_of` returns them.
        """
        directory, payload = self.directory, self.parts.payload
        scores = self._all_scores(records["scores"])
        trained, nothing = _by_round(records["rounds"]), records["rounds"].iloc[:0]
        scored = _by_round(scores)
        rows = [
            self._whole(row, trained.get(row[ROUND], nothing), scored.get(row[ROUND]))
            for row in directory.rows()
        ]
        directory.replace_rounds(rows)
        sha256 = sha256_of(records["models"][SHA256].tolist())
        target = self.experiment.settings.evaluate.target
        summary = summarise_run(directory, payload.timeline, target, sha256)
        directory.finish({**facts_of(self.experiment, payload), **summary}, scores)

    def _all_scores(self, later: pd.DataFrame) -> pd.DataFrame:
        """A row for each client and evaluation, as a run that scored all of them would have it."""
        here = self.directory.clients()
        later = later.assign(**{MODEL: self.bank.owner[later[CLIENT]]})
        earlier = here[here[ROUND] <= self.begin]
        scores = pd.concat([earlier, later]) if len(earlier) else later
        return scores.sort_values([ROUND, PART, CLIENT], ignore_index=True)

    def _whole(self, row: RoundRow, trained: pd.DataFrame, scored: pd.DataFrame | None) -> RoundRow:
        """A round's row for all clients.

        Args:
            row: as it was recorded by the run that trained some of the clients.
            trained: what clients trained in this round.
            scored: their scores; None: it was not evaluated.
        """
        t = row[ROUND]
        if t <= self.begin:
            return row
        steps = int(trained[STEPS].sum())
        if t == 1:  # this row also has the cost of a clustering before round 1
            steps += self.branch.counts[CLIENT_STEPS]
        whole = row | {CLIENT_STEPS: steps}
        losses = trained.loc[trained[STEPS] > 0, LOSS].to_numpy()
        if len(losses):
            whole[TRAIN_LOSS] = float(losses.mean())
        if scored is not None:
            whole |= self._evaluated(t, scored)
        return whole

    def _evaluated(self, t: int, scored: pd.DataFrame) -> RoundRow:
        """The columns of an evaluation in round t, from the scores of all clients."""
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(t)
        parts, columns = dict(list(scored.groupby(PART))), self.directory.scores()
        client_scores = {p: scores_in(parts[p], columns) for p in PARTS if p in parts}
        partition = self.branch.partition(self.branch.state)
        row = evaluation_row(client_scores, partition, split, settings.evaluate.target)
        tuning = settings.evaluate.tuning(settings.train)
        if tuning is not None:  # all clients are present, and none was dropped
            steps = num_local_steps(split.num_train_examples, tuning)
            row[CLIENT_STEPS_EVALUATION] = int(steps.sum())
        return row


def _by_round(frame: pd.DataFrame) -> dict[Any, pd.DataFrame]:  # Any: rounds, as pandas has them
    return dict(list(frame.groupby(ROUND)))

"""Components: clients that hear each other and nobody else after a clustering, trained once.

After the clustering of FL+HC a cluster samples, trains and averages its own clients, so it goes on
alike in every partition that has it. A run trains the components that nobody else has, keeps what
others need of them in the cache, and puts its records together from those of all its components.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flray.columns import (
    CLIENT,
    CLIENT_STEPS,
    CLIENT_STEPS_EVALUATION,
    CORRECT,
    LOSS,
    MODEL,
    PARAMS_CHANGE,
    PART,
    ROUND,
    TOTAL,
    TRAIN_LOSS,
)
from flray.config.experiment import Experiment
from flray.data.dataset import Ids
from flray.engines.plan import num_local_steps
from flray.execution.federation import Share, nobody
from flray.measures.scores import ClientScores
from flray.models.bank import ModelBank, sha256_of
from flray.records.components import MOVED, STEPS, PartRecords
from flray.records.run_directory import RunDirectory
from flray.records.score_files import PARTS
from flray.runs.assemble import facts_of
from flray.runs.preparing import Prepared
from flray.server.evaluation import RoundRow, evaluation_row
from flray.server.summary import summarise_run
from flray.sweeps.cache import Cache

KIND = "component"
TABLES = ("rounds", "scores", "models")  # of an entry
SHA256 = "sha256"  # column of models
ENTRIES_KEPT = 256  # by a process, of those it has read

Frames = Mapping[str, pd.DataFrame]  # by name, of TABLES
Components = Mapping[str, Ids]  # the clients of each, by key


def clients_of(components: Components) -> Ids:
    return np.sort(np.concatenate([nobody(), *components.values()]))


@dataclass(frozen=True)
class ComponentRecorder:
    """Records what the clients of a share train; at the end, writes an entry for each component."""

    share: Share
    directory: RunDirectory
    cache: Cache

    @property
    def records(self) -> PartRecords:
        return PartRecords(self.directory.path)

    def truncate(self, after_round: int) -> None:
        self.records.truncate(after_round)

    def round(self, t: int, moved: NDArray[np.float64] | None) -> None:
        tables = [
            pd.DataFrame({CLIENT: each.clients, LOSS: each.loss, STEPS: each.num_steps})
            for each in self.share.trained
        ]
        self.share.trained.clear()
        if moved is not None:
            own = self.share.clients
            tables.append(pd.DataFrame({CLIENT: own, MOVED: moved[own]}))
        if tables and t > self.share.after:
            self.records.append(t, pd.concat(tables))

    def finish(self, bank: ModelBank) -> None:
        own, scores = self.share.clients, self.directory.clients()
        tables = {
            "rounds": self.records.table(),
            "scores": scores[scores[ROUND] > self.share.after].drop(columns=MODEL),
            "models": pd.DataFrame({CLIENT: own, SHA256: bank.digests(own)}),
        }
        for key, clients in self.records.components().items():
            if not self.cache.path(KIND, key).exists():
                mine = {k: table[table[CLIENT].isin(clients)] for k, table in tables.items()}
                self.cache.publish(KIND, key, partial(_write, mine))


def _write(tables: Frames, folder: Path) -> int:
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
    return int(tables["rounds"][STEPS].sum())


@lru_cache(maxsize=ENTRIES_KEPT)
def _read(folder: Path) -> Frames:
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}


def tables_of(cache: Cache, components: Components) -> Frames:
    """The records of components, whichever run trained them, in the order of their clients."""
    entries = [_read(cache.path(KIND, key)) for key in components]
    joined = {name: pd.concat([each[name] for each in entries]) for name in TABLES}
    return {
        name: table.sort_values(CLIENT, kind="stable", ignore_index=True)
        for name, table in joined.items()
    }


@dataclass(frozen=True)
class Assembly:
    """Gives a run directory that trained a part of its clients the records of all of them.

    They are equal to the last bit to those of a run that trained everybody.
    """

    directory: RunDirectory
    experiment: Experiment
    parts: Prepared
    begin: int  # the round after which components were trained
    partition: Ids  # (M,) the cluster of each client
    owner: Ids  # (M,) the row of the bank that each client uses

    @cached_property
    def _trained_here(self) -> Ids:
        return clients_of(PartRecords(self.directory.path).components())

    def put_together(self, tables: Frames) -> None:
        """Write the records of all clients. May be cut short and done again."""
        directory, payload = self.directory, self.parts.payload
        scores = self._all_scores(tables["scores"])
        directory.replace_rounds([self._whole(row, tables, scores) for row in directory.rows()])
        sha256 = sha256_of(tables["models"][SHA256].tolist())
        target = self.experiment.settings.evaluate.target
        summary = summarise_run(directory, payload.timeline, target, sha256)
        directory.conclude(scores, {**facts_of(self.experiment, payload), **summary})

    def _all_scores(self, later: pd.DataFrame) -> pd.DataFrame:
        """A row for each client and evaluation, as a run that scored all of them would have it."""
        own = self.directory.clients()
        later = later.assign(**{MODEL: self.owner[later[CLIENT]]})
        earlier = own[own[ROUND] <= self.begin]
        scores = pd.concat([earlier, later]) if len(earlier) else later
        return scores.sort_values([ROUND, PART, CLIENT], ignore_index=True)

    def _whole(self, row: RoundRow, tables: Frames, scores: pd.DataFrame) -> RoundRow:
        """A round's row for all clients.

        Args:
            row: as it was recorded by the run that trained some of the clients.
        """
        t = row[ROUND]
        if t <= self.begin:
            return row
        known, scored = _of_round(tables["rounds"], t), _of_round(scores, t)
        elsewhere = known.loc[~known[CLIENT].isin(self._trained_here), STEPS]
        whole = row | {CLIENT_STEPS: row.get(CLIENT_STEPS, 0) + int(elsewhere.sum())}
        losses = known.loc[known[STEPS] > 0, LOSS].to_numpy()
        if len(losses):
            whole[TRAIN_LOSS] = float(losses.mean())
        if len(scored):
            whole |= self._evaluated(t, scored)
            whole[PARAMS_CHANGE] = float(known[MOVED].dropna().to_numpy().sum())
        return whole

    def _evaluated(self, t: int, scored: pd.DataFrame) -> RoundRow:
        names = (CLIENT, CORRECT, TOTAL, LOSS)
        parts = {part: scored[scored[PART] == part] for part in PARTS}
        found = {
            part: ClientScores(*(frame[name].to_numpy() for name in names))
            for part, frame in parts.items()
            if len(frame)
        }
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(t)
        row = evaluation_row(found, self.partition, split, settings.evaluate.target)
        tuning = settings.evaluate.tuning(settings.train)
        if tuning is not None:  # all clients are present, and none was dropped
            steps = num_local_steps(split.num_train_examples, tuning)
            row[CLIENT_STEPS_EVALUATION] = int(steps.sum())
        return row


def _of_round(table: pd.DataFrame, t: int) -> pd.DataFrame:
    return table[table[ROUND] == t]

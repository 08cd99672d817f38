"""Independent groups: clients that hear each other and nobody else after a clustering.

After the clustering of FL+HC a cluster samples, trains and averages its own clients, so it
continues alike in every partition that has it. A run trains the groups that nobody else has trained
and stores their records in the cache, one entry for each group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from flray.algorithms.algorithm import Branching
from flray.columns import CLIENT, LOSS, MODEL, ROUND
from flray.data.dataset import Ids
from flray.execution.federation import nobody
from flray.execution.partial import PartialFederation
from flray.files import replace_file
from flray.models.bank import ModelBank
from flray.records.run_directory import COMPONENTS, RunDirectory
from flray.server.loop import Callbacks
from flray.sweeps.cache import Cache

KIND = "group"  # kind of cache entry
TABLES = ("rounds", "scores", "models")  # files of an entry
STEPS, MOVED, SHA256 = "steps", "moved", "sha256"  # columns of them beside those of run directories
ENTRIES_KEPT = 256  # entries that a process keeps after reading them

Frames = Mapping[str, pd.DataFrame]  # by name, of TABLES
Groups = Mapping[str, Ids]  # the clients of each group, by key


def clients_of(groups: Groups) -> Ids:
    return np.sort(np.concatenate([nobody(), *groups.values()]))


def independent_groups(algorithm: Branching[Any], state: Any) -> list[tuple[Ids, object]]:
    """The groups of clients, each with the strengths by which they hear each other.

    Empty if the algorithm does not promise that clients hear only those whom the state relates, or
    if a client has no cluster yet. Any: the state is the algorithm's own.
    """
    labels = algorithm.partition(state)
    if algorithm.spent_fields is None or (labels < 0).any():
        return []
    relation = getattr(state, "relation", None)
    if relation is None:
        return [(np.flatnonzero(labels == label), None) for label in np.unique(labels)]
    strengths = relation.rows[relation.of]  # (M, M)
    _, group = connected_components(strengths, directed=True, connection="weak")
    members = [np.flatnonzero(group == number) for number in np.unique(group)]
    return [(clients, strengths[np.ix_(clients, clients)].tolist()) for clients in members]


@dataclass(frozen=True)
class GroupRecorder(Callbacks):
    """Records what a partial federation hears; at the end, writes an entry for each group.

    `part/round_000012.parquet` of the run directory has loss and steps of the clients that trained
    in round 12 and, if the round was evaluated, how far each client's model moved.
    """

    fed: PartialFederation
    directory: RunDirectory
    cache: Cache
    groups: Groups  # that are trained here

    def after_round(self, t: int, moved: NDArray[np.float64] | None) -> None:
        tables = [
            pd.DataFrame({CLIENT: heard.clients, LOSS: heard.loss, STEPS: heard.num_steps})
            for heard in self.fed.heard
        ]
        self.fed.heard.clear()
        if moved is not None:
            tables.append(pd.DataFrame({CLIENT: self.fed.own, MOVED: moved[self.fed.own]}))
        if tables and t > self.fed.begin:
            folder = self.directory.path / COMPONENTS
            folder.mkdir(exist_ok=True)
            table = pd.concat(tables).assign(**{ROUND: t})
            replace_file(folder / f"round_{t:06d}.parquet", lambda path: table.to_parquet(path))

    def finish(self, bank: ModelBank) -> bool:
        clients, scores = self.fed.own, self.directory.clients()
        tables = {
            "rounds": self._rounds(),
            "scores": scores[scores[ROUND] > self.fed.begin].drop(columns=MODEL),
            "models": pd.DataFrame({CLIENT: clients, SHA256: bank.digests(clients)}),
        }
        for key, members in self.groups.items():
            if not self.cache.path(KIND, key).exists():
                theirs = {
                    name: table[table[CLIENT].isin(members)] for name, table in tables.items()
                }
                self.cache.publish(KIND, key, partial(_write, theirs))
        return True

    def _rounds(self) -> pd.DataFrame:
        files = sorted((self.directory.path / COMPONENTS).glob("round_*.parquet"))
        tables = [table for table in map(pd.read_parquet, files) if len(table)]
        joined = pd.concat(tables or [pd.DataFrame()])
        return joined.reindex(columns=[ROUND, CLIENT, LOSS, STEPS, MOVED])


def _write(tables: Frames, folder: Path) -> int:
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
    return int(tables["rounds"][STEPS].sum())


@lru_cache(maxsize=ENTRIES_KEPT)
def _read(folder: Path) -> Frames:
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}


def records_of(cache: Cache, groups: Groups) -> Frames:
    """The records of groups, whichever run trained them, in the order of their clients."""
    entries = [_read(cache.path(KIND, key)) for key in groups]
    joined = {name: pd.concat([entry[name] for entry in entries]) for name in TABLES}
    return {
        name: table.sort_values(CLIENT, kind="stable", ignore_index=True)
        for name, table in joined.items()
    }

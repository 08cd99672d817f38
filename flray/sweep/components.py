"""Components: clients that hear each other and nobody else after a clustering, trained once.

After the clustering of FL+HC a cluster samples, trains and averages its own clients, so it goes on
alike in every partition that has it. A run trains the components that nobody else has, keeps what
others need of them in the cache, and puts its records together from those of all its components.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from flray.client.plan import num_local_steps
from flray.config.build import Prepared, facts_of
from flray.config.experiment import Experiment
from flray.data.dataset import Ids
from flray.execution.federation import nobody
from flray.execution.partial import PartialFederation
from flray.models.bank import ModelBank, sha256_of
from flray.records.columns import (
    CLIENT,
    CLIENT_STEPS,
    CLIENT_STEPS_EVALUATION,
    COHORT_SIZE,
    CORRECT,
    COUNTED,
    GROUND_TRUTH_READS,
    LOSS,
    MODEL,
    PARAMS_CHANGE,
    PART,
    ROUND,
    SECONDS,
    TOTAL,
    TRAIN_LOSS,
)
from flray.records.components import Arrays, PartRecords
from flray.records.run_directory import PARTS, RunDirectory
from flray.scores import ClientScores
from flray.server.evaluation import RoundRow, evaluation_row
from flray.server.loop import Evaluated
from flray.server.summary import summarise_run
from flray.sweep.cache import Cache

KIND = "component"
TABLES = ("heard", "moved", "scores", "models")
# How the columns of a round's costs begin, and of what else the meter counts.
COSTS = (*COUNTED, SECONDS, GROUND_TRUTH_READS)
ENTRIES_KEPT = 256  # by a process, of those it has read

Frames = dict[str, pd.DataFrame]  # by name, of TABLES
Components = Mapping[str, Ids]  # the clients of each, by key


def clients_of(components: Components) -> Ids:
    return np.sort(np.concatenate([nobody(), *components.values()]))


@dataclass(frozen=True)
class ComponentRecorder:
    """Keeps what a partial federation hears, and at the end an entry for each of its components."""

    fed: PartialFederation
    directory: RunDirectory
    cache: Cache

    @property
    def records(self) -> PartRecords:
        return PartRecords(self.directory.path)

    def truncate(self, after_round: int) -> None:
        self.records.truncate(after_round)

    def round(self, t: int, evaluated: Evaluated | None, partition: Ids) -> None:
        heard = list(self.fed.heard)
        self.fed.heard.clear()
        if t <= self.fed.begin:
            return
        arrays = {
            CLIENT: np.concatenate([nobody(), *(each.clients for each in heard)]),
            LOSS: np.concatenate([np.empty(0), *(each.loss for each in heard)]),
            "steps": np.concatenate([nobody(), *(each.num_steps for each in heard)]),
        }
        steps = self.fed.meter.counts[CLIENT_STEPS]  # of a clustering before round 1 too
        arrays["other_steps"] = np.array(steps - arrays["steps"].sum())
        if evaluated is not None:
            moved = evaluated.moved[self.fed.own]
            arrays |= {"owner": evaluated.owner, "partition": partition, "moved": moved}
        self.records.append(t, arrays)

    def finish(self, bank: ModelBank) -> None:
        own = self.fed.own
        rounds = self.records.rounds()
        tables = {
            "heard": _long(rounds, (CLIENT, LOSS, "steps")),
            "moved": _long(
                {t: {**a, CLIENT: own} for t, a in rounds.items() if "moved" in a},
                (CLIENT, "moved"),
            ),
            "scores": self._scores(),
            "models": pd.DataFrame({CLIENT: own, "sha256": bank.digests(own)}),
        }
        for key, clients in self.records.components().items():
            if not self.cache.path(KIND, key).exists():
                mine = {k: table[table[CLIENT].isin(clients)] for k, table in tables.items()}
                self.cache.publish(KIND, key, partial(_write, mine))

    def _scores(self) -> pd.DataFrame:
        scores = self.directory.clients()
        return scores[scores[ROUND] > self.fed.begin].drop(columns=MODEL)


def _long(rounds: Mapping[int, Arrays], columns: Iterable[str]) -> pd.DataFrame:
    """Arrays of several rounds as one table with the column `round`."""
    empty = {ROUND: nobody(), **{name: np.empty(0) for name in columns}}
    frames = [pd.DataFrame({ROUND: t} | {c: a[c] for c in columns}) for t, a in rounds.items()]
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(empty)


def _write(tables: Frames, folder: Path) -> int:
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
    return int(tables["heard"]["steps"].sum())


@lru_cache(maxsize=ENTRIES_KEPT)
def _read(folder: Path) -> Frames:
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}


def put_together(
    directory: RunDirectory, experiment: Experiment, parts: Prepared, tables: Frames
) -> None:
    """Give a run directory that trained a part of its clients the records of all of them.

    They are equal to the last bit to those of a run that trained everybody. May be cut short and
    done again.
    """
    rounds = PartRecords(directory.path).rounds()
    timeline, settings = parts.payload.timeline, experiment.settings
    tuning = settings.evaluate.tuning(settings.train)
    scores = _all_scores(directory, rounds, tables["scores"])
    rows = []
    for row in directory.rows():
        t = row[ROUND]
        if t in rounds:
            heard, moved = (_of_round(tables[name], t) for name in ("heard", "moved"))
            evaluated: RoundRow = {}
            if "owner" in rounds[t]:
                split, found = timeline.at(t), _by_part(scores[scores[ROUND] == t])
                target = settings.evaluate.target
                evaluated = evaluation_row(found, rounds[t]["partition"], split, target)
                evaluated[PARAMS_CHANGE] = float(moved["moved"].to_numpy().sum())
            row = _whole(row, rounds[t], heard, evaluated)
            if evaluated and tuning is not None:  # all clients are there, and none was dropped
                steps = num_local_steps(split.num_train_examples, tuning)
                row[CLIENT_STEPS_EVALUATION] = int(steps.sum())
        rows.append(row)
    directory.replace_rounds(rows)
    sha256 = sha256_of(tables["models"]["sha256"].tolist())
    summary = summarise_run(directory, timeline, settings.evaluate.target, sha256)
    directory.conclude(scores, {**facts_of(experiment, parts.payload), **summary})


def tables_of(cache: Cache, components: Components) -> Frames:
    """What was kept of components, whoever trained them, in the order of their clients."""
    entries = [_read(cache.path(KIND, key)) for key in components]
    joined = {name: pd.concat([each[name] for each in entries]) for name in TABLES}
    return {
        name: table.sort_values(CLIENT, kind="stable", ignore_index=True)
        for name, table in joined.items()
    }


def _of_round(table: pd.DataFrame, t: int) -> pd.DataFrame:
    return table[table[ROUND] == t]


def _all_scores(
    directory: RunDirectory, rounds: Mapping[int, Arrays], later: pd.DataFrame
) -> pd.DataFrame:
    """A row for each client and evaluation, as a run that scored all of them would have it."""
    own = directory.clients()
    before = own[own[ROUND] < min(rounds)]
    owners = zip(later[ROUND], later[CLIENT], strict=True)
    models = np.array([int(rounds[t]["owner"][i]) for t, i in owners], dtype=np.int64)
    columns = dict.fromkeys([*own.columns, *later.columns])  # one that scored nobody has no groups
    scores = pd.concat([before, later.assign(model=models)])[list(columns)]
    return scores.sort_values([ROUND, PART, CLIENT], ignore_index=True)


def _by_part(scores: pd.DataFrame) -> dict[str, ClientScores]:
    names = (CLIENT, CORRECT, TOTAL, LOSS)
    there = set(scores[PART])
    chosen = {part: scores[scores[PART] == part] for part in PARTS if part in there}
    return {
        part: ClientScores(*(frame[name].to_numpy() for name in names))
        for part, frame in chosen.items()
    }


def _whole(row: RoundRow, own: Arrays, heard: pd.DataFrame, evaluated: RoundRow) -> RoundRow:
    """A round's row for all clients; its columns come in the order in which a run writes them.

    Args:
        row: as it was recorded by the run that trained some of the clients.
        own: what that run kept of this round.
    """
    keys = list(row)
    first: RoundRow = {key: row[key] for key in keys[: keys.index(COHORT_SIZE) + 1]}
    losses = heard.loc[heard["steps"] > 0, LOSS].to_numpy()
    if len(losses):
        first[TRAIN_LOSS] = float(losses.mean())
    first |= evaluated
    costs = {key: value for key, value in row.items() if key.startswith(COSTS)}
    costs[CLIENT_STEPS] = int(own["other_steps"]) + int(heard["steps"].sum())
    return first | costs

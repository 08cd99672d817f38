"""A run's directory: the one place a result is written to and read from.

While a run goes on, the scores of its clients are small files below checkpoints/, one per
evaluation; `finish` joins them. Append the rows of a round before its checkpoint is saved: after a
kill `truncate` drops what the checkpoint does not know, but nothing brings back what is missing.
"""

import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.records import lock
from flray.records.atomic import replace_file, replace_text
from flray.records.clusterings import FOLDER, write_clustering
from flray.records.columns import (
    ACCURACY,
    CLIENT,
    CORRECT,
    GROUP,
    LOSS,
    MODEL,
    PART,
    ROUND,
    ROUNDS,
    SPLIT_SHA256,
    TOTAL,
)
from flray.records.damage import read_json, reading
from flray.records.inside import refuse_links_out
from flray.scores import ClientScores

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start

Config = Mapping[str, Any]  # resolved: nested mappings, lists and plain values

# What a client's model is scored on: its own examples or the whole test set (global), as it is or
# after fine-tuning on the client's own data. last_trained: its own test examples, by the model that
# it has just trained; round 0 is the initial model.
PARTS = (
    "test",
    "validation",
    "global",
    "tuned_test",
    "tuned_validation",
    "tuned_global",
    "last_trained",
)

COMMAND = "command.json"  # what the command line was told, kept beside the run

_ROUND = re.compile(r"round_(\d+).*")


class RunDirectory:
    """Everything a run records. A round's rows are written once, in order of rounds."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._parts = self.checkpoints / "clients"
        self._clusterings = self.path / FOLDER
        self._config = self.path / "config.yaml"
        self._environment = self.path / "environment.json"
        self._rounds = self.path / "rounds.parquet"
        self._clients = self.path / "clients.parquet"
        self._summary = self.path / "summary.json"

    def holds_run(self) -> bool:
        return self._config.is_file()

    def check_start(self, config: Config) -> None:
        """Refuse a directory that already holds something."""
        self.check_resume(config)
        if self.holds_run():
            raise ExperimentError(
                f"{self.path} already holds this experiment: pass --resume to go on with it (flray "
                f"run --out {shlex.quote(str(self.path))} --resume), or choose another --out"
            )

    def check_resume(self, config: Config) -> None:
        """Refuse a directory that holds anything but this experiment or nothing.

        A run may go on for more rounds than it was started for.
        """
        refuse_links_out(self.path)
        if self.holds_run():
            here, held = yaml.safe_load(_to_yaml(config)), self._held_config()
            if here.get("rounds", 0) > held.get("rounds", 0):
                held = {**held, "rounds": here["rounds"]}
            difference = first_difference(*_alike(deciding(held), deciding(here)))
            if difference is not None:
                raise ExperimentError(
                    f"{self.path} holds another experiment ({difference}): "
                    "choose another --out or remove it"
                )
        elif self.path.exists():
            self._check_empty()

    def start(self, config: Config, environment: Mapping[str, Any], split_digest: str) -> None:
        """Make the directory of a new run."""
        self.check_start(config)
        self.path.mkdir(parents=True, exist_ok=True)
        recorded = {**environment, SPLIT_SHA256: split_digest}
        replace_text(self._environment, _to_json(recorded))
        replace_text(self._config, _to_yaml(config))  # last: it is what makes this a run

    def resume(self, config: Config, environment: Mapping[str, Any], split_digest: str) -> None:
        """Go on with the run this directory holds, or start it; `truncate` comes next."""
        self.check_resume(config)
        if not self.holds_run():
            return self.start(config, environment, split_digest)
        recorded = read_json(self._environment)
        held = recorded.get(SPLIT_SHA256)
        if held != split_digest:
            raise ExperimentError(
                f"{self.path} holds another experiment (its split has the digest {held}, the "
                f"split made now {split_digest}; has the dataset changed?): choose another --out "
                "or remove it"
            )
        is_longer = config.get("rounds", 0) > self._held_config().get("rounds", 0)
        if is_longer or (self._summary.is_file() and not self.is_finished(config)):
            self._reopen(config)
        # A run that was finished elsewhere must not pass for one of the first machine only.
        resumed = [*recorded.get("resumed", []), environment]
        replace_text(self._environment, _to_json({**recorded, "resumed": resumed}))

    def is_finished(self, config: Config) -> bool:
        """True if all rounds of this configuration are done."""
        summary = self.summary()
        wanted = config.get("rounds", 0)
        return summary is not None and bool(summary.get(ROUNDS, wanted) >= wanted)

    def _reopen(self, config: Config) -> None:
        """Make a finished run one that goes on: scores as parts again, and no summary."""
        if self._summary.is_file():
            table = _read(self._clients)
            self._parts.mkdir(parents=True, exist_ok=True)
            pairs = zip(table[ROUND].to_pylist(), table[PART].to_pylist(), strict=True)
            for t, part in dict.fromkeys(pairs):
                rows = table.filter((pc.field(ROUND) == t) & (pc.field(PART) == part))
                _write(self._parts / f"round_{t:06d}_{part}.parquet", rows)
        replace_text(self._config, _to_yaml({**self._held_config(), "rounds": config["rounds"]}))
        self._summary.unlink(missing_ok=True)

    def append_rounds(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of rounds; columns may come and go between them."""
        tables = [pa.Table.from_pylist([dict(row)]) for row in rows]
        if self._rounds.is_file():
            tables.insert(0, _read(self._rounds))
        rounds = [t for table in tables for t in table[ROUND].to_pylist()]
        for before, after in pairwise(rounds):
            if after <= before:
                raise ValueError(f"rounds are appended in order, got {after} after {before}")
        _write(self._rounds, _join(tables))

    def append_clients(
        self,
        t: int,
        part: str,
        scores: ClientScores,
        model: Ids,
        group: Ids | None = None,
    ) -> None:
        """Add a row for each scored client of one part, one of PARTS, in round t.

        Args:
            model: the bank row each client of the run uses, by client id 0..M-1.
            group: planted groups, by client id too.
        """
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
        path = self._parts / f"round_{t:06d}_{part}.parquet"
        if path.exists():
            raise ValueError(f"the {part} scores of round {t} are already recorded")
        table = _client_rows(t, part, scores)
        table = table.append_column(MODEL, pa.array(model[scores.clients]))
        if group is not None:
            table = table.append_column(GROUP, pa.array(group[scores.clients]))
        self._parts.mkdir(parents=True, exist_ok=True)
        _write(path, table)

    def append_clustering(
        self, t: int, arrays: Mapping[str, NDArray[Any]], num_later: int = 0
    ) -> None:
        """Keep the evidence of a clustering after round t (0: before the first).

        Args:
            num_later: how many clusterings of the same round come after it.
        """
        write_clustering(self._clusterings, t, arrays, num_later)

    def adopt(self, other: "RunDirectory", num_rounds: int) -> None:
        """Take over the first rounds of another, unfinished run, which this one would repeat."""
        table = _read(other._rounds).filter(pc.field(ROUND) <= num_rounds)
        seen = [name for name in table.column_names if table[name].null_count < len(table)]
        _write(self._rounds, table.select(seen))
        self._parts.mkdir(parents=True, exist_ok=True)
        for file in other._part_files():
            if _round_of(file) <= num_rounds:
                shutil.copyfile(file, self._parts / file.name)

    def clustering_rounds(self) -> list[int]:
        """The rounds after which clients were clustered, in order."""
        return sorted({_round_of(path) for path in self._clusterings.glob("round_*.npz")})

    def has_clustering(self, t: int) -> bool:
        return t in self.clustering_rounds()

    def truncate(self, after_round: int) -> None:
        """Drop every record later than a round (-1: every record) of an unfinished run."""
        if self._summary.is_file():
            raise ValueError(f"{self.path} holds a finished run: its records are final")
        self._clients.unlink(missing_ok=True)  # of a `finish` that was cut short
        for path in [*self._part_files(), *self._clusterings.glob("round_*.npz")]:
            if _round_of(path) > after_round:
                path.unlink()
        if not self._rounds.is_file():
            return
        table = _read(self._rounds).filter(pc.field(ROUND) <= after_round)
        if len(table):
            _write(self._rounds, table)
        else:
            self._rounds.unlink()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write clients.parquet and, last, summary.json: numbers that are not finite are null."""
        table = self._client_table()
        _write(self._clients, table)
        replace_text(self._summary, _to_json(summary))
        if self._parts.is_dir():
            shutil.rmtree(self._parts)

    def replace_rounds(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of all rounds anew."""
        table = _join([pa.Table.from_pylist([dict(row)]) for row in rows])
        _write(self._rounds, table)

    def conclude(self, scores: "pd.DataFrame", summary: Mapping[str, Any]) -> None:
        """Finish with scores that were recorded elsewhere."""
        table = pa.Table.from_pandas(scores, preserve_index=False).replace_schema_metadata(None)
        _write(self._clients, table)
        replace_text(self._summary, _to_json(summary))

    def copy_records_to(self, path: Path) -> None:
        """Copy what a finished run recorded, but not its configuration; the summary comes last."""
        if self._clusterings.is_dir():
            shutil.copytree(self._clusterings, path / FOLDER, dirs_exist_ok=True)
        for file in (self._rounds, self._clients, self._summary):
            replace_file(path / file.name, partial(shutil.copyfile, file))

    def summary(self) -> dict[str, Any] | None:
        """What `finish` wrote, None while the run is unfinished."""
        if not self._summary.is_file():
            return None
        return read_json(self._summary)

    def config(self) -> Config:
        """The resolved configuration of the run."""
        return self._held_config()

    def plans(self) -> list[str | None]:
        """What each start of the run asked of a cluster; None where it ran in process."""
        if not self._environment.is_file():
            return []
        recorded = read_json(self._environment)
        return [start.get("plan") for start in [recorded, *recorded.get("resumed", [])]]

    def rounds(self) -> "pd.DataFrame":
        """A row for each round so far."""
        if not self._rounds.is_file():
            empty: pd.DataFrame = pa.table({ROUND: np.empty(0, np.int64)}).to_pandas()
            return empty
        frame: pd.DataFrame = _read(self._rounds).to_pandas()
        return frame

    def rows(self, seen: int = 0) -> list[dict[str, Any]]:
        """The rows of rounds.parquet after the first `seen`, each without its empty columns."""
        if not self._rounds.is_file():
            return []
        rows: list[dict[str, Any]] = _read(self._rounds).slice(seen).to_pylist()
        return [{key: value for key, value in row.items() if value is not None} for row in rows]

    def clients(self) -> "pd.DataFrame":
        """A row for each client and evaluation so far."""
        frame: pd.DataFrame = self._client_table().to_pandas()
        return frame

    def _held_config(self) -> Config:
        try:
            held = yaml.safe_load(self._config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            return {}
        return held if isinstance(held, dict) else {}

    def _check_empty(self) -> None:
        if not self.path.is_dir():
            raise ExperimentError(f"{self.path} is a file: choose another --out or remove it")
        # environment.json alone is a start that was cut short.
        ours = {self._environment.name, f"{self._environment.name}.tmp", f"{self._config.name}.tmp"}
        ours |= {lock.NAME, "server.log", COMMAND}
        foreign = sorted({path.name for path in self.path.iterdir()} - ours)
        if foreign:
            raise ExperimentError(
                f"{self.path} holds something that is not an experiment ({foreign[0]}): "
                "choose another --out or remove it"
            )

    def _part_files(self) -> list[Path]:
        return sorted(self._parts.glob("round_*.parquet"), key=lambda p: (_round_of(p), p.name))

    def _client_table(self) -> pa.Table:
        # Until the summary is there the parts count: a `finish` may have been cut short.
        if self._summary.is_file():
            return _read(self._clients)
        nothing = np.empty(0, np.int64)
        empty = _client_rows(0, PARTS[0], ClientScores(nothing, nothing, nothing, np.empty(0)))
        empty = empty.append_column(MODEL, pa.array(nothing))
        return _join([empty, *(_read(path) for path in self._part_files())])


def deciding(config: Config) -> Config:
    """The keys that decide a result: the same run may go on with other actors."""
    kept = {key: value for key, value in config.items() if key not in ("execution", "tracking")}
    execution = config.get("execution", {})
    free = ("executor", "actors", "server")
    return kept | {"execution": {k: v for k, v in execution.items() if k not in free}}


def _alike(held: Config, here: Config) -> tuple[Config, Config]:
    """Both without `execution.block`, if one of them leaves it to the default."""
    blocks = [config["execution"].get("block") for config in (held, here)]
    if None not in blocks:
        return held, here

    def without(config: Config) -> Config:
        execution = {k: v for k, v in config["execution"].items() if k != "block"}
        return {**config, "execution": execution}

    return without(held), without(here)


def first_difference(held: Config, config: Config) -> str | None:
    """The first key two configs disagree in, with both values.

    >>> first_difference({"seed": 0, "model": {"name": "a"}}, {"seed": 0, "model": {"name": "b"}})
    "model.name is 'a' there and 'b' here"
    """
    there, here = leaves(held), leaves(config)
    for key in here | there:
        if key not in there or key not in here or there[key] != here[key]:
            old = repr(there[key]) if key in there else "absent"
            new = repr(here[key]) if key in here else "absent"
            return f"{key} is {old} there and {new} here"
    return None


def leaves(config: Config, prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted keys.

    >>> leaves({"train": {"lr": 0.1}, "seed": 0})
    {'train.lr': 0.1, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _client_rows(t: int, part: str, scores: ClientScores) -> pa.Table:
    num_rows = len(scores.clients)
    return pa.table(
        {
            ROUND: np.full(num_rows, t, dtype=np.int64),
            CLIENT: scores.clients,
            PART: pa.array([part] * num_rows, pa.string()),
            CORRECT: scores.correct,
            TOTAL: scores.total,
            ACCURACY: scores.accuracy,
            LOSS: scores.loss,
        }
    )


def _round_of(path: Path) -> int:
    name = _ROUND.fullmatch(path.name)
    assert name is not None, path
    return int(name[1])


def _write(path: Path, table: pa.Table) -> None:
    replace_file(path, lambda file: pq.write_table(table, file, write_page_checksum=True))


def _read(path: Path) -> pa.Table:
    # `read_table` opens by name more than once, and a run puts new files in the place of old ones.
    with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()


def _join(tables: list[pa.Table]) -> pa.Table:
    """One below the other; a column that one of them lacks is null there."""
    return pa.concat_tables(tables, promote_options="permissive")


def _to_yaml(config: Config) -> str:
    text: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return text


def _to_json(value: object) -> str:
    return json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: object) -> object:
    """What JSON can hold: numpy scalars as Python's, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

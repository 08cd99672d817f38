"""A run's directory: the one place a result is written to and read from.

While a run goes on, the scores of its clients are small files below checkpoints/, one per
evaluation; `finish` joins them. Append the rows of a round before its checkpoint is saved: after a
kill `truncate` drops what the checkpoint does not know, but nothing brings back what is missing.
"""

import hashlib
import json
import math
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
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

from flray.columns import (
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
from flray.config.deciding import (
    FIXED,
    Config,
    deciding,
    differences,
    first_difference,
    is_below,
    value_text,
    with_block_of,
)
from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.files import damaged, read_json, reading, replace_file, replace_text
from flray.measures.scores import ClientScores
from flray.records import lock
from flray.records.checkpoint import CheckpointStore
from flray.records.clusterings import FOLDER, write_clustering
from flray.records.command import COMMAND
from flray.records.inside import refuse_links_out

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start

Json = dict[str, Any]  # Any: JSON

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

COMPONENTS = "part"  # folder of a run that trains a part of its clients (sweeps/groups.py)
CONFIGURATIONS = "configurations"  # key of environment.json

_NUMBERS = {
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()),
        *(pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.null()),
    )
}
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
            held, here = self.config(), with_block_of(self.config(), _to_plain(config))
            self._check_unedited(held)
            if here.get("rounds", 0) > held.get("rounds", 0):
                held = {**held, "rounds": here["rounds"]}
            difference = first_difference(deciding(held), deciding(here))
            if difference is not None:
                raise ExperimentError(
                    f"{self.path} holds another experiment ({difference}): choose another --out or "
                    f"remove it{self._how_to_change(held, here)}"
                )
        elif self.path.exists():
            self._check_empty()

    def _how_to_change(self, held: Config, config: Config) -> str:
        key, _, value = next(differences(deciding(held), deciding(config)))
        if is_below(key, (*FIXED, "rounds")) or self._summary.exists():
            return ""
        return f"; to go on with the new value type {self._resume_command(key, value)}"

    def _check_unedited(self, held: Config) -> None:
        """Refuse a config.yaml that is not what the run was computed with."""
        recorded = self.configurations()
        if not recorded:  # of a version that kept none; `resume` refuses it
            return
        for key, old, new in differences(recorded[-1]["config"], _to_json_values(deciding(held))):
            raise ExperimentError(
                f"{self._config} was edited: {key} was {value_text(old)} and is now "
                f"{value_text(new)}. To go on as before type {self._resume_command(key, old)}; "
                f"with the new value from the next round on: {self._resume_command(key, new)}"
            )

    def _resume_command(self, key: str, value: object) -> str:
        setting = shlex.quote(f"{key}={json.dumps(value, default=str)}")
        return f"flray run --out {shlex.quote(str(self.path))} --resume {setting}"

    def change_settings(self, config: Config, keys: Collection[str]) -> None:
        """Let a run go on with the values that a command gives to some keys, and record both.

        Does nothing if the configuration differs in other keys or in keys that a run keeps, and
        nothing for a finished run: `check_resume` refuses these.

        Args:
            keys: dotted; a key includes those below it.
        """
        if not keys or not self.holds_run() or self.is_finished(config):
            return
        recorded = self.configurations()
        if not recorded:
            return
        lock.check_free(self.path)
        held, config = self.config(), with_block_of(self.config(), _to_plain(config))
        old, new = recorded[-1]["config"], _to_json_values(deciding(config))
        edited = differences(old, _to_json_values(deciding(held)))
        changed = {key for key, _, _ in (*differences(old, new), *edited)}
        may_change = all(is_below(key, keys) and not is_below(key, FIXED) for key in changed)
        if changed and may_change and new.get("rounds", 0) >= old.get("rounds", 0):
            self.store().check_newest()
            self._record_configuration(config)

    def _record_configuration(self, config: Config) -> None:
        """Make this the configuration of all rounds after the last checkpoint."""
        environment = self.environment()
        new = _to_json_values(deciding(config))
        if new != environment[CONFIGURATIONS][-1]["config"]:
            entry = {"from_round": (self.store().newest_round() or 0) + 1, "config": new}
            environment[CONFIGURATIONS].append(entry)
            replace_text(self._environment, _to_json(environment))
        replace_text(self._config, _to_yaml(config))

    def start(self, config: Config, environment: Mapping[str, Any], split_digest: str) -> None:
        """Make the directory of a new run."""
        self.check_start(config)
        self.path.mkdir(parents=True, exist_ok=True)
        first = {"from_round": 1, "config": deciding(_to_plain(config))}
        recorded = {**environment, SPLIT_SHA256: split_digest, CONFIGURATIONS: [first]}
        replace_text(self._environment, _to_json(recorded))
        replace_text(self._config, _to_yaml(config))  # last: it is what makes this a run

    def resume(self, config: Config, environment: Mapping[str, Any], split_digest: str) -> None:
        """Go on with the run this directory holds, or start it; `truncate` comes next."""
        self.check_resume(config)
        if not self.holds_run():
            return self.start(config, environment, split_digest)
        held = self.environment().get(SPLIT_SHA256)
        if held != split_digest:
            raise ExperimentError(
                f"{self.path} holds another experiment (its split has the digest {held}, the "
                f"split made now {split_digest}; has the dataset changed?): choose another --out "
                "or remove it"
            )
        if not self.configurations():
            raise ExperimentError(
                f"{self._environment} has no {CONFIGURATIONS!r}, which this version of flray "
                "compares checkpoints with: start the experiment again in another --out"
            )
        self.store().check_newest()
        is_longer = config.get("rounds", 0) > self.config().get("rounds", 0)
        if is_longer:
            self._record_configuration({**self.config(), "rounds": config["rounds"]})
        if self._summary.exists() and not self.is_finished(config):
            self._reopen()
        # A run that was finished elsewhere must not pass for one of the first machine only.
        recorded = self.environment()
        resumed = [*recorded.get("resumed", []), environment]
        replace_text(self._environment, _to_json({**recorded, "resumed": resumed}))

    def store(self, packages: Collection[str] = ()) -> CheckpointStore:
        """The checkpoints of the run, each bound to the run and to what was recorded before it."""
        return CheckpointStore(self.checkpoints, packages, self.bound_to)

    def bound_to(self, t: int) -> Json:
        """What a checkpoint after round t belongs to: which run, and how many records until then.

        The run is named by what decided its first round; changes later on are recorded.
        """
        recorded = self.environment()
        with reading(self._environment):
            decided = [recorded[CONFIGURATIONS][0]["config"], recorded[SPLIT_SHA256]]
        rounds = _read(self._rounds, [ROUND])[ROUND].to_pylist() if self._rounds.exists() else []
        return {
            "run": hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest(),
            "rounds": sum(recorded_round <= t for recorded_round in rounds),
            "evaluations": self._num_evaluations(t),
            "clusterings": _num_files(self._clusterings, "npz", t),
            "rounds of components": _num_files(self.path / COMPONENTS, "parquet", t),
        }

    def _num_evaluations(self, t: int) -> int:
        """How many parts of clients were scored until round t, each a file until the end."""
        if not self._summary.exists():
            return _num_files(self._parts, "parquet", t)
        table = _read(self._clients, [ROUND, PART]).filter(pc.field(ROUND) <= t)
        return len(table.group_by([ROUND, PART]).aggregate([]))

    def is_finished(self, config: Config) -> bool:
        """True if all rounds of this configuration are done."""
        summary = self.summary()
        wanted = config.get("rounds", 0)
        return summary is not None and bool(summary.get(ROUNDS, wanted) >= wanted)

    def _reopen(self) -> None:
        """Make a finished run one that goes on: scores as parts again, and no summary."""
        table = _read(self._clients)
        self._parts.mkdir(parents=True, exist_ok=True)
        pairs = zip(table[ROUND].to_pylist(), table[PART].to_pylist(), strict=True)
        for t, part in dict.fromkeys(pairs):
            rows = table.filter((pc.field(ROUND) == t) & (pc.field(PART) == part))
            _write(self._parts / f"round_{t:06d}_{part}.parquet", rows)
        self._summary.unlink()

    def append_rounds(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of rounds; columns may come and go between them."""
        tables = [pa.Table.from_pylist([dict(row)]) for row in rows]
        if self._rounds.exists():
            tables.insert(0, _read(self._rounds))
        elif rows[0][ROUND] > 1:
            raise ExperimentError(
                f"{self._rounds} is missing, with the rounds before round {rows[0][ROUND]}"
            )
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
        if not len(scores.clients):
            return  # a finished run could not tell that it was there
        table = _client_rows(t, part, scores)
        table = table.append_column(MODEL, pa.array(model[scores.clients]))
        if group is not None:
            table = table.append_column(GROUP, pa.array(group[scores.clients]))
        if not self.path.is_dir():
            raise ExperimentError(f"{self.path} is missing: it was removed while the run went on")
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
        if self._summary.exists():
            raise ValueError(f"{self.path} holds a finished run: its records are final")
        self._begin_configurations(after_round + 1)
        self._clients.unlink(missing_ok=True)  # of a `finish` that was cut short
        for path in [*self._part_files(), *self._clusterings.glob("round_*.npz")]:
            if _round_of(path) > after_round:
                path.unlink()
        if not self._rounds.exists():
            return
        table = _read(self._rounds).filter(pc.field(ROUND) <= after_round)
        if len(table):
            _write(self._rounds, table)
        else:
            self._rounds.unlink()

    def _begin_configurations(self, t: int) -> None:
        """Let configurations hold from round t on that were to hold later."""
        if not self.has_environment():
            return
        environment = self.environment()
        later = [c for c in environment.get(CONFIGURATIONS, []) if c["from_round"] > max(t, 1)]
        for configuration in later:
            configuration["from_round"] = t
        if later:
            replace_text(self._environment, _to_json(environment))

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
        if not self._summary.exists():
            return None
        summary = read_json(self._summary)
        if not isinstance(summary.get(ROUNDS, 0), int):
            raise damaged(self._summary, f"{ROUNDS} must be a number, got {summary[ROUNDS]!r}")
        return summary

    def config(self) -> Config:
        """The resolved configuration of the run."""
        with reading(self._config):
            held = yaml.safe_load(self._config.read_text(encoding="utf-8"))
            if not isinstance(held, dict):
                raise ValueError(f"a mapping of keys was expected, got {type(held).__name__}")
            if not isinstance(held.get("execution", {}), dict):
                raise ValueError(f"execution must be a mapping, got {held['execution']!r}")
            return held

    def has_environment(self) -> bool:
        return self._environment.exists()

    def environment(self) -> Json:
        """What the run was computed with: environment.json."""
        held = read_json(self._environment)
        starts = [held, *_list_of_mappings(held, "resumed", self._environment)]
        for key in ("versions", "hardware"):
            for start in starts:
                if not isinstance(start.get(key, {}), dict):
                    raise damaged(self._environment, f"{key} must be an object")
        return held

    def configurations(self) -> list[Json]:
        """The configurations of the run, by the round `from_round` from which each holds.

        The last of those that begin with the same round holds. Empty for old runs.
        """
        held = self.environment()
        found = _list_of_mappings(held, CONFIGURATIONS, self._environment)
        if not all(isinstance(entry.get("config"), dict) for entry in found):
            raise damaged(self._environment, f"an entry of {CONFIGURATIONS} has no config")
        return found

    def plans(self) -> list[str | None]:
        """What each start of the run asked of a cluster; None where it ran in process."""
        if not self.has_environment():
            return []
        recorded = self.environment()
        return [start.get("plan") for start in [recorded, *recorded.get("resumed", [])]]

    def rounds(self) -> "pd.DataFrame":
        """A row for each round so far."""
        if not self._rounds.exists():
            empty: pd.DataFrame = pa.table({ROUND: np.empty(0, np.int64)}).to_pandas()
            return empty
        frame: pd.DataFrame = _read(self._rounds).to_pandas()
        return frame

    def rows(self, seen: int = 0) -> list[dict[str, Any]]:
        """The rows of rounds.parquet after the first `seen`, each without its empty columns."""
        if not self._rounds.exists():
            return []
        rows: list[dict[str, Any]] = _read(self._rounds).slice(seen).to_pylist()
        return [{key: value for key, value in row.items() if value is not None} for row in rows]

    def clients(self) -> "pd.DataFrame":
        """A row for each client and evaluation so far."""
        frame: pd.DataFrame = self._client_table().to_pandas()
        return frame

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
        if self._summary.exists():
            return self._scores(self._clients)
        nothing = np.empty(0, np.int64)
        empty = _client_rows(0, PARTS[0], ClientScores(nothing, nothing, nothing, np.empty(0)))
        empty = empty.append_column(MODEL, pa.array(nothing))
        return _join([empty, *map(self._scores, self._part_files())])

    def _scores(self, path: Path) -> pa.Table:
        table = _read(path)
        with reading(path):
            _require(table, [CLIENT, PART, CORRECT, TOTAL, ACCURACY, LOSS, MODEL])
        return table


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


def _num_files(folder: Path, suffix: str, t: int) -> int:
    """The number of files in a folder that belong to rounds up to t."""
    return sum(_round_of(path) <= t for path in folder.glob(f"round_*.{suffix}"))


def _write(path: Path, table: pa.Table) -> None:
    replace_file(path, lambda file: pq.write_table(table, file, write_page_checksum=True))


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    # `read_table` opens by name more than once, and a run puts new files in the place of old ones.
    with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read(columns)
        for name, kind in zip(table.column_names, table.schema.types, strict=True):
            if name != PART and kind.id not in _NUMBERS:
                raise ValueError(f"the column {name!r} holds values of type {kind}, not numbers")
        _require(table, columns or [ROUND])
        return table


def _require(table: pa.Table, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(f"there is no column {missing[0]!r}")
    if table[ROUND].null_count or not pa.types.is_integer(table[ROUND].type):
        raise ValueError(f"the column {ROUND!r} must hold whole numbers")


def _join(tables: list[pa.Table]) -> pa.Table:
    """One below the other; a column that one of them lacks is null there."""
    return pa.concat_tables(tables, promote_options="permissive")


def _to_yaml(config: Config) -> str:
    text: str = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return text


def _to_plain(config: Config) -> Json:
    """What is read of a configuration that was written as YAML."""
    plain: Json = yaml.safe_load(_to_yaml(config))
    return plain


def _to_json_values(config: Config) -> Json:
    """What is read of a configuration that was written as JSON."""
    plain: Json = json.loads(_to_json(config))
    return plain


def _list_of_mappings(held: Json, key: str, path: Path) -> list[Json]:
    found = held.get(key, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise damaged(path, f"{key} must be a list of objects")
    return found


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

"""What a run has recorded: its rounds, the scores of its clients, its clusterings, its summary.

While a run goes on, the scores of its clients are small files below checkpoints/, one per
evaluation; `finish` joins them. Append the rows of a round before its checkpoint is saved: after a
kill `truncate` drops what the checkpoint does not know, but nothing brings back what is missing.
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from flray.columns import ACCURACY_COLUMNS, ENDED_BY, ROUND, ROUNDS, SPLIT_SHA256, ScoreColumns
from flray.config.deciding import Config
from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.files import TEMPORARY, read_json, reading, replace_file, replace_text, to_json
from flray.measures.scores import ClientScores
from flray.records import tables
from flray.records.checkpoint import CheckpointStore
from flray.records.clusterings import FOLDER, write_clustering
from flray.records.score_files import ScoreFiles

if TYPE_CHECKING:
    import pandas as pd  # imported for types only: pandas delays a start

Json = dict[str, Any]  # Any: JSON
Row = Mapping[str, Any]  # Any: one value per column

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tenfold faster where libyaml is there
PART_FOLDER = "part"  # folder of a run that trains a part of its clients (sweeps/groups.py)
# Keys of environment.json
CONFIGURATIONS, SCORES, CLIENT_NAMES = "configurations", "scores", "client_names"
GROUP_NAMES = "group_names"
FILES = "files"  # SHA-256 of the files that the experiment names, by key


class RunRecords:
    """The files of a run's folder: what is read, what is appended, and what a checkpoint needs.

    A round's rows are written once, in order of rounds. Reading checks types and checksums; a
    damaged or missing file is an ExperimentError that names it.

    Files, below `path`:
        config.yaml: the resolved experiment.
        environment.json: versions, hardware, scores other than accuracy, names of clients,
            digests of the split and of files, configurations, later starts.
        rounds.parquet: one row per round.
        clients.parquet: one row per client, part and evaluated round; written by `finish`.
        summary.json: numbers of the finished run; its presence makes a run finished.
        clusterings/: one file per clustering. checkpoints/: the state, and scores until `finish`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._clusterings = self.path / FOLDER
        self._config = self.path / "config.yaml"
        self._environment = self.path / "environment.json"
        self._rounds = self.path / "rounds.parquet"
        self._scores = ScoreFiles(self.checkpoints / "clients", self.path / "clients.parquet")
        self._summary = self.path / "summary.json"

    def config(self) -> Config:
        """The resolved configuration of the run: config.yaml, as nested mappings and lists.

        Raises:
            ExperimentError: The file is missing or damaged.
        """
        with reading(self._config):
            config = yaml.load(self._config.read_text(encoding="utf-8"), _Loader)
            if not isinstance(config, dict):
                raise ValueError(f"a mapping of keys was expected, got {type(config).__name__}")
            if not isinstance(config.get("execution", {}), dict):
                raise ValueError(f"execution must be a mapping, got {config['execution']!r}")
            return config

    def has_environment(self) -> bool:
        """True if environment.json is there; runs of old versions and copies may lack it."""
        return self._environment.exists()

    def environment(self) -> Json:
        """What the run was computed with: environment.json.

        Beside the keys of `records/environment.py` it has `split_sha256`, `configurations`, `plan`
        and, for every later start, an entry of `resumed`.
        """
        recorded = read_json(self._environment)
        with reading(self._environment):
            for key in ("resumed", CONFIGURATIONS):
                entries = recorded.get(key, [])
                if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
                    raise ValueError(f"{key} must be a list of objects")
            for start in (recorded, *recorded.get("resumed", [])):
                for key in ("versions", "hardware"):
                    if not isinstance(start.get(key, {}), dict):
                        raise ValueError(f"{key} must be an object")
            for entry in recorded.get(CONFIGURATIONS, []):
                for key, kind in (("config", dict), ("from_round", int)):
                    if not isinstance(entry.get(key), kind):
                        raise ValueError(f"an entry of {CONFIGURATIONS} has no {key}")
        return recorded

    def configurations(self) -> list[Json]:
        """The configurations of the run, by the round `from_round` from which each holds.

        The last of those that begin with the same round holds. Empty for old runs.
        """
        entries: list[Json] = self.environment().get(CONFIGURATIONS, [])
        return entries

    def scores(self) -> tuple[ScoreColumns, ...]:
        """What the run records of its clients' predictions; the first score ranks."""
        entries = self.environment().get(SCORES, []) if self.has_environment() else []
        with reading(self._environment):
            return tuple(ScoreColumns(**entry) for entry in entries) or (ACCURACY_COLUMNS,)

    def client_names(self) -> tuple[str, ...]:
        """(M,) the owners' names in the data; () for clients that a split made."""
        recorded = self.environment() if self.has_environment() else {}
        return tuple(recorded.get(CLIENT_NAMES, ()))

    def plans(self) -> list[str | None]:
        """What each start of the run asked of a cluster; None where it ran in process.

        One entry per start; [] for a run that has not started.
        """
        if not self.has_environment():
            return []
        recorded = self.environment()
        return [start.get("plan") for start in (recorded, *recorded.get("resumed", []))]

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
        return {
            "run": hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest(),
            "rounds": sum(n <= t for n in self._recorded_rounds()),
            "evaluations": self._scores.num_evaluations(t, self._summary.exists()),
            "clusterings": tables.num_files(self._clusterings, "npz", t),
            "rounds of components": tables.num_files(self.path / PART_FOLDER, "parquet", t),
        }

    def _recorded_rounds(self) -> list[int]:
        if not self._rounds.exists():
            return []
        rounds: list[int] = tables.read(self._rounds, [ROUND])[ROUND].to_pylist()
        return rounds

    def append_rounds(self, rows: Sequence[Row]) -> None:
        """Add the rows of rounds, which follow those that are there.

        Args:
            rows: one mapping of columns per round, with `round`; columns may come and go.
        """
        parts = [tables.of_rows(rows)]
        if self._rounds.exists():
            parts.insert(0, tables.read(self._rounds))
        elif rows[0][ROUND] > 1:
            raise ExperimentError(
                f"{self._rounds} is missing, with the rounds before round {rows[0][ROUND]}"
            )
        table = tables.join(parts)
        for before, after in pairwise(table[ROUND].to_pylist()):
            if after <= before:
                raise ValueError(f"rounds are appended in order, got {after} after {before}")
        tables.write(self._rounds, table)

    def append_clients(
        self, t: int, part: str, scores: ClientScores, model: Ids, group: Ids | None = None
    ) -> None:
        """Add a row for each scored client of one part, as `ScoreFiles.append` does."""
        if not self.path.is_dir():
            raise ExperimentError(f"{self.path} is missing: it was removed while the run went on")
        self._scores.append(t, part, scores, model, group)

    def append_clustering(
        self, t: int, arrays: Mapping[str, NDArray[Any]], num_later: int = 0
    ) -> None:
        """Keep the evidence of a clustering after round t (0: before the first).

        Args:
            arrays: the fields of `ClusteringRecord` by name.
            num_later: how many clusterings of the same round come after it.
        """
        write_clustering(self._clusterings, t, arrays, num_later)

    def adopt(self, other: "RunRecords", num_rounds: int) -> None:
        """Take over the first rounds of another, unfinished run, which this one would repeat.

        Columns that are empty in these rounds are left out, as a run that stopped there has them.
        """
        table = tables.read(other._rounds).filter(pc.field(ROUND) <= num_rounds)
        used = [name for name in table.column_names if table[name].null_count < len(table)]
        tables.write(self._rounds, table.select(used))
        self._scores.adopt(other._scores, num_rounds)

    def truncate(self, after_round: int) -> None:
        """Drop every record later than a round (-1: every record) of an unfinished run.

        Configurations that were to hold later hold from the next round on.
        """
        if self._summary.exists():
            raise ValueError(f"{self.path} holds a finished run: its records are final")
        self._begin_configurations(after_round + 1)
        self._scores.truncate(after_round)
        for path in self.path.glob(f"{self._rounds.name}.*{TEMPORARY}"):
            path.unlink(missing_ok=True)  # left by a write that was cut short
        tables.remove_later_files(self._clusterings, "npz", after_round)
        if not self._rounds.exists():
            return
        table = tables.read(self._rounds).filter(pc.field(ROUND) <= after_round)
        if len(table):
            tables.write(self._rounds, table)
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
            replace_text(self._environment, to_json(environment))

    def finish(self, summary: Row, scores: "pd.DataFrame | None" = None) -> None:
        """Write clients.parquet and, last, summary.json: numbers that are not finite are null.

        After that the records are final, until `reopen`.

        Args:
            scores: The table of clients.parquet; None: the scores that were recorded here.
        """
        if scores is None:
            table = self._scores.table(is_final=False)
        else:
            table = pa.Table.from_pandas(scores, preserve_index=False).replace_schema_metadata(None)
        self._scores.replace(table)
        replace_text(self._summary, to_json(summary))
        self._scores.remove_parts()

    def reopen(self) -> None:
        """Make a finished run one that goes on: scores as parts again, and no summary."""
        self._scores.divide()
        self._summary.unlink()

    def replace_rounds(self, rows: Sequence[Row]) -> None:
        """Write the rows of all rounds anew; a reader sees the old table or the new one."""
        tables.write(self._rounds, tables.of_rows(rows))

    def copy_records_to(self, path: Path) -> None:
        """Copy rounds, scores, clusterings and, last, the summary of a finished run to a folder.

        The configuration is not copied: runs of a sweep with equal records differ in it.
        """
        if self._clusterings.is_dir():
            shutil.copytree(self._clusterings, path / FOLDER, dirs_exist_ok=True)
        for file in (self._rounds, self._scores.path, self._summary):
            replace_file(path / file.name, partial(shutil.copyfile, file))

    def summary(self) -> dict[str, Any] | None:
        """The numbers of the finished run, from summary.json; None while it is unfinished."""
        if not self._summary.exists():
            return None
        summary = read_json(self._summary)
        with reading(self._summary):
            if not isinstance(summary.get(ROUNDS, 0), int):
                raise ValueError(f"{ROUNDS} must be a number, got {summary[ROUNDS]!r}")
        return summary

    def is_finished(self, config: Config) -> bool:
        """True if the run is finished and has at least the rounds of this configuration.

        A finished run with fewer rounds can go on (`reopen`).
        A run that the same `stop` has ended needs no more rounds.
        """
        summary = self.summary()
        if summary is None:
            return False
        if ENDED_BY in summary and config.get("stop") == self.config().get("stop"):
            return True
        wanted = config.get("rounds", 0)
        return bool(summary.get(ROUNDS, wanted) >= wanted)

    def clustering_rounds(self) -> list[int]:
        """The rounds after which clients were clustered, in order."""
        files = tables.files_of_rounds(self._clusterings, "npz")
        return list(dict.fromkeys(map(tables.round_of, files)))

    def has_clustering(self, t: int) -> bool:
        """True if clients were clustered after round t."""
        return t in self.clustering_rounds()

    def rounds(self) -> "pd.DataFrame":
        """A row for each round so far, with the columns of `flray.columns`.

        Columns that a round does not have are NaN or None there; without rounds there is the column
        `round` alone.
        """
        is_begun = self._rounds.exists()
        table = tables.read(self._rounds) if is_begun else pa.table({ROUND: np.empty(0, np.int64)})
        frame: pd.DataFrame = table.to_pandas()
        return frame

    def rows(self, seen: int = 0) -> list[dict[str, Any]]:
        """The rows of rounds.parquet after the first `seen`, each without its empty columns.

        For those who follow a run and poll it; does not import pandas.
        """
        if not self._rounds.exists():
            return []
        rows: list[dict[str, Any]] = tables.read(self._rounds).slice(seen).to_pylist()
        return [{key: value for key, value in row.items() if value is not None} for row in rows]

    def clients(self) -> "pd.DataFrame":
        """A row for each client, part and evaluated round so far.

        Columns: round, client, part (one of PARTS), correct, total, accuracy or other scores, loss,
        model (row of the bank) and, where groups were planted, group.
        """
        # Until the summary is there the parts count: a `finish` may have been cut short.
        frame: pd.DataFrame = self._scores.table(is_final=self._summary.exists()).to_pandas()
        return frame

    def has_scores_of(self, part: str) -> bool:
        """True if clients were scored on this part, one of PARTS, in any round so far."""
        return self._scores.has_part(part, is_final=self._summary.exists())

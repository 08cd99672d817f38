"""Run directories as tables, figures and pages read them: one record per run, finished or not.

`find_runs` returns the runs and sweeps to report, `collect_runs` the finished runs, also those
inside sweeps, that may fill a published table. A run directory is recognised by its files alone
(`holds_run`), wherever it lies; nothing here writes into one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from flray import columns as recorded
from flray.columns import ScoreColumns
from flray.errors import ExperimentError
from flray.records.clusterings import clustering_files
from flray.records.command import read_command
from flray.records.recorded import GROUP_NAMES
from flray.records.run_directory import RunDirectory
from flray.reports.columns import value_text
from flray.reports.configuration import value_at
from flray.reports.settings import SEED_FOLDER, readable_names, settings_text
from flray.reports.sweeps import Sweep, enclosing_sweep, holds_sweep, read_sweep
from flray.server.summary import checked_summary, numbers_so_far

Plain = Mapping[str, Any]  # Any: YAML and JSON


@dataclass(frozen=True)
class RunRecord:
    """A run directory; its tables are read when they are first used.

    `read_run` makes one. `numbers` are those of the summary, or of the last round so far. A record
    is a snapshot: tables that were read once do not change while the run goes on.

    >>> config = {"algorithm": {"name": "ifca", "k": 4}, "dataset": "digits", "seed": 1}
    >>> run = RunRecord(Path("runs/ifca/seed_1"), config, {"accuracy_mean": 0.5}, "ifca")
    >>> run.label, run.folder, run.title
    ('ifca, seed 1', 'ifca/seed_1', 'ifca · digits · ?')
    >>> run.value("algorithm.k"), run.value("summary.accuracy_mean"), run.value("train.lr")
    (4, 0.5, None)
    """

    path: Path
    config: Plain  # resolved configuration, nested mappings
    summary: Plain | None  # None: the run is not finished
    name: str = ""  # name of the experiment, shared by its seeds
    missing_seeds: int = 0  # runs with the same settings and another seed that did not finish

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round so far, as in rounds.parquet."""
        return RunDirectory(self.path).rounds()

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row for each client and evaluation so far, as in clients.parquet.

        With a column `name` if clients have names in the data.
        """
        clients = RunDirectory(self.path).clients()
        if self.client_names:
            names = [self.client_names[client] for client in clients[recorded.CLIENT]]
            clients.insert(list(clients).index(recorded.CLIENT) + 1, recorded.NAME, names)
        return clients

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """(M,) the names of the clients in the data; () if they have none."""
        return RunDirectory(self.path).client_names()

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """(G,) the names of the planted groups: kinds of the data, pipelines, turns; () if none."""
        views = self.value("split.pipelines") or self.value("split.degrees") or ()
        return tuple(self.environment.get(GROUP_NAMES) or map(str, views))

    @cached_property
    def clusterings(self) -> Mapping[int, Path]:
        """The files of the recorded clusterings by round, ascending; round 0 is before training.

        `flray.records.clusterings.read_clustering` reads one.
        """
        return clustering_files(self.path)

    @cached_property
    def environment(self) -> Plain:
        """The content of environment.json: versions, commit, hardware; {} if the run has none."""
        directory = RunDirectory(self.path)
        return directory.environment() if directory.has_environment() else {}

    @cached_property
    def numbers(self) -> Plain:
        """The summary; for an unfinished run, the last evaluation and the totals so far."""
        return numbers_so_far(RunDirectory(self.path)) if self.summary is None else self.summary

    @cached_property
    def scores(self) -> tuple[ScoreColumns, ...]:
        """What the run records of its clients' predictions; the first one is `score`."""
        return RunDirectory(self.path).scores()

    @property
    def score(self) -> ScoreColumns:
        """The score that ranks clients and runs."""
        return self.scores[0]

    @property
    def seed(self) -> int | None:
        """The seed of this run; None if its configuration has none."""
        return self.config.get(recorded.SEED)

    @property
    def label(self) -> str:
        """The name of the experiment with the seed, to tell apart the runs of one experiment."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    @property
    def folder(self) -> str:
        """The path relative to the folder of the experiment."""
        parts = self.path.parts
        return "/".join(parts[-2:] if SEED_FOLDER.fullmatch(parts[-1]) else parts[-1:])

    @property
    def title(self) -> str:
        """Algorithm, dataset and split by name, "?" for what the configuration does not have."""
        keys = ("algorithm.name", "dataset.name", "split.name")
        return " · ".join(str(self.value(key) or "?") for key in keys)

    @property
    def uses_ground_truth(self) -> bool:
        """True if the run read ground truth; if that is not recorded, whether it was allowed to."""
        allowed = self.config.get(recorded.USES_GROUND_TRUTH) is True
        return bool(self.numbers.get(recorded.USES_GROUND_TRUTH, allowed))

    def value(self, key: str) -> Any:  # Any: YAML and JSON
        """The value of a dotted key of the configuration, or of summary.KEY; None without one.

        A component that is given by its name alone has that `name`, so that "split.name" works for
        both forms. Keys of the summary are not nested.
        """
        first, _, rest = key.partition(".")
        return (self.summary or {}).get(rest) if first == "summary" else value_at(self.config, key)

    def row(self, t: int | None) -> Plain:
        """The numbers of round t in rounds.parquet, {} without such a round.

        Columns that were not measured in this round are left out.
        """
        row = self.rounds[self.rounds[recorded.ROUND] == t]
        return {} if row.empty else {str(k): v for k, v in row.iloc[0].dropna().items()}

    def at(self, t: int | None) -> Plain:
        """The numbers of round t, {} without such a round; None: those of the end of the run.

        The last round of a finished run has the keys of its summary, other rounds have the columns
        of rounds.parquet, which are fewer.
        """
        is_end = self.summary is not None and t in (None, self.summary.get(recorded.ROUNDS))
        return self.numbers if is_end else self.row(t)

    def evaluated(self) -> pd.DataFrame:
        """The rounds with a score: its mean and worst decile, number of clusters and ARI."""
        columns = [self.score.mean, self.score.column("worst_decile"), recorded.CLUSTERS]
        columns.append(recorded.ARI)
        rounds = self.rounds.reindex(columns=[recorded.ROUND, *map(str, columns)])
        return rounds.dropna(subset=[self.score.mean])

    @property
    def is_evaluated(self) -> bool:
        """True if at least one round so far has a score on test parts."""
        return len(self.evaluated()) > 0

    def last_test(self) -> pd.DataFrame:
        """The rows of `clients` of the last evaluation on test parts.

        One row per evaluated client; no row before the first evaluation.
        """
        test = self.clients[self.clients[recorded.PART] == "test"]
        last: pd.DataFrame = test[test[recorded.ROUND] == test[recorded.ROUND].max()]
        return last


Experiments = Mapping[str, Sequence[RunRecord]]  # the seeds of each, by name


def score_of(experiments: Experiments) -> ScoreColumns:
    """The score that experiments are compared by: that of the first run."""
    return next(run.score for runs in experiments.values() for run in runs)


def by_experiment(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """The runs of each experiment in the order of seeds, with the number of unfinished ones.

    Experiments come in the order of their first run. Each returned record has `missing_seeds` set
    to the unfinished runs of its experiment.

    >>> done, running = (RunRecord(Path(p), {"seed": s}, x, "fedavg")
    ...                  for p, s, x in (("b", 1, {}), ("a", 0, None)))
    >>> [(run.seed, run.missing_seeds) for run in by_experiment([done, running])["fedavg"]]
    [(0, 1), (1, 1)]
    """
    grouped: dict[str, list[RunRecord]] = {}
    for run in runs:
        grouped.setdefault(run.name, []).append(run)
    for name, seeds in grouped.items():
        missing = sum(run.summary is None for run in seeds)
        ordered = sorted(seeds, key=lambda run: run.seed or 0)
        grouped[name] = [replace(run, missing_seeds=missing) for run in ordered]
    return grouped


def finished(experiments: Experiments) -> dict[str, list[RunRecord]]:
    """The experiments with only their finished runs; experiments without one are left out."""
    done = {name: [r for r in runs if r.summary is not None] for name, runs in experiments.items()}
    return {name: runs for name, runs in done.items() if runs}


def read_run(path: Path, name: str = "") -> RunRecord:
    """The run in a folder; its summary is checked against its other files.

    Args:
        path: The run directory.
        name: The name of its experiment in tables and figures.

    Raises:
        ExperimentError: There is no run, or its files contradict each other.
    """
    directory = RunDirectory(path)
    if not directory.holds_run():
        raise ExperimentError(f"{path} holds no run: it has no config.yaml")
    return RunRecord(path, directory.config(), checked_summary(directory), name)


def find_runs(folders: Sequence[Path]) -> tuple[list[RunRecord], list[Sweep]]:
    """All runs, finished or not, and all sweeps in and below the folders.

    Runs of one command come in the order of the command, others in that of their paths. They are
    named after their experiments. Runs of a sweep are not listed: they are rows of the sweep. Links
    in the folders are followed, links further below are not.

    Args:
        folders: Folders of runs or sweeps, or folders that contain such folders.

    Raises:
        ExperimentError: There is neither a run nor a sweep in one of the folders.
    """
    paths: dict[Path, Path] = {}
    for folder in folders:
        below = [path for root in _roots(folder.resolve()) for path in _below(root)]
        if not below:
            raise ExperimentError(_nothing_in(folder))
        for path in below:
            paths.setdefault(path.resolve(), path)
    sweeps = [path for path in paths.values() if holds_sweep(path)]
    runs = [path for path in paths.values() if path not in sweeps]
    records = [read_run(path) for path in runs]
    names = readable_names(runs, [run.config for run in records])
    named = [replace(run, name=name) for run, name in zip(records, names, strict=True)]
    return named, [read_sweep(path) for path in sweeps]


def row_runs(sweep: Sweep) -> list[RunRecord]:
    """The finished rows of a sweep as runs; the settings of a configuration are its name.

    A number is preceded by the name of its key.
    """
    keys = {key: sweep.names.get(key, key) for key in sweep.identifying}
    runs = []
    for _, row in sweep.finished.iterrows():
        texts = [
            f"{name} {value_text(row[key])}" if sweep.is_number(key) else value_text(row[key])
            for key, name in keys.items()
            # A row with `algorithm.name` has the same in `algorithm`, which a baseline may set.
            if pd.notna(row[key]) and row[key] != row.get(f"{key}.name")
        ]
        label = ", ".join(texts) or sweep.path.name
        runs.append(read_run(sweep.path / str(row[recorded.FOLDER]), label))
    return runs


def run_folders(*folders: Path) -> dict[Path, Path | None]:
    """The run directories in and below folders, in the order of paths, each with its sweep.

    The sweep is None for a run of its own. Of a sweep, these are the runs of its rows, without
    those of its cache. Links in the folders are followed, links further below are not.
    """
    roots = [root for folder in folders for root in _roots(folder)]
    files = [file for root in roots for file in sorted(root.rglob("config.yaml"))]
    distinct = {file.parent.resolve(): file.parent for file in reversed(files)}
    paths = sorted(distinct.values())
    sweeps = {path: enclosing_sweep(path.resolve()) for path in paths if holds_run(path)}
    return {
        path: sweep
        for path, sweep in sweeps.items()
        if sweep is None or sweep == path.resolve().parent.parent
    }


def collect_runs(*folders: Path) -> list[RunRecord]:
    """The finished runs below folders, also those of sweeps, in the order of their paths.

    Each has the number of runs with the same settings and another seed that did not finish: rows of
    the same configuration in its sweep, otherwise unfinished runs below the folders.
    """
    sweeps = run_folders(*folders)
    runs = [read_run(path) for path in sweeps]
    finished = [run for run in runs if run.summary is not None]
    # The table of a sweep has its unfinished rows; other runs are compared by their settings.
    tables = [read_sweep(path) for path in {*sweeps.values()} if path and holds_sweep(path)]
    missing_by_folder = {k: n for table in tables for k, n in table.missing_by_folder.items()}
    done = {settings_text(run.config) for run in finished}
    unfinished = [run.config for run in runs if run.summary is None and sweeps[run.path] is None]
    lacking = {settings_text(config): settings_text(config, recorded.SEED) for config in unfinished}
    missing_by_settings = Counter(text for run, text in lacking.items() if run not in done)

    def num_missing(run: RunRecord) -> int:
        if sweeps[run.path] is not None:
            return missing_by_folder.get(run.path.resolve(), 0)
        return missing_by_settings[settings_text(run.config, recorded.SEED)]

    return [replace(run, missing_seeds=num_missing(run)) for run in finished]


def holds_run(path: Path) -> bool:
    """True for a run directory; a run that has just started has an environment, but no rounds.

    A config.yaml alone, as a user may keep one beside runs, is not enough.
    """
    files = (path / "rounds.parquet", path / "environment.json")
    return RunDirectory(path).holds_run() and any(file.is_file() for file in files)


def _roots(folder: Path) -> list[Path]:
    """A folder that a user named, and the folders that links in it lead to.

    Links inside a run or a sweep are not followed: its records lie below its own folder.
    """
    if not folder.is_dir() or holds_run(folder) or holds_sweep(folder):
        return [folder]
    return [folder, *sorted(c for c in folder.iterdir() if c.is_symlink() and c.is_dir())]


def _below(folder: Path) -> Iterator[Path]:
    """The runs and sweeps in a folder; a folder inside one of them is part of it."""
    if holds_sweep(folder) or holds_run(folder):
        yield folder
    elif folder.is_dir():
        children = [c for c in sorted(folder.iterdir()) if c.is_dir() and not c.is_symlink()]
        order = _order_of_command(folder)
        below = [path for child in children for path in _below(child)]
        yield from sorted(below, key=lambda path: order.get(path, len(order)))


def _order_of_command(folder: Path) -> dict[Path, int]:
    """The position of each run in the command that `flray run` was given for this folder."""
    runs = read_command(folder).get("runs", [])
    return {folder / run["folder"]: position for position, run in enumerate(runs)}


def _nothing_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; expected one that `flray run` or `flray sweep` made"
    return (
        f"nothing to report in {folder}: expected a run (config.yaml and rounds.parquet), a sweep "
        "(sweep.json and rows.parquet), or a folder with such folders below it"
    )

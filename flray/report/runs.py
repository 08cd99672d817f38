"""Run directories as tables, figures and pages read them: one record per run, finished or not."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from flray.errors import ExperimentError
from flray.records.clusterings import clustering_files
from flray.records.columns import GROUND_TRUTH_READS
from flray.records.damage import read_json
from flray.records.run_directory import RunDirectory, leaves
from flray.report.configuration import look_up
from flray.report.sweeps import SPACE, Sweep, holds_sweep, read_sweep

Plain = Mapping[str, Any]  # Any: YAML and JSON

# Keys that do not change the experiment; a key includes those below it.
NO_MATTER = ("execution", "tracking", "dataset.download", "on_client_failure")
_SEED_FOLDER = re.compile(r"seed_\d+")


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: Plain  # resolved: nested mappings
    summary: Plain | None  # None: the run is not finished
    name: str = ""  # of the experiment, shared by its seeds
    missing_seeds: int = 0  # runs that differ in their seed alone and failed or did not finish

    @cached_property
    def rounds(self) -> pd.DataFrame:
        return RunDirectory(self.path).rounds()

    @cached_property
    def clients(self) -> pd.DataFrame:
        return RunDirectory(self.path).clients()

    @cached_property
    def clusterings(self) -> Mapping[int, Path]:
        """Files by round."""
        return clustering_files(self.path)

    @cached_property
    def environment(self) -> Plain:
        file = self.path / "environment.json"
        return read_json(file) if file.is_file() else {}

    @cached_property
    def numbers(self) -> Plain:
        """The summary; of an unfinished run the last evaluation and totals so far."""
        return _so_far(self.rounds) if self.summary is None else self.summary

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config.get("seed")
        return seed

    @property
    def label(self) -> str:
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    @property
    def folder(self) -> str:
        """Its path relative to the folder of its experiment."""
        parts = self.path.parts
        return "/".join(parts[-2:] if _SEED_FOLDER.fullmatch(parts[-1]) else parts[-1:])

    @property
    def title(self) -> str:
        keys = ("algorithm.name", "dataset.name", "split.name")
        return " · ".join(str(look_up(self.config, key) or "?") for key in keys)

    @property
    def uses_ground_truth(self) -> bool:
        """True if the run read ground truth; an old run did not record it: if it was allowed to."""
        allowed = self.config.get("uses_ground_truth") is True
        return bool(self.numbers.get("uses_ground_truth", allowed))

    def at(self, t: int | None) -> Plain:
        """What was measured in round t, {} if nothing was; None is the end of the run."""
        if self.summary is not None and (t is None or t == self.summary.get("rounds")):
            return self.summary
        row = self.rounds[self.rounds["round"] == t]
        return {} if row.empty else {str(k): v for k, v in row.iloc[0].dropna().items()}

    def evaluated(self) -> pd.DataFrame:
        """The rounds that have an accuracy."""
        columns = ["round", "accuracy_mean", "accuracy_worst_decile", "clusters"]
        return self.rounds.reindex(columns=columns).dropna(subset=["accuracy_mean"])

    @property
    def is_evaluated(self) -> bool:
        return len(self.evaluated()) > 0

    def last_test(self) -> pd.DataFrame:
        """A row for each client at the last evaluation on its test part."""
        test = self.clients[self.clients["part"] == "test"]
        last: pd.DataFrame = test[test["round"] == test["round"].max()]
        return last


Experiments = Mapping[str, Sequence[RunRecord]]  # the seeds of each, by name


def by_experiment(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    grouped: dict[str, list[RunRecord]] = {}
    for run in runs:
        grouped.setdefault(run.name, []).append(run)
    return {name: sorted(seeds, key=lambda run: run.seed or 0) for name, seeds in grouped.items()}


def read_run(path: Path, name: str = "") -> RunRecord:
    directory = RunDirectory(path)
    if not directory.holds_run():
        raise ExperimentError(f"{path} holds no run: it has no config.yaml")
    return RunRecord(path, directory.config(), directory.summary(), name)


def find_runs(folders: Sequence[Path]) -> tuple[list[RunRecord], list[Sweep]]:
    """All runs, finished or not, and all sweeps in and below the folders."""
    found: dict[Path, None] = {}
    for folder in folders:
        below = list(_below(folder.resolve()))
        if not below:
            raise ExperimentError(_nothing_in(folder))
        found |= dict.fromkeys(below)
    sweeps = [path for path in found if holds_sweep(path)]
    runs = [path for path in found if path not in sweeps]
    named = zip(runs, experiment_names(runs), strict=True)
    return [read_run(path, name) for path, name in named], [read_sweep(path) for path in sweeps]


def collect_runs(folder: Path) -> list[RunRecord]:
    """The finished runs below a folder, those of sweeps too, in the order of their paths."""
    runs = [read_run(file.parent) for file in sorted(folder.rglob("config.yaml"))]
    finished = [run for run in runs if run.summary is not None]
    # The table of a sweep tells which of its rows did not finish.
    unfinished = [r.config for r in runs if r.summary is None and _sweep_folder(r.path) is None]
    return _with_missing_seeds(finished, unfinished)


def holds_run(path: Path) -> bool:
    """A run that has only begun has no rounds yet, but an environment."""
    recorded = (path / "rounds.parquet", path / "environment.json")
    return RunDirectory(path).holds_run() and any(file.is_file() for file in recorded)


def experiment_names(runs: Sequence[Path]) -> list[str]:
    """The folder above seeds, from where such folders begin to differ.

    >>> experiment_names([Path("x/a/seed_0"), Path("x/a/seed_1"), Path("x/b")])
    ['a', 'a', 'b']
    """
    paths = [p.parent if _SEED_FOLDER.fullmatch(p.name) else p for p in runs]
    if len(set(paths)) < 2:
        return [path.name for path in paths]
    common = Path(os.path.commonpath([str(path) for path in paths]))
    return [path.relative_to(common).as_posix() if path != common else "." for path in paths]


def without(config: Plain, keys: Sequence[str]) -> dict[str, Any]:  # Any: YAML
    """The values of a configuration by dotted key, less those keys and what is below them."""
    return {
        key: value
        for key, value in leaves(config).items()
        if not any(key == left_out or key.startswith(f"{left_out}.") for left_out in keys)
    }


def _with_missing_seeds(runs: Sequence[RunRecord], unfinished: Sequence[Plain]) -> list[RunRecord]:
    """The runs, each with the number of seeds of its configuration that have no finished run."""
    sweeps = {run.path: _sweep_folder(run.path) for run in runs}
    of_sweeps: dict[Path, int] = {}
    for sweep in {path for path in sweeps.values() if path is not None and holds_sweep(path)}:
        of_sweeps |= {sweep / name: n for name, n in read_sweep(sweep).missing_by_folder.items()}
    lacking, there = _seeds(unfinished), _seeds(run.config for run in runs)
    missing = {key: len(seeds - there[key]) for key, seeds in lacking.items()}
    return [
        replace(
            run,
            missing_seeds=missing.get(_but_for_the_seed(run.config), 0)
            if sweeps[run.path] is None
            else of_sweeps.get(run.path, 0),
        )
        for run in runs
    ]


def _seeds(configs: Iterable[Plain]) -> defaultdict[str, set[int | None]]:
    """The seeds of each configuration."""
    seeds: defaultdict[str, set[int | None]] = defaultdict(set)
    for config in configs:
        seeds[_but_for_the_seed(config)].add(config.get("seed"))
    return seeds


def _but_for_the_seed(config: Plain) -> str:
    return json.dumps(without(config, (*NO_MATTER, "seed")), sort_keys=True, default=str)


def _sweep_folder(run: Path) -> Path | None:
    """The folder of the sweep that a run is part of; it may have no table yet."""
    return next((path for path in run.parents if (path / SPACE).is_file()), None)


def _below(folder: Path) -> Iterator[Path]:
    """Runs and sweeps in a folder; what lies inside one is part of it."""
    if holds_sweep(folder) or holds_run(folder):
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _below(child)


def _nothing_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; expected one that `flray run` or `flray sweep` made"
    return (
        f"nothing to report in {folder}: expected a run (config.yaml and rounds.parquet), a sweep "
        "(sweep.json and rows.parquet), or a folder with such folders below it"
    )


def _so_far(rounds: pd.DataFrame) -> Plain:
    """Like a summary: the last evaluation, and totals."""
    totals: dict[str, Any] = {"rounds": int(rounds["round"].max()) if len(rounds) else 0}
    for name in ("bytes_up", "bytes_down", "client_steps", "seconds"):
        pattern = f"^{name}_" if name.startswith("bytes") else f"^{name}$"
        totals[name] = float(rounds.filter(regex=pattern).sum().sum())
    totals["uses_ground_truth"] = bool(rounds.filter(items=[GROUND_TRUTH_READS]).sum().sum())
    if "accuracy_mean" not in rounds or rounds["accuracy_mean"].isna().all():
        return totals
    last = rounds.dropna(subset=["accuracy_mean"]).iloc[-1].dropna()
    return {str(name): value for name, value in last.items()} | totals

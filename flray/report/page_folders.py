"""What lies in the folders that a page is made of: runs, finished or not, and sweeps."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from flray.errors import ExperimentError
from flray.execution.federation import GROUND_TRUTH_READS
from flray.records.run_directory import RunDirectory
from flray.report.figures import Run, read_run
from flray.report.runs import Plain, look_up, used_ground_truth
from flray.report.sweep_record import Sweep, holds_sweep, read_sweep

_SEED_FOLDER = re.compile(r"seed_\d+")


@dataclass(frozen=True)
class PageRun:
    """A run as the page shows it."""

    name: str  # of the experiment; its seeds share it
    path: Path
    config: Plain  # resolved: nested mappings
    environment: Plain
    summary: Plain | None  # None: it is not finished
    shown: Run

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config.get("seed")
        return seed

    @property
    def label(self) -> str:
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    @property
    def folder(self) -> str:
        """Its path from the folder that its experiment lies in."""
        parts = self.path.parts
        return "/".join(parts[-2:] if _SEED_FOLDER.fullmatch(parts[-1]) else parts[-1:])

    @property
    def title(self) -> str:
        """What was run: algorithm, data and split."""
        keys = ("algorithm.name", "dataset.name", "split.name")
        return " · ".join(str(look_up(self.config, key) or "?") for key in keys)

    @property
    def uses_ground_truth(self) -> bool:
        return used_ground_truth(self.config, self.numbers)

    @cached_property
    def numbers(self) -> Plain:
        """The summary, or as much of it as there is so far."""
        return self.summary if self.summary is not None else _so_far(self.shown.rounds)


@dataclass(frozen=True)
class Found:
    """Everything below the folders."""

    runs: tuple[PageRun, ...]
    sweeps: tuple[Sweep, ...]

    @property
    def experiments(self) -> dict[str, list[PageRun]]:
        """Runs by the name of their experiment, in order of seeds."""
        grouped: dict[str, list[PageRun]] = {}
        for run in self.runs:
            grouped.setdefault(run.name, []).append(run)
        return {name: sorted(runs, key=lambda r: r.seed or 0) for name, runs in grouped.items()}


def find(folders: Sequence[Path]) -> Found:
    """All runs and sweeps in and below the folders."""
    runs: list[Path] = []
    sweeps: list[Path] = []
    for folder in folders:
        before = len(runs) + len(sweeps)
        for path in _below(folder.resolve()):
            (sweeps if holds_sweep(path) else runs).append(path)
        if len(runs) + len(sweeps) == before:
            raise ExperimentError(_nothing_in(folder))
    runs, sweeps = list(dict.fromkeys(runs)), list(dict.fromkeys(sweeps))
    names = experiment_names(runs)
    return Found(
        tuple(read_page_run(path, name) for path, name in zip(runs, names, strict=True)),
        tuple(read_sweep(path) for path in sweeps),
    )


def read_page_run(path: Path, name: str) -> PageRun:
    directory = RunDirectory(path)
    environment = path / "environment.json"
    held = json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {}
    return PageRun(name, path, directory.config(), held, directory.summary(), read_run(path))


def holds_run(path: Path) -> bool:
    """A run that has only begun has no rounds yet, but has noted what it runs on."""
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
    totals: dict[str, object] = {"rounds": int(rounds["round"].max()) if len(rounds) else 0}
    for name, pattern in (
        ("bytes_up", "^bytes_up_"),
        ("bytes_down", "^bytes_down_"),
        ("client_steps", "^client_steps$"),
        ("seconds", "^seconds$"),
    ):
        totals[name] = float(rounds.filter(regex=pattern).sum().sum())
    totals["uses_ground_truth"] = bool(rounds.filter(items=[GROUND_TRUTH_READS]).sum().sum())
    return _last_evaluation(rounds) | totals


def _last_evaluation(rounds: pd.DataFrame) -> dict[str, object]:
    if "accuracy_mean" not in rounds:
        return {}
    evaluated = rounds.dropna(subset=["accuracy_mean"])
    if evaluated.empty:
        return {}
    row = {str(name): value for name, value in evaluated.iloc[-1].dropna().items()}
    return {"round_evaluated": row["round"], **row}

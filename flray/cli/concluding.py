"""The end of `flray run`: one table of all runs, and their figures."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flray.reports.comparison import clustering_sheet, comparison_sheet
from flray.reports.figure_files import write_figures
from flray.reports.runs import RunRecord, by_experiment
from flray.reports.writers import to_rich
from flray.wording import counted


def show_results(done: Sequence[RunRecord], console: Console, url: str | None = None) -> None:
    """The table of finished runs, where they are, and their figures.

    Args:
        url: where their folder is copied to, if it is.
    """
    console.print(to_rich(comparison_sheet(by_experiment(done))))
    clusterings = clustering_sheet(by_experiment(done))
    if clusterings is not None:
        console.print(to_rich(clusterings))
    for run in done:
        console.print(f"{run.name}: {run.path}", soft_wrap=True, markup=False)
    root = common_folder([run.path for run in done])
    drawn = write_figures(by_experiment(done), root / "figures")
    for line in (
        f"{counted(len(drawn), 'figure')}: {root / 'figures'}",
        f"a page of it: flray report {shlex.quote(url or str(root))}",
    ):
        console.print(line, soft_wrap=True, markup=False)


def common_folder(paths: Sequence[Path]) -> Path:
    """The folder that holds all of them; of one it is itself.

    >>> common_folder([Path("a/x/s"), Path("a/y/s")]).as_posix()
    'a'
    """
    return Path(os.path.commonpath([str(path) for path in paths]))

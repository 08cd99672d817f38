"""The end of `flray run`: one table of all runs, and their figures."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from flray.columns import ENDED_BY, ROUNDS
from flray.reports.comparison import clustering_sheet, comparison_sheet
from flray.reports.figure_files import write_figures
from flray.reports.runs import by_experiment, read_run
from flray.reports.writers import to_rich
from flray.wording import counted


def show_results(runs: Mapping[Path, str], console: Console, url: str | None = None) -> None:
    """Show the table of finished runs and where they are, and draw their figures.

    Figures go to figures/ in the deepest folder that holds all of the runs.

    Args:
        runs: The name of each run directory in the table; runs of one name are seeds.
        url: Where their folder has a copy.
    """
    done = [read_run(path, name) for path, name in runs.items()]
    experiments = by_experiment(done)
    for sheet in filter(None, (comparison_sheet(experiments), clustering_sheet(experiments))):
        console.print(to_rich(sheet))
    for run in done:
        summary = run.summary or {}
        rule = summary.get(ENDED_BY)
        end = f" (ended by stop.{rule} after round {summary[ROUNDS]})" if rule else ""
        console.print(f"{run.name}: {run.path}{end}", soft_wrap=True, markup=False)
    root = Path(os.path.commonpath([run.path for run in done]))
    drawn = write_figures(experiments, root / "figures")
    for line in (
        f"{counted(len(drawn), 'figure')}: {root / 'figures'}",
        f"a page of it: flray report {shlex.quote(url or str(root))}",
    ):
        console.print(line, soft_wrap=True, markup=False)

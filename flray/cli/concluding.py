"""The end of `flray run`: one table of all runs, and their figures."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from flray.columns import ENDED_BY, ROUNDS
from flray.files import is_forbidden
from flray.reports.comparison import clustering_sheet, comparison_sheet
from flray.reports.figure_files import write_figures
from flray.reports.runs import Experiments, by_experiment, read_run
from flray.reports.writers import to_rich
from flray.wording import counted


def show_results(runs: Mapping[Path, str], console: Console, url: str | None = None) -> None:
    """Show the table of finished runs and where they are, and draw their figures.

    Figures go to figures/ in the deepest folder that holds all of the runs; there are none where
    the user may only read it.

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
        console.out(f"{run.name}: {run.path}{end}")
    root = Path(os.path.commonpath([run.path for run in done]))
    console.out(_draw(experiments, root / "figures"))
    console.out(f"a page of it: flray report {shlex.quote(url or str(root))}")


def _draw(experiments: Experiments, folder: Path) -> str:
    """Draw the figures of runs into a folder; a line on where they are, or why there are none."""
    try:
        drawn = write_figures(experiments, folder)
    except OSError as error:
        if not is_forbidden(error):
            raise
        # The run of another user, which `flray attach` shows all the same.
        return f"no figures: {folder} cannot be written ({error.strerror})"
    return f"{counted(len(drawn), 'figure')}: {folder}"

"""What `flray run` needs at its end only, imported then: pandas and matplotlib delay a start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


@dataclass(frozen=True)
class Finished:
    """A run that is done."""

    path: Path
    config: Mapping[str, Any]  # Any: YAML
    summary: Mapping[str, Any]  # Any: JSON
    name: str


def draw_figures(run: Path) -> Sequence[Path]:
    """The figures of a run directory, as PNG files."""
    from flray.reports.figure_files import figures_of

    return figures_of(run)


def conclude(done: Sequence[Finished], console: Console, url: str | None = None) -> None:
    """Show the table of finished runs, where they are, and their figures.

    Args:
        url: where the folder is copied to, if it is.
    """
    from flray.cli.concluding import show_results
    from flray.reports.runs import RunRecord

    records = [RunRecord(each.path, each.config, each.summary, each.name) for each in done]
    show_results(records, console, url)

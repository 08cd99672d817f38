"""`flray table` and `flray list tables`: the papers' tables, what fills them, what they cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flray.cli.listing import titled_table
from flray.cli.places import RUNS
from flray.errors import ExperimentError
from flray.reports.published import Table, find_table, load_tables
from flray.wording import counted

if TYPE_CHECKING:
    from flray.reports.writers import Format


def show_table(name: str, folders: Sequence[Path], form: "Format", console: Console) -> None:
    """Print a published table with the numbers of finished runs beside the paper's.

    Below a table for people: how many runs there are, and what to run if none of them fits.

    Args:
        name: Name of the table, such as flhc.4.
        folders: Finished runs anywhere below them count.
        form: Format; texts are printed without wrapping, so that they can be written to a file.

    Raises:
        ExperimentError: There is no such table, or one of the folders is missing.
    """
    # Imported here: pandas and seaborn take seconds, and `flray list tables` needs neither.
    from flray.reports.published.filling import fill, is_filled, nearest_miss
    from flray.reports.published.sheet import render
    from flray.reports.runs import collect_runs

    table = find_table(name)
    for folder in folders:
        if not folder.is_dir() and folder != RUNS:
            raise ExperimentError(
                f"there is no folder {folder}; expected one that holds runs (--runs)"
            )
    finished = collect_runs(*folders)
    cells = fill(table, finished)
    rendered = render(table, cells, form)
    if isinstance(rendered, str):
        console.out(rendered, end="", highlight=False)
        return
    console.print(rendered)
    num_runs = counted(len(finished), "finished run")
    is_there = any(folder.is_dir() for folder in folders)
    where = f"{num_runs} below" if is_there else "no folder"
    where += f" {', '.join(map(str, folders))}"
    console.print(Text(f"{where}; {_state(table)}.", style="dim"))
    if table.match.numbers and not is_filled(cells):
        miss = nearest_miss(table, finished)
        reason = f"none of them meets all conditions of a cell; {miss}" if miss else where
        space = f"\nflray sweep {Path(table.space).stem} runs what fills it" if table.space else ""
        console.out(f"no cell is filled: {reason}{space}")


def tables_listing() -> RichTable:
    """A table of all published tables, as `flray list tables` prints it.

    It has what they cost, whether flray has their methods, and the sweep that fills them.
    """
    listing = titled_table("tables", "name", "what it is", "client SGD steps", "state")
    for table in load_tables().values():
        what = f"{table.paper}, Table {table.number}. {table.caption}"
        sweep = f"\nflray sweep tune_spaces/{table.space}" if table.space else ""
        state = _state(table) + sweep
        listing.add_row(table.key, Text(what), _cost(table), state)
    return listing


def _cost(table: Table) -> str:
    """Client steps of all runs that fill the table, and a note on them."""
    steps = "" if table.cost.steps is None else f"{table.cost.steps:,}"
    if not table.cost.note:
        return steps
    return f"{steps} ({table.cost.note})" if steps else table.cost.note


def _state(table: Table) -> str:
    """Whether flray has what the table needs."""
    if table.is_formulas:
        return "formulas, nothing to run"
    if not table.match.numbers:
        return "its algorithms are there, no run records its numbers yet"
    return "its algorithms are there"

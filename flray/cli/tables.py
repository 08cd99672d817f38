"""`flray table` and `flray list tables`: the papers' tables, what fills them, what they cost."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flray.config.reference import names
from flray.errors import ExperimentError
from flray.reports.published import Table, find_table, load_tables

DEFAULT_RUNS = Path("runs")


def show_table(
    name: str, runs: Path, form: Literal["rich", "md", "latex", "csv"], console: Console
) -> None:
    """Print a published table, filled with the finished runs below a folder."""
    # Imported here: pandas and seaborn take seconds, and `flray list tables` needs neither.
    from flray.reports.published.filling import fill, is_filled, nearest_miss
    from flray.reports.published.sheet import render
    from flray.reports.runs import collect_runs

    table = find_table(name)
    if not runs.is_dir() and runs != DEFAULT_RUNS:
        raise ExperimentError(f"there is no folder {runs}; expected one that holds runs (--runs)")
    found = collect_runs(runs)
    cells = fill(table, found)
    rendered = render(table, cells, form)
    if isinstance(rendered, str):
        console.out(rendered, end="", highlight=False)
        return
    console.print(rendered)
    where = f"{len(found)} finished runs below {runs}" if runs.is_dir() else f"no folder {runs}"
    console.print(Text(f"{where}; {_state(table, names('algorithm'))}.", style="dim"))
    if table.match.numbers and not is_filled(cells):
        miss = nearest_miss(table, found)
        reason = f"none of them meets all conditions of a cell; {miss}" if miss else where
        space = f"\nflray sweep {Path(table.space).stem} runs what fills it" if table.space else ""
        console.print(Text(f"no cell is filled: {reason}{space}"), soft_wrap=True)


def tables_listing() -> RichTable:
    """Every published table: what it takes, whether its methods are there, what fills it."""
    listing = RichTable(title="tables", title_justify="left", title_style="bold")
    for column in ("name", "what it is", "client SGD steps", "state"):
        listing.add_column(column, overflow="fold")
    for table in load_tables().values():
        what = f"{table.paper}, Table {table.number}. {table.caption}"
        sweep = f"\nflray sweep tune_spaces/{table.space}" if table.space else ""
        state = _state(table, names("algorithm")) + sweep
        listing.add_row(table.key, Text(what), _cost(table), state)
    return listing


def _cost(table: Table) -> str:
    steps = "" if table.cost.steps is None else f"{table.cost.steps:,}"
    if not table.cost.note:
        return steps
    return f"{steps} ({table.cost.note})" if steps else table.cost.note


def _state(table: Table, known: Collection[str]) -> str:
    if table.is_formulas:
        return "formulas, nothing to run"
    missing = [name for name in table.required_algorithms if name not in known]
    if missing:
        return f"algorithms not there yet: {', '.join(missing)}"
    if not table.match.numbers:
        return "its algorithms are there, no run records its numbers yet"
    return "its algorithms are there"

"""A published table with our numbers beside the paper's, and the ranks of methods in both."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.console import RenderableType
from scipy.stats import spearmanr

from flray.columns import ROBUSTNESS_SE
from flray.reports.columns import MISSING
from flray.reports.published.filling import LEFT_OUT, VARIED
from flray.reports.published.tables import Table
from flray.reports.sheets import Sheet, mark_notes
from flray.reports.writers import Format, render_sheet

FEWEST_FOR_CORRELATION = 3  # methods
STANDARD_ERRORS = {  # what is behind `se`, by its key in summary.json
    "accuracy_se_binomial": "the binomial standard error, which is what the paper's ± is",
    ROBUSTNESS_SE: "the standard error over clusters; of what the paper's ± is, it does not say",
}


def render(table: Table, cells: pd.DataFrame, form: Format) -> RenderableType:
    """The table with the cells that `fill` returned; text, except for the format `rich`.

    The CSV has a line for each cell and more columns than the other formats (`to_csv`).
    """
    return to_csv(table, cells) if form == "csv" else render_sheet(_sheet(table, cells), form)


def _sheet(table: Table, cells: pd.DataFrame) -> Sheet:
    """The table as a sheet, with notes on its numbers and the ranks of methods below it."""
    return Sheet(
        title=f"{table.key} · {table.paper}, Table {table.number}. {table.caption}",
        labels=pd.DataFrame([row.labels for row in table.rows], columns=list(table.row_headings)),
        headings=table.columns,
        cells=cells,
        blocks=tuple(row.block for row in table.rows),
        notes=tuple(_notes(table, cells)),
        below=_below(rank(table, cells)),
        numbers_runs=True,
        ratio_decimals=1,
    )


def rank(table: Table, cells: pd.DataFrame) -> pd.DataFrame:
    """The ranks of methods, by row number and column key, in cells with both numbers.

    `ours` and `paper` are the ranks (1 is best) among the methods of a `comparison`: one column of
    a block, or one row where methods are columns. `spearman` is their correlation, NaN if it is
    undefined. A comparison has at least two methods; tables of settings of one method have none.
    """
    compared = pd.DataFrame(_compared(table), columns=["row", "column", "comparison", "method"])
    values = cells["value"].unstack("source").reindex(columns=["ours", "paper"]).dropna()
    cells_of_both = compared.set_index(["row", "column"]).join(values, how="inner")
    comparison = cells_of_both["comparison"]
    lower = {column.key for column in table.columns if column.lower_is_better}
    signs = [1.0 if key in lower else -1.0 for _, key in cells_of_both.index]
    groups = cells_of_both[["ours", "paper"]].mul(signs, axis=0).groupby(comparison, sort=False)
    agreement = {name: _correlation(numbers) for name, numbers in groups}
    ranked = groups.rank(method="min").astype(int)
    ranked = cells_of_both.assign(**ranked, spearman=comparison.map(agreement))
    return ranked[groups["ours"].transform("size") > 1]


def _compared(table: Table) -> Iterator[tuple[int, str, str, str]]:
    """Row number, column key, title of the comparison and method of each cell, in order."""
    if table.is_formulas or table.has_ratios:
        return
    methods_are_columns = all(row.method is None for row in table.rows)
    for block in dict.fromkeys(row.block for row in table.rows):
        for column in table.columns:
            for r, row in enumerate(table.rows):
                if row.block == block and methods_are_columns:
                    yield r, column.key, row.title, column.title
                elif row.block == block:
                    title = ", ".join(filter(None, (block, column.title)))
                    yield r, column.key, title, row.method or ""


def _correlation(numbers: pd.DataFrame) -> float | None:
    """Spearman's; None for fewer than three methods, or where one source does not vary."""
    if len(numbers) < FEWEST_FOR_CORRELATION or (numbers.nunique() == 1).any():
        return None
    return float(spearmanr(numbers["ours"], numbers["paper"]).statistic)


def _below(ranked: pd.DataFrame) -> pd.DataFrame:
    """A line of text for each comparison."""
    texts = []
    for title, methods in ranked.groupby("comparison", sort=False):
        best = methods.sort_values("ours", kind="stable")
        pairs = zip(best["method"], best["ours"], best["paper"], strict=True)
        spearman = best["spearman"].iloc[0]
        shown = MISSING if pd.isna(spearman) else f"{spearman:.2f}"
        texts.append((title, ", ".join(f"{name} {a}/{b}" for name, a, b in pairs), shown))
    return pd.DataFrame(texts, columns=["compared in", "ranks, ours/paper", "Spearman"])


def within_tolerance(table: Table, cells: pd.DataFrame) -> "pd.Series[bool]":
    """True for cells that differ from the paper's by at most the tolerance of their column.

    By row number and column key; cells of columns without a tolerance are left out. A difference
    has the decimals that the table prints, so that readers can check it.
    """
    limits = {column.key: column for column in table.columns if column.tolerance}
    differences = _of_source(cells, "difference")["value"]
    judged = differences[differences.index.get_level_values("column").isin(list(limits))]
    columns = [limits[key] for _, key in judged.index]
    printed = [
        abs(round(difference, column.decimals))
        for difference, column in zip(judged, columns, strict=True)
    ]
    return pd.Series(printed, judged.index) <= [column.tolerance for column in columns]


def _notes(table: Table, cells: pd.DataFrame) -> Iterator[str]:
    """Sentences below the table: how cells were filled, selected and marked; the paper's notes."""
    ours, test = (_of_source(cells, source) for source in ("ours", "test"))
    if not table.is_formulas:
        total = len(table.rows) * len(table.columns)
        yield f"{len(ours)} of {total} cells are filled by runs; {MISSING} is missing."
    if len(ours):
        counts = sorted({len(seeds) for seeds in ours["seeds"]})
        over = f"{counts[0]} seed{'s' * (counts[0] > 1)}" if len(counts) == 1 else "n seeds"
        yield (
            f"Ours is a mean over {over}, ± its standard deviation over them, diff. ours less the "
            "paper's; [k] are the runs listed below."
        )
    if len(is_within := within_tolerance(table, cells)):
        yield f"{is_within.sum()} of {len(is_within)} cells are within their column's tolerance."
    cells_of = itertools.product(table.rows, table.columns)
    metrics = [m for row, column in cells_of if (m := table.match.metric(row, column))]
    if any(metric.best_round for metric in metrics):
        yield "Ours is that of the round with the best test number, which is the paper's protocol."
    if ours["se"].notna().any():
        yield f"se is {', '.join(dict.fromkeys(STANDARD_ERRORS[m.se] for m in metrics if m.se))}."
    if len(test):
        varied = sorted({key for keys in test[VARIED] for key in keys})
        yield (
            "Selected by validation accuracy, seed by seed, among runs that differ in "
            f"{', '.join(varied) or 'nothing but their folder'}. "
            "test is selected the papers' way: the best by its own test number."
        )
    yield from mark_notes(cells)
    left_out = {path for paths in cells[LEFT_OUT] for path in paths}
    if left_out:
        runs = "runs are" if len(left_out) > 1 else "run is"
        yield (
            f"{len(left_out)} {runs} left out of the choice: another seed of the configuration "
            "failed or did not finish."
        )
    if table.has_ratios and not all(ours["baselines"]):
        yield (
            "Ours without a ratio: no FedAvg run with these settings, seed and split has the round."
        )
    if ours["ratio"].notna().any():
        yield "(x) ours is the mean over seeds of the ratio to FedAvg with the same seed and split."
    for note in filter(None, (table.metric, table.note)):
        yield f"Paper: {note}."
    for note in dict.fromkeys(row.note for row in table.rows if row.note):
        rows = dict.fromkeys(", ".join(row.labels) for row in table.rows if row.note == note)
        yield f"Paper, {'; '.join(rows)}: {note}."


def _of_source(cells: pd.DataFrame, source: str) -> pd.DataFrame:
    """The cells of a source by row and column."""
    selected: pd.DataFrame = cells[cells.index.get_level_values("source") == source]
    return selected.droplevel("source")


def to_csv(table: Table, cells: pd.DataFrame) -> str:
    """A line for each cell, with empty fields where numbers are missing and runs joined by `;`.

    Cells come row by row in the order of the paper. Numbers are in the unit of their column and not
    rounded; `seeds` is how many were averaged, `runs` are the folders behind `ours`.
    """
    order = [(r, column) for r in range(len(table.rows)) for column in table.columns]
    index = pd.MultiIndex.from_tuples([(r, column.key) for r, column in order])
    ours, paper, difference, test = (
        _of_source(cells, source).reindex(index)
        for source in ("ours", "paper", "difference", "test")
    )
    ranked = rank(table, cells).reindex(index)
    columns = {
        "table": table.key,
        "block": [table.rows[r].block for r, _ in order],
        "row": [", ".join(table.rows[r].labels) for r, _ in order],
        "column": [column.key for _, column in order],
        "unit": [column.unit for _, column in order],
        "ours": ours["value"],
        "std": ours["error"],
        "seeds": ours["seeds"].map(len, na_action="ignore").astype("Int64"),
        "se": ours["se"],
        "ratio": ours["ratio"],
        "paper": paper["value"].astype(object).where(paper["text"] == "", paper["text"]),
        "paper_spread": paper["error"],
        "paper_ratio": paper["ratio"],
        "difference": difference["value"],
        "tolerance": [column.tolerance for _, column in order],
        "rank": ranked["ours"].astype("Int64"),
        "paper_rank": ranked["paper"].astype("Int64"),
        "spearman": ranked["spearman"],
        "uses_ground_truth": ours["uses_ground_truth"],
        "missing_seeds": ours["missing_seeds"].astype("Int64"),
        "test_selected": test["value"],
        "test_selected_std": test["error"],
        "runs": ours["runs"].map(_joined, na_action="ignore"),
        "fedavg_runs": ours["baselines"].map(_joined, na_action="ignore"),
        "test_selected_runs": test["runs"].map(_joined, na_action="ignore"),
    }
    return pd.DataFrame(columns, index).to_csv(index=False)


def _joined(paths: Sequence[Path]) -> str:
    return ";".join(map(str, paths))

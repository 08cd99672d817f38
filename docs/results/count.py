"""Count, paper by paper, the cells of published tables that were run and agree with the paper.

`python docs/results/count.py` writes the table of all papers into README.md, and that of each
paper's tables into its page, between two comments. Ours are the numbers in
docs/results/*/table.md, as `flray table NAME --format md` wrote them. papers.yaml lists what the
data at hand allow and the cells outside tolerance whose cause is known.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from flray.reports.published import Table, find_table
from flray.reports.published.sheet import rank, within_tolerance
from flray.reports.sheets import Fields, numbers

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- counts -->", "<!-- end of counts -->"
HEAD = (
    "paper",
    "tables run, of those that the data allow",
    "figures run",
    "cells run, of those printed there",
    "within tolerance",
    "others explained",
    "pairs of methods in the paper's order",
    "seeds",
    "spread over seeds, points",
)
Ours = dict[tuple[int, str], Fields]  # fields of numbers by row number and column key


def read_table(text: str) -> tuple[Table, Ours] | None:
    """The table of a Markdown file and our numbers in it; None if it is no published table."""
    name = re.match(r"\*\*(\w+\.\d+) · ", text)
    if name is None:
        return None
    table, ours = find_table(name[1]), {}
    lines = [line for line in text.split("\n\n")[1].splitlines()[2:] if not line.startswith("| *")]
    seeds = re.search(r"mean over (\d+) seed", text)  # else each cell has its own
    for r, line in enumerate(lines):
        cells = line[2:-2].split(" | ")[len(table.row_headings) :]
        for column, cell in zip(table.columns, cells, strict=True):
            text = cell.split("<br>")[0]  # the paper's number and the difference follow
            if number := re.match(r"\**(-?[\d,]+(\.\d+)?)", text):
                ratio = re.search(r"\((?:([\d.]+)x|–)\)", text)
                spread = re.search(r" ± ([\d.,]+)", text)
                count = seeds or re.search(r" n=(\d+)", text)
                ours[r, column.key] = {
                    "value": float(number[1].replace(",", "")),
                    "error": float(spread[1].replace(",", "")) if spread else None,
                    "seeds": tuple(range(int(count[1]))) if count else (),
                    "ratio": float(ratio[1]) if ratio and ratio[1] else None,
                    "has_ratio": ratio is not None,
                }
    return table, ours


def counts(table: Table, ours: Ours, causes: Sequence[dict[str, str]] = ()) -> dict[str, int]:
    """How many cells of a table are printed, run, judged and within tolerance, and so on.

    `known` are cells outside tolerance that a cause explains, `pairs` the pairs of methods that the
    paper prints in an order, `kept` those in the same order here; equal numbers keep none.
    """
    cells = frame(table, ours)
    is_within = within_tolerance(table, cells)
    outside = [
        (table.key, table.rows[r].title, key) for r, key in is_within.index[~is_within.astype(bool)]
    ]
    orders = np.sign(
        ratios_to_one(cells) if table.has_ratios else differences_in_rank(table, cells)
    )
    orders = orders[orders[:, 1] != 0]
    sources = cells["value"].dropna().index.get_level_values("source")
    return {
        "printed": int((sources == "paper").sum()),
        "cells": int((sources == "difference").sum()),
        "judged": len(is_within),
        "within": int(is_within.sum()),
        "known": sum(any(_is_meant(cause, names) for cause in causes) for names in outside),
        "pairs": len(orders),
        "kept": int((orders[:, 0] == orders[:, 1]).sum()),
    }


def frame(table: Table, ours: Ours) -> pd.DataFrame:
    """Our numbers, the paper's and their differences, as `flray table` has them."""
    cells = {(*place, "ours"): fields for place, fields in ours.items()}
    for (r, row), column in itertools.product(enumerate(table.rows), table.columns):
        cell = row.cells[column.key]
        is_printed = cell.value is not None
        fields = {"value": cell.value, "ratio": cell.ratio, "has_ratio": is_printed}
        cells[r, column.key, "paper"] = fields
        if (r, column.key) in ours and cell.value is not None:
            difference = ours[r, column.key]["value"] - cell.value
            cells[r, column.key, "difference"] = {"value": difference}
    return numbers(cells)


def differences_in_rank(table: Table, cells: pd.DataFrame) -> NDArray[np.float64]:
    """(pairs, 2) of each two methods that are compared: ours, the paper's."""
    groups = rank(table, cells).groupby("comparison", sort=False)[["ours", "paper"]]
    pairs = [a - b for _, g in groups for a, b in itertools.combinations(g.to_numpy(float), 2)]
    return np.array(pairs, np.float64).reshape(-1, 2)


def ratios_to_one(cells: pd.DataFrame) -> NDArray[np.float64]:
    """(cells, 2) ratios to FedAvg less 1, with the decimal that FL+HC prints: ours, the paper's.

    Infinite where FedAvg has 0 and the method has more.
    """
    without = pd.Series(np.where(cells["value"] > 0, np.inf, 1.0), cells.index)
    ratios = cells["ratio"].fillna(without).where(cells["has_ratio"]).unstack("source")
    both = ratios.reindex(columns=["ours", "paper"]).dropna()
    return both.to_numpy(np.float64).round(1) - 1


def _is_meant(cause: dict[str, str], names: tuple[str, str, str]) -> bool:
    patterns = (cause["table"], cause.get("row", "*"), cause.get("column", "*"))
    return all(map(fnmatch, names, patterns))


def line_of(paper: dict[str, Any], tables: dict[str, tuple[Table, Ours]]) -> list[str]:
    """The row of a paper, or of some columns of its tables."""
    chosen = {key: _with_columns(*tables[key], paper) for key in paper["tables"] if key in tables}
    each = [counts(table, ours, paper.get("causes", [])) for table, ours in chosen.values()]
    total = {name: sum(count[name] for count in each) for name in each[0]} if each else {}
    cells = [
        (table, key, cell) for table, ours in chosen.values() for (_, key), cell in ours.items()
    ]

    def share(part: str, whole: str) -> str:
        return f"{total[part]} of {total[whole]}" if total.get(whole) else "–"

    total["others"] = total.get("judged", 0) - total.get("within", 0)
    numerals = ", ".join(table.number for table, _ in chosen.values())
    figures = paper.get("figures", [])
    return [
        paper["name"],
        f"{len(chosen)} of {len(paper['tables'])}" + f": {numerals}" * bool(numerals),
        f"{len(paper.get('figures_run', []))} of {len(figures)}" if figures else "–",
        share("cells", "printed"),
        share("within", "judged"),
        share("known", "others"),
        share("kept", "pairs"),
        numbers_of_seeds([len(cell["seeds"]) for _, _, cell in cells]),
        mean_spread([cell for table, key, cell in cells if _has_tolerance(table, key)]),
    ]


def numbers_of_seeds(numbers: Sequence[int]) -> str:
    """Over how many seeds the cells are means.

    >>> numbers_of_seeds([3, 3]), numbers_of_seeds([3, 1, 1])
    ('3', '1, 3 in 1 of 3')
    """
    counts = Counter(numbers).most_common()
    if not counts:
        return "–"
    (usual, _), *others = counts
    return ", ".join([str(usual), *(f"{n} in {c} of {len(numbers)}" for n, c in others)])


def mean_spread(cells: Sequence[Fields]) -> str:
    """The mean over cells of their standard deviation over seeds; "–" if all have one seed.

    >>> mean_spread([{"error": 0.5}, {"error": 1.5}, {"error": None}])
    '1.00'
    """
    spreads = [cell["error"] for cell in cells if cell.get("error") is not None]
    return f"{np.mean(spreads):.2f}" if spreads else "–"


def _has_tolerance(table: Table, key: str) -> bool:
    return any(column.key == key and column.tolerance for column in table.columns)


def _with_columns(table: Table, ours: Ours, paper: dict[str, Any]) -> tuple[Table, Ours]:
    """The table with the columns that the entry of a paper names by a pattern, or all."""
    chosen = [column for column in table.columns if fnmatch(column.key, paper.get("columns", "*"))]
    keys = [column.key for column in chosen]
    kept = {place: fields for place, fields in ours.items() if place[1] in keys}
    return replace(table, columns=tuple(chosen)), kept


def found_tables() -> dict[str, tuple[Table, Ours]]:
    """Every table with numbers of ours by its key.

    A cell that several files have is that of the last of them, by folder.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*/table.md"))]
    pages = [page for text in texts if (page := read_table(text))]
    tables: dict[str, tuple[Table, Ours]] = {}
    for table, ours in pages:
        _, before = tables.get(table.key, (table, {}))
        tables[table.key] = table, before | ours
    return tables


def count() -> dict[str, str]:
    """The tables of counts as Markdown, by file: of all papers, and of each paper's tables."""
    papers = yaml.safe_load((FOLDER / "papers.yaml").read_text(encoding="utf-8"))
    tables = found_tables()
    lines = {"README.md": [list(HEAD), *(line_of(paper, tables) for paper in papers)]}
    for paper in papers:
        rows = lines.setdefault(paper["page"], [["table", *HEAD[3:]]])
        for key in paper["tables"]:
            cells = line_of({**paper, "tables": [key]}, tables)[3:]
            rows.append([f"{paper['name']}, Table {find_table(key).number}", *cells])
    return {page: _markdown(head, rows) for page, (head, *rows) in lines.items()}


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for name, counted in count().items():
        page = (FOLDER / name).read_text(encoding="utf-8")
        before, _, after = page.partition(BEGIN)
        (FOLDER / name).write_text(
            f"{before}{BEGIN}\n{counted}\n{END}{after.partition(END)[2]}", encoding="utf-8"
        )

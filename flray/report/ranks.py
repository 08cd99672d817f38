"""Who is best: the methods' ranks in ours and in the paper, and how well the two agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import rankdata, spearmanr

from flray.published.tables import Column, Table

Place = tuple[int, str]  # row number, column key
_FEWEST_FOR_CORRELATION = 3


@dataclass(frozen=True)
class Ranking:
    """Methods that are compared with each other: one column of a block, or one row."""

    title: str
    ours: Mapping[Place, int]  # 1 is best; only places that ours and the paper's both fill
    paper: Mapping[Place, int]  # among the same
    spearman: float | None  # where three or more are there


def rank(table: Table, cells: pd.DataFrame) -> list[Ranking]:
    """All comparisons of two methods or more; [] where rows are settings of one method."""
    rankings = [_ranking(cells, title, places) for title, places in _comparisons(table)]
    return [ranking for ranking in rankings if ranking is not None]


def method_of(table: Table, place: Place) -> str:
    r, key = place
    return table.rows[r].method or next(c.title for c in table.columns if c.key == key)


def _comparisons(table: Table) -> list[tuple[str, list[tuple[int, Column]]]]:
    if table.is_formulas or table.has_ratios:
        return []
    if all(row.method is None for row in table.rows):  # methods are columns
        return [
            (row.title, [(r, column) for column in table.columns])
            for r, row in enumerate(table.rows)
        ]
    return [
        (
            ", ".join(filter(None, (block, column.title))),
            [(r, column) for r, row in enumerate(table.rows) if row.block == block],
        )
        for block in dict.fromkeys(row.block for row in table.rows)
        for column in table.columns
    ]


def _ranking(
    cells: pd.DataFrame, title: str, places: Sequence[tuple[int, Column]]
) -> Ranking | None:
    both: dict[Place, tuple[float, float]] = {}
    for r, column in places:
        sign, value = 1.0 if column.lower_is_better else -1.0, cells["value"]
        pair = [sign * value.get((r, column.key, s), np.nan) for s in ("ours", "paper")]
        if not np.isnan(pair).any():
            both[r, column.key] = (pair[0], pair[1])
    if len(both) < 2:
        return None
    mine, theirs = zip(*both.values(), strict=True)
    return Ranking(title, _ranks(both, mine), _ranks(both, theirs), correlation(mine, theirs))


def _ranks(places: Mapping[Place, object], values: Sequence[float]) -> dict[Place, int]:
    return dict(zip(places, map(int, rankdata(values, method="min")), strict=True))


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three, or where one of them does not vary.

    >>> correlation([1, 2, 3], [10, 30, 20])
    0.5
    """
    if len(a) < _FEWEST_FOR_CORRELATION or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(spearmanr(a, b).statistic)

"""Who is best: the methods' ranks in ours and in the paper, and how well the two agree."""

from collections.abc import Sequence

import pandas as pd
from scipy.stats import spearmanr

from flray.published.tables import Table

_FEWEST_FOR_CORRELATION = 3


def rank(table: Table, cells: pd.DataFrame) -> pd.DataFrame:
    """A row for each place (row number, column key) that ours and the paper's both fill.

    `ours` and `paper` are the ranks (1 is best) among the methods of a `comparison`: one column of
    a block, or one row where methods are columns; `spearman` is their correlation, NaN where it has
    none. Comparisons have two methods or more; tables of settings of one method have none.
    """
    compared = _comparisons(table)
    values = cells["value"].unstack("source").reindex(columns=["ours", "paper"]).dropna()
    filled = set(values.index)
    values = values.loc[[place for place in compared if place in filled]]
    lower = {column.key for column in table.columns if column.lower_is_better}
    values = values.mul([1.0 if key in lower else -1.0 for _, key in values.index], axis=0)
    named = values.assign(
        comparison=[compared[place][0] for place in values.index],
        method=[compared[place][1] for place in values.index],
    )
    groups = named.groupby("comparison", sort=False)
    agreed = {
        name: correlation(own["ours"].tolist(), own["paper"].tolist()) for name, own in groups
    }
    ranked = groups[["ours", "paper"]].rank(method="min").astype(int)
    found = named.assign(**ranked, spearman=named["comparison"].map(agreed))
    return found[groups["ours"].transform("size") > 1]


def _comparisons(table: Table) -> dict[tuple[int, str], tuple[str, str]]:
    """Where methods stand that are compared, in order: title of the comparison, and method."""
    if table.is_formulas or table.has_ratios:
        return {}
    rows = list(enumerate(table.rows))
    if all(row.method is None for row in table.rows):  # methods are columns
        return {(r, c.key): (row.title, c.title) for r, row in rows for c in table.columns}
    return {
        (r, column.key): (", ".join(filter(None, (block, column.title))), row.method or "")
        for block in dict.fromkeys(row.block for row in table.rows)
        for column in table.columns
        for r, row in rows
        if row.block == block
    }


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three, or where one of them does not vary.

    >>> correlation([1, 2, 3], [10, 30, 20])
    0.5
    """
    if len(a) < _FEWEST_FOR_CORRELATION or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(spearmanr(a, b).statistic)

"""How far our numbers agree with a paper's: cells within tolerance, methods in its order."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import spearmanr

from flray.reports.published.tables import Table

FEWEST_FOR_CORRELATION = 3  # methods
RATIO_DECIMALS = 1  # as FL+HC prints ratios to FedAvg


@dataclass(frozen=True)
class Agreement:
    """Counts of the cells of a table that have both a number of ours and the paper's."""

    cells: int
    judged: int  # cells whose column has a tolerance
    within: int  # cells of these that differ by at most that much
    pairs: int  # pairs of methods that the paper prints in an order
    kept: int  # pairs of these that are in the same order here

    @property
    def text(self) -> str:
        """The counts in a sentence; "" if there are none."""
        counts = [(self.within, self.judged, "cells are within the tolerance of their column")]
        counts += [(self.kept, self.pairs, "pairs of methods are in the paper's order")]
        parts = [f"{part} of {whole} {what}" for part, whole, what in counts if whole]
        return f"{', '.join(parts)}." if parts else ""


def agreement(table: Table, cells: pd.DataFrame) -> Agreement:
    """The counts of a table with the cells that `fill` returned.

    A column of percent has a tolerance in points (`TableColumn.tolerance`), other units have none.
    Pairs of methods are those of a comparison (`rank`) or, where a paper prints ratios to FedAvg,
    the method of the cell and FedAvg. Equal numbers of ours keep no order.
    """
    both = cells["value"].unstack("source").reindex(columns=["ours", "paper"]).dropna()
    tolerances = {column.key: column.tolerance for column in table.columns}
    limits = np.array([tolerances[key] for _, key in both.index], dtype=float)  # NaN: None
    # Rounded: 98.3 - 95.3 is more than 3 in floating point.
    is_within = (both["ours"] - both["paper"]).abs().round(6) <= limits
    orders = np.sign(_differences(table, cells))
    orders = orders[orders[:, 1] != 0]
    kept = int((orders[:, 0] == orders[:, 1]).sum())
    judged = int(np.isfinite(limits).sum())
    return Agreement(len(both), judged, int(is_within.sum()), len(orders), kept)


def _differences(table: Table, cells: pd.DataFrame) -> npt.NDArray[np.float64]:
    """Differences in rank of pairs of methods, or of ratios to 1: ours, the paper's. (pairs, 2)"""
    if table.has_ratios:
        to_zero = pd.Series(np.where(cells["value"] > 0, np.inf, 1.0), cells.index)  # FedAvg has 0
        ratios = cells["ratio"].fillna(to_zero).where(cells["has_ratio"]).unstack("source")
        both = ratios.reindex(columns=["ours", "paper"]).dropna()
        return both.to_numpy(np.float64).round(RATIO_DECIMALS) - 1
    groups = rank(table, cells).groupby("comparison", sort=False)[["ours", "paper"]]
    pairs = [a - b for _, g in groups for a, b in itertools.combinations(g.to_numpy(float), 2)]
    return np.array(pairs, np.float64).reshape(-1, 2)


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
    correlations = {name: _correlation(numbers) for name, numbers in groups}
    ranked = groups.rank(method="min").astype(int)
    ranked = cells_of_both.assign(**ranked, spearman=comparison.map(correlations))
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

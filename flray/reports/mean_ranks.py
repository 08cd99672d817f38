"""Mean ranks of methods over splits, and how far apart they must be to differ.

Demšar: Statistical Comparisons of Classifiers over Multiple Data Sets. JMLR 7, 2006: the Friedman
test, and the critical difference of the Nemenyi test (Section 3.2.2).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy.stats import friedmanchisquare, studentized_range

ALPHA = 0.05  # level of significance
DECIMALS = 12  # decimals of a score; what differs by less is a tie


def split_ranks(scores: pd.DataFrame, is_maximised: Sequence[bool]) -> pd.DataFrame:
    """The rank of each method in each split, 1 is best; equal scores share the mean of their ranks.

    Methods with a score in every split are ranked among each other. A method that lacks a score has
    the rank that it would have among them, in the splits that it has, and changes no other rank.

    Args:
        scores: A row per method, a column per split; NaN where a method does not apply.
        is_maximised: For each split, whether higher scores are better.

    >>> scores = pd.DataFrame({"a": [0.9, 0.8, 0.8, 0.95], "b": [0.3, 0.2, 0.1, None]})
    >>> split_ranks(scores, [True, False])
         a    b
    0  1.0  3.0
    1  2.5  2.0
    2  2.5  1.0
    3  1.0  NaN
    """
    losses = (scores * np.where(is_maximised, -1.0, 1.0)).round(DECIMALS)
    complete = losses.dropna()
    below = [(complete < row).sum() + (complete == row).sum() / 2 for _, row in losses.iterrows()]
    ranks = pd.DataFrame(below, losses.index).where(losses.notna())
    # A complete method is equal to itself: half a rank too many, where others need one more.
    return ranks + np.where(losses.index.isin(complete.index), 0.5, 1.0)[:, None]


def critical_difference(num_methods: int, num_splits: int) -> float:
    """The least difference of two mean ranks that is significant at α = 5 % (Nemenyi).

    CD = q_α √(k (k + 1) / 6N), with q_α of the studentised range over √2, for k methods, N splits.

    >>> round(critical_difference(4, 14), 2)
    1.25
    """
    q = float(studentized_range.ppf(1 - ALPHA, num_methods, np.inf)) / np.sqrt(2)
    return float(q * np.sqrt(num_methods * (num_methods + 1) / (6 * num_splits)))


def friedman(ranks: pd.DataFrame) -> tuple[float, float]:
    """Friedman's χ², corrected for ties, and its p-value; NaN for fewer than three methods.

    Args:
        ranks: A row per method, a column per split, without NaN.
    """
    if len(ranks) < 3 or not ranks.nunique().gt(1).any():
        return float("nan"), float("nan")
    statistic, p = friedmanchisquare(*ranks.to_numpy())
    return float(statistic), float(p)


def indistinct(mean_ranks: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """The first and last of each largest run of methods that differ by less than `difference`.

    Args:
        mean_ranks: Mean ranks, ascending.
        difference: The critical difference.

    >>> indistinct([1.0, 1.5, 2.4, 4.0], 1.0)
    [(0, 1), (1, 2)]
    """
    ranks = np.asarray(mean_ranks)
    last = np.searchsorted(ranks, ranks + difference) - 1
    runs = [(-1, -1), *enumerate(last.tolist())]
    return [run for before, run in pairwise(runs) if run[1] > max(run[0], before[1])]

"""Mean ranks, Friedman test and critical difference, against Demšar 2006 and brute force."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from flray.reports.mean_ranks import critical_difference, friedman, indistinct, split_ranks

# Demšar 2006, Table 6: ranks of C4.5, C4.5+m, C4.5+cf, C4.5+m+cf on 14 data sets.
DEMSAR = np.array(
    [
        *([4, 3, 2, 1], [1, 2, 3, 4], [4, 1, 2, 3], [4, 1, 3, 2], [4, 2, 3, 1]),
        *([1, 2.5, 4, 2.5], [3, 2, 4, 1], [2.5, 2.5, 4, 1], [4, 3, 2, 1], [2.5] * 4),
        *([4, 2.5, 1, 2.5], [3, 2, 4, 1], [4, 1, 2, 3], [3, 1, 4, 2]),
    ]
)


def test_mean_ranks_and_critical_difference_are_the_published_ones() -> None:
    """Section 3.2.2: ranks 3.143, 2.000, 2.893, 1.964; χ² 9.28 without ties; CD 1.25."""
    ranks = split_ranks(pd.DataFrame(-DEMSAR.T), [True] * 14)
    means = ranks.mean(axis=1)
    assert means.tolist() == pytest.approx([3.143, 2.0, 2.893, 1.964], abs=5e-4)
    k, n = 4, 14
    without_ties = 12 * n / (k * (k + 1)) * ((means**2).sum() - k * (k + 1) ** 2 / 4)
    assert without_ties == pytest.approx(9.28, abs=5e-3)
    ties = sum(t**3 - t for t in (2, 2, 4, 2))  # sizes of ties, by hand
    assert friedman(ranks)[0] == pytest.approx(without_ties / (1 - ties / (n * (k**3 - k))))
    assert critical_difference(k, n) == pytest.approx(1.25, abs=5e-3)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (7, 2.949), (10, 3.164)])
def test_q_is_that_of_the_published_table(k, q) -> None:
    """Demšar 2006, Table 5(a), α = 0.05."""
    assert critical_difference(k, 1) / np.sqrt(k * (k + 1) / 6) == pytest.approx(q, abs=1.1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_those_of_brute_force_with_ties_and_both_directions(seed) -> None:
    rng = np.random.default_rng(seed)
    scores = pd.DataFrame(rng.integers(0, 4, size=(6, 5)) / 4)
    is_maximised = [True, False, True, True, False]
    for split, rank in split_ranks(scores, is_maximised).items():
        sign = -1 if is_maximised[split] else 1
        np.testing.assert_array_equal(rank, rankdata(sign * scores[split]))


def test_scores_that_differ_by_rounding_alone_are_ties() -> None:
    ranks = split_ranks(pd.DataFrame({"a": [0.3, 0.1 + 0.2, 0.2]}), [True])
    assert ranks["a"].tolist() == [1.5, 1.5, 3]


def test_a_method_that_lacks_a_split_changes_no_other_rank() -> None:
    scores = pd.DataFrame({"a": [0.9, 0.8, 0.7], "b": [0.5, 0.6, 0.7]}, ["x", "y", "z"])
    partial = pd.DataFrame({"a": [0.8], "b": [np.nan]}, ["part"])
    ranks = split_ranks(pd.concat([partial, scores]), [True, True])
    pd.testing.assert_frame_equal(ranks.loc[["x", "y", "z"]], split_ranks(scores, [True, True]))
    # Below x, level with y, above z: between the ranks 2 and 3 of four.
    assert ranks.loc["part", "a"] == 2.5
    assert np.isnan(ranks.loc["part", "b"])


@pytest.mark.parametrize("difference", [0.1, 0.5, 1.3, 9.0])
def test_bars_join_exactly_the_pairs_that_do_not_differ(difference) -> None:
    ranks = np.sort(np.random.default_rng(1).uniform(1, 5, size=9))
    bars = indistinct(ranks.tolist(), difference)
    joined = {
        (a, b) for first, last in bars for b in range(first, last + 1) for a in range(first, b)
    }
    near = {(a, b) for b in range(9) for a in range(b) if ranks[b] - ranks[a] < difference}
    assert joined == near
    assert not any(a[0] <= b[0] and b[1] <= a[1] for a in bars for b in bars if a != b)


def test_two_methods_or_equal_ones_cannot_be_tested() -> None:
    assert np.isnan(friedman(pd.DataFrame([[1.0, 2.0], [2.0, 1.0]]))[0])
    assert np.isnan(friedman(pd.DataFrame(np.full((4, 3), 2.5)))[0])

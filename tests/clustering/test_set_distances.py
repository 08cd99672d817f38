from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment, linprog
from scipy.spatial.distance import cdist

from flray.clustering import set_distances
from flray.clustering.points import Points
from flray.clustering.set_distances import (
    LARGEST_TABLE,
    Matching,
    MinPair,
    Wasserstein,
    least_assignment,
)

RAGGED = (1, 4, 2, 3, 5, 2)


def sets_of(sizes, seed=0, dimensions=3):
    rng = np.random.default_rng(seed)
    sets = [rng.normal(size=(size, dimensions)) for size in sizes]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return sets, Points(np.arange(len(sizes)), torch.from_numpy(np.concatenate(sets)), owner)


def assert_pairwise(D, sets, between):
    assert len(sets) > 1
    for i, a in enumerate(sets):
        for j, b in enumerate(sets):
            assert D[i, j] == pytest.approx(0 if i == j else between(a, b), rel=1e-9)


def brute_matching(a, b):
    few, many = sorted([a, b], key=len)
    totals = [
        sum(((few[r] - many[s]) ** 2).sum() for r, s in enumerate(order))
        for order in permutations(range(len(many)), len(few))
    ]
    return np.sqrt(min(totals)) / len(few)


def transport(a, b):
    """Weights 1/|a| and 1/|b| moved at least cost, as a linear program over the plan."""
    rows = np.kron(np.eye(len(a)), np.ones(len(b)))
    columns = np.kron(np.ones(len(a)), np.eye(len(b)))
    weights = np.r_[np.full(len(a), 1 / len(a)), np.full(len(b), 1 / len(b))]
    plan = linprog(cdist(a, b, "sqeuclidean").ravel(), A_eq=np.r_[rows, columns], b_eq=weights)
    assert plan.success
    return np.sqrt(plan.fun)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4,) * 5, RAGGED])
def test_min_pair_is_the_nearest_pair(sizes):
    sets, points = sets_of(sizes)
    assert_pairwise(MinPair()(points), sets, lambda a, b: cdist(a, b).min())


@pytest.mark.parametrize("sizes", [(k,) * 4 for k in (1, 2, 3, 4, 5)] + [(7, 7), RAGGED, (2, 7, 3)])
def test_matching_is_the_best_permutation(sizes):
    sets, points = sets_of(sizes)
    assert_pairwise(Matching()(points), sets, brute_matching)


def test_a_subset_matches_for_nothing_but_is_moved_at_a_cost():
    points = Points(np.arange(2), torch.tensor([[0.0], [6.0], [6.0]]), np.array([0, 0, 1]))
    assert Matching()(points)[0, 1] == 0
    assert Wasserstein()(points)[0, 1] == pytest.approx(np.sqrt(6**2 / 2))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3,) * 5, (5,) * 4, (8, 8), RAGGED, (6, 4, 9)])
def test_wasserstein_is_the_least_transport(sizes):
    sets, points = sets_of(sizes)
    assert_pairwise(Wasserstein()(points), sets, transport)


def test_wasserstein_refuses_sets_that_repeat_too_often(monkeypatch):
    monkeypatch.setattr(set_distances, "LARGEST_REPEATED", 5)
    Wasserstein()(sets_of((5, 5, 1))[1])
    with pytest.raises(ValueError, match="2 and 3 points by repeating them to 6, at most 5"):
        Wasserstein()(sets_of((2, 3))[1])


@given(
    cost=st.integers(1, LARGEST_TABLE).flatmap(
        lambda b: st.integers(1, b).flatmap(
            lambda a: arrays(np.float64, (a, b, 2), elements=st.integers(0, 9))
        )
    )
)
@settings(max_examples=60)
def test_the_table_finds_what_the_hungarian_method_finds(cost):
    least = least_assignment(cost)
    for pair in range(2):
        one = cost[:, :, pair]
        assert least[pair] == one[linear_sum_assignment(one)].sum()


def test_the_hungarian_method_finds_what_the_table_finds(monkeypatch):
    cost = np.random.default_rng(8).random((3, 5, 4, 6))
    by_table = least_assignment(cost)
    monkeypatch.setattr(set_distances, "LARGEST_TABLE", 0)
    by_hungarian = least_assignment(cost)
    assert by_table.shape == by_hungarian.shape == (4, 6)
    np.testing.assert_allclose(by_table, by_hungarian, rtol=1e-12)

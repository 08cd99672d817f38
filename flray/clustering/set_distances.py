"""Distance between clients that sent a set of points each, the same number or not: D (m, m).

Meant for a handful of points per client (k-means centres), compared on the CPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, combinations_with_replacement
from math import lcm
from typing import ClassVar

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from flray.clustering.checks import require_finite
from flray.clustering.chunks import chunk_length
from flray.clustering.distances import mirrored
from flray.clustering.points import Matrix, Points
from flray.data.dataset import Ids

# Assignments of up to so many points are solved for all pairs of clients at once: the table of
# b 2^(b-1) sums is then cheaper than one call of the Hungarian method for each pair.
LARGEST_TABLE = 6
LARGEST_REPEATED = 2048  # points a set is repeated to; beyond it one pair takes seconds


@dataclass(frozen=True)
class MinPair:
    """Distance of the nearest two points, one of each client: FLT as in its paper (Alg. 2)."""

    euclidean: ClassVar[bool] = False

    def __call__(self, points: Points) -> Matrix:
        """min over r, s of |u_ir - u_js|.

        >>> import torch
        >>> MinPair()(Points(np.arange(2), torch.tensor([[0.0], [5], [7]]), np.array([0, 0, 1])))
        array([[0., 2.],
               [2., 0.]])
        """
        return np.sqrt(_between_sets(points, lambda cost: cost.min(axis=(0, 1))))


@dataclass(frozen=True)
class Matching:
    """Cost of the best pairing of two clients' points: FLT as in its code.

    k is the number of pairs, the size of the smaller set: points left over cost nothing, so a set
    is at 0 from each of its subsets.
    """

    euclidean: ClassVar[bool] = False

    def __call__(self, points: Points) -> Matrix:
        """min over pairings of sqrt(sum_r |u_ir - u_j,perm(r)|²) / k.

        >>> import torch
        >>> two = Points(np.arange(2), torch.tensor([[0.0], [9], [12], [4]]), np.repeat([0, 1], 2))
        >>> Matching()(two)  # sqrt(4² + 3²) / 2
        array([[0. , 2.5],
               [2.5, 0. ]])
        """
        return _between_sets(points, lambda cost: np.sqrt(least_assignment(cost)) / len(cost))


@dataclass(frozen=True)
class Wasserstein:
    """Wasserstein distance of order 2, solved exactly; all points of a set weigh the same."""

    euclidean: ClassVar[bool] = False

    def __call__(self, points: Points) -> Matrix:
        """sqrt of the least mean squared distance that moves one set onto the other.

        >>> import torch
        >>> one = Points(np.arange(2), torch.tensor([[0.0], [8], [6]]), np.array([0, 0, 1]))
        >>> (Wasserstein()(one)[0] ** 2).round(9)  # (6² + 2²) / 2
        array([ 0., 20.])
        """
        return np.sqrt(_between_sets(points, _mean_transport))


def least_assignment(cost: Matrix) -> Matrix:
    """The least total cost that gives each of a rows a column of its own: (a, b, ...) -> (...).

    >>> least_assignment(np.array([[1.0, 2.0, 9.0], [1.0, 5.0, 9.0]]))  # 2 + 1
    array(3.)
    """
    num_columns, rest = cost.shape[1], cost.shape[2:]
    if num_columns > LARGEST_TABLE:
        costs = np.moveaxis(cost.reshape(*cost.shape[:2], -1), -1, 0)
        return np.array([c[linear_sum_assignment(c)].sum() for c in costs]).reshape(rest)
    least: dict[tuple[int, ...], Matrix] = {(): np.zeros(rest)}  # by the columns taken so far
    for num_taken, row in enumerate(cost, start=1):
        least = {
            taken: reduce(
                np.minimum,
                (least[taken[:p] + taken[p + 1 :]] + row[c] for p, c in enumerate(taken)),
            )
            for taken in combinations(range(num_columns), num_taken)
        }
    return np.asarray(reduce(np.minimum, least.values()))


def _mean_transport(cost: Matrix) -> Matrix:
    """Equal weights on a and on b points: an assignment, once both are repeated to lcm(a, b)."""
    a, b = cost.shape[:2]
    size = lcm(a, b)
    if a == b:
        return least_assignment(cost) / size
    if size > LARGEST_REPEATED:
        raise ValueError(
            f"wasserstein compares sets of {a} and {b} points by repeating them to {size}, "
            f"at most {LARGEST_REPEATED}; give every client the same number of points"
        )
    pairs = cost.reshape(a, b, -1)
    length = chunk_length(8 * size**2)  # repeated, the costs may outgrow the chunk they came in
    chunks = (pairs[:, :, p : p + length] for p in range(0, pairs.shape[2], length))
    repeated = (c.repeat(size // a, axis=0).repeat(size // b, axis=1) for c in chunks)
    return np.concatenate([least_assignment(c) for c in repeated]).reshape(cost.shape[2:]) / size


def _between_sets(points: Points, of_costs: Callable[[Matrix], Matrix]) -> Matrix:
    """D from `of_costs`: squared distances (a, b, ...) of clients with a <= b points -> (...)."""
    require_finite(points)
    values, size = points.array(), np.bincount(points.owner)  # (P, e), (m,)
    with_size = {int(a): np.flatnonzero(size == a) for a in np.unique(size)}
    distance = np.zeros((len(size), len(size)))
    for a, b in combinations_with_replacement(with_size, 2):
        for clients, others in _blocks(with_size[a], with_size[b], num_costs=a * b):
            rows, columns = (values[np.isin(points.owner, c)] for c in (clients, others))
            cost = cdist(rows, columns, "sqeuclidean").reshape(len(clients), a, len(others), b)
            block = of_costs(np.ascontiguousarray(cost.transpose(1, 3, 0, 2)))
            distance[np.ix_(clients, others)] = block
            distance[np.ix_(others, clients)] = block.T
    return mirrored(distance)


def _blocks(few: Ids, many: Ids, num_costs: int) -> Iterator[tuple[Ids, Ids]]:
    """Every pair of clients once or more, as many at a time as memory allows."""
    length = chunk_length(8 * num_costs * len(many))
    for start in range(0, len(few), length):
        # Clients of one size meet themselves: those before `start` have met everybody.
        yield few[start : start + length], many[start:] if few is many else many

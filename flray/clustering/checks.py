"""Checks of what a stage is given, with errors that name the client or the stage."""

import os

import numpy as np
import torch

from flray.clustering.chunks import chunk_length
from flray.clustering.points import Matrix, Partition, Points
from flray.clustering.related import Related
from flray.errors import ExperimentError

LARGEST = 1e150  # squares of larger numbers leave float64
ASYMMETRY = 1e-6  # share of the largest distance that D_ij and D_ji may differ by
COPIES_OF_D = 5  # arrays of the size of D that l2 holds while it computes D
ROWS_AT_ONCE = 1000  # rows of D that are compared at a time


def require_finite(points: Points) -> None:
    """Refuse points with a NaN or too large a number to be squared; names the first client.

    >>> import numpy as np
    >>> require_finite(Points.vectors(np.array([4, 9]), torch.tensor([[1.0], [torch.nan]])))
    Traceback (most recent call last):
    flray.errors.ExperimentError: client 9 must send finite numbers, got NaN, ...
    """
    wrong = torch.zeros(len(points.values), dtype=torch.int64)  # (P,)
    for part in torch.split(points.values.detach(), chunk_length(8 * len(wrong)), dim=1):
        wrong += (~(part.double().abs() <= LARGEST)).sum(1).cpu()  # NaN is not <= either
    if not wrong.any():
        return
    position = int(points.owner[int(wrong.nonzero()[0, 0])])
    rows = torch.from_numpy(points.owner == position)
    raise ExperimentError(
        f"client {points.clients[position]} must send finite numbers, got NaN, infinity or "
        f"> {LARGEST} in {int(wrong[rows].sum())} of {int(rows.sum()) * points.values.shape[1]}; "
        "where training diverges, lower train.lr"
    )


def require_distances(distance: Matrix, points: Points, stage: object) -> None:
    """Raise if D is not symmetric, has another shape or holds NaN, naming the distance stage.

    >>> points = Points.vectors(np.array([4, 9]), torch.zeros(2, 1))
    >>> require_distances(np.zeros((2, 3)), points, points)
    Traceback (most recent call last):
    ValueError: distance Points must be (2, 2), a row for each client, got the shape (2, 3)
    """
    name, m = f"distance {type(stage).__name__}", points.num_clients
    _require_square(distance, m, name)
    for start in range(0, m, ROWS_AT_ONCE):
        rows = distance[start : start + ROWS_AT_ONCE]
        back = distance[:, start : start + ROWS_AT_ONCE].T
        bound = ASYMMETRY * np.abs(rows[np.isfinite(rows)]).max(initial=0.0)
        with np.errstate(invalid="ignore"):  # inf - inf
            is_alike = (rows == back) | (np.abs(rows - back) <= bound)  # never for NaN
        if not is_alike.all():
            i, j = np.argwhere(~is_alike)[0]
            raise ValueError(
                f"{name} must be symmetric and without NaN, got {rows[i, j]} from client "
                f"{points.clients[start + i]} to {points.clients[j]} and {back[i, j]} back"
            )


def require_observed(observed: object, stage: object) -> None:
    """Raise if a signature returned something else than points and its memory, naming it.

    >>> require_observed(np.zeros((2, 3)), {})
    Traceback (most recent call last):
    flray.errors.ExperimentError: signature dict must return Points and a memory, got a ndarray; ...
    """
    parts = observed if isinstance(observed, tuple) else (observed,)
    if len(parts) == 2 and isinstance(parts[0], Points) and isinstance(parts[1], dict):
        return
    raise ExperimentError(
        f"signature {type(stage).__name__} must return Points and a memory, got a "
        f"{' and a '.join(type(part).__name__ for part in parts)}; return "
        "Points.vectors(clients, tensor), {}"
    )


def require_embedded(embedded: object, points: Points, stage: object) -> None:
    """Raise if an embed returned something else than points of the same clients, naming it.

    >>> points = Points.vectors(np.array([4, 9]), torch.zeros(2, 1))
    >>> require_embedded(points.array(), points, points)
    Traceback (most recent call last):
    ValueError: embed Points must return Points of the same clients, got a ndarray; return ...
    """
    name = f"embed {type(stage).__name__} must return Points of the same clients"
    if not isinstance(embedded, Points):
        got = type(embedded).__name__
        raise ValueError(f"{name}, got a {got}; return points.moved_to(array)")
    if not np.array_equal(embedded.clients, points.clients):
        raise ValueError(f"{name}, got {embedded.num_clients} of {points.num_clients} clients")


def require_relations(relation: Matrix | None, points: Points, stage: object) -> None:
    """Raise if R is not None and has another shape than D or holds NaN, naming the stage.

    >>> points = Points.vectors(np.array([4, 9]), torch.zeros(2, 1))
    >>> require_relations(np.ones((2, 3)), points, points)
    Traceback (most recent call last):
    ValueError: relate Points must be (2, 2), a row for each client, got the shape (2, 3)
    """
    if relation is None:
        return
    name = f"relate {type(stage).__name__}"
    _require_square(relation, points.num_clients, name)
    if np.isnan(relation).any():
        i, j = np.argwhere(np.isnan(relation))[0]
        raise ValueError(
            f"{name} must be without NaN, got NaN from client {points.clients[i]} to "
            f"{points.clients[j]}"
        )


def require_labels(partition: object, points: Points, stage: object) -> None:
    """Raise if a partition is none of these clients or has other labels than 0 to C - 1.

    >>> points = Points.vectors(np.array([4, 9]), torch.zeros(2, 1))
    >>> require_labels(Partition(np.array([0, -1])), points, points)  # -1: noise, as of DBSCAN
    Traceback (most recent call last):
    ValueError: partition Points must number C clusters from 0 to C - 1, got the labels -1, 0; ...
    """
    name, m = f"partition {type(stage).__name__}", points.num_clients
    if not isinstance(partition, Partition):
        got = type(partition).__name__
        raise ValueError(f"{name} must return a Partition, got a {got}; return Partition(labels)")
    labels = partition.labels
    is_whole = isinstance(labels, np.ndarray) and np.issubdtype(labels.dtype, np.integer)
    if not is_whole or labels.shape != (m,):
        got = f"{np.shape(labels)} of {getattr(labels, 'dtype', type(labels).__name__)}"
        raise ValueError(
            f"the labels of {name} must be a NumPy array ({m},) of whole numbers, one for each "
            f"client, got {got}"
        )
    numbers = np.unique(labels)
    if not np.array_equal(numbers, np.arange(len(numbers))):
        shown = ", ".join(map(str, numbers[:10]))
        raise ValueError(
            f"{name} must number C clusters from 0 to C - 1, got the labels {shown}; give a client "
            "of no cluster (-1) one of its own and return Partition(by_smallest_member(labels))"
        )


def _require_square(matrix: Matrix, m: int, name: str) -> None:
    """Raise if what a stage returned is no NumPy array (m, m)."""
    if np.shape(matrix) != (m, m):
        raise ValueError(
            f"{name} must be {(m, m)}, a row for each client, got the shape {np.shape(matrix)}"
        )
    if not isinstance(matrix, np.ndarray):
        raise ValueError(
            f"{name} must be a NumPy array, got a {type(matrix).__name__}; a tensor t is one "
            "after t.cpu().numpy()"
        )


def require_distance(related: Related, who: str) -> Matrix:
    """D (m, m), for a partition that needs it; raises if it was left out.

    Args:
        who: the partition, as the message names it.
    """
    if related.distance is None:
        raise ValueError(f"{who} needs distances between all clients, got none")
    return related.distance


def require_room(num_clients: int) -> None:
    """Raise if D and what is computed from it cannot lie in this machine's memory.

    >>> require_room(10**7)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    flray.errors.ExperimentError: distances between 10,000,000 clients need 3,725,290 GiB (5 ...
    """
    needed = COPIES_OF_D * 8 * num_clients**2
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ExperimentError(
            f"distances between {num_clients:,} clients need {needed / 2**30:,.0f} GiB "
            f"({COPIES_OF_D} arrays of clients x clients), this machine has "
            f"{available / 2**30:,.0f}; choose a partition that takes points, with sketched "
            "signatures and without relation: clustering: {embed: {name: sketch, dim: 256}, "
            "relate: none, partition: {name: two_level, groups: 1000, threshold: 3.0}}, or "
            "partition: {name: neighbours, nearest: 15}, or "
            "partition: {name: kmeans, number: 10, batch: 4096}"
        )


def require_relation(related: Related, who: str) -> Matrix:
    """R (m, m), for a partition that needs one; raises if nothing was related.

    Args:
        who: the partition, as the message names it.
    """
    if related.relation is None:
        raise ValueError(
            f"{who} needs a relation between clients, got relate: none; choose threshold or kernel"
        )
    return related.relation


def require_at_most_clients(number: int, num_clients: int) -> None:
    """Raise if more clusters are asked for than there are clients."""
    if number > num_clients:
        raise ExperimentError(
            f"partition.number must be at most the number of clients, {num_clients}, got {number}"
        )

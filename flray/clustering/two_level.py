"""Partition `two_level`: many small groups first, then a dendrogram of their centres."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from flray.clustering.hierarchical import Hierarchical
from flray.clustering.partitions import KMeans
from flray.clustering.points import Matrix, Partition, Points, Vector, by_smallest_member
from flray.clustering.related import Related
from flray.data.dataset import Ids
from flray.values import Unbounded, require_at_least


@dataclass(frozen=True)
class TwoLevel:
    """Hierarchical clustering of the centres of small groups, which mini-batch k-means makes.

    Approximates `hierarchical` with the same linkage and threshold or number, without D: clients of
    one group are never separated, and the members of a group count as if they were at its centre.
    Ward and average linkage weigh a group by its size, so that heights, and with them thresholds,
    are near those of a dendrogram of all clients. Average linkage of L2 distances takes the root
    mean square of the distances between members for their mean. Distances of centres leave out the
    spread within groups, by which complete linkage goes, and average linkage of other distances.
    With as many groups as clients it is `hierarchical` itself. Groups are made by L2 distances;
    where clusters are by another distance, clusters are only as good as these groups (for cosine,
    `embed: unit` makes both alike).

        partition: {name: two_level, groups: 1000, linkage: ward, threshold: 3.0}

    >>> import torch
    >>> from flray.clustering.distances import L2
    >>> points = Points.vectors(np.arange(4), torch.tensor([[0.0], [0.1], [5.0], [9.0]]))
    >>> related = Related(points, None, None, np.random.default_rng(0), None, measure=L2())
    >>> TwoLevel(groups=3, linkage="single", threshold=4.5)(related).labels
    array([0, 0, 1, 1])
    """

    exclusive: ClassVar[tuple[str, ...]] = ("threshold", "number")  # naming one unsets the other
    takes_points: ClassVar[bool] = True
    takes_vectors: ClassVar[bool] = True

    groups: int = 1000  # Number of groups of the first level; as many as clients if there are fewer
    # Distance between two clusters; ward needs distance l2
    linkage: Literal["single", "complete", "average", "ward"] = "ward"
    # Distance T above which clusters are not merged; .inf: one cluster
    threshold: Unbounded | None = None
    # Number of clusters, instead of a threshold. auto: chosen by `choose_by`
    number: int | Literal["auto"] | None = None
    # How number: auto chooses among 2 to groups - 1 clusters. gap: the widest gap between
    # successive merges; silhouette: the best silhouette of the centres
    choose_by: Literal["gap", "silhouette"] = "gap"
    batch: int = 4096  # Clients per step of mini-batch k-means

    def __post_init__(self) -> None:
        require_at_least(self, groups=1, batch=1)
        self._upper_level()  # refuses what hierarchical refuses
        if isinstance(self.number, int) and self.number > self.groups:
            raise ValueError(f"number must be at most groups, {self.groups}, got {self.number}")

    def _upper_level(self) -> Hierarchical:
        return Hierarchical(self.linkage, self.threshold, self.number, self.choose_by)

    def __call__(self, related: Related) -> Partition:
        group = self._groups(related)  # (m,)
        centres = Points.vectors(np.unique(group), related.points.cluster_means(group))
        assert related.measure is not None  # given by every pipeline
        upper = self._upper_level()
        D = related.measure(centres)
        if self.linkage == "average" and getattr(related.measure, "euclidean", False):
            D = member_distances(D, squared_spread(related.points, centres, group))
        above = Related(centres, D, None, related.rng, related.label_counts)
        num_groups = len(centres.clients)
        if isinstance(self.number, int) and self.number > num_groups:
            raise ValueError(
                f"two_level cannot find {self.number} clusters: clients are in {num_groups} of "
                f"{self.groups} groups, as those with equal vectors share one; lower number, or "
                "raise groups"
            )
        is_exact = num_groups == len(group)
        weights = np.bincount(group)
        tree = upper.tree(above) if is_exact else weighted_tree(D, weights, self.linkage)
        return Partition(by_smallest_member(upper.cut(tree, above)[group]))

    def _groups(self, related: Related) -> Ids:
        num_clients = related.points.num_clients
        related.points.one_each("two_level")
        if self.groups >= num_clients:
            return np.arange(num_clients)
        return KMeans(self.groups, n_init=1, batch=self.batch)(related).labels


def squared_spread(points: Points, centres: Points, group: Ids) -> Vector:
    """(G,) the mean squared distance of each group's members to its centre."""
    centre = centres.values[torch.from_numpy(group).to(centres.values.device)]
    squares = (points.means() - centre).square().sum(1, dtype=torch.float64)
    return np.bincount(group, squares.cpu().numpy()) / np.bincount(group)


def member_distances(distance: Matrix, spread: Vector) -> Matrix:
    """(G, G) the root mean square of the L2 distances between the members of two groups.

    Mean |x - y|² = |a - b|² + mean |x - a|² + mean |y - b|², for members x and y, centres a and b.

    >>> D = np.array([[0.0, 3.0], [3.0, 0.0]])
    >>> member_distances(D, spread=np.array([7.0, 0.0])).tolist()
    [[0.0, 4.0], [4.0, 0.0]]

    Args:
        distance: (G, G) L2 distances of the centres.
        spread: (G,) mean squared distance of the members to their centre.
    """
    between: Matrix = np.sqrt(np.square(distance) + np.add.outer(spread, spread))
    np.fill_diagonal(between, 0.0)
    return between


def weighted_tree(distance: Matrix, sizes: Ids, linkage: str) -> Matrix:
    """(G - 1, 4) the merges of G groups from low to high, by the formulas of Lance and Williams.

    scipy's `linkage` for groups of one member. Groups of n_a and n_b members are merged by Ward at
    sqrt(2 n_a n_b / (n_a + n_b)) times the distance of their centres.

    >>> D = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> weighted_tree(D, np.array([3, 1]), "ward").round(3).tolist()  # sqrt(2 * 3 / 4) * 2
    [[0.0, 1.0, 2.449, 4.0]]

    Args:
        distance: (G, G) distances of the centres.
        sizes: (G,) members of each group.
    """
    n, D = sizes.astype(np.float64), distance.copy()
    if linkage == "ward":
        D *= np.sqrt(2 * np.multiply.outer(n, n) / np.add.outer(n, n))
    np.fill_diagonal(D, np.inf)
    node = np.arange(len(n))  # the cluster in each row of D, as scipy numbers them
    tree = np.zeros((len(n) - 1, 4))
    for merge in range(len(tree)):
        a, b = np.unravel_index(int(D.argmin()), D.shape)
        tree[merge] = (*sorted((node[a], node[b])), D[a, b], n[a] + n[b])
        merged = _distances_after(D, n, int(a), int(b), linkage)
        D[a], D[:, a], D[b], D[:, b], D[a, a] = merged, merged, np.inf, np.inf, np.inf
        n[a], node[a] = n[a] + n[b], len(sizes) + merge
    return tree


def _distances_after(D: Matrix, n: Matrix, a: int, b: int, linkage: str) -> Matrix:
    """(G,) distances of the cluster that a and b become; n (G,) members of each cluster."""
    of_a: Matrix = D[a]
    of_b: Matrix = D[b]
    if linkage == "single":
        return np.minimum(of_a, of_b)
    if linkage == "complete":
        return np.maximum(of_a, of_b)
    if linkage == "average":
        return np.asarray((n[a] * of_a + n[b] * of_b) / (n[a] + n[b]))
    with np.errstate(invalid="ignore"):  # inf - inf: rows of a, b and of clusters merged before
        squared = (n + n[a]) * of_a**2 + (n + n[b]) * of_b**2 - n * D[a, b] ** 2
        ward = np.sqrt(np.maximum(squared, 0) / (n + n[a] + n[b]))
    return np.where(np.isnan(ward), np.inf, ward)

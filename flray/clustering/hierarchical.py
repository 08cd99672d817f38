"""Agglomerative hierarchical clustering (FL+HC, Briggs 2020, arXiv:2004.11791; FLT with HC)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from flray.clustering.checks import require_at_most_clients, require_distance, require_relation
from flray.clustering.points import Matrix, Partition, by_smallest_member
from flray.clustering.related import Related
from flray.data.dataset import Ids
from flray.values import Unbounded, highest_equal, require_at_least


@dataclass(frozen=True)
class Hierarchical:
    """Merge the two nearest clusters until a threshold or a number of clusters is reached.

    Deviates from FLT's code, which lists a cluster's members in the order of the dendrogram's
    leaves: here they are the clients that bear its label.

    >>> import torch
    >>> from flray.clustering.points import Points
    >>> points = Points.vectors(np.arange(3), torch.tensor([[0.0], [1.0], [9.0]]))
    >>> D = np.array([[0.0, 1, 9], [1, 0, 8], [9, 8, 0]])
    >>> related = Related(points, D, None, None, None)
    >>> Hierarchical("single", threshold=1.0)(related).labels
    array([0, 0, 1])
    >>> Hierarchical("single", number=3)(related).labels
    array([0, 1, 2])
    """

    exclusive: ClassVar[tuple[str, ...]] = ("threshold", "number")  # naming one unsets the other

    # Distance between two clusters; ward needs distance l2
    linkage: Literal["single", "complete", "average", "ward"] = "ward"
    # Distance T above which clusters are not merged; .inf: one cluster
    threshold: Unbounded | None = None
    # Number of clusters, instead of a threshold. auto: chosen by `choose_by`
    number: int | Literal["auto"] | None = None
    # How number: auto chooses among 2 to m - 1 clusters. gap: the widest gap between successive
    # merges; silhouette: the best silhouette of D
    choose_by: Literal["gap", "silhouette"] = "gap"
    # What is clustered. distance: D; relation: the rows of R as vectors, as FLT does
    on: Literal["distance", "relation"] = "distance"

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.number is None):
            raise ValueError(
                "hierarchical needs exactly one of threshold and number, "
                f"got threshold {self.threshold} and number {self.number}"
            )
        require_at_least(self, threshold=0)
        if isinstance(self.number, int) and self.number < 1:
            raise ValueError(f"number must be >= 1 or auto, got {self.number}")

    @property
    def needs_relation(self) -> bool:
        """True if rows of R are compared."""
        return self.on == "relation"

    def __call__(self, related: Related) -> Partition:
        tree = self.tree(related)
        return Partition(self.cut(tree, related), tree)

    def tree(self, related: Related) -> Matrix:
        """(m - 1, 4) merges from low to high, as scipy writes them.

        Of equal merges scipy does those first whose clients are listed first, and clients of one
        group often follow each other: a shuffle that is always the same decides instead.
        """
        if related.points.num_clients == 1:
            return np.zeros((0, 4))
        if self.on == "relation":
            compared = require_relation(related, "hierarchical with on: relation")
        else:
            compared = require_distance(related, "hierarchical")
        tree = self._merges(compared)
        if (np.diff(tree[:, 2]) > 0).all():
            return tree
        order = np.random.default_rng(0).permutation(len(compared))
        columns = order if self.on == "distance" else slice(None)
        tree = self._merges(compared[order][:, columns])
        node = np.append(order, np.arange(len(order), 2 * len(order) - 1))
        tree[:, :2] = np.sort(node[tree[:, :2].astype(np.int64)], axis=1)
        return tree

    def _merges(self, compared: Matrix) -> Matrix:
        """The tree of the rows of R, or of the distances D."""
        compared = compared if self.on == "relation" else squareform(compared, checks=False)
        return np.asarray(linkage(compared, self.linkage))

    def cut(self, tree: Matrix, related: Related) -> Ids:
        """(m,) labels of the clients; one tree serves every threshold and number."""
        if self.threshold is not None:
            return after_merges(tree, int(np.sum(tree[:, 2] <= highest_equal(self.threshold))))
        number = self._chosen(tree, related) if self.number == "auto" else self.number
        assert number is not None  # checked by __post_init__
        require_at_most_clients(number, related.points.num_clients)
        # Merges are undone one by one: by height, equal ones would be undone together.
        return after_merges(tree, related.points.num_clients - number)

    def _chosen(self, tree: Matrix, related: Related) -> int:
        """The best of 2 .. m - 1 clusters, the fewest of equals; 1 where all merges are alike."""
        height = tree[:, 2]
        if len(height) < 2 or height[0] == height[-1]:
            return 1
        numbers = range(2, len(height) + 1)
        if self.choose_by == "gap":
            score = np.diff(height)[::-1]  # n clusters end below merge m - n, counted from 0
        else:
            from sklearn.metrics import silhouette_score  # seconds to import, and seldom needed

            labels = (after_merges(tree, len(height) + 1 - n) for n in numbers)
            D = require_distance(related, "choose_by: silhouette")
            score = np.array([silhouette_score(D, c, metric="precomputed") for c in labels])
        return numbers[int(score.argmax())]


def after_merges(tree: Matrix, num_merges: int) -> Ids:
    """(m,) labels once the lowest merges are done.

    >>> tree = np.array([[0, 2, 1.0, 2], [1, 3, 4.0, 3]])  # 0 and 2 at height 1, then all at 4
    >>> after_merges(tree, 1)
    array([0, 1, 0])
    """
    num_clients = len(tree) + 1
    label = np.arange(num_clients + num_merges)  # clients, then the cluster each merge makes
    for merge in reversed(range(num_merges)):
        label[tree[merge, :2].astype(np.int64)] = label[num_clients + merge]
    return by_smallest_member(label[:num_clients])

"""Partitions: from points, D or R to clusters. `hierarchical` has a file of its own."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from flray.clustering.checks import require_at_most_clients, require_distance, require_relation
from flray.clustering.points import Partition, by_smallest_member
from flray.clustering.related import Related
from flray.clustering.relations import Kernel
from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.execution.federation import GROUND_TRUTH, Federation
from flray.values import require_at_least


@dataclass(frozen=True)
class Components:
    """Clusters are the connected components of R.

    >>> R = np.array([[1.0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    >>> Components()(Related(None, None, R, None, None)).labels
    array([0, 0, 0, 1])
    """

    needs_relation: ClassVar[bool] = True

    def __call__(self, related: Related) -> Partition:
        relation = require_relation(related, "components")
        _, labels = connected_components(csr_matrix(relation != 0), directed=False)
        return Partition(by_smallest_member(labels))


@dataclass(frozen=True)
class Rows:
    """Clusters are the rows of R, which may overlap; equal rows are one (FLT, Alg. 3, Case I).

    Meant for a relation of 0 and 1: soft strengths are equal only for equal clients.

    >>> R = np.array([[1.0, 1, 0], [1, 1, 1], [0, 1, 1]])  # a chain: three different rows
    >>> Rows()(Related(None, None, R, None, None)).labels
    array([0, 1, 2])
    """

    needs_relation: ClassVar[bool] = True

    def __call__(self, related: Related) -> Partition:
        return Partition(equal_rows(require_relation(related, "rows")), overlapping=True)


@dataclass(frozen=True)
class KMeans:
    """k-means on one vector per client; fewer clusters if fewer vectors differ.

    With `batch` centres move by so many clients at a time (mini-batch k-means; Sculley 2010), which
    approximates k-means: on many clients it is faster and ends a little above its inertia.

    >>> import torch
    >>> from flray.clustering.points import Points
    >>> points = Points.vectors(np.arange(3), torch.tensor([[0.0], [9.0], [1.0]]))
    >>> KMeans(2)(Related(points, None, None, np.random.default_rng(0), None)).labels
    array([0, 1, 0])
    """

    takes_points: ClassVar[bool] = True
    takes_vectors: ClassVar[bool] = True

    number: int  # Number of clusters k
    n_init: int = 10  # Random starts, of which the best is kept
    # Clients per step of mini-batch k-means, an approximation. null: exact steps with all clients
    batch: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, number=1, n_init=1, batch=1)

    def __call__(self, related: Related) -> Partition:
        related.points.one_each("kmeans")
        require_at_most_clients(self.number, related.points.num_clients)
        seed = int(related.rng.integers(2**31))
        from sklearn import cluster  # seconds to import, and seldom needed

        options = {"n_init": self.n_init, "random_state": seed}
        if self.batch is None:
            kmeans = cluster.KMeans(self.number, **options)
        else:
            kmeans = cluster.MiniBatchKMeans(self.number, batch_size=self.batch, **options)
        return Partition(by_smallest_member(kmeans.fit_predict(related.points.array())))


@dataclass(frozen=True)
class Spectral:
    """k-means on the first eigenvectors of a graph of clients (von Luxburg 2007).

    The edges of the graph are R; without a relation they are those of `Kernel`, exp(-D² / (2 σ²))
    with the median distance σ.

    >>> import torch
    >>> from flray.clustering.points import Points
    >>> x = np.array([0.0, 0.1, 9.0, 9.1])
    >>> points = Points.vectors(np.arange(4), torch.from_numpy(x[:, None]))
    >>> D = np.abs(x[:, None] - x)
    >>> Spectral(2)(Related(points, D, None, np.random.default_rng(0), None)).labels
    array([0, 0, 1, 1])
    """

    number: int  # Number of clusters k

    def __post_init__(self) -> None:
        require_at_least(self, number=1)

    def __call__(self, related: Related) -> Partition:
        require_at_most_clients(self.number, related.points.num_clients)
        num_clients = related.points.num_clients
        if self.number in (1, num_clients):  # no eigenvector decides
            return Partition(np.arange(num_clients) * (self.number > 1))
        edges = related.relation
        if edges is None:
            edges = Kernel()(require_distance(related, "spectral"))
        seed = int(related.rng.integers(2**31))
        from sklearn import cluster  # seconds to import, and seldom needed

        spectral = cluster.SpectralClustering(
            self.number, affinity="precomputed", random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a graph in several components
            return Partition(by_smallest_member(spectral.fit_predict(edges)))


@dataclass(frozen=True)
class Hdbscan:
    """Dense regions of D (Campello 2013); finds the number of clusters, at least two or none.

    A client in no dense region (noise) is a cluster of its own: it keeps training, alone, rather
    than with other outliers that it has nothing in common with.

    >>> import torch
    >>> from flray.clustering.points import Points
    >>> x = np.array([0.0, 0.1, 9.0, 9.1, 50.0])
    >>> points = Points.vectors(np.arange(5), torch.from_numpy(x[:, None]))
    >>> D = np.abs(x[:, None] - x)
    >>> Hdbscan(2)(Related(points, D, None, None, None)).labels
    array([0, 0, 1, 1, 2])
    """

    min_cluster_size: int = 5  # Fewest clients of a cluster; smaller if there are fewer clients

    def __post_init__(self) -> None:
        require_at_least(self, min_cluster_size=2)

    def __call__(self, related: Related) -> Partition:
        num_clients = related.points.num_clients
        if num_clients == 1:
            return Partition(np.zeros(1, np.int64))
        size = min(self.min_cluster_size, num_clients)
        from sklearn import cluster  # seconds to import, and seldom needed

        hdbscan = cluster.HDBSCAN(min_cluster_size=size, metric="precomputed", copy=True)
        labels = hdbscan.fit_predict(require_distance(related, "hdbscan"))
        noise = labels < 0
        labels[noise] = num_clients + np.arange(noise.sum())
        return Partition(by_smallest_member(labels))


@dataclass(frozen=True)
class Random:
    """Random clusters whose sizes differ by at most one: the baseline of any clustering.

    >>> import torch
    >>> from flray.clustering.points import Points
    >>> points = Points.vectors(np.arange(4), torch.zeros(4, 1))
    >>> labels = Random(2)(Related(points, None, None, np.random.default_rng(0), None)).labels
    >>> np.bincount(labels)
    array([2, 2])
    """

    takes_points: ClassVar[bool] = True

    number: int  # Number of clusters

    def __post_init__(self) -> None:
        require_at_least(self, number=1)

    def __call__(self, related: Related) -> Partition:
        require_at_most_clients(self.number, related.points.num_clients)
        order = related.rng.permutation(related.points.num_clients)
        return Partition(by_smallest_member(order % self.number))


@dataclass(frozen=True)
class LabelCounts:
    """Clusters of clients that hold the same set of labels. Reads the ground truth: a reference.

    >>> counts = np.array([[5, 0], [2, 0], [1, 3]])  # (clients, labels)
    >>> LabelCounts()(Related(None, None, None, None, lambda: counts)).labels
    array([0, 0, 1])
    """

    takes_points: ClassVar[bool] = True

    def require(self, fed: Federation) -> None:
        """Refuse an experiment without permission to read the ground truth, or without classes."""
        fed.require_ground_truth(GROUND_TRUTH)
        fed.timeline.at(1).require_classes("partition label_counts", "choose another partition")

    def __call__(self, related: Related) -> Partition:
        return Partition(equal_rows(related.label_counts() > 0))


@dataclass(frozen=True)
class Given:
    """Clusters are the known groups: what perfect clusters would give. Reads the ground truth.

    The signature is `metadata`, so nobody trains to be clustered, and newcomers join the cluster of
    their group; one of a group that nobody has been clustered with joins the first cluster.

    >>> groups = np.array([4, 2, 4])
    >>> Given()(Related(None, None, None, None, None, lambda: groups)).labels
    array([0, 1, 0])
    """

    takes_points: ClassVar[bool] = True

    def require(self, fed: Federation) -> None:
        """Refuse an experiment without permission to read the ground truth, or without groups."""
        fed.require_ground_truth(GROUND_TRUTH)
        if fed.timeline.at(1).groups is None:
            raise ExperimentError(
                "partition given needs groups, and the clients of this split have none: choose a "
                "split with groups, or another partition"
            )

    def __call__(self, related: Related) -> Partition:
        assert related.groups is not None  # given by every pipeline
        return Partition(by_smallest_member(related.groups()))


def equal_rows(matrix: NDArray[np.generic]) -> Ids:
    """(m,) one label for each distinct row.

    >>> equal_rows(np.array([[1, 1], [0, 1], [1, 1]]))
    array([0, 1, 0])
    """
    _, labels = np.unique(matrix, axis=0, return_inverse=True)
    return by_smallest_member(labels.ravel())

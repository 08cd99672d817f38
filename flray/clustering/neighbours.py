"""Partition `neighbours`: communities in the graph of each client's nearest neighbours."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flray.clustering.points import Partition, by_smallest_member
from flray.clustering.related import Related
from flray.values import require_above_zero, require_at_least


@dataclass(frozen=True)
class Neighbours:
    """Communities (Louvain; Blondel 2008, arXiv:0803.0476) in a graph of nearest neighbours.

    Each client is joined to its `nearest` neighbours by the distance of the pipeline (l1,
    l2 or cosine). The number of clusters is found, nobody is left over, and memory grows with
    clients, not with their square.

    Approximates: clusters of a graph of all pairs, of which the `nearest` shortest per client are
    kept; Louvain's modularity is a local optimum, which the seed of the run decides. Neighbours are
    exact: time grows with the square of the clients.

        partition: {name: neighbours, nearest: 15}

    >>> import torch
    >>> from flray.clustering.distances import L2
    >>> from flray.clustering.points import Points
    >>> points = Points.vectors(np.arange(4), torch.tensor([[0.0], [0.1], [5.0], [5.1]]))
    >>> related = Related(points, None, None, np.random.default_rng(0), None, measure=L2())
    >>> Neighbours(nearest=1)(related).labels
    array([0, 0, 1, 1])
    """

    takes_points: ClassVar[bool] = True
    takes_vectors: ClassVar[bool] = True
    takes_metric: ClassVar[bool] = True

    nearest: int = 15  # Neighbours of each client; fewer if there are fewer clients
    resolution: float = 1.0  # Higher: more and smaller clusters

    def __post_init__(self) -> None:
        require_at_least(self, nearest=1)
        require_above_zero(self, "resolution")

    def __call__(self, related: Related) -> Partition:
        points, metric = related.points, getattr(related.measure, "metric", None)
        assert metric is not None  # checked by every pipeline
        values = points.one_each("neighbours").detach().cpu().numpy()
        number = min(self.nearest, points.num_clients - 1)
        if number == 0:
            return Partition(np.zeros(1, np.int64))
        seed = int(related.rng.integers(2**31))
        import networkx  # seconds to import, and seldom needed
        from sklearn.neighbors import kneighbors_graph

        near = kneighbors_graph(values, number, metric=metric)  # (m, m) sparse
        graph = networkx.from_scipy_sparse_array(near.maximum(near.T))
        communities = networkx.community.louvain_communities(
            graph, weight=None, resolution=self.resolution, seed=seed
        )
        labels = np.empty(points.num_clients, np.int64)
        for label, members in enumerate(communities):
            labels[list(members)] = label
        return Partition(by_smallest_member(labels))

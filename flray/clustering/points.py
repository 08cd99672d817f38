"""Points: what the server knows of each client, a vector or a set of vectors."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.clustering.gram import centred_gram
from flray.clustering.projection import by_covariance, by_gram
from flray.data.dataset import Ids

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """One vector, or a set of vectors, for each of m clients.

    Signatures return points and embeds move them. Client clients[c] has the rows of `values` whose
    `owner` is c, at least one.

    >>> two = Points(np.array([3, 8]), torch.tensor([[0.0], [2.0], [7.0]]), np.array([0, 0, 1]))
    >>> two.means().tolist()  # client 3 sent two points, client 8 one
    [[1.0], [7.0]]
    """

    clients: Ids  # (m,) ascending
    values: Tensor  # (P, e) on any device
    # (P,) owner[p] is the position in `clients` of the client that sent row p; ascending
    owner: Ids

    def __post_init__(self) -> None:
        if not np.array_equal(np.unique(self.owner), np.arange(len(self.clients))):
            raise ValueError("every client needs at least one point, and every point a client")
        if np.any(np.diff(self.owner) < 0) or np.any(np.diff(self.clients) <= 0):
            raise ValueError("clients and the owners of points must be in ascending order")
        if len(self.values) != len(self.owner) or self.values.dim() != 2:
            raise ValueError(
                f"points are (P, e) with P owners, got {tuple(self.values.shape)} "
                f"with {len(self.owner)} owners"
            )

    @classmethod
    def vectors(cls, clients: Ids, values: Tensor) -> "Points":
        """One vector for each client, in the order of clients."""
        return cls(clients, values, np.arange(len(clients)))

    @property
    def num_clients(self) -> int:
        """Number of clients m, of which each has at least one point."""
        return len(self.clients)

    def array(self) -> Matrix:
        """`values` (P, e) on the CPU in float64."""
        return self.values.detach().cpu().double().numpy()

    @cached_property
    def principal(self) -> Matrix:
        """(P, min(P - 1, e)) coordinates with the same L2 distances; computed once."""
        num_points, num_dimensions = self.values.shape
        return by_covariance(self.values) if num_points > num_dimensions else by_gram(self.gram)

    @cached_property
    def gram(self) -> Tensor:
        """(P, P) products of the centred points, right above the diagonal; computed once."""
        return centred_gram(self.values)

    def moved_to(self, values: Matrix) -> "Points":
        """The same clients, described by other points."""
        return Points(self.clients, torch.from_numpy(np.ascontiguousarray(values)), self.owner)

    def one_each(self, who: str) -> Tensor:
        """`values` (m, e), for a stage that needs one vector per client; raises if there are sets.

        Args:
            who: the stage, as the message names it.
        """
        if len(self.values) != len(self.clients):
            raise ValueError(
                f"{who} needs one vector a client, got {len(self.values)} points of "
                f"{len(self.clients)} clients; choose a signature that sends one (update, weights, "
                "k: 1) or a stage for sets (matching, min_pair, wasserstein)"
            )
        return self.values

    def means(self) -> Tensor:
        """(m, e) the mean of each client's points."""
        return _means(self.values, self.owner)

    def cluster_means(self, labels: Ids, weights: Vector | None = None) -> Tensor:
        """(C, e) the mean over each cluster's clients of their means; labels 0 to C - 1.

        Args:
            weights: (m,) how much each client counts, by default all alike.
        """
        means = self.means()
        if weights is None:
            return _means(means, labels)
        shares = weights / np.bincount(labels, weights)[labels]  # shares of each cluster sum to 1
        of_cluster = np.zeros((labels.max() + 1, len(labels)))
        of_cluster[labels, np.arange(len(labels))] = shares
        return torch.from_numpy(of_cluster).to(means) @ means

    def means_of_clusters(self, labels: Ids) -> "Points":
        """The mean of each cluster, under its number, by labels (M,) of all clients; -1: none."""
        placed = self.of(self.clients[labels[self.clients] >= 0])
        clusters, position = np.unique(labels[placed.clients], return_inverse=True)
        return Points.vectors(clusters, placed.cluster_means(position))

    def of(self, clients: Ids) -> "Points":
        """The points of these clients; clients without points are ignored."""
        is_kept = np.isin(self.clients, clients)
        if is_kept.all():
            return self
        position = np.cumsum(is_kept) - 1
        is_kept_row = is_kept[self.owner]
        values = self.values[torch.from_numpy(is_kept_row).to(self.values.device)]
        return Points(self.clients[is_kept], values, position[self.owner[is_kept_row]])

    def updated_by(self, new: "Points") -> "Points":
        """These points with those of new clients added, and of clients in both replaced.

        >>> old = Points.vectors(np.array([1, 2]), torch.tensor([[1.0], [2.0]]))
        >>> both = old.updated_by(Points.vectors(np.array([0, 2]), torch.tensor([[0.0], [9.0]])))
        >>> both.clients, both.values.flatten().tolist()
        (array([0, 1, 2]), [0.0, 1.0, 9.0])
        """
        if not new.num_clients:
            return self
        old = self.of(np.setdiff1d(self.clients, new.clients))
        client = np.concatenate([old.clients[old.owner], new.clients[new.owner]])  # (P,)
        order = np.argsort(client, kind="stable")
        clients, owner = np.unique(client[order], return_inverse=True)
        values = torch.cat([old.values, new.values.to(old.values)])
        return Points(clients, values[torch.from_numpy(order).to(values.device)], owner)


def _means(values: Tensor, owner: Ids) -> Tensor:
    """(number of owners, e) the mean of the rows of each owner."""
    if len(values) == owner.max(initial=-1) + 1:  # a row each, in ascending order of owners
        return values[torch.from_numpy(np.argsort(owner)).to(values.device)]
    # Slice by slice: a scattered sum on a GPU adds in an order of its own.
    order = torch.from_numpy(np.argsort(owner, kind="stable")).to(values.device)
    parts = torch.split(values[order], np.bincount(owner).tolist())
    return torch.stack([part.mean(0) for part in parts])


@dataclass(frozen=True)
class Partition:
    """Clusters of m clients, numbered from 0 by their smallest member.

    >>> partition = Partition(np.array([0, 1, 0]))  # clients 0 and 2 share a model
    >>> partition.overlapping
    False
    """

    labels: Ids  # (m,) in the order of the clients clustered
    linkage: Matrix | None = None  # (m - 1, 4) as scipy writes a dendrogram
    # The clusters are the rows of R, one of each client, and labels tell the distinct ones apart.
    overlapping: bool = False


def by_smallest_member(labels: Ids) -> Ids:
    """The same clusters, numbered in the order in which clients first meet them.

    >>> by_smallest_member(np.array([7, 3, 7, 9]))
    array([0, 1, 0, 2])
    """
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))
    return number[inverse].astype(np.int64)

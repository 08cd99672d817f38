"""Regrouping: what becomes of clusters when their clients send new signatures."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.points import Partition, Points, by_smallest_member
from flray.data.dataset import Ids
from flray.execution.federation import Federation
from flray.models.bank import ModelBank

Then = Literal["anew", "split", "merge", "move"]


@dataclass(frozen=True)
class Regrouping:
    """Clients that have clusters, and their new signatures.

    `after(then)` returns the clustering, for the records, and (M,) the cluster of each client: old
    clusters keep their numbers, new ones have higher numbers. Clients that sent no signature go
    where most of their cluster goes.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> points = Points.vectors(np.arange(5), torch.tensor([[0.0], [0.1], [9.0], [9.1], [0.2]]))
    >>> old = np.array([3, 3, 5, 5, 5, 3, -1])  # client 5 is absent, client 6 has no cluster
    >>> Regrouping(Pipeline(), points, old, SimpleNamespace(seed=0)).after("move")[1]
    array([ 3,  3,  5,  5,  3,  3, -1])
    """

    pipeline: Pipeline
    points: Points  # of the m clients that were heard
    old: Ids  # (M,) clusters before; -1: none
    fed: Federation
    # Clients whose data changed, which alone may move and by which no cluster is matched. None: all
    movers: Ids | None = None

    def after(self, then: Then) -> tuple[Clustering, Ids]:
        """The clustering, and the new cluster of each of the M clients; -1: none."""
        if then == "anew":
            clustering = self.pipeline.decide(self.points, self.fed, self.fed.t)
            return clustering, self._numbered(clustering.labels)
        if then == "move":
            labels = self.old.copy()
            labels[self.points.clients] = self._moved()
        else:
            labels = self._numbered(self._split() if then == "split" else self._merged())
        return self._recorded(labels), labels

    @property
    def _mine(self) -> Ids:
        """(m,) the old clusters of the clients that were heard."""
        return self.old[self.points.clients]

    def _split(self) -> Ids:
        parts = np.full(self.points.num_clients, -1, np.int64)
        for cluster in np.unique(self._mine[self._mine >= 0]):
            members = np.flatnonzero(self._mine == cluster)
            signatures = self.points.of(self.points.clients[members])
            divided = np.zeros(len(members), np.int64)  # fewer than the number of clusters stay one
            if self.pipeline.can_divide(len(members)):
                divided = self.pipeline.decide(signatures, self.fed, self.fed.t).labels
            parts[members] = parts.max() + 1 + divided
        return parts

    def _merged(self) -> Ids:
        means = self.points.means_of_clusters(self.old)
        if not self.pipeline.can_divide(means.num_clients):
            return self._mine
        joined = self.pipeline.decide(means, self.fed, self.fed.t)
        number = dict(zip(means.clients.tolist(), joined.labels.tolist(), strict=True))
        return np.array([number.get(int(c), -1) for c in self._mine])

    def _moved(self) -> Ids:
        is_mover = stays = self._mine >= 0
        if self.movers is not None:
            has_changed = np.isin(self.points.clients, self.movers)
            is_mover, stays = is_mover & has_changed, stays & ~has_changed
        if not stays.any() or not is_mover.any():
            return self._mine
        staying = self.points.of(self.points.clients[stays])
        clusters, position = np.unique(self.old[staying.clients], return_inverse=True)
        new = self.points.of(self.points.clients[is_mover])
        moved = self._mine.copy()
        moved[is_mover] = clusters[self.pipeline.place(staying, position, new, self.fed.seed)]
        return moved

    def _numbered(self, new: Ids) -> Ids:
        """(M,) clusters of all clients, numbered by the old clusters they have most of."""
        labels, heard, before = self.old.copy(), self.points.clients, self._mine
        if self.movers is not None and len(np.setdiff1d(heard, self.movers)):
            before = np.where(np.isin(heard, self.movers), -1, before)  # others carry the number on
        labels[heard] = matched(new, before, int(self.old.max(initial=-1)) + 1)
        others = np.setdiff1d(np.flatnonzero(self.old >= 0), heard)
        for cluster in np.unique(self.old[others]):
            now = labels[heard][before == cluster]
            if len(now):
                labels[others[self.old[others] == cluster]] = most_common(now)
        return labels

    def _recorded(self, labels: Ids) -> Clustering:
        """What clients were regrouped by, as a clustering of those that were heard."""
        embedded = self.pipeline.embed(self.points, self.fed.seed)
        partition = Partition(by_smallest_member(labels[self.points.clients]))
        distance = self.pipeline.distances(embedded)
        return Clustering(self.points.clients, embedded, distance, None, partition, self.points)


def matched(new: Ids, old: Ids, first_free: int) -> Ids:
    """(m,) the new clusters with the numbers of old ones, such that most clients keep theirs.

    Clusters that are matched to none are numbered from `first_free`; -1 stays -1.

    >>> matched(np.array([0, 0, 1, 1, 2]), old=np.array([4, 4, 4, 2, 2]), first_free=5)
    array([4, 4, 2, 2, 5])
    """
    names, old_names = np.unique(new[new >= 0]), np.unique(old[old >= 0])
    overlap = np.array([[np.sum((new == n) & (old == k)) for k in old_names] for n in names])
    numbers = first_free + np.arange(len(names))
    if overlap.size:
        for row, column in zip(*linear_sum_assignment(overlap, maximize=True), strict=True):
            if overlap[row, column]:
                numbers[row] = old_names[column]
    unmatched = numbers >= first_free
    numbers[unmatched] = first_free + np.arange(unmatched.sum())
    labels = np.full(len(new), -1, np.int64)
    labels[new >= 0] = numbers[np.searchsorted(names, new[new >= 0])]
    return labels


def most_common(values: Ids) -> int:
    """The value that occurs most often, the smallest of equals.

    >>> most_common(np.array([7, 2, 7, 2, 5]))
    2
    """
    names, counts = np.unique(values, return_counts=True)
    return int(names[counts.argmax()])


def regrouped_bank(
    bank: ModelBank, old: Ids, labels: Ids, weights: NDArray[np.float64] | None = None
) -> ModelBank:
    """The models of new clusters, a row for each, beside those of clients without a cluster.

    >>> import torch
    >>> bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, np.array([0, 0, 1]))
    >>> old = np.array([0, 0, 1])
    >>> regrouped_bank(bank, old, np.array([0, 2, 1])).of_clients(np.arange(3))["w"].flatten()
    tensor([1., 1., 5.])
    >>> regrouped_bank(bank, old, np.zeros(3, np.int64), np.ones(3)).params["w"]
    tensor([[2.3333]])

    Args:
        old: (M,) the clusters whose models the bank has.
        labels: (M,) the new clusters; a cluster with an old number keeps its model.
        weights: (M,) weights of clients in the mean of the models of their cluster, for merged
            clusters. None: clusters are not merged.
    """
    kinds = np.stack([labels, np.where(labels < 0, bank.owner, -1)])
    rows, owner = np.unique(kinds, axis=1, return_inverse=True)
    owner = owner.reshape(-1)
    shares = np.zeros((rows.shape[1], bank.num_rows))
    for v, label in enumerate(rows[0]):
        members = np.flatnonzero(owner == v)
        if weights is not None and label >= 0 and weights[members].sum() > 0:
            np.add.at(shares[v], bank.owner[members], weights[members])
            shares[v] /= shares[v].sum()  # exactly 1 of a single model, whose bits are kept
            continue
        before = np.flatnonzero(old == label) if label >= 0 else members
        shares[v, most_common(bank.owner[before if len(before) else members])] = 1.0
    return bank.combined(shares, owner)

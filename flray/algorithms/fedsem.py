"""FedSEM: k-means on the clients' models in every round, then their means inside the clusters.

Xie, Long, Shen, Zhou, Wang, Jiang, Zhang: Multi-Center Federated Learning. arXiv 2005.01026
(FeSEM), in the version of FLT's baseline (Jamali-Rad et al., IEEE TNNLS 2022, arXiv 2103.15947).

Deviates from Xie: all layers are compared (`space: last_layer` is nearer to their code), and each
round ends with one run of k-means until it stands still, not with one step.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.algorithms.algorithm import Outcome
from flray.client.embedding import fitted_k_means
from flray.clustering.checks import require_finite
from flray.clustering.distances import L2
from flray.clustering.pipeline import Clustering, nearest_cluster
from flray.clustering.points import Partition, Points, by_smallest_member
from flray.clustering.update import flatten
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params, last_layers
from flray.models.client_table import ClientTable
from flray.models.mixing import ClientModels, HeldModels
from flray.values import require_at_least

MOST_STEPS = 300  # of k-means
MOST_RECORDED = 2000  # clients of a clustering that is kept: D grows with their square


@dataclass(frozen=True)
class FedSemState:
    """State of FedSEM: a model per cluster, and the last model of each client."""

    bank: ModelBank  # a row for each cluster; owner: each client's, row 0 for those without one
    labels: Ids  # (M,) the cluster of each client; -1: a holdout client that is not placed yet
    models: ClientTable  # w_i as client i last trained it; the initial model before that
    # (K, p) of the last k-means; fewer as long as there were fewer clients
    centres: Tensor | None = None


@dataclass(frozen=True)
class FedSem:
    """K models, and k-means on the clients' models after each round.

    A client trains from its cluster's model. Then all clients that are present are clustered by the
    models they trained last, however long ago; those never heard have the initial model, as do
    clients that join later. The model of a cluster is the mean of the same models of its members.

    A clustering is recorded in rounds that change the partition. A holdout client trains once, not
    as a round, from the mean of the models that clients use, and stays with the nearest centre.

        algorithm: {name: fedsem, number: 3, space: last_layer}

    >>> FedSem(number=0)
    Traceback (most recent call last):
    ValueError: number must be >= 1, got 0
    """

    refused_keys: ClassVar = {"recluster": "clients go to the nearest centre again in every round"}
    returns_clusterings: ClassVar = True

    number: int = 5  # Number of clusters K; FLT has 10 in scenario 4
    space: Literal["all", "last_layer"] = "all"  # Layers by which models are compared
    # Models that are averaged. members: those that all members of the cluster trained last; heard:
    # those of the round; aggregate.unheard then decides whether the other members count
    mean_of: Literal["members", "heard"] = "members"
    # Random starts of the first k-means; later ones start at the previous centres
    first_starts: int = 20

    def __post_init__(self) -> None:
        require_at_least(self, number=1, first_starts=1)

    gradient = staticmethod(plain_gradient)

    def init(self, fed: Federation) -> Outcome[FedSemState]:
        rows = {n: leaf.repeat_interleave(self.number, 0) for n, leaf in fed.initial.items()}
        bank = replace(fed.initial_bank(), params=rows)
        labels = np.zeros(fed.num_clients, np.int64)
        labels[fed.holdout] = -1
        models = ClientTable.empty(fed.initial, fed.num_clients)
        return Outcome(FedSemState(bank, labels, models))

    def cohort(self, state: FedSemState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def round(self, state: FedSemState, cohort: Cohort, fed: Federation) -> Outcome[FedSemState]:
        trained = fed.train(state.bank, cohort, self.gradient)
        fed.count_models(state.bank, cohort, trained)
        models = state.models.updated(trained.clients, trained.params)
        last = models.of_clients(fed.clients)  # w_i of all clients that are there
        points = Points.vectors(fed.clients, self._vectors(last, fed))
        labels, centres = self._clusters(state, points, fed)
        clusterings = _recorded(points, labels, state.labels)
        hears = (labels == np.arange(self.number)[:, None]).astype(np.float64)  # (K, M)
        # In each cluster: w_k <- sum_i n_i / n w_i
        is_heard = self.mean_of == "heard"
        is_heard |= np.array_equal(trained.clients, fed.clients)  # by everybody: the same models
        averaged = trained if is_heard else ClientModels(fed.clients, HeldModels(last))
        bank = fed.mix_rows(hears, averaged, state.bank)
        labels = self._place(labels, centres, state.bank, fed)
        bank = replace(bank, owner=np.maximum(labels, 0))
        return Outcome(FedSemState(bank, labels, models, centres), trained.metrics(), clusterings)

    def deploy(self, state: FedSemState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: FedSemState) -> Ids:
        return state.labels

    def _vectors(self, models: Params, fed: Federation) -> Tensor:
        """(m, p) what is compared of the models."""
        learned = fed.learned(fed.initial)
        names = last_layers(learned, 1) if self.space == "last_layer" else learned
        return flatten({name: models[name] for name in names})

    def _clusters(
        self, state: FedSemState, points: Points, fed: Federation
    ) -> tuple[Ids, Tensor | None]:
        """The labels of all clients and the centres after k-means on the points."""
        if not points.num_clients:
            return state.labels, state.centres
        require_finite(points)
        with fed.meter.phase("cluster"):
            if state.centres is None:
                seed = int(fed.generator("fedsem", fed.t).integers(2**31))
                origin = self._vectors(fed.initial, fed)  # of all who have not trained yet
                assigned, centres = self._first_clusters(points.values, origin, seed)
            else:
                missing = min(self.number, points.num_clients) - len(state.centres)
                # Nobody is nearest to a centre that is there twice, so that it is made anew.
                again = state.centres[:1].expand(max(missing, 0), -1)
                assigned, centres = lloyd(points.values, torch.cat([state.centres, again]))
        labels = state.labels.copy()
        labels[points.clients] = assigned
        return labels, centres

    def _first_clusters(self, vectors: Tensor, origin: Tensor, seed: int) -> tuple[Ids, Tensor]:
        """Labels and centres of the best of `first_starts` random starts."""
        moved = vectors - origin
        number = min(self.number, len(moved))
        assigned = fitted_k_means(coordinates(moved), number, self.first_starts, seed).labels_
        is_member = torch.eye(number).to(moved)[torch.from_numpy(assigned)]  # (m, K)
        counts = is_member.sum(0)[:, None].clamp(min=1)  # a centre without members is at `origin`
        return assigned, is_member.T @ moved / counts + origin

    def _place(
        self, labels: Ids, centres: Tensor | None, before: ModelBank, fed: Federation
    ) -> Ids:
        """Labels with holdout clients that have none placed by one training, not a round."""
        new = fed.holdout[labels[fed.holdout] < 0]
        if not len(new) or centres is None or not len(fed.clients):
            return labels
        shares = np.bincount(before.owner[fed.clients], minlength=before.num_rows)
        mean = {
            n: torch.tensordot(torch.from_numpy(shares / shares.sum()).to(leaf), leaf, 1)[None]
            for n, leaf in before.params.items()
        }
        joint = ModelBank(mean, np.zeros_like(before.owner))
        probed = fed.train(joint, Cohort(fed.t, new, is_probe=True), self.gradient)
        exchanged = len(new) * joint.bytes_per_model
        fed.meter.count_transfer("signature", down=exchanged, up=exchanged)
        if not len(probed.clients):
            return labels
        used = np.unique(labels[fed.clients])
        among = Points.vectors(used, centres[torch.from_numpy(used).to(centres.device)])
        vectors = Points.vectors(probed.clients, self._vectors(probed.params, fed))
        placed = labels.copy()
        placed[probed.clients] = used[nearest_cluster(L2(), among, vectors)]
        return placed


def coordinates(points: Tensor) -> NDArray[np.float64]:
    """(m, r) coordinates with the distances of points (m, p), r at most the points that are not 0.

    A few models in many dimensions lie in a space of few: that of their inner products.

    >>> found = coordinates(torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 4.0, 0.0]]))
    >>> np.abs(found).tolist()
    [[0.0], [5.0]]
    """
    is_moved = points.any(1)
    moved = points[is_moved].double()
    if 0 < len(moved) < points.shape[1]:
        eigenvalues, eigenvectors = torch.linalg.eigh(moved @ moved.T)
        points = eigenvectors.new_zeros(len(points), len(moved))
        points[is_moved] = eigenvectors * eigenvalues.clamp(min=0).sqrt()
    return np.asarray(points.cpu(), np.float64)


def lloyd(points: Tensor, centres: Tensor) -> tuple[Ids, Tensor]:
    """Labels (m,) of points (m, p) and centres (K, p) once k-means from given centres stands still.

    A cluster that lost all its points goes on at the point that is farthest from its centre, but
    stays where it is if there are fewer points than clusters.

    >>> labels, centres = lloyd(torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([[4.0], [5.0]]))
    >>> labels.tolist(), centres.tolist()
    ([0, 0, 1], [[0.5], [9.0]])
    """
    origin = centres[0]  # distances do not change with it, rounding errors do
    x, c = points - origin, centres - origin
    units, labels = torch.eye(len(c)).to(x), np.full(len(x), -1)
    for _ in range(MOST_STEPS):
        # r_i = argmin_k ||w_i - c_k||, all of them less ||w_i||²
        squared, nearest = (c.square().sum(1) - 2 * (x @ c.T)).min(1)
        before, labels = labels, nearest.cpu().numpy()  # the only wait for a GPU
        if np.array_equal(labels, before):
            break
        # c_k = the mean of its w_i
        is_member = units[nearest]  # (m, K)
        empty = np.setdiff1d(np.arange(len(c)), labels)
        if len(empty) and len(x) >= len(c):
            farthest = (squared + x.square().sum(1)).topk(len(empty)).indices
            is_member[farthest] = units[torch.from_numpy(empty).to(x.device)]
        counts = is_member.sum(0)[:, None]
        c = torch.where(counts > 0, (is_member.T @ x) / counts.clamp(min=1), c)
    return labels, c + origin


def _recorded(points: Points, labels: Ids, before: Ids) -> tuple[Clustering, ...]:
    """The clustering as evidence, if it changed something and its D is not too large to keep."""
    clusters = labels[points.clients]
    if points.num_clients > MOST_RECORDED or np.array_equal(clusters, before[points.clients]):
        return ()
    partition = Partition(by_smallest_member(clusters))
    return (Clustering(points.clients, points, L2()(points), None, partition),)

"""REPA: clients are clustered by statistics of their unlabelled data in a network's latents.

Radovič, Pejović: REPA: Client Clustering without Training and Data Labels for Improved Federated
Learning in Non-IID Settings. arXiv 2309.14088. Eq. 3-5 and 8.

Deviates: the appendix with model, sizes and settings was not available, see docs/deviations.md.
Statistics are standardised before k-means, and the proximal term acts after the clustering alone.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.algorithms.clustered import cluster, labels_of, place, unplaced
from flray.algorithms.recluster import Recluster, Watch
from flray.clustering import EmbedStage, PartitionStage, SignatureStage
from flray.clustering.embeds import Standardise
from flray.clustering.partitions import KMeans
from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.points import Points
from flray.clustering.statistics import Statistics
from flray.data.dataset import Ids
from flray.engines.affine import affine
from flray.engines.training import LocalBatch, LossGradient, plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.models.mixing import Relation
from flray.models.repa_net import EMBEDDER, without_embedder
from flray.values import require_at_least


@dataclass(frozen=True)
class StatisticsClustering(Pipeline):
    """α: statistics of latents, standardised, L2, k-means with K = 10."""

    signature: SignatureStage = field(default_factory=Statistics)
    embed: EmbedStage = field(default_factory=Standardise)
    partition: PartitionStage = field(default_factory=lambda: KMeans(number=10))


@dataclass(frozen=True)
class RepaState:
    """State of REPA: the joint model, after the clustering a model per cluster."""

    bank: ModelBank  # θ, then θ_k of each cluster
    labels: Ids  # (M,) α(i), the cluster of each client; -1: not placed
    # After the clustering: the model that clients were described with, and what they said.
    joint: ModelBank | None = None
    known: Points | None = None
    watch: Watch | None = None  # for `recluster`
    clustered_at: int = 1  # the round of the last clustering; WD's newcomers train with its rate


@dataclass(frozen=True)
class Repa:
    """FedAvg of all clients, one clustering, then FedAvg with a proximal term in each cluster.

    Clients are clustered by statistics of what the joint model makes of their images, without
    labels. A round's cohort is sampled from all clients; a cluster of which nobody is heard keeps
    its model. Holdout clients and those that join later go to the nearest centroid, which takes no
    training and no labels; `evaluate.robustness` measures how well clients are placed so. With
    `recluster` clients are clustered again, by statistics in the same joint model.

        algorithm: {name: repa, rounds_before: 5, clustering: {partition: {number: 4}}}

    >>> import torch
    >>> w, w0 = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> g = Repa(mu=0.5).gradient(lambda w, batch: {"w": torch.tensor([10.0])}, w, None, w0, {})
    >>> g["w"]  # 10 + 0.5 (3 - 1)
    tensor([11.])
    """

    # Rounds T of FedAvg before the clustering; the joint model encodes the data
    rounds_before: int = 10
    mu: float = 0.01  # Weight μ of the proximal term after the clustering
    # How clients are clustered after these rounds
    clustering: StatisticsClustering = field(default_factory=StatisticsClustering)
    # When clients are clustered again, and what becomes of clusters; by default never
    recluster: Recluster = field(default_factory=Recluster)

    def __post_init__(self) -> None:
        require_at_least(self, rounds_before=0, mu=0)

    def init(self, fed: Federation) -> Outcome[RepaState]:
        bank = fed.initial_bank()
        if self.rounds_before == 0:
            return cluster(self, bank, fed)
        return Outcome(RepaState(bank, bank.owner, watch=self.recluster.start(fed)))

    @affine
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        # Eq. 8: l(θ_i) + μ/2 ||θ_i - θ||²
        return {name: g[name] + self.mu * (w[name] - w0[name]) for name in g}

    def classifier_gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        """Eq. 8 for a module with an embedder, which has done its work."""
        return self.gradient(grad, w, replace(batch, loss="classifier_losses"), w0, memo)

    def cohort(self, state: RepaState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients[state.labels[fed.clients] >= 0]))

    def round(self, state: RepaState, cohort: Cohort, fed: Federation) -> Outcome[RepaState]:
        is_joint = self.recluster.is_joint(state.watch, self.rounds_before, cohort.t)
        has_embedder = any(name.startswith(EMBEDDER) for name in fed.initial)
        proximal = self.classifier_gradient if has_embedder else self.gradient
        gradient = plain_gradient if is_joint else proximal
        trained = fed.train(state.bank, cohort, gradient)
        fed.count_models(state.bank if is_joint else without_embedder(state.bank), cohort, trained)
        # Eq. 4: θ_k <- W({(θ_i, ε_i) | α(i) = k}), the mean weighted by n_i
        bank = fed.mix(Relation.of_clusters(state.labels), trained, state.bank)
        metrics = trained.metrics()
        watch = self.recluster.watched(state, bank, trained, fed)
        if is_joint and self.recluster.is_first_due(watch, self.rounds_before, cohort.t):
            return replace(cluster(self, bank, fed, t=cohort.t), metrics=metrics)
        state = replace(state, bank=bank, watch=watch)
        clusterings: tuple[Clustering, ...] = ()
        if not is_joint and state.joint is not None:
            if (now := self.recluster.again(self, state, state.joint, fed)) is not None:
                state = RepaState(now.bank, now.labels, now.anchor, now.points, now.watch, fed.t)
                clusterings = (now.clustering,)
            state = self._place(state, unplaced(state.labels, fed.clients, fed.holdout), fed)
        return Outcome(state, metrics, clusterings)

    def deploy(self, state: RepaState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: RepaState) -> Ids:
        return state.labels

    @property
    def spent_fields(self) -> tuple[str, ...] | None:
        """None if clients are clustered again."""
        return self.recluster.spent()

    def branch(
        self, bank: ModelBank, clustering: Clustering, memory: Params, fed: Federation
    ) -> RepaState:
        labels = labels_of(clustering, fed.num_clients)
        # Eq. 5: e_i = S(φ(X_i)) of every client that may train
        watch = self.recluster.after_first(memory, fed)
        state = RepaState(bank.split(labels), labels, bank, clustering.signatures, watch, fed.t)
        return self._place(state, fed.holdout, fed)

    def nearest_clusters(self, state: RepaState, clients: Ids, fed: Federation) -> tuple[Ids, Ids]:
        """The clients that answered, and the cluster with the nearest centroid for each of them."""
        if state.joint is None or state.known is None or not len(clients):
            return clients[:0], clients[:0]
        # All use its one row, whatever their ids.
        joint = replace(state.joint, owner=np.zeros(clients.max() + 1, np.int64))
        former = fed.at_rate_of(state.clustered_at)
        new, _ = self.clustering.observe(former, joint, Cohort(fed.t, clients), {})
        if not new.num_clients:
            return new.clients, new.clients
        placed = state.known.of(np.flatnonzero(state.labels >= 0))
        clusters, position = np.unique(state.labels[placed.clients], return_inverse=True)
        return new.clients, clusters[self.clustering.place(placed, position, new, fed.seed)]

    def _place(self, state: RepaState, clients: Ids, fed: Federation) -> RepaState:
        return place(state, clients, lambda new: self.nearest_clusters(state, new, fed))

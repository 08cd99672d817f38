"""FL+HC: some rounds of FedAvg, then one clustering of all clients by their updates.

Briggs, Fan, Andras: Federated learning with hierarchical clustering of local updates to improve
training on non-IID data. IJCNN 2020, arXiv 2004.11791. Algorithm 1.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from flray.algorithms.algorithm import Outcome
from flray.algorithms.clustered import cluster, labels_of, mix_clusters, place, unplaced
from flray.algorithms.recluster import Recluster, Watch
from flray.clustering import PartitionStage
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Clustering, Pipeline, nearest_cluster
from flray.clustering.points import Points
from flray.clustering.sketch import Sketch
from flray.clustering.update import Update
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params, layers_of, leaves_of_layers
from flray.values import require_at_least

CohortSize = Literal["of_all", "of_cluster", "joint"]


@dataclass(frozen=True)
class UpdateClustering(Pipeline):
    """The five stages of FL+HC, which Alg. 1 calls P, with the paper's values for MNIST.

    Signature: the update Δ; distance: L2; partition: Ward linkage up to the threshold 3.0.
    """

    partition: PartitionStage = field(default_factory=lambda: Hierarchical(threshold=3.0))


@dataclass(frozen=True)
class FlhcState:
    """State of FL+HC: the joint model, after the clustering a model per cluster."""

    bank: ModelBank  # before the clustering one row, after it one row per cluster
    labels: Ids  # (M,) the cluster of each client; -1: not placed
    # To place clients that were not clustered and to cluster again; None if neither is possible
    joint: ModelBank | None = None  # the joint model w at the clustering
    means: Points | None = None  # the mean update Δ of each cluster; `clients` are clusters
    watch: Watch | None = None  # for `recluster`
    clustered_at: int = 1  # the round of the last clustering; newcomers train with its rate


@dataclass(frozen=True)
class Flhc:
    """Alg. 1: FedAvg, one clustering of all clients by their updates, FedAvg in each cluster.

    After `rounds_before` rounds every client trains once from the joint model. This training is not
    a round; its bytes are counted as those of signatures. Agglomerative clustering of the updates
    gives the clusters.
    Every cluster then starts from the joint model and samples, trains and averages its own clients.

    A client that joins later is placed at the end of its first round: it trains once from the
    joint model, with the learning rate of the clustering, and joins the cluster whose mean update
    is nearest. Clusters outlive their members: where all clients leave, nobody trains until
    newcomers are placed.

    With `shared_layers: n` the first n layers are averaged over all clients after the clustering
    too, and clusters differ in the layers above them. All layers are FedAvg, for the same cohorts.
    With `recluster` clients are clustered again every few rounds, when their data drift, or when
    updates stop turning (`when: auto`, which chooses the round of the first clustering too):

        algorithm: {name: flhc, recluster: {when: on_drift, then: anew}}

    A first clustering alone, the default, is the paper's:

        algorithm: {name: flhc, rounds_before: 5, clustering: {partition: {threshold: 1.5}}}
    """

    rounds_before: int = 10  # Rounds n of FedAvg before the clustering
    # How clients are clustered after these rounds
    clustering: UpdateClustering = field(default_factory=UpdateClustering)
    # Clients that train in a round. of_all: of each cluster as many as the share ρ of all clients,
    # at most the whole cluster; of_cluster: the share ρ of each cluster; joint: the share ρ of all
    # clients, drawn whatever their clusters
    cohort_size: CohortSize = "of_all"
    # Start each cluster from the weighted mean of the models that its members trained for the
    # clustering. false: from the joint model
    keep_pass: bool = False
    # Number of first layers that all clusters share after the clustering; 0: clusters share nothing
    shared_layers: int = 0
    # When clients are clustered again, and what becomes of clusters; by default never
    recluster: Recluster = field(default_factory=Recluster)

    def __post_init__(self) -> None:
        require_at_least(self, rounds_before=0, shared_layers=0)
        if self.keep_pass and self.shared_layers:
            raise ValueError(
                "shared_layers must be 0 with keep_pass, which starts clusters from models of "
                f"their own, got {self.shared_layers}"
            )
        signature = self.clustering.signature
        if self.keep_pass and not (type(signature) is Update and signature.layers == "all"):
            raise ValueError(
                "keep_pass needs the trained models that clustering.signature=update sends with "
                f"layers all, got signature {type(signature).__name__}"
            )
        if self.keep_pass and isinstance(self.clustering.embed, Sketch):
            raise ValueError("keep_pass needs whole updates, got embed sketch; remove one of them")

    def require(self, fed: Federation) -> None:
        self._shared(fed)  # refuses a model with fewer layers

    def _shared(self, fed: Federation) -> frozenset[str]:
        """Names of the leaves of the first `shared_layers` layers."""
        layers = layers_of(fed.initial)
        if self.shared_layers > len(layers):
            raise ExperimentError(
                f"shared_layers must be at most the {len(layers)} layers of this model "
                f"({', '.join(layers)}), got {self.shared_layers}"
            )
        return leaves_of_layers(fed.initial, tuple(layers[: self.shared_layers]))

    def init(self, fed: Federation) -> Outcome[FlhcState]:
        bank = fed.initial_bank()
        if self.rounds_before == 0:
            return cluster(self, bank, fed)
        labels = np.zeros(fed.num_clients, np.int64)
        return Outcome(FlhcState(bank, labels, watch=self.recluster.start(fed)))

    gradient = staticmethod(plain_gradient)  # l. 30: w <- w - η ∇L(w; b)

    def cohort(self, state: FlhcState, t: int, fed: Federation) -> Cohort:
        # l. 14, 19-20: m <- max(α K, 1) clients of each cluster; α is our `participation` ρ, K the
        # number of clients that may train. None: max(ρ |cluster|, 1) clients of each cluster.
        if self.cohort_size == "joint":
            return Cohort(t, fed.sample(t, fed.clients[state.labels[fed.clients] >= 0]))
        size = fed.cohort_size if self.cohort_size == "of_all" else None
        return Cohort(t, fed.sample_clusters(t, state.labels, size))

    def round(self, state: FlhcState, cohort: Cohort, fed: Federation) -> Outcome[FlhcState]:
        # l. 24: w_{c,t+1} <- sum_k n_k / n w^k_{t+1} over the cohort's clients k in cluster c,
        # where n is the sum of their n_k
        trained = fed.train(state.bank, cohort, self.gradient)
        fed.count_models(state.bank, cohort, trained)
        bank = mix_clusters(state.labels, trained, state.bank, self._shared(fed), fed)
        metrics = trained.metrics()
        is_joint = self.recluster.is_joint(state.watch, self.rounds_before, cohort.t)
        watch = self.recluster.watched(state, bank, trained, fed)
        if is_joint and self.recluster.is_first_due(watch, self.rounds_before, cohort.t):
            return replace(cluster(self, bank, fed, t=cohort.t), metrics=metrics)
        state = replace(state, bank=bank, watch=watch)
        clusterings: tuple[Clustering, ...] = ()
        if not is_joint:
            anchor = state.bank if state.joint is None else state.joint
            if (now := self.recluster.again(self, state, anchor, fed)) is not None:
                means = now.points.means_of_clusters(now.labels)
                state = FlhcState(now.bank, now.labels, now.anchor, means, now.watch, fed.t)
                clusterings = (now.clustering,)
            state = self._place(state, unplaced(state.labels, fed.clients, fed.holdout), fed)
        return Outcome(state, metrics, clusterings)

    def deploy(self, state: FlhcState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: FlhcState) -> Ids:
        return state.labels

    @property
    def spent_fields(self) -> tuple[str, ...] | None:
        """None if clients hear those of other clusters, or are clustered again."""
        return None if self.shared_layers else self.recluster.spent("keep_pass")

    def branch(
        self, bank: ModelBank, clustering: Clustering, memory: Params, fed: Federation
    ) -> FlhcState:
        labels = labels_of(clustering, fed.num_clients)  # l. 10: C <- HC(Δw, P)
        state = FlhcState(bank.split(labels), labels, clustered_at=fed.t)  # l. 12: w_{c,0} <- w
        deltas = clustering.signatures  # l. 7-9: Δw^k of every client that was clustered
        if self.keep_pass:
            state = replace(state, bank=_with_pass(state, deltas, fed))
        watch = self.recluster.after_first(memory, fed)
        if watch is None and len(clustering.clients) == fed.num_clients:
            return state
        state = replace(state, joint=bank, means=deltas.means_of_clusters(labels), watch=watch)
        return self._place(state, fed.holdout, fed)

    def _place(self, state: FlhcState, clients: Ids, fed: Federation) -> FlhcState:
        """Put clients without a cluster into the one whose mean Δ is nearest to theirs."""
        joint, means = state.joint, state.means
        if joint is None or means is None:
            return state

        def nearest_clusters(new: Ids) -> tuple[Ids, Ids]:
            # Updates can be compared if they have one learning rate.
            former = fed.at_rate_of(state.clustered_at)
            deltas, _ = self.clustering.observe(former, joint, Cohort(fed.t, new), {})
            if not deltas.num_clients:
                return deltas.clients, deltas.clients
            nearest = nearest_cluster(self.clustering.distance, means, deltas)
            return deltas.clients, means.clients[nearest]

        return place(state, clients, nearest_clusters)


def _with_pass(state: FlhcState, deltas: Points, fed: Federation) -> ModelBank:
    """The bank after each cluster's model moved by its mean update: w_c + sum_k n_k / n Δw^k.

    Statistics of BatchNorm stay those of the joint model.
    """
    labels = state.labels[deltas.clients]
    _, first = np.unique(labels, return_index=True)
    rows = torch.from_numpy(state.bank.owner[deltas.clients[first]])
    means = deltas.cluster_means(labels, fed.weights(deltas.clients))  # (C, p)
    params = {name: leaf.clone() for name, leaf in state.bank.params.items()}
    # In the order of `flatten` (update.py)
    leaves = [params[name] for name in sorted(fed.learned(params))]
    parts = torch.split(means, [leaf[0].numel() for leaf in leaves], dim=1)
    for leaf, part in zip(leaves, parts, strict=True):
        leaf[rows] += part.view(len(rows), *leaf.shape[1:])
    return replace(state.bank, params=params)

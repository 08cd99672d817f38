"""FLIS (HC): one clustering of all clients by what their models predict, then FedAvg in clusters.

Morafah, Vahidian, Wang, Lin: FLIS: Clustered Federated Learning via Inference Similarity for
Non-IID Data Distribution. 2022, arXiv 2208.09754. Algorithm 3.

Deviates: the paper does not say which hierarchical clustering HC(A, β) is, and the authors' code
has none; here it is average linkage on 1 - A until 1 - β.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.algorithms.choosing import ChooseBy, choose, require_choice
from flray.algorithms.clustered import cluster, labels_of, place, unplaced
from flray.algorithms.recluster import Recluster, Watch
from flray.clustering import DistanceStage, PartitionStage, SignatureStage
from flray.clustering.distances import Disagreement
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.predictions import PublicPredictions
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.models.mixing import Relation


@dataclass(frozen=True)
class InferenceClustering(Pipeline):
    """B on the server's examples, 1 - A, average linkage until 1 - β, with β 0.3.

    Ward on the rows of A, which the authors' code has in a comment: `relate: similarity` and
    `partition: {name: hierarchical, on: relation, linkage: ward, number: 5}`.
    """

    signature: SignatureStage = field(default_factory=PublicPredictions)
    distance: DistanceStage = field(default_factory=Disagreement)
    partition: PartitionStage = field(
        default_factory=lambda: Hierarchical(linkage="average", threshold=0.7)
    )


@dataclass(frozen=True)
class FlisHcState:
    """State of FLIS (HC): a model per cluster."""

    bank: ModelBank  # θ_g,j: a row for each cluster, and θ_g for those who have none
    labels: Ids  # (M,) the cluster of each client; -1: none
    watch: Watch | None = None  # for `recluster`


@dataclass(frozen=True)
class FlisHc:
    """Alg. 3: one clustering of all clients by what their models predict, FedAvg in clusters.

    The clustering comes before round 1 and is not counted as one: every client trains once from the
    initial model, and the server predicts public examples with these models (`split.server`). A
    client that joins later, or failed in the clustering, chooses the cluster whose model is best
    for it at the end of its first round, and stays. Holdout clients choose at test time. With
    `recluster` clients are clustered again, by predictions after training the initial model again.

        algorithm: {name: flis_hc, clustering: {partition: {threshold: 0.5}}}
    """

    # How clients are clustered before round 1
    clustering: InferenceClustering = field(default_factory=InferenceClustering)
    # Part whose loss a client that comes later minimises to choose a cluster
    choose_by: ChooseBy = "validation"
    # When clients are clustered again, and what becomes of clusters; by default never
    recluster: Recluster = field(default_factory=Recluster)

    gradient = staticmethod(plain_gradient)

    def require(self, fed: Federation) -> None:
        if len(fed.clients) < fed.num_clients:  # newcomers and holdout clients choose
            require_choice(self.choose_by, fed)

    def init(self, fed: Federation) -> Outcome[FlisHcState]:
        # l. 4: every client trains θ_g and sends its model, on which the server predicts
        return cluster(self, fed.initial_bank(), fed)

    def cohort(self, state: FlisHcState, t: int, fed: Federation) -> Cohort:
        placed = fed.clients[state.labels[fed.clients] >= 0]
        return Cohort(t, fed.sample(t, placed))  # l. 9-10: S_t

    def round(self, state: FlisHcState, cohort: Cohort, fed: Federation) -> Outcome[FlisHcState]:
        # l. 12-14, in each cluster: θ_g,j <- sum_k |D_k| θ_k / sum_k |D_k|; unheard ones stay
        clusters = Relation.of_clusters(state.labels)
        bank, trained = fed.average(clusters, state.bank, cohort, self.gradient)
        watch = self.recluster.watched(state, bank, trained, fed)
        state = replace(state, bank=bank, watch=watch)
        clusterings: tuple[Clustering, ...] = ()
        if (now := self.recluster.again(self, state, fed.initial_bank(), fed)) is not None:
            state = FlisHcState(now.bank, now.labels, now.watch)
            clusterings = (now.clustering,)
        new = unplaced(state.labels, fed.clients)
        if len(new):
            models = _models_of_clusters(state)
            sent = len(new) * models.num_rows * models.bytes_per_model
            fed.meter.count_transfer("placing", down=sent)
        return Outcome(self._place(state, new, fed), trained.metrics(), clusterings)

    def deploy(self, state: FlisHcState, clients: Ids, fed: Federation) -> ModelBank:
        new = np.intersect1d(clients, fed.holdout)
        fed.count_placing(_models_of_clusters(state), new)
        return self._place(state, new, fed).bank

    def partition(self, state: FlisHcState) -> Ids:
        return state.labels

    rounds_before = 0

    @property
    def spent_fields(self) -> tuple[str, ...] | None:
        """None if clients are clustered again."""
        return self.recluster.spent()

    def branch(
        self, bank: ModelBank, clustering: Clustering, memory: Params, fed: Federation
    ) -> FlisHcState:
        labels = labels_of(clustering, fed.num_clients)  # l. 6: C_1, ... <- HC(A, β)
        watch = self.recluster.after_first(memory, fed)
        return FlisHcState(bank.split(labels), labels, watch)  # l. 7: θ_g,j <- θ_g

    def _place(self, state: FlisHcState, clients: Ids, fed: Federation) -> FlisHcState:
        """Put clients without a cluster into the one whose model they choose."""

        def chosen_clusters(new: Ids) -> tuple[Ids, Ids]:
            answered, positions = choose(_models_of_clusters(state), new, self.choose_by, fed)
            return answered, np.unique(state.labels[state.labels >= 0])[positions]

        return place(state, clients, chosen_clusters)


def _models_of_clusters(state: FlisHcState) -> ModelBank:
    """A row for each cluster and no other, in the order of labels."""
    labels, first = np.unique(state.labels, return_index=True)
    return replace(state.bank, params=state.bank.of_clients(first[labels >= 0]))

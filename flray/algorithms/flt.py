"""FLT: client relatedness learned before training from signatures of the data; models mix by it.

Jamali-Rad, Abdizadeh, Singh: Federated Learning With Taskonomy for Non-IID Data. IEEE TNNLS 2022,
arXiv 2103.15947; workshop version at ICLR DPML 2021. Algorithms 2 (FCR) and 3.

Deviates: weights are n_i normalised over those heard, as in the authors' code (the paper's do not
sum to 1); averages are taken from the models before the round, not in place.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.algorithms.change import Dynamic, Flags
from flray.algorithms.clustered import cluster, labels_of, place, unplaced
from flray.clustering import DistanceStage, EmbedStage, PartitionStage, RelateStage, SignatureStage
from flray.clustering.distances import L2
from flray.clustering.embeds import Umap
from flray.clustering.encoder_centres import EncoderCentres
from flray.clustering.partitions import Components
from flray.clustering.pipeline import Clustering, Pipeline, nearest_cluster
from flray.clustering.points import Points
from flray.clustering.relations import Threshold
from flray.clustering.set_distances import Matching
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation, nobody
from flray.models.bank import ModelBank, Params
from flray.models.mixing import Relation
from flray.values import require_at_least


@dataclass(frozen=True)
class Taskonomy(Pipeline):
    """FCR: encoder and k-means on the client, UMAP, matching distance, D < γ, its components."""

    signature: SignatureStage = field(default_factory=EncoderCentres)
    embed: EmbedStage = field(default_factory=Umap)
    distance: DistanceStage = field(default_factory=Matching)
    relate: RelateStage = field(default_factory=Threshold)
    partition: PartitionStage = field(default_factory=Components)


@dataclass(frozen=True)
class FltState:
    """State of FLT: the distinct models, and the relation by which they mix."""

    bank: ModelBank  # W: as many rows as there are distinct ones
    relation: Relation  # Ã of all M clients; a client without a signature hears nobody
    labels: Ids  # (M,) C, the cluster of each client; -1: none yet
    centres: Points  # M of everybody who answered so far
    memory: Params  # the signature's own, an encoder as far as it was fine-tuned
    flags: Flags  # Δ


@dataclass(frozen=True)
class Flt:
    """Alg. 3: FCR relates clients before round 1, then each client averages over those it hears.

    FCR (Alg. 2) encodes the images of a client, sends the centres of k-means on the codes, and
    relates clients whose centres are near each other. A client trains once it has a cluster; who
    joins gets one at the end of a round.

    Where nobody who is present has a cluster yet, because all others left, nobody trains in that
    round, and the newcomers are placed as always: `mean_embedding` gives them the models of the
    clusters that were left, `fcr` relates them to each other alone. A stage that finds nobody left
    to hear is skipped.

        algorithm: {name: flt, case: clusters, clustering: {relate: {gamma: 0.8}}}

    >>> Flt().rounds_before, Flt(stages=2).spent_fields is None  # stages are related one by one
    (0, True)
    """

    refused_keys: ClassVar = {
        "recluster": "clients are related again by `dynamic`, with its keys flags and every"
    }

    # Averaging of Alg. 3. rows: Case I, by each client's row of Ã; clusters: Case II, within
    # clusters
    case: Literal["rows", "clusters"] = "rows"
    # How clients are related and clustered before round 1
    clustering: Taskonomy = field(default_factory=Taskonomy)
    # Number of parts in which FCR hears the clients, one before each of the first rounds
    stages: int = 1
    dynamic: Dynamic = field(default_factory=Dynamic)  # When clients are clustered again
    # Clusters of clients that join later. mean_embedding: the nearest mean; fcr: related anew by
    # FCR
    newcomers: Literal["mean_embedding", "fcr"] = "mean_embedding"

    def __post_init__(self) -> None:
        require_at_least(self, stages=1)

    def require(self, fed: Federation) -> None:
        if self.stages > len(fed.clients):
            raise ExperimentError(
                f"stages must be at most the {len(fed.clients)} clients, got {self.stages}: "
                "each stage hears at least one"
            )
        self.clustering.require_number(len(self._stages_until(0, fed)))

    def init(self, fed: Federation) -> Outcome[FltState]:
        # l. 2: FCR (Alg. 2) with the clients of the first stage
        return cluster(self, fed.initial_bank(), fed, self._stages_until(0, fed))

    gradient = staticmethod(plain_gradient)  # l. 9: w_m <- w_m - η ∇F_m(w_m)

    def cohort(self, state: FltState, t: int, fed: Federation) -> Cohort:
        placed = fed.clients[state.labels[fed.clients] >= 0]
        return Cohort(t, fed.sample(t, placed))  # l. 5: S^t

    def round(self, state: FltState, cohort: Cohort, fed: Federation) -> Outcome[FltState]:
        t, before = cohort.t, state.bank
        bank, trained = fed.average(state.relation, before, cohort, self.gradient)  # l. 7-20
        flags = self.dynamic.updated(state.flags, trained, before, fed)  # l. 22
        state = replace(state, bank=bank, flags=flags)
        heard_now = self._stages_until(t, fed) if t < self.stages else nobody()
        asked = unplaced(state.labels, heard_now)
        clusterings: tuple[Clustering, ...] = ()
        has_newcomers = t >= self.stages and len(unplaced(state.labels, fed.clients)) > 0
        if self.dynamic.is_due(flags, t) or (self.newcomers == "fcr" and has_newcomers):
            asked = fed.clients
            state, clusterings = self._form(state, t, asked, fed)  # l. 23-27
            state = replace(state, flags=Flags.none(fed.num_clients))
        elif len(asked):
            state, clusterings = self._form(state, t, asked, fed)
        return Outcome(self._place_present(state, t, asked, fed), trained.metrics(), clusterings)

    def _stages_until(self, last: int, fed: Federation) -> Ids:
        """The clients of stages 0 to `last`."""
        order = fed.generator("stages").permutation(fed.clients)
        return np.sort(np.concatenate(np.array_split(order, self.stages)[: last + 1]))

    rounds_before = 0

    @property
    def spent_fields(self) -> tuple[str, ...] | None:
        """None if clients are related again, in further stages or because they changed."""
        if self.stages > 1 or not self.dynamic.is_static:
            return None
        return ("case", "stages", "dynamic", "newcomers")

    def branch(
        self, bank: ModelBank, clustering: Clustering, memory: Params, fed: Federation
    ) -> FltState:
        observed = (clustering.signatures, memory)
        state = self._related(bank, observed, clustering, Flags.none(fed.num_clients))
        return self._place_present(state, 0, self._stages_until(0, fed), fed)

    def _form(
        self, state: FltState, t: int, clients: Ids, fed: Federation
    ) -> tuple[FltState, tuple[Clustering, ...]]:
        """FCR (Alg. 2): hear some clients, then relate all that have answered and are there."""
        heard, memory = self._observe(state, Cohort(t, clients), fed)  # l. 1-11
        centres = state.centres.updated_by(heard)  # l. 12: M
        clustering = self.clustering.decide(centres.of(fed.clients), fed, t)  # l. 13-19
        return self._related(state.bank, (centres, memory), clustering, state.flags), (clustering,)

    def _observe(self, state: FltState, cohort: Cohort, fed: Federation) -> tuple[Points, Params]:
        """Signatures of the cohort, and what the signature keeps for its next call."""
        # Those of different rounds can be compared if they are computed with one model.
        return self.clustering.observe(fed, fed.initial_bank(), cohort, state.memory)

    def _related(
        self, bank: ModelBank, observed: tuple[Points, Params], clustering: Clustering, flags: Flags
    ) -> FltState:
        """The state in which clients mix by a clustering; models stay as they are."""
        labels = labels_of(clustering, len(bank.owner))
        relation = self._relation(clustering, labels)
        return FltState(bank.split(relation.row_of_client), relation, labels, *observed, flags)

    def _relation(self, clustering: Clustering, labels: Ids) -> Relation:
        """Ã of all clients: rows of R in Case I, clusters in Case II."""
        if self.case == "clusters" or clustering.relation is None:
            return Relation.of_clusters(labels)
        strengths = np.zeros((len(labels), len(labels)))
        strengths[np.ix_(clustering.clients, clustering.clients)] = clustering.relation
        return Relation.of_matrix(strengths)

    def deploy(self, state: FltState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: FltState) -> Ids:
        return state.labels

    def _place_present(self, state: FltState, t: int, asked: Ids, fed: Federation) -> FltState:
        """Place whoever is present without a cluster.

        Those asked in this round's FCR failed and were dropped: they keep their model and do not
        train until they answer in a later round. Holdout clients come last, and what they do to the
        signature's memory is forgotten: nobody else depends on their data.
        """
        new = np.setdiff1d(unplaced(state.labels, fed.clients), asked)
        if t + 1 < self.stages:
            new = nobody()  # they are still to be heard
        state = self._place(state, new, fed)
        return replace(self._place(state, fed.holdout, fed), memory=state.memory)

    def _place(self, state: FltState, clients: Ids, fed: Federation) -> FltState:
        """Put clients without a cluster into the one with the nearest mean latent embedding."""
        new = unplaced(state.labels, clients)
        if not len(new):
            return state
        heard, memory = self._observe(state, Cohort(fed.t, new), fed)
        if not heard.num_clients:
            return state
        placed = state.centres.of(np.flatnonzero(state.labels >= 0))  # without holdout clients
        means = placed.cluster_means(state.labels[placed.clients])
        clusters = nearest_cluster(L2(), Points.vectors(np.arange(len(means)), means), heard)
        state = place(state, new, lambda _: (heard.clients, clusters), placed.clients)
        centres = placed.updated_by(heard.of(fed.clients))
        relation = _with_newcomers(state.relation, state.labels, heard.clients, centres.clients)
        return replace(state, relation=relation, centres=centres, memory=memory)


def _with_newcomers(relation: Relation, labels: Ids, new: Ids, may_train: Ids) -> Relation:
    """The relation in which newcomers hear their cluster, and are heard by it if they may train."""
    strengths = relation.matrix()
    for i in new:
        members = may_train[labels[may_train] == labels[i]]
        strengths[i, members] = 1.0
        if i in may_train:
            strengths[members, i] = 1.0
    return Relation.of_matrix(strengths)

"""FLIS (DC): overlapping clusters of each round's clients, by what their models predict.

Morafah, Vahidian, Wang, Lin: FLIS: Clustered Federated Learning via Inference Similarity for
Non-IID Data Distribution. 2022, arXiv 2208.09754. Algorithms 1 and 2.

Deviates: A is the share of public examples on which two models agree, as in the authors' code (the
paper's formula is `similarity: frobenius`); clients choose by validation loss, not on test data;
the server's examples are held out of the training set, or made up (`split.server_from`); A >= β,
where the paper's Sign is strict.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.algorithms.choosing import ChooseBy, choose, require_choice
from flray.algorithms.clustered import labels_of
from flray.client.tasks import PredictionKind
from flray.clustering.distances import Disagreement
from flray.clustering.partitions import equal_rows
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Partition
from flray.clustering.predictions import predicted_points
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation, Predictions
from flray.models.bank import ModelBank
from flray.models.mixing import Relation


@dataclass(frozen=True)
class FlisDcState:
    """State of FLIS (DC): the cluster models of the last round."""

    bank: ModelBank  # θ_g,j: the cluster models of the last round; θ_g before the first
    labels: Ids  # (M,) the cluster that the last round made for each of its clients; -1: not in it


@dataclass(frozen=True)
class FlisDc:
    """Alg. 1: a round makes a cluster and a model for each of its clients.

    The server predicts public examples with every trained model; a client's cluster are the clients
    whose models agree with its own, so clusters overlap. Equal clusters are one model, sent once.
    At the start of a round, and at test time, every client chooses among the models of the last
    round. The partition is of the last round's clients: those with the same cluster are together.
    Needs public examples (`split.server`).

        algorithm: {name: flis_dc, beta: 0.5}
    """

    refused_keys: ClassVar = {"recluster": "clients are clustered again in every round"}
    returns_clusterings: ClassVar = True

    # Threshold β: clients whose models agree on this share of examples are together
    beta: float = 0.3
    # Similarity A of two clients' predictions
    similarity: Literal["agreement", "frobenius"] = "agreement"
    # Predictions B on the public images. hard: one-hot; soft: class probabilities
    predictions: PredictionKind = "hard"
    # Part whose loss L_k a client minimises to choose a model; the paper says D_k^test
    # (test_accuracy)
    choose_by: ChooseBy = "validation"

    gradient = staticmethod(plain_gradient)

    def require(self, fed: Federation) -> None:
        fed.require_public()
        require_choice(self.choose_by, fed)

    def init(self, fed: Federation) -> Outcome[FlisDcState]:
        return Outcome(FlisDcState(fed.initial_bank(), np.full(fed.num_clients, -1, np.int64)))

    def cohort(self, state: FlisDcState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))  # l. 3-4: S_t

    def round(self, state: FlisDcState, cohort: Cohort, fed: Federation) -> Outcome[FlisDcState]:
        bank, answered = self._chosen(state.bank, cohort.clients, fed)  # l. 7, 9
        trained = fed.train(bank, replace(cohort, clients=answered), self.gradient)  # l. 10
        size = bank.bytes_per_model
        down = len(cohort.clients) * bank.num_rows * size
        fed.meter.count_transfer("model", down=down, up=len(trained.clients) * size)
        if not len(trained.clients):
            return Outcome(state)
        # Alg. 2, l. 2: B_k = F_k(D^server; θ_k)
        heard = replace(cohort, clients=trained.clients)
        predictions = fed.predict(trained.params, heard, self.predictions)
        if not len(predictions.clients):
            return Outcome(state, trained.metrics())
        clustering = self._clusters(predictions)  # l. 11
        labels = labels_of(clustering, fed.num_clients)
        # l. 12: θ_g,j <- sum_{k in C_j} |D_k| θ_k / sum_{k in C_j} |D_k|
        mixed = fed.mix(_relation(clustering, labels), trained, bank).of_some(clustering.clients)
        return Outcome(FlisDcState(mixed, labels), trained.metrics(), (clustering,))

    def deploy(self, state: FlisDcState, clients: Ids, fed: Federation) -> ModelBank:
        there = fed.present(clients)
        fed.count_placing(state.bank, there)
        return self._chosen(state.bank, there, fed)[0]

    def partition(self, state: FlisDcState) -> Ids:
        return state.labels

    def _chosen(self, bank: ModelBank, clients: Ids, fed: Federation) -> tuple[ModelBank, Ids]:
        """The bank of which each of the clients uses the row it chose, and who answered."""
        answered, rows = choose(bank, clients, self.choose_by, fed)  # argmin_j L_k(D_k; θ_g,j)
        owner = np.zeros_like(bank.owner)
        owner[answered] = rows
        return replace(bank, owner=owner), answered

    def _clusters(self, predictions: Predictions) -> Clustering:
        """ISC (Alg. 2): C_i = {i} and {j: A_ij >= β}, the rows of R."""
        points = predicted_points(predictions)
        distance = Disagreement(self.similarity)(points)  # l. 3: 1 - A
        together = distance <= 1 - self.beta  # l. 4
        np.fill_diagonal(together, True)
        relation = together.astype(np.float64)
        partition = Partition(equal_rows(relation), overlapping=True)
        return Clustering(predictions.clients, points, distance, relation, partition)


def _relation(clustering: Clustering, labels: Ids) -> Relation:
    """Clients of the round hear their cluster; the others, with label -1, nobody."""
    _, first = np.unique(clustering.labels, return_index=True)
    rows = np.zeros((len(first) + 1, len(labels)))
    rows[:-1, clustering.clients] = clustering.together[first]
    return Relation(rows, np.where(labels < 0, len(first), labels), np.arange(len(labels)))

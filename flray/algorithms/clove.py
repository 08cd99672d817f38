"""CLoVE: clients are clustered by the losses of several models on their data.

Bhatia et al., ICML 2026, arXiv 2506.22427. The vector L_i of all models' losses is clustered, where
IFCA looks at its smallest entry alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from flray.algorithms.algorithm import Outcome
from flray.clustering.distances import L2
from flray.clustering.losses import LOSS_BYTES
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Partition, Points, by_smallest_member
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.values import require_at_least

BETTER = 1.1  # factor by which the silhouette of more clusters must beat fewer (authors' code)

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class CloveState:
    """State of CLoVE: the models, who uses which, and what newcomers are compared with."""

    bank: ModelBank  # θ_k, a row for each model, used or not
    chosen: Ids  # (M,) the row each client was given last; -1: none yet
    unchanged: Ids  # (M,) in how many of its last rounds a client kept its row
    is_settled: bool = False  # clusters do not change any more
    judged: ModelBank | None = None  # the models of the last clustering
    centres: Points | None = None  # mean loss vector of each row's clients; `clients` are rows


@dataclass(frozen=True)
class Clove:
    """Each round, until clusters settle: losses of all models, k-means, and a matching to models.

    A model that is matched to no cluster stays as it is. Clusters settle once every client of a
    cohort kept its model for `settle_after` rounds; then it is FedAvg in clusters. Clients that
    were never asked take the model whose clients' mean loss vector is nearest to theirs.
    """

    refused_keys: ClassVar = {
        "recluster": "clusters change in every round until they settle, see settle_after"
    }
    returns_clusterings: ClassVar = True

    number: int = 2  # Number of models
    # Number of clusters K, at most the number of models. auto: the best silhouette of a Ward tree
    clusters: int | Literal["auto"] | None = None
    settle_after: int = 3  # Rounds in which clients must keep their models. 0: never settle

    gradient = staticmethod(plain_gradient)

    def __post_init__(self) -> None:
        require_at_least(self, number=1, settle_after=0)
        if isinstance(self.clusters, int) and not 1 <= self.clusters <= self.number:
            raise ValueError(
                f"clusters must be between 1 and number ({self.number}), got {self.clusters}"
            )

    def require(self, fed: Federation) -> None:
        if self.number > 1:
            fed.require_example_losses()

    def init(self, fed: Federation) -> Outcome[CloveState]:
        bank = replace(fed.initial_bank(), params=fed.initial_models(self.number))
        nobody = np.full(fed.num_clients, -1 if self.number > 1 else 0)
        return Outcome(CloveState(bank, nobody, np.zeros(fed.num_clients, np.int64)))

    def cohort(self, state: CloveState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def round(self, state: CloveState, cohort: Cohort, fed: Federation) -> Outcome[CloveState]:
        if self.number == 1:
            clusterings: tuple[Clustering, ...] = ()
        elif state.is_settled:
            new = cohort.clients[state.chosen[cohort.clients] < 0]
            self._count(state.bank, len(new), len(new), fed)
            state, clusterings = self._with_newcomers(state, new, fed), ()
        else:
            state, clusterings = self._clustered(state, cohort, fed)
        asked = cohort.clients[state.chosen[cohort.clients] >= 0]
        bank = replace(state.bank, owner=np.maximum(state.chosen, 0))
        trained = fed.train(bank, replace(cohort, clients=asked), self.gradient)
        fed.count_models(bank, replace(cohort, clients=asked), trained)
        hears = (state.chosen == np.arange(self.number)[:, None]).astype(np.float64)  # (K, M)
        # θ_k <- sum over its clients of n_i / n θ_i; a model that nobody uses stays
        state = replace(state, bank=fed.mix_rows(hears, trained, bank))
        return Outcome(state, trained.metrics(), clusterings)

    def deploy(self, state: CloveState, clients: Ids, fed: Federation) -> ModelBank:
        """The model that each client was given last; who was never asked is compared now."""
        there = fed.present(clients)
        if state.centres is not None:
            fed.count_placing(state.bank, there)
            state = self._with_newcomers(state, there, fed)
        return replace(state.bank, owner=np.maximum(state.chosen, 0))

    def partition(self, state: CloveState) -> Ids:
        return state.chosen

    def _losses(self, bank: ModelBank, clients: Ids, fed: Federation) -> tuple[Ids, Losses]:
        """(m,) clients that answered and have examples, and (m, K) their losses of all models."""
        judgement = fed.judge(bank, Cohort(fed.t, clients), "train")
        answered = judgement.best >= 0
        return judgement.clients[answered], judgement.loss[answered]

    def _count(self, bank: ModelBank, num_asked: int, num_answers: int, fed: Federation) -> None:
        """Count models sent to each client asked, beside the one it trains, and losses received."""
        down = num_asked * (bank.num_rows - 1) * bank.bytes_per_model
        fed.meter.count_transfer("losses", down=down, up=num_answers * bank.num_rows * LOSS_BYTES)

    def _clustered(
        self, state: CloveState, cohort: Cohort, fed: Federation
    ) -> tuple[CloveState, tuple[Clustering, ...]]:
        """Cluster the cohort by its loss vectors and give each cluster a model."""
        clients, losses = self._losses(state.bank, cohort.clients, fed)
        self._count(state.bank, len(cohort.clients), len(clients), fed)
        if not len(clients):
            return state, ()
        points = Points.vectors(clients, torch.from_numpy(losses))
        distance = L2()(points)  # refuses losses that are not finite
        labels = self._labels(losses, fed.generator("clove", cohort.t))
        rows = match(labels, losses)[labels]
        chosen, unchanged = state.chosen.copy(), state.unchanged.copy()
        unchanged[clients] = np.where(chosen[clients] == rows, unchanged[clients] + 1, 1)
        chosen[clients] = rows
        state = replace(
            state,
            chosen=chosen,
            unchanged=unchanged,
            is_settled=bool(self.settle_after) and unchanged[clients].min() >= self.settle_after,
            judged=state.bank,
            centres=points.means_of_clusters(chosen),
        )
        clustering = Clustering(clients, points, distance, None, Partition(labels))
        return state, (clustering,)

    def _labels(self, losses: Losses, rng: np.random.Generator) -> Ids:
        """(m,) clusters of the loss vectors, numbered by their smallest member."""
        number = self.number if self.clusters is None else self.clusters
        if number == "auto":
            number = best_number(losses, self.number)
        number = min(int(number), len(np.unique(losses, axis=0)))
        from sklearn.cluster import KMeans  # seconds to import, and seldom needed

        kmeans = KMeans(number, n_init=10, random_state=int(rng.integers(2**31)))
        return by_smallest_member(kmeans.fit_predict(losses))

    def _with_newcomers(self, state: CloveState, clients: Ids, fed: Federation) -> CloveState:
        """Give clients that have no model the one whose clients' losses are nearest to theirs."""
        new = clients[state.chosen[clients] < 0]
        if not len(new) or state.centres is None or state.judged is None:
            return state
        answered, losses = self._losses(state.judged, new, fed)
        centres = state.centres.array()  # (C, K)
        nearest = ((losses[:, None] - centres) ** 2).sum(2).argmin(1) if len(losses) else answered
        chosen = state.chosen.copy()
        chosen[answered] = state.centres.clients[nearest]
        return replace(state, chosen=chosen)


def match(labels: Ids, losses: Losses) -> Ids:
    """(C,) the model of each cluster, all different, with the least total loss.

    >>> losses = np.array([[1.0, 5.1], [1.0, 5.1], [2.1, 3.5], [2.1, 3.5]])
    >>> match(np.array([0, 0, 1, 1]), losses)  # 2 + 7 < 10.2 + 4.2; IFCA sends all to model 0
    array([0, 1])
    """
    clusters = np.unique(labels)
    cost = np.stack([losses[labels == c].sum(0) for c in clusters])  # (C, K)
    _, models = linear_sum_assignment(cost)
    return np.asarray(models, np.int64)


def best_number(losses: Losses, largest: int) -> int:
    """2 to `largest` clusters of a Ward tree; more only if their silhouette is 10 % better."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from sklearn.metrics import silhouette_score

    if len(losses) == 1:
        return 1
    tree, best, score = linkage(losses, "ward"), 1, 0.0
    for number in range(2, min(largest, len(losses) - 1) + 1):
        labels = fcluster(tree, number, "maxclust")
        if len(np.unique(labels)) < 2:
            continue
        reached = float(silhouette_score(losses, labels))
        if reached > score * BETTER:
            best, score = number, reached
    return best

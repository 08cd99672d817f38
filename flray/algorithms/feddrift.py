"""FedDrift: models are born where no model fits a client's data, and merged where they agree.

Jothimurugesan, Hsieh, Wang, Joshi, Gibbons: Federated Learning under Distributed Concept Drift.
AISTATS 2023, arXiv 2206.00799.

Time is divided into steps of R rounds. At the start of step τ all models are sent to all clients,
which answer with their losses ℓ_cm. A client raises an alarm if min_m ℓ^τ > min_m ℓ^(τ-1) + δ; the
others take the model with the least loss. Each alarmed client starts a new model, which it trains
alone for one step; with `eager` all alarmed clients start one together. Models are then compared:
L_ij is the loss of model i on the clients of model j, D_ij = max(L_ij - L_ii, L_ji - L_jj, 0), and
complete linkage merges models while D < δ. A merged model is the mean by numbers of examples. R
rounds of FedAvg in clusters follow, in which model m trains on all data (c, τ) that client c had in
a step τ when it used m: a client whose data changed goes on training its former model on its former
data, and sends as many models as it trains. The server learns the losses of all models on each
client, and in which steps data changed.

Deviates: a client has new data in the steps after an event, not in each step; models are judged on
data that clients hold now; a client may be left out of a round (`participation`). The authors' code
compares accuracies instead of losses, has at most a given number of models, and copies a client's
best model where the paper starts a new one.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from flray.algorithms.algorithm import Outcome
from flray.algorithms.choosing import choose
from flray.algorithms.clustered import unplaced
from flray.clustering.distances import L2
from flray.clustering.hierarchical import after_merges
from flray.clustering.losses import LOSS_BYTES
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Matrix, Partition, Points, by_smallest_member
from flray.columns import TRAIN_LOSS
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.values import Unbounded, require_at_least


@dataclass(frozen=True)
class FedDriftState:
    """State of FedDrift: the models, who uses which, and how well the best one fitted."""

    bank: ModelBank  # a row for each model, used or not
    labels: Ids  # (M,) the model of each client; -1: none yet
    loss: NDArray[np.float64]  # (M,) min_m ℓ_cm of the last step; NaN before the first
    # Data that clients do not hold any more, in rows of former steps
    rounds: Ids  # (S,) a round of each of these steps
    models: Ids  # (S, M) the model that trains on the data of the client; -1: none


@dataclass(frozen=True)
class FedDrift:
    """FedAvg in clusters that change at the start of each step of `every` rounds.

    All clients start with one model. A newcomer takes the model with the least loss, holdout
    clients do so whenever models are evaluated. A model that nobody uses is kept: its concept may
    return.

        algorithm: {name: feddrift, delta: 0.5, every: 5}
    """

    refused_keys: ClassVar = {
        "recluster": "clusters change at the start of each step of `every` rounds"
    }
    returns_clusterings: ClassVar = True

    # Rise δ of a client's least loss that is an alarm, and loss below which models are merged
    delta: Unbounded = 0.1
    every: int = 10  # Rounds R of a time step; 100 in the paper
    eager: bool = False  # One new model for all clients that raise an alarm (FedDrift-Eager)
    # Train models on data of former steps too. false: on present data alone (FedDrift-W)
    history: bool = True

    gradient = staticmethod(plain_gradient)

    def __post_init__(self) -> None:
        require_at_least(self, delta=0, every=1)

    def require(self, fed: Federation) -> None:
        fed.require_example_losses()

    def init(self, fed: Federation) -> Outcome[FedDriftState]:
        labels = np.full(fed.num_clients, -1)
        labels[fed.clients] = 0
        loss, rounds = np.full(len(labels), np.nan), np.empty(0, np.int64)
        models = np.empty((0, len(labels)), np.int64)
        return Outcome(FedDriftState(fed.initial_bank(), labels, loss, rounds, models))

    def cohort(self, state: FedDriftState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def round(
        self, state: FedDriftState, cohort: Cohort, fed: Federation
    ) -> Outcome[FedDriftState]:
        clusterings: tuple[Clustering, ...] = ()
        if (cohort.t - 1) % self.every == 0:
            state, clusterings = self._step(state, fed)
        new = unplaced(state.labels, fed.clients)
        self._count(state.bank, len(new) if state.bank.num_rows > 1 else 0, fed)
        state = self._with_newcomers(state, new, fed)
        asked = cohort.clients[state.labels[cohort.clients] >= 0]
        bank, losses, hears = state.bank, [], strengths(state, fed)
        for models, data in self._trainings(state, asked, cohort.t):
            start = replace(bank, owner=models)
            members = replace(cohort, clients=np.array(list(data), np.int64))
            rounds = list(data.values()) if len(state.rounds) else ()  # (): present data alone
            trained = fed.train(start, members, self.gradient, rounds=rounds)
            fed.count_models(start, members, trained)
            is_trained = np.isin(np.arange(bank.num_rows), models[members.clients])
            bank = fed.mix_rows(hears * is_trained[:, None], trained, start)
            losses.append(trained.loss[trained.num_steps > 0])
        loss = np.concatenate([[], *losses])
        metrics = {TRAIN_LOSS: float(loss.mean())} if len(loss) else {}
        return Outcome(replace(state, bank=bank), metrics, clusterings)

    def deploy(self, state: FedDriftState, clients: Ids, fed: Federation) -> ModelBank:
        there = fed.present(clients)
        fed.count_placing(state.bank, there)
        state = self._with_newcomers(state, unplaced(state.labels, there), fed)
        return replace(state.bank, owner=np.maximum(state.labels, 0))

    def partition(self, state: FedDriftState) -> Ids:
        return state.labels

    def _trainings(
        self, state: FedDriftState, clients: Ids, t: int
    ) -> list[tuple[Ids, dict[int, tuple[int, ...]]]]:
        """Pairs of (M,) the model of each client, and the rounds whose data it trains it on.

        One pair if no client, asked or not, has data of two models, otherwise one for each model.
        """
        present = np.maximum(state.labels, 0)
        data: dict[int, dict[int, tuple[int, ...]]] = {}
        for i in clients.tolist():
            data.setdefault(int(present[i]), {})[i] = (t,)
            for round_, model in zip(state.rounds.tolist(), state.models[:, i], strict=True):
                if model >= 0:
                    rounds = data.setdefault(int(model), {})
                    rounds[i] = (*rounds.get(i, ()), round_)
        if not ((state.models >= 0) & (state.models != present)).any():
            return [(present, dict(sorted((i, r) for m in data.values() for i, r in m.items())))]
        return [(np.full_like(present, m), rounds) for m, rounds in sorted(data.items())]

    def _former(self, state: FedDriftState, fed: Federation) -> tuple[Ids, Ids]:
        """`rounds` and `models` of the state at the start of a step, before merges."""
        if not self.history or fed.t <= self.every:
            return state.rounds, state.models
        rounds = np.append(state.rounds, fed.t - self.every)
        models = np.concatenate([state.models, state.labels[None]])
        is_former = np.array([fed.timeline.differs(int(t), fed.t) for t in rounds])
        models = np.where(is_former, models, -1)
        used = (models >= 0).any(1)
        return rounds[used], models[used]

    def _with_newcomers(self, state: FedDriftState, new: Ids, fed: Federation) -> FedDriftState:
        """Give these clients the model with the least loss on their training part."""
        answered, rows = choose(state.bank, new, "train", fed)
        labels = state.labels.copy()
        labels[answered] = rows
        return replace(state, labels=labels)

    def _count(self, bank: ModelBank, num_asked: int, fed: Federation) -> None:
        """Count all models sent to each client asked, and their losses received."""
        num = num_asked * bank.num_rows
        fed.meter.count_transfer("losses", down=num * bank.bytes_per_model, up=num * LOSS_BYTES)

    def _step(
        self, state: FedDriftState, fed: Federation
    ) -> tuple[FedDriftState, tuple[Clustering, ...]]:
        """Alarms, choices, merges and new models at the start of a time step."""
        bank = state.bank
        judgement = fed.judge(bank, Cohort(fed.t, fed.clients), "train")
        self._count(bank, len(fed.clients), fed)
        has_examples = judgement.best >= 0
        clients, losses = judgement.clients[has_examples], judgement.loss[has_examples]
        if not len(clients):
            return state, ()
        points = Points.vectors(clients, torch.from_numpy(losses))
        distance = L2()(points)  # refuses losses that are not finite
        labels, loss = state.labels.copy(), state.loss.copy()
        # Alarm: min_m ℓ^τ > min_m ℓ^(τ-1) + δ; never at first, NaN compares False
        is_alarmed = losses.min(1) > loss[clients] + self.delta
        loss[clients] = losses.min(1)
        labels[clients] = np.where(is_alarmed, -1, losses.argmin(1))
        settled = clients[~is_alarmed]
        D, used = model_distances(losses[~is_alarmed], labels[settled], fed.weights(settled))
        target = merges(D, used, bank.num_rows, self.delta)
        rounds, models = self._former(state, fed)
        before = FedDriftState(bank, labels, loss, rounds, models)
        # By all data that present clients train a model on
        examples = strengths(before, fed)[:, fed.clients] @ fed.weights(fed.clients)
        bank = merged(bank, examples, target)
        labels = np.where(labels >= 0, target[labels], -1)
        models = np.where(models >= 0, target[models], -1)
        born = clients[is_alarmed]
        numbers = np.zeros(len(born), np.int64) if self.eager else np.arange(len(born))
        labels[born] = bank.num_rows + numbers
        bank = with_new_models(bank, int(numbers.max(initial=-1)) + 1, fed)
        partition = Partition(by_smallest_member(labels[clients]))
        clustering = Clustering(clients, points, distance, None, partition)
        return FedDriftState(bank, labels, loss, rounds, models), (clustering,)


def strengths(state: FedDriftState, fed: Federation) -> NDArray[np.float64]:
    """(U, M) how much each model hears each client, in units of its present number of examples.

    Clients count by all examples that the model trains on, each once; alike with
    `aggregate.weights: uniform`.
    """
    rows, now = np.arange(state.bank.num_rows)[:, None], np.maximum(fed.weights(), 1)
    is_uniform = fed.aggregation.weights == "uniform"
    hears: NDArray[np.float64] = (state.labels == rows).astype(np.float64)
    former = np.unique(np.argwhere(state.models >= 0)[:, 1])  # clients with former data
    for i in former.tolist():
        for m in np.unique(state.models[state.models[:, i] >= 0, i]).tolist():
            rounds = state.rounds[state.models[:, i] == m].tolist() + [fed.t] * int(hears[m, i])
            num = 1 if is_uniform else len(fed.timeline.trained_on(i, rounds))
            hears[m, i] = num / now[i]
    return hears


def model_distances(
    losses: Matrix, labels: Ids, weights: NDArray[np.float64]
) -> tuple[Matrix, Ids]:
    """D between the models that clients use, and these models.

    >>> losses = np.array([[0.1, 0.9], [0.3, 0.2]])  # model 0 costs the client of model 1 0.2 more
    >>> D, used = model_distances(losses, np.array([0, 1]), np.ones(2))
    >>> D.round(3).tolist(), used
    ([[0.0, 0.7], [0.7, 0.0]], array([0, 1]))

    Args:
        losses: (m, U) of every model on the data of each client.
        labels: (m,) the model of each client.
        weights: (m,) numbers of examples of the clients.
    """
    used = np.unique(labels)
    shares = (labels == used[:, None]) * weights
    shares = shares / np.maximum(shares.sum(1, keepdims=True), 1)
    L = (shares @ losses[:, used]).T  # (C, C) L_ij: model i on the clients of model j
    worse = L - np.diag(L)[:, None]  # L_ij - L_ii
    return np.maximum(np.maximum(worse, worse.T), 0.0), used


def merges(distance: Matrix, used: Ids, num_models: int, delta: float) -> Ids:
    """(U,) the new row of each model, after complete linkage merged those nearer than delta.

    >>> D = np.array([[0.0, 0.3, 5.0], [0.3, 0.0, 5.0], [5.0, 5.0, 0.0]])
    >>> merges(D, used=np.array([0, 2, 3]), num_models=4, delta=0.5)  # nobody uses model 1
    array([0, 1, 0, 2])
    """
    target = np.arange(num_models)
    if len(used) > 1:
        tree = linkage(squareform(distance, checks=False), "complete")
        labels = after_merges(tree, int(np.sum(tree[:, 2] < delta)))
        first = np.array([used[labels == label][0] for label in labels])
        target[used] = first
    return by_smallest_member(target)


def merged(bank: ModelBank, examples: NDArray[np.float64], target: Ids) -> ModelBank:
    """The bank after merges: models with one target become their mean by numbers of examples.

    Args:
        examples: (U,) of each model.
        target: (U,) the new row of each model.
    """
    shares = (target == np.arange(target.max() + 1)[:, None]).astype(np.float64)  # (V, U)
    is_merged = shares.sum(1) > 1
    shares[is_merged] *= examples
    shares /= shares.sum(1, keepdims=True)
    return bank.combined(shares, bank.owner)


def with_new_models(bank: ModelBank, number: int, fed: Federation) -> ModelBank:
    """The bank with so many copies of the initial model as further rows, with first moments."""
    new = {
        name: fed.initial[name].to(leaf).expand(number, *leaf.shape[1:])
        for name, leaf in bank.params.items()
    }
    params = {name: torch.cat([leaf, new[name]]) for name, leaf in bank.params.items()}
    moments = {}
    for name, leaf in bank.moments.items():
        letter, _, of_leaf = name.partition("/")
        first = fed.aggregation.optimizer.start(new[of_leaf])[letter]
        moments[name] = torch.cat([leaf, first])
    return replace(bank, params=params, moments=moments)

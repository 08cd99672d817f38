"""IFCA: k models; each sampled client trains the one that has the least loss on its own data.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS
2020, arXiv 2006.04088. Algorithm 1, option II (model averaging); section 6 for weight sharing.

HypCluster is `start: clients`: Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization
with Applications to Federated Learning. 2020, arXiv 2002.10619. Clients train one initial model w0;
the k models start from those of clients that are far from each other in loss.

Deviates: weights are n_i (`aggregate.weights: uniform` is the paper's mean); restarts are judged
before training; with weight sharing the last layers start as independent draws.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flray.algorithms.algorithm import Outcome
from flray.client.tasks import TrainingPart
from flray.clustering.update import probe
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, last_layers, rows_of
from flray.values import require_at_least

CHOICE_BYTES = 4  # s_i, sent as a number


@dataclass(frozen=True)
class IfcaState:
    """State of IFCA: the k models, and the last choice of each client."""

    bank: ModelBank  # θ_j: a row for each cluster, used or not; one row while pre-training
    chosen: Ids  # (M,) the row each client chose last; -1: none yet


@dataclass(frozen=True)
class Ifca:
    """Alg. 1: clients choose among k models, train the chosen one, and models are averaged.

    The partition is the last choice of each client that was ever sampled. At test time every client
    that is present, sampled or not, chooses among the current models; so do holdout clients and
    newcomers. All k models are sent to each client of a cohort.

    With `own: last_layer` the other layers are one model's, which `rounds_before` of FedAvg
    train and nothing changes afterwards. `restarts` draws that many sets of k initial models and
    keeps the set with the least mean over clients of their best model's loss; to train several
    times and keep the best, as the paper does, run several seeds.

        algorithm: {name: ifca, number: 3, choose_by: validation}
    """

    refused_keys: ClassVar = {"recluster": "clients choose among the models again in every round"}

    number: int = 2  # Number of models k; 2 in FLIS, 3 in FLT
    # Part of a client's examples whose loss F_i it minimises to choose a model
    choose_by: TrainingPart = "train"
    # Sets of k initial models that are drawn; the one with the least mean loss is kept
    restarts: int = 1
    # Rounds of FedAvg for the layers that models share, with own: last_layer
    rounds_before: int = 0
    own: Literal["all", "last_layer"] = "all"  # Layers that differ between the k models
    # Initial models. draws: independent random ones; clients: models that clients trained from one
    # random model, chosen to be far from each other in loss (HypCluster)
    start: Literal["draws", "clients"] = "draws"
    start_clients: int = 10  # Clients that are drawn for start: clients, at most all

    def __post_init__(self) -> None:
        require_at_least(self, number=1, restarts=1, rounds_before=0, start_clients=1)
        if self.start == "clients" and self.start_clients < self.number:
            raise ValueError(
                f"start_clients must be at least the {self.number} models, got {self.start_clients}"
            )
        if self.start == "clients" and (self.restarts > 1 or self.own != "all"):
            raise ValueError(
                "start: clients chooses whole models of clients once; it needs restarts 1 and own "
                f"all, got {self.restarts} and {self.own}"
            )
        if self.rounds_before and self.own == "all":
            raise ValueError(
                f"rounds_before must be 0 with own: all, got {self.rounds_before}: models that "
                "share no layer start anew after it; set own: last_layer"
            )

    gradient = staticmethod(plain_gradient)

    def require(self, fed: Federation) -> None:
        if self.number == 1:
            return
        fed.require_example_losses()
        validation = fed.timeline.at(1).validation
        if self.choose_by == "validation" and not any(len(validation[i]) for i in fed.clients):
            raise ExperimentError(
                "ifca chooses models by their validation loss, and no client has a validation "
                "part: set split.validation > 0, or algorithm.choose_by=train"
            )
        if self.start == "clients":
            num_steps = fed.num_steps(self._starters(fed), fed.training)
            self._require_starts(len(np.flatnonzero(num_steps)))

    def init(self, fed: Federation) -> Outcome[IfcaState]:
        joint = fed.initial_bank()
        if self.rounds_before:
            return Outcome(IfcaState(joint, joint.owner))
        return Outcome(self._start(joint, fed))

    def cohort(self, state: IfcaState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))  # M_t

    def round(self, state: IfcaState, cohort: Cohort, fed: Federation) -> Outcome[IfcaState]:
        is_pretraining = cohort.t <= self.rounds_before
        chosen, answered = self._choices(state, cohort.clients, fed)
        bank = replace(state.bank, owner=np.maximum(chosen, 0))
        leaves = frozenset(fed.initial) if is_pretraining else self._own_leaves(fed)
        training = fed.training.only(leaves) if len(leaves) < len(fed.initial) else None
        # θ̃_i = LocalUpdate(θ_ĵ, γ, τ)
        asked = replace(cohort, clients=answered)
        trained = fed.train(bank, asked, self.gradient, training=training)
        self._count(bank, len(cohort.clients), len(trained.clients), fed)
        hears = (chosen == np.arange(bank.num_rows)[:, None]).astype(np.float64)  # s (k, M)
        # θ_j <- sum_i s_ij θ̃_i / sum_i s_ij, with n_i; a model that nobody chose stays
        mixed = fed.mix_rows(hears, trained, bank)
        # A mean of equal leaves need not have their bits: put those that nobody trained back.
        params = {n: leaf if n in leaves else bank.params[n] for n, leaf in mixed.params.items()}
        state = IfcaState(replace(mixed, params=params), chosen)
        if cohort.t == self.rounds_before:
            state = self._start(state.bank, fed)
        return Outcome(state, trained.metrics())

    def deploy(self, state: IfcaState, clients: Ids, fed: Federation) -> ModelBank:
        there = fed.present(clients)
        chosen, _ = self._choices(state, there, fed)
        fed.count_placing(state.bank, there)
        return replace(state.bank, owner=np.maximum(chosen, 0))

    def partition(self, state: IfcaState) -> Ids:
        return state.chosen

    def _choices(self, state: IfcaState, clients: Ids, fed: Federation) -> tuple[Ids, Ids]:
        """(M,) the choice of each client after these were asked, and who of them answered.

        A client without examples to judge by keeps its last choice, at first row 0.
        """
        if state.bank.num_rows == 1:
            return state.chosen, clients
        judgement = fed.judge(state.bank, Cohort(fed.t, clients), self.choose_by)
        chosen = state.chosen.copy()
        last = np.maximum(chosen[judgement.clients], 0)
        # Alg. 1: ĵ = argmin_j F_i(θ_j)
        chosen[judgement.clients] = np.where(judgement.best < 0, last, judgement.best)
        return chosen, judgement.clients

    def _start(self, joint: ModelBank, fed: Federation) -> IfcaState:
        """k models whose own leaves are independent draws; the others are those of `joint`."""
        if self.start == "clients" and self.number > 1:
            return self._start_from_clients(joint, fed)
        leaves, drawn = self._own_leaves(fed), fed.initial_models(self.number * self.restarts)
        params = {
            n: leaf if n in leaves else joint.params[n].expand_as(leaf).clone()
            for n, leaf in drawn.items()
        }
        if self.restarts > 1:
            first = self.number * self._best_set(replace(joint, params=params), fed)
            params = {n: leaf[first : first + self.number] for n, leaf in params.items()}
        nobody_chose = np.full(fed.num_clients, -1 if self.number > 1 else 0)
        return IfcaState(ModelBank(params, joint.owner), nobody_chose)

    def _start_from_clients(self, joint: ModelBank, fed: Federation) -> IfcaState:
        """HypCluster: the model of a client, then of the one whose best loss so far is worst."""
        trained = probe(fed, joint, Cohort(fed.t, self._starters(fed))).with_steps()
        self._require_starts(len(trained.clients))  # some may have failed
        candidates = replace(joint, params=trained.params)
        judgement = fed.judge(candidates, Cohort(fed.t, trained.clients), self.choose_by)
        fed.meter.count_transfer(
            "signature", down=len(trained.clients) * candidates.num_rows * joint.bytes_per_model
        )
        losses = np.full((candidates.num_rows,) * 2, np.nan)
        losses[np.isin(trained.clients, judgement.clients)] = judgement.loss
        rows = farthest(losses, self.number)
        params = {n: rows_of(leaf, rows) for n, leaf in candidates.params.items()}
        return IfcaState(replace(joint, params=params), np.full(fed.num_clients, -1))

    def _starters(self, fed: Federation) -> Ids:
        """The clients that are drawn for `start: clients`, ascending."""
        size = min(self.start_clients, len(fed.clients))
        drawn = fed.generator("start clients").choice(fed.clients, size, replace=False)
        return np.sort(drawn)

    def _require_starts(self, num_trained: int) -> None:
        if num_trained < self.number:
            raise ExperimentError(
                f"start: clients needs the models of {self.number} clients, and {num_trained} of "
                "those drawn train one; raise algorithm.start_clients, or lower train.batch_size "
                "where train.drop_last leaves out clients with less than a batch"
            )

    def _best_set(self, bank: ModelBank, fed: Federation) -> int:
        """The set of k models with the least mean over clients of their best model's loss."""
        judgement = fed.judge(bank, Cohort(fed.t, fed.clients), self.choose_by)
        self._count(bank, len(fed.clients), 0, fed)
        sets = judgement.loss[judgement.best >= 0].reshape(-1, self.restarts, self.number)
        return int(sets.min(2).mean(0).argmin())

    def _own_leaves(self, fed: Federation) -> frozenset[str]:
        return frozenset(fed.initial) if self.own == "all" else last_layers(fed.initial, 1)

    def _count(self, bank: ModelBank, num_asked: int, num_answers: int, fed: Federation) -> None:
        """Count all models sent to each client asked; from each heard one, and its choice."""
        down = num_asked * bank.num_rows
        size = bank.bytes_per_model
        fed.meter.count_transfer("model", down=down * size, up=num_answers * size)
        if bank.num_rows > 1:
            fed.meter.count_transfer("choice", up=num_answers * CHOICE_BYTES)


def farthest(losses: NDArray[np.float64], number: int) -> Ids:
    """The models of so many clients: the first, then those of clients that models so far fit worst.

    Unlike in public code no client is taken twice. Clients whose losses are NaN come last.

    >>> farthest(np.array([[0.1, 3.0, 2.0], [3.0, 0.1, 2.0], [1.0, 2.0, 0.1]]), 2)
    array([0, 1])

    Args:
        losses: (m, m) of the model of client j on the data of client i.
    """
    rows = [0]
    while len(rows) < number:
        best = np.nan_to_num(losses[:, rows].min(1), nan=np.finfo(np.float64).min, posinf=np.inf)
        best[rows] = -np.inf
        rows.append(int(best.argmax()))
    return np.array(rows)

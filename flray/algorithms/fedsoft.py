"""FedSoft: every client has a model of its own, pulled to all cluster centres by their importance.

Ruan, Joe-Wong: FedSoft: Soft Clustered Federated Learning with Proximal Local Updating. AAAI 2022,
arXiv 2112.06053. Algorithm 1.

The server learns the importances and the model of each client that it draws. Clients receive all
centres when they train or estimate importances, and send one model and K numbers.

Deviates: importances are scaled to sum to 1 after `smallest` is put in place of zeros, batches are
shuffled, and the optimiser is new in each round. A client that has never trained uses the centre
with the largest importance. The released code does not run (a call passes an argument that is not
taken), and FedRC's copy of it takes the centre with the largest loss.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.affine import affine
from flray.engines.training import LocalBatch, LossGradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.models.client_table import ClientTable
from flray.values import require_at_least

Shares = NDArray[np.float64]

NUMBER_BYTES = 4  # of one importance, sent as a number


@dataclass(frozen=True)
class FedSoftState:
    """State of FedSoft: centres, the model of each client, and its importances."""

    bank: ModelBank  # θ_k, a row for each centre
    models: ClientTable  # w_i of the clients that have trained
    shares: Shares  # (M, K) u_i; zero for clients that were never asked


@dataclass(frozen=True)
class FedSoft:
    """Alg. 1: clients minimise f_i(w) + λ/2 Σ_k u_ik ||w - θ_k||² and centres average them.

    u_ik is the share of a client's examples that centre k fits best, estimated every `every` rounds
    by all clients. For each centre, clients are drawn with probability v_ik ∝ u_ik n_i, and it
    becomes their mean; where everybody takes part it becomes Σ_i v_ik w_i. λ = 0 is Local.

        algorithm: {name: fedsoft, number: 2, lam: 0.1}

    >>> w, memo = {"w": torch.tensor([3.0])}, {"anchor/w": torch.tensor([1.0])}
    >>> loss_gradient = {"w": torch.tensor([10.0])}
    >>> FedSoft(lam=0.5).gradient(lambda w, batch: loss_gradient, w, None, w, memo)["w"]
    tensor([11.])
    """

    refused_keys: ClassVar = {
        "recluster": "shares of clusters are estimated again every `every` rounds"
    }

    number: int = 2  # Number S of cluster centres
    lam: float = 0.1  # Weight λ of the distances to the centres
    smallest: float = 1e-4  # Importance σ in place of 0
    every: int = 2  # Interval τ, in rounds, after which importances are estimated again
    selected: int | None = None  # Clients drawn for each centre. None: `participation` of all

    def __post_init__(self) -> None:
        require_at_least(self, number=1, lam=0, every=1, selected=1)
        if not 0 < self.smallest < 1:
            raise ValueError(f"smallest must be in (0, 1), got {self.smallest}")

    def require(self, fed: Federation) -> None:
        if self.number > 1:
            fed.require_example_losses()

    def init(self, fed: Federation) -> Outcome[FedSoftState]:
        bank = replace(fed.initial_bank(), params=fed.initial_models(self.number))
        models = ClientTable.empty(fed.initial, fed.num_clients)
        state = FedSoftState(bank, models, np.zeros((fed.num_clients, self.number)))
        return Outcome(self._estimated(state, fed.clients, fed))

    def cohort(self, state: FedSoftState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, np.flatnonzero(self._drawn(state, t, fed).any(0)))

    def _drawn(self, state: FedSoftState, t: int, fed: Federation) -> NDArray[np.bool_]:
        """(K, M) the clients that each centre hears in round t."""
        clients = _candidates(state, fed)
        size = fed.cohort_size if self.selected is None else self.selected
        drawn = np.zeros((self.number, fed.num_clients), np.bool_)
        if size >= len(clients):
            drawn[:, clients] = True
            return drawn
        for k in range(self.number):
            v = state.shares[clients, k] * fed.num_examples[clients]
            rng = fed.generator("fedsoft", t, k)
            drawn[k, rng.choice(clients, size, replace=False, p=v / v.sum())] = True
        return drawn

    @affine
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        # Alg. 1: Σ_k u_ik (w - θ_k) = w - Σ_k u_ik θ_k, FedProx's term with that anchor
        return {name: g[name] + self.lam * (w[name] - memo[f"anchor/{name}"]) for name in g}

    def round(self, state: FedSoftState, cohort: Cohort, fed: Federation) -> Outcome[FedSoftState]:
        drawn = self._drawn(state, cohort.t, fed)
        centres = replace(state.bank, moments={})
        sums = centres.combined(state.shares[cohort.clients], cohort.clients)  # Σ_k u_ik θ_k
        anchors = {f"anchor/{n}": leaf for n, leaf in sums.params.items()}
        trained = fed.train(state.models.bank(cohort.clients), cohort, self.gradient, anchors)
        models = state.models.updated(trained.clients, trained.params)
        self._count(state.bank, cohort, len(trained.clients), fed)
        if drawn.all(0).sum() == len(_candidates(state, fed)):  # θ_k = Σ_i v_ik w_i
            hears = state.shares.T
        else:  # Alg. 1: the mean of those drawn, who were drawn by n_i already
            hears = drawn / np.maximum(fed.weights(), 1)
        unheard = np.setdiff1d(cohort.clients, trained.clients)  # those who failed
        bank = fed.mix_rows(hears, trained, _with_models(state.bank, models, unheard))
        state = replace(state, bank=replace(bank, owner=state.bank.owner), models=models)
        is_due = cohort.t % self.every == 0
        asked = fed.clients[is_due | ~state.shares[fed.clients].any(1)]
        return Outcome(self._estimated(state, asked, fed), trained.metrics())

    def _count(self, bank: ModelBank, cohort: Cohort, num_answers: int, fed: Federation) -> None:
        """Count all centres sent, unless clients have just judged them, and models received."""
        is_sent = (cohort.t - 1) % self.every > 0 or bank.num_rows == 1
        down = len(cohort.clients) * bank.num_rows * is_sent
        size = bank.bytes_per_model
        fed.meter.count_transfer("model", down=down * size, up=num_answers * size)

    def _estimated(self, state: FedSoftState, clients: Ids, fed: Federation) -> FedSoftState:
        """The state after these clients have estimated their importances."""
        if len(clients) and self.number > 1:
            down = len(clients) * self.number * state.bank.bytes_per_model
            up = len(clients) * self.number * NUMBER_BYTES
            fed.meter.count_transfer("importance", down=down, up=up)
        return replace(state, shares=self._importances(state, clients, fed))

    def _importances(self, state: FedSoftState, clients: Ids, fed: Federation) -> Shares:
        """(M, K) u, anew of these clients. u_ik is the share of examples that θ_k fits best"""
        shares = state.shares.copy()
        if not len(clients) or self.number == 1:
            shares[clients] = 1.0
            return shares
        for i, answer in fed.example_losses(state.bank, Cohort(fed.t, clients)).items():
            counts = np.bincount(answer.loss.argmin(1), minlength=self.number)
            u = np.maximum(counts / max(len(answer.loss), 1), self.smallest)
            shares[i] = u / u.sum()
        return shares

    def deploy(self, state: FedSoftState, clients: Ids, fed: Federation) -> ModelBank:
        """w_i, and the centre with the largest importance for clients that have never trained."""
        there = fed.present(clients)
        new = np.setdiff1d(there, state.models.clients)
        new = new[~state.shares[new].any(1)]
        shares = state.shares
        if len(new) and self.number > 1:
            fed.count_placing(state.bank, new)
            shares = self._importances(state, new, fed)
        holders = np.intersect1d(clients, state.models.clients)
        return _with_models(ModelBank(state.bank.params, shares.argmax(1)), state.models, holders)

    def partition(self, state: FedSoftState) -> Ids:
        return np.where(state.shares.any(1), state.shares.argmax(1), -1)


def _candidates(state: FedSoftState, fed: Federation) -> Ids:
    """The clients that may be drawn: those with examples and importances."""
    is_known = state.shares.any(1) & (fed.num_examples > 0)
    return fed.clients[is_known[fed.clients]]


def _with_models(bank: ModelBank, models: ClientTable, clients: Ids) -> ModelBank:
    """The bank with further rows: the models that these clients have in the table, and use."""
    owner, rows = bank.owner.copy(), models.of_clients(clients)
    owner[clients] = bank.num_rows + np.arange(len(clients))
    params = {n: torch.cat([leaf, rows[n]]) for n, leaf in bank.params.items()}
    return replace(bank, params=params, owner=owner)

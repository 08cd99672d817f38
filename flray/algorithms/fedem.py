"""FedEM: clients are mixtures of a few distributions, and learn a model of each.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of
Distributions. NeurIPS 2021, arXiv 2108.10252. Algorithm 1.

The server learns K models of each client of a cohort, not its weights pi. All K models go down and
come up: K times FedAvg's bytes and steps.

Deviates: the mean is over the clients heard; the authors' code counts unsampled clients with the
model of the round before, which is `aggregate.unheard: stale`. There, weights of test clients carry
over from one evaluation to the next; here a client that has never trained starts from equal ones.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flray.algorithms.algorithm import Outcome
from flray.client.tasks import ClientLosses
from flray.columns import TRAIN_LOSS
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import MixtureBank, ModelBank, Params
from flray.models.mixing import Relation
from flray.values import require_at_least

Shares = NDArray[np.float64]

PLACING_STEPS = 20  # E steps by which a client that has never trained finds its weights


@dataclass(frozen=True)
class FedEmState:
    """State of FedEM: the models θ_k of the components, and the weights of each client."""

    bank: ModelBank  # θ_k, a row for each component
    shares: Shares  # (M, K) π_i of the clients that have trained; zero for the others


@dataclass(frozen=True)
class FedEm:
    """Alg. 1: an E step on each client, then each component is trained on weighted examples.

    A client predicts with the mixture Σ_k π_ik p_k(y | x) of all models. One that has never trained
    finds its π by E steps on its own training data. All models are sent to each client of a cohort
    and come back; π stays with the client. With one component this is FedAvg. The partition is the
    component with the largest π_ik.

        algorithm: {name: fedem, number: 3}

    >>> losses = np.log([[2.0, 4.0], [4.0, 2.0]])  # likelihoods 1/2 and 1/4, and reversed
    >>> responsibilities(np.array([0.5, 0.5]), -losses).round(3).tolist()
    [[0.667, 0.333], [0.333, 0.667]]
    """

    refused_keys: ClassVar = {"recluster": "shares of models are estimated again in every round"}

    number: int = 3  # Number K of components

    gradient = staticmethod(plain_gradient)

    def __post_init__(self) -> None:
        require_at_least(self, number=1)

    def require(self, fed: Federation) -> None:
        fed.require_example_losses()

    def init(self, fed: Federation) -> Outcome[FedEmState]:
        bank = replace(fed.initial_bank(), params=fed.initial_models(self.number))
        share = 1.0 if self.number == 1 else 0.0
        return Outcome(FedEmState(bank, np.full((fed.num_clients, self.number), share)))

    def cohort(self, state: FedEmState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def log_likelihoods(self, state: FedEmState, answer: ClientLosses) -> Shares:
        """(n, K) log p(y | x, θ_k) of a client's examples, up to a constant of the example."""
        return -answer.loss

    def round(self, state: FedEmState, cohort: Cohort, fed: Federation) -> Outcome[FedEmState]:
        answers = fed.example_losses(state.bank, cohort)
        asked, prior = replace(cohort, clients=np.array(list(answers), np.int64)), _prior(state)
        # Alg. 1, E step: q_ijk ∝ π_ik exp(-l(x_j; θ_k))
        q = {
            i: responsibilities(prior[i], self.log_likelihoods(state, answer))
            for i, answer in answers.items()
        }
        rows, losses = [], []
        for k in range(self.number):
            of_k = replace(state.bank, owner=np.full_like(state.bank.owner, k))
            model = of_k.of_some(np.arange(fed.num_clients))  # θ_k alone
            # Alg. 1, M step: θ_ik <- argmin Σ_j q_ijk l(x_j; θ), by local SGD on Σ_j q_ijk l_j / B
            weights = [q_i[:, k] for q_i in q.values()]
            trained = fed.train(model, asked, self.gradient, weights=weights)
            fed.count_models(model, cohort, trained)
            # Alg. 1: θ_k <- Σ_i n_i / n θ_ik
            rows.append(fed.mix(Relation.joint(fed.num_clients), trained, model))
            losses.append(trained.metrics())
        params, moments = _joined([row.params for row in rows]), _joined([r.moments for r in rows])
        bank = replace(state.bank, params=params, moments=moments)
        metrics = {TRAIN_LOSS: sum(m[TRAIN_LOSS] for m in losses)} if all(losses) else {}
        return Outcome(replace(self.heard(state, q, answers, fed), bank=bank), metrics)

    def heard(
        self,
        state: FedEmState,
        q: dict[int, Shares],
        answers: dict[int, ClientLosses],
        fed: Federation,
    ) -> FedEmState:
        """The state with what the E step of the cohort tells. π_ik <- mean_j q_ijk"""
        shares = state.shares.copy()
        for i, q_i in q.items():
            shares[i] = q_i.mean(0) if len(q_i) else _prior(state)[i]
        return replace(state, shares=shares)

    def deploy(self, state: FedEmState, clients: Ids, fed: Federation) -> ModelBank:
        shares = _prior(state)
        there = fed.present(clients)
        new = there[~state.shares[there].any(1)]
        if len(new):
            fed.count_placing(state.bank, new)
            for i, answer in fed.example_losses(state.bank, Cohort(fed.t, new)).items():
                log_p = self.log_likelihoods(state, answer)
                for _ in range(PLACING_STEPS if len(log_p) else 0):
                    shares[i] = responsibilities(shares[i], log_p).mean(0)
        return MixtureBank.of(state.bank.params, shares)

    def partition(self, state: FedEmState) -> Ids:
        return np.where(state.shares.any(1), state.shares.argmax(1), -1)


def _joined(models: list[Params]) -> Params:
    """Leaves (K, ...) of K models with leaves (1, ...)."""
    return {name: torch.cat([model[name] for model in models]) for name in models[0]}


def _prior(state: FedEmState) -> Shares:
    """(M, K) π, equal weights for clients that have none."""
    is_known = state.shares.any(1, keepdims=True)
    return np.where(is_known, state.shares, 1 / state.shares.shape[1])


def responsibilities(prior: Shares, log_likelihoods: Shares) -> Shares:
    """(n, K) posterior weights of K components, whose prior is (K,); rows sum to 1.

    A component with prior 0 keeps weight 0.
    """
    with np.errstate(divide="ignore"):
        joint = np.log(prior) + log_likelihoods
    joint = np.exp(joint - joint.max(1, keepdims=True, initial=-np.inf))
    posterior: Shares = joint / joint.sum(1, keepdims=True)
    return posterior

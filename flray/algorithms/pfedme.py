"""pFedMe: personal models by a proximal step, and a global model that follows them.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020, arXiv
2006.08848. Algorithm 1; beta is `aggregate.server_lr`, eta is `train.lr`.
"""

from dataclasses import dataclass, replace

import torch

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.affine import affine, stacked
from flray.engines.training import LocalBatch, LossGradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation
from flray.values import require_above_zero, require_at_least


@dataclass(frozen=True)
class PFedMeState:
    """State of pFedMe: the global model w and the personal models theta_k."""

    bank: ModelBank  # w, one row
    personal: ClientTable  # theta_k of the clients that have trained


@dataclass(frozen=True)
class PFedMe:
    """Alg. 1: each local step solves for θ near w and moves w towards it.

    θ(w) = argmin f(θ; batch) + λ/2 ||θ - w||² by `inner_steps` steps of size `inner_lr`, then
    w <- w - η λ (w - θ). It is computed as a way d = (w - θ) / η_p, so that one inner step of size
    1/λ is FedAvg's step to the last bit. The personal model of a client is one
    proximal pass over its data from the w_k that it trained.

    >>> w = {"w": torch.tensor([2.0])}
    >>> method = PFedMe(lam=2.0, inner_steps=1, inner_lr=0.5)
    >>> method.gradient(lambda at, batch: at, w, None, w, {})["w"]  # f = w²/2: that of FedAvg, 2
    tensor([2.])
    """

    lam: float = 15.0  # Weight λ of the distance between θ and w
    inner_steps: int = 5  # Steps K that solve for θ on a batch
    inner_lr: float = 0.05  # Size of these steps

    def __post_init__(self) -> None:
        require_at_least(self, lam=0, inner_steps=1)
        require_above_zero(self, "inner_lr")

    def init(self, fed: Federation) -> Outcome[PFedMeState]:
        table = ClientTable.empty(fed.initial, fed.num_clients)
        return Outcome(PFedMeState(fed.initial_bank(), table))

    def cohort(self, state: PFedMeState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    @stacked
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        d = grad(w, batch)  # (w - θ) / η_p after a step from θ = w; η_p is `inner_lr`
        kept = 1 - self.inner_lr * self.lam
        for _ in range(self.inner_steps - 1):
            theta = {name: torch.sub(w[name], d[name], alpha=self.inner_lr) for name in d}
            # Eq. 7: θ <- θ - η_p (grad f(θ) + λ (θ - w)), as a way from w
            d = {n: g.add_(d[n], alpha=kept) for n, g in grad(theta, batch).items()}
        # Alg. 1 l. 8: w <- w - η λ (w - θ)
        return {name: self.lam * self.inner_lr * d[name] for name in d}

    @affine
    def proximal_gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        return {name: g[name] + self.lam * (w[name] - w0[name]) for name in g}

    def round(self, state: PFedMeState, cohort: Cohort, fed: Federation) -> Outcome[PFedMeState]:
        # Alg. 1 l. 11: w <- (1 - β) w + β mean of w_k
        joint = Relation.joint(fed.num_clients)
        bank, trained = fed.average(joint, state.bank, cohort, self.gradient)
        models = state.personal.updated(trained.clients, trained.params)  # w_k
        # θ_k: one pass of proximal steps over the client's data, from w_k
        training = replace(fed.training, optimizer="sgd", lr=self.inner_lr, momentum=0.0, epochs=1)
        asked, start = replace(cohort, clients=trained.clients), models.bank(trained.clients)
        theta = fed.train(start, asked, self.proximal_gradient, training=training)
        models = models.updated(theta.clients, theta.params)
        return Outcome(PFedMeState(bank, models), trained.metrics())

    def deploy(self, state: PFedMeState, clients: Ids, fed: Federation) -> ModelBank:
        """θ_k, and w for clients that have never trained."""
        return replace(state.personal, default=state.bank.params).bank(clients)

    def partition(self, state: PFedMeState) -> Ids:
        return state.bank.owner

"""FedAMP: clients hear those whose models are like their own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data.
AAAI 2021, arXiv 2007.03797. Algorithm 1 with the attention A(x) = 1 - exp(-x / σ).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import squareform

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.affine import affine
from flray.engines.training import LocalBatch, LossGradient
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import SUMMED, ModelBank, Params, flat_rows
from flray.models.client_table import ClientTable
from flray.values import require_above_zero, require_at_least


@dataclass(frozen=True)
class FedAmpState:
    """State of FedAMP: the model w_k of each client that has trained."""

    models: ClientTable


@dataclass(frozen=True)
class FedAmp:
    """Alg. 1: u_k = ξ_kk w_k + Σ_{j≠k} ξ_kj w_j, then w_k <- argmin F_k(w) + λ/(2α) ||w - u_k||².

    ξ_kj = α A'(||w_k - w_j||²) with A'(x) = exp(-x / σ) / σ, and ξ_kk makes the row sum to 1. λ = 0
    is Local. Sums run over the cohort, and the argmin is the client's local training from w_k. A
    client that has never trained has the initial model.

    >>> FedAmp(alpha=0.5, sigma=1.0).attention(np.array([[0.0, 0.0], [0.0, 0.0]])).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    alpha: float = 0.1  # Step α of the server, which scales the attention
    sigma: float = 1.0  # Squared distance σ at which attention has fallen to 1/e
    lam: float = 0.1  # Weight λ of the distance to u_k

    def __post_init__(self) -> None:
        require_above_zero(self, "alpha", "sigma")
        require_at_least(self, lam=0)

    def require(self, fed: Federation) -> None:
        """Refuse an attention that would be refused in round 1, in which all models are equal."""
        num_sampled = len(fed.sample(1, fed.clients))
        self.attention(np.zeros((num_sampled, num_sampled)))

    def init(self, fed: Federation) -> Outcome[FedAmpState]:
        return Outcome(FedAmpState(ClientTable.empty(fed.initial, fed.num_clients)))

    def cohort(self, state: FedAmpState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def attention(self, squared: NDArray[np.float64]) -> NDArray[np.float64]:
        """(K, K) ξ from squared distances (K, K); rows sum to 1."""
        xi: NDArray[np.float64] = self.alpha * np.exp(-squared / self.sigma) / self.sigma
        np.fill_diagonal(xi, 0.0)
        xi_kk = 1 - xi.sum(1)
        if len(xi_kk) and xi_kk.min() < 0:
            raise ExperimentError(
                f"fedamp: a client's own model would have the weight {xi_kk.min():.3g} in its "
                f"attention over {len(xi_kk)} clients; lower algorithm.alpha or raise "
                "algorithm.sigma"
            )
        return xi + np.diag(xi_kk)

    @affine
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        # Gradient of F_k(w) + λ/(2α) ||w - u_k||²
        pull = self.lam / self.alpha
        return {name: g[name] + pull * (w[name] - memo[f"u/{name}"]) for name in g}

    def round(self, state: FedAmpState, cohort: Cohort, fed: Federation) -> Outcome[FedAmpState]:
        w = state.models.of_clients(cohort.clients)
        xi = self.attention(_squared_distances(w))
        u = ModelBank(w, np.arange(len(xi))).combined(xi, np.arange(len(xi))).params  # Σ_j ξ_kj w_j
        memo = {f"u/{name}": leaf for name, leaf in u.items()}
        before = state.models.bank(cohort.clients)
        trained = fed.train(before, cohort, self.gradient, memo)
        fed.count_models(before, cohort, trained)  # u_k down, w_k up
        models = state.models.updated(trained.clients, trained.params)
        return Outcome(FedAmpState(models), trained.metrics())

    def deploy(self, state: FedAmpState, clients: Ids, fed: Federation) -> ModelBank:
        return state.models.bank(clients)

    def partition(self, state: FedAmpState) -> Ids:
        """One cluster: who hears whom is a matter of degree."""
        return np.zeros(len(state.models.block_of), np.int64)


def _squared_distances(w: Params) -> NDArray[np.float64]:
    """(K, K) squared L2 distances of stacked models: of parts of them, summed up in float64."""
    parts = [part for leaf in w.values() for part in torch.split(flat_rows(leaf), SUMMED, 1)]
    of_pairs = torch.stack([torch.pdist(part) for part in parts]).double().square_().sum(0)
    return np.asarray(squareform(of_pairs.cpu().numpy()))

"""FedProx: FedAvg whose clients are held near the model they started from.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, arXiv 1812.06127. Algorithm 2, Eq. 2; local solver as in FedAvg.
"""

from dataclasses import dataclass

from flray.algorithms.fedavg import FedAvg
from flray.engines.affine import affine
from flray.engines.training import LocalBatch, LossGradient
from flray.models.bank import Params
from flray.values import require_at_least


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with the proximal term μ/2 ||w - w^t||² in the local loss; μ = 0 is FedAvg.

    Everything else is as in FedAvg, so the method is its gradient:

        algorithm: {name: fedprox, mu: 0.1}

    >>> import torch
    >>> w, w0 = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> loss_gradient = {"w": torch.tensor([10.0])}
    >>> g = FedProx(mu=0.5).gradient(lambda w, batch: loss_gradient, w, None, w0, {})
    >>> g["w"]  # 10 + 0.5 (3 - 1)
    tensor([11.])
    """

    mu: float = 0.01  # Weight μ of the proximal term

    def __post_init__(self) -> None:
        require_at_least(self, mu=0)

    @affine
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        # Eq. 2: h_k(w; w^t) = F_k(w) + μ/2 ||w - w^t||²
        return {name: g[name] + self.mu * (w[name] - w0[name]) for name in g}

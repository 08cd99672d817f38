"""APFL: each client mixes the global model with a private one, by a weight that it learns.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020, arXiv 2003.13461.
Algorithm 1, with the step of alpha.

The server learns what it learns in FedAvg, and a client sends and receives what it does there, one
model each way; v and alpha stay with the client. A step takes two gradients.

Deviates: with momentum the cut of alpha to [0, 1] is that of the plain step, and alpha is cut again
where it is used. Statistics of BatchNorm are those of the global model. Public code computes other
things: FedTorch mixes logits and moves alpha at the first batch of a round only; PFLlib trains v on
its own loss and overwrites it by the mixture; FL-bench steps w twice along one gradient; fluke's v
never learns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flray.algorithms.algorithm import Outcome
from flray.algorithms.partly_shared import PartlyShared, PartlySharedState
from flray.data.dataset import Ids
from flray.engines.affine import stacked
from flray.engines.training import LocalBatch, LossGradient
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, Params
from flray.models.client_table import ClientTable


@dataclass(frozen=True)
class Apfl(PartlyShared):
    """Alg. 1: a client uses v̄ = α v + (1 - α) w and steps w, v and α on the same batch.

    The global model w is FedAvg's to the last bit. v and α are private and never sent; a client
    that has never trained has the initial model as v. With α fixed to 0 this is FedAvg, with α
    fixed to 1 it is Local.

        algorithm: {name: apfl, alpha: 0.5, adaptive: true}

    >>> w = {"w": torch.tensor([1.0]), "v/w": torch.tensor([3.0]), "alpha": torch.tensor([0.5])}
    >>> square = lambda at, batch: at  # gradient of |w|² / 2: at v̄ = 2 it is 2
    >>> memo = {"lr": torch.tensor(0.1), "decay": torch.tensor(0.0)}
    >>> step = Apfl().gradient(square, w, None, w, memo)
    >>> step["w"], step["v/w"], step["alpha"]  # w, α v̄, and (v - w) v̄ = 4
    (tensor([1.]), tensor([1.]), tensor([4.]))
    """

    alpha: float = 0.5  # Weight α of the private model, which every client starts from
    adaptive: bool = True  # Let each client learn its α. False: it stays as it is

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")

    def require(self, fed: Federation) -> None:
        if fed.training.optimizer != "sgd":
            raise ExperimentError(
                "apfl steps its models and the weight between them by SGD of size train.lr: set "
                f"train.optimizer to sgd, got {fed.training.optimizer}"
            )

    def init(self, fed: Federation) -> Outcome[PartlySharedState]:
        v = {f"v/{name}": leaf for name, leaf in fed.learned(fed.initial).items()}
        alpha = next(iter(fed.initial.values())).new_full((1, 1), self.alpha)
        private = ClientTable.empty(v | {"alpha": alpha}, fed.num_clients)
        return Outcome(PartlySharedState(private, fed.initial_bank()))

    @stacked
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        names = [name.removeprefix("v/") for name in w if name.startswith("v/")]
        alpha = w["alpha"].clamp(0, 1)  # (1,), or (K, 1) of stacked clients
        # Alg. 1: w_i <- w_i - η grad f_i(w_i)
        g = grad({name: w[name] for name in names}, batch)
        alpha_of = {name: _beside(alpha, w[name]) for name in names}  # for leaves of any shape
        mixed = {n: torch.lerp(w[n], w[f"v/{n}"], alpha_of[n]) for n in names}  # v̄
        h = grad(mixed, batch)  # at v̄
        # Alg. 1: v_i <- v_i - η α_i grad f_i(v̄_i)
        if not self.adaptive:
            return g | {f"v/{name}": h[name].mul_(alpha_of[name]) for name in names}
        # Alg. 1: α_i <- α_i - η <v_i - w_i, grad f_i(v̄_i)>, cut to [0, 1]
        # An axis to sum over, for leaves of one number too.
        products = ((w[f"v/{n}"] - w[n]).mul_(h[n])[..., None] for n in names)
        slopes = [p.sum(tuple(range(alpha.dim() - 1, p.dim()))) for p in products]  # by leaf
        of_v = {f"v/{name}": h[name].mul_(alpha_of[name]) for name in names}
        lr = memo["lr"][..., None]
        new_alpha = (alpha - lr * torch.stack(slopes, -1).sum(-1, keepdim=True)).clamp(0, 1)
        # The direction whose step of size lr leads to the new α once weight decay is added.
        to_new_alpha = (w["alpha"] - new_alpha) / lr - memo["decay"][..., None] * w["alpha"]
        return g | of_v | {"alpha": to_new_alpha}

    def train(self, state: PartlySharedState, cohort: Cohort, fed: Federation) -> Trained:
        models = self.assembled(state, cohort.clients)
        trained = models.params.keys() - ({"alpha"} if not self.adaptive else set())
        number = state.private.default["alpha"].new_tensor
        shared = {"lr": number(fed.training.lr), "decay": number(fed.training.weight_decay)}
        training = fed.training.only(trained)
        return fed.train(models, cohort, self.gradient, shared=shared, training=training)

    def deploy(self, state: PartlySharedState, clients: Ids, fed: Federation) -> ModelBank:
        """v̄ = α v + (1 - α) w of each client."""
        models = self.assembled(state, clients)
        alpha = models.params["alpha"].clamp(0, 1)  # (U, 1)
        mixed = {
            n: torch.lerp(w, models.params[f"v/{n}"], _beside(alpha, w))
            for n, w in models.params.items()
            if f"v/{n}" in models.params
        }
        leaves = {n: mixed.get(n, models.params[n]) for n in state.shared.params}
        return ModelBank(leaves, models.owner)


def _beside(alpha: Tensor, leaf: Tensor) -> Tensor:
    """α (..., 1) with as many axes as a leaf (..., any shape)."""
    return alpha.view((*alpha.shape[:-1], *[1] * (leaf.dim() - alpha.dim() + 1)))

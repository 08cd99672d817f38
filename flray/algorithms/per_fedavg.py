"""Per-FedAvg: the global model is learned for what it becomes after a step on a client's own data.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach. NeurIPS 2020, arXiv 2002.07948. Algorithm 1 with the
approximations Per-FedAvg (FO) and (HF) of its gradient; the outer step beta is train.lr.

A step takes two batches, D and D'; a client with a single example has no pair and is left out of
the mean (`clients_skipped`). Every client, newcomers and holdout clients too, is evaluated with the
global model; `evaluate.fine_tune` personalises it, as for any other method.

Deviates: the batch D'' of the Hessian is D again, and not a third one. Outer steps alone have
momentum; public code shares its buffer between inner and outer steps. Models are averaged with n_k;
the paper's unweighted mean is aggregate.weights: uniform.
"""

from dataclasses import dataclass
from typing import Literal

from flray.algorithms.algorithm import Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.engines.affine import stacked
from flray.engines.training import LocalBatch, LossGradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import Params
from flray.models.mixing import Relation
from flray.values import require_above_zero, require_at_least


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """Alg. 1, FO or HF: a step takes batches D and D' and follows the meta-gradient.

    `evaluate.fine_tune` shows what the model becomes after training on a client's own data.

        algorithm: {name: per_fedavg, alpha: 0.01, order: hessian_free}

    >>> import torch
    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(second=None)
    >>> batch.second = batch  # D' = D
    >>> square = lambda w, batch: {"w": w["w"]}  # gradient of w² / 2, whose Hessian is 1
    >>> w = {"w": torch.tensor([1.0])}
    >>> PerFedAvg(alpha=0.5).gradient(square, w, batch, w, {})["w"]  # w - α w
    tensor([0.5000])
    >>> exact = PerFedAvg(alpha=0.5, order="hessian_free", delta=0.5)
    >>> exact.gradient(square, w, batch, w, {})["w"]  # (1 - α) (w - α w)
    tensor([0.2500])
    """

    alpha: float = 0.01  # Step size α of the inner step
    # Meta-gradient. first: FO, without the Hessian; hessian_free: HF, by finite differences
    order: Literal["first", "hessian_free"] = "first"
    delta: float = 0.001  # Step δ of the finite difference, with order: hessian_free

    def __post_init__(self) -> None:
        require_at_least(self, alpha=0)
        require_above_zero(self, "delta")

    @stacked
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        assert batch.second is not None  # training is paired
        # Alg. 1: w~ <- w - α grad f(w, D), then a step along (I - α H(w, D'')) grad f(w~, D')
        adapted = _moved(w, -self.alpha, grad(w, batch))
        v = grad(adapted, batch.second)
        if self.order == "first":
            return v  # FO: H is left out
        # HF: H v = (grad f(w + δ v) - grad f(w - δ v)) / 2δ
        ahead = grad(_moved(w, self.delta, v), batch)
        behind = grad(_moved(w, -self.delta, v), batch)
        scale = self.alpha / (2 * self.delta)
        return {name: v[name] - scale * (ahead[name] - behind[name]) for name in v}

    def round(self, state: FedAvgState, cohort: Cohort, fed: Federation) -> Outcome[FedAvgState]:
        paired = fed.training.paired()
        trained = fed.train(state.bank, cohort, self.gradient, training=paired)
        learned = trained.with_steps()
        fed.meter.counts["clients_skipped"] += len(trained.clients) - len(learned.clients)
        fed.count_models(state.bank, cohort, learned)
        # Alg. 1: w_{k+1} <- mean of w_{k+1}^i over the clients heard
        bank = fed.mix(Relation.joint(fed.num_clients), learned, state.bank)
        return Outcome(FedAvgState(bank), learned.metrics())


def _moved(w: Params, step: float, direction: Params) -> Params:
    return {name: (step * direction[name]).add_(w[name]) for name in direction}

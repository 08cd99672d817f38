"""Server optimisers: the mean of the clients' models is taken as a step, not as the new model.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization.
ICLR 2021, arXiv 2003.00295. Algorithm 2, FedAdam and FedYogi; there is no bias correction.
Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019, arXiv 1909.06335. FedAvgM.

Δ is the mean minus the model before, η is `aggregate.server_lr`. Every model of a bank has moments
of its own, which follow its row: a row that a clustering makes starts with a copy of them, merged
rows with their mean, and a row that hears nobody keeps them.

Deviates: Δ is weighted by n_k as every mean (`aggregate.weights: uniform` is the paper's), and
statistics of BatchNorm become their means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flray.models.bank import ModelBank, Params, rows_of
from flray.values import require_above_zero, require_share

Moments = dict[str, Tensor]  # of one leaf, by letter, each (U, ...)


@dataclass(frozen=True)
class NoOptimizer:
    """The model moves by η Δ: FedAvg."""


@dataclass(frozen=True)
class FedAvgM:
    """Momentum at the server: v <- β v + Δ, and the model moves by η v.

    >>> FedAvgM(0.5).step(torch.tensor([1.0]), {"v": torch.tensor([4.0])})[0]
    tensor([3.])
    """

    momentum: float = 0.9  # Momentum β of the server

    def __post_init__(self) -> None:
        require_share(self, "momentum")

    def start(self, w: Tensor) -> Moments:
        """The moments before the first step of models w."""
        return {"v": torch.zeros_like(w)}

    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """The step that η is multiplied with, and the moments after it."""
        v = self.momentum * moments["v"] + delta
        return v, {"v": v}


@dataclass(frozen=True)
class FedAdam:
    """Adam at the server (Alg. 2): the model moves by η m / (√v + τ).

    >>> step, moments = FedAdam(0.9, 0.75, 1.0).step(
    ...     torch.tensor([2.0]), {"m": torch.tensor([0.0]), "v": torch.tensor([4.0])}
    ... )
    >>> moments["v"], step  # 0.75 * 4 + 0.25 * 2², and 0.1 * 2 / (2 + 1)
    (tensor([4.]), tensor([0.0667]))
    """

    beta1: float = 0.9  # Decay β1 of the first moment m
    beta2: float = 0.99  # Decay β2 of the second moment v
    tau: float = 1e-3  # Adaptivity τ, added to √v: a smaller value adapts more

    def __post_init__(self) -> None:
        require_share(self, "beta1", "beta2")
        require_above_zero(self, "tau")

    def start(self, w: Tensor) -> Moments:
        """The moments before the first step of models w."""
        return {"m": torch.zeros_like(w), "v": torch.full_like(w, self.tau**2)}  # v_{-1} >= τ²

    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """The step that η is multiplied with, and the moments after it."""
        m = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        v = self.second_moment(moments["v"], delta.square())
        return m / (v.sqrt() + self.tau), {"m": m, "v": v}

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """v after a step, from v before it and Δ²."""
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi at the server (Alg. 2): as FedAdam, but v moves towards Δ² by at most a share of Δ².

    >>> FedYogi(beta2=0.75).second_moment(torch.tensor([4.0]), torch.tensor([100.0]))  # 4 + 25
    tensor([29.])
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """v - (1 - β2) Δ² sign(v - Δ²)."""
        return v - (1 - self.beta2) * squared * (v - squared).sign()


OPTIMIZERS: dict[str, type] = {
    "fedadam": FedAdam,
    "fedavgm": FedAvgM,
    "fedyogi": FedYogi,
    "none": NoOptimizer,
}


@dataclass(frozen=True)
class ServerStep:
    """How the server moves models once it knows the means of what they hear."""

    optimizer: Any  # Any: one of OPTIMIZERS but `none`
    lr: float  # η
    plain: frozenset[str] = frozenset()  # leaves that become their means: BatchNorm statistics

    def __call__(
        self, means: Params, bank: ModelBank, rows: Sequence[tuple[int, bool]]
    ) -> ModelBank:
        """The bank of the new models and their moments; who uses which row is left to the caller.

        Args:
            means: (V, ...) of the new models; of one that hears nobody the model before.
            bank: the models before.
            rows: (V,) the row each new model had in it, and whether it hears anybody.
        """
        before = torch.tensor([u for u, _ in rows]).numpy()
        params, moments = dict(means), {}
        for name in means.keys() - self.plain:
            mean = means[name]
            w = rows_of(bank.params[name], before)
            moves = torch.tensor([hears for _, hears in rows], device=w.device)
            moves = moves.view(-1, *[1] * (w.dim() - 1))
            old = {
                letter: rows_of(bank.moments[f"{letter}/{name}"], before)
                if f"{letter}/{name}" in bank.moments
                else initial
                for letter, initial in self.optimizer.start(w).items()
            }
            delta = mean - w
            step, new = self.optimizer.step(delta, old)
            # w + η step, written so that a step of Δ gives the mean to the last bit
            params[name] = torch.where(moves, mean + (self.lr * step - delta), mean)
            for letter, moment in new.items():
                moments[f"{letter}/{name}"] = torch.where(moves, moment, old[letter])
        return replace(bank, params=params, moments=dict(sorted(moments.items())))

"""How a client trains: optimiser, epochs and batches, and the hook for local equations."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.errors import ExperimentError
from flray.models.bank import Params

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Training:
    """Settings of local training, the same for every client.

    A round is `epochs` passes over a client's n_k examples, in batches of `batch_size` (the last
    may be smaller), with a fresh optimiser each round.

    >>> Training(lr=0.1, epochs=5).paired().batches_per_step
    2
    >>> Training(momentum=0.9, optimizer="adam")
    Traceback (most recent call last):
    ValueError: momentum is SGD's; got 0.9 with adam
    """

    # Local optimiser; module: the model's own configure_optimizers
    optimizer: Literal["sgd", "adam", "module"] = "sgd"
    lr: float = 0.01  # Learning rate η of the local optimiser
    momentum: float = 0.0  # Momentum of SGD
    weight_decay: float = 0.0  # Weight decay of the local optimiser
    epochs: int = 1  # Local epochs E per round
    batch_size: int = 10  # Batch size B
    batches_per_step: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be > 0 and finite, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is SGD's; got {self.momentum} with {self.optimizer}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be >= 0, got {self.weight_decay}")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def paired(self) -> "PairedTraining":
        """The same settings with two batches per step."""
        return PairedTraining(**asdict(self))

    def make_optimizer(
        self, module: LightningModule, params: Params, capturable: bool = False
    ) -> torch.optim.Optimizer:
        """A fresh optimiser over `params`, which stand for the module's parameters of these names.

        Elementwise optimisers step a stack of models exactly as they step each one, so the stack
        is simply what they are given.
        """
        if self.optimizer == "module":
            return _adopt(module, params)
        leaves: Iterable[Tensor] = params.values()
        if self.optimizer == "adam":
            return torch.optim.Adam(
                leaves, lr=self.lr, weight_decay=self.weight_decay, capturable=capturable
            )
        return torch.optim.SGD(
            leaves, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )

    def make_scheduled(
        self, module: LightningModule, params: Params
    ) -> "tuple[torch.optim.Optimizer, Schedule | None]":
        """A fresh optimiser over the module's own parameters, with its scheduler if it has one."""
        if self.optimizer == "module":
            return own_optimizer(module)
        return self.make_optimizer(module, params), None


@dataclass(frozen=True)
class PairedTraining(Training):
    """Local training whose steps take two batches, for methods such as Per-FedAvg.

    Consecutive batches of an epoch form a step and an odd last batch is left out. A client with one
    batch per epoch splits it in halves; a client with one example takes no steps.
    """

    batches_per_step: ClassVar[int] = 2


def _adopt(module: LightningModule, params: Params) -> torch.optim.Optimizer:
    """The module's own optimiser, class, groups and settings, over other tensors."""
    own, schedule = own_optimizer(module)
    if schedule is not None:
        raise ExperimentError(
            f"the scheduler of {type(module).__name__} needs execution.engine=loop or lightning"
        )
    name_of = {id(p): name for name, p in module.named_parameters()}
    groups = [
        {**group, "params": [params[name_of[id(p)]] for p in group["params"] if p.requires_grad]}
        for group in own.param_groups
    ]
    rebuild: Callable[..., torch.optim.Optimizer] = type(own)
    return rebuild(groups)


@dataclass(frozen=True)
class Schedule:
    """A scheduler of a module, stepped as Lightning does."""

    scheduler: torch.optim.lr_scheduler.LRScheduler
    by_step: bool = False  # or by epoch
    frequency: int = 1  # every so many of them

    def after(self, step: int, steps_per_epoch: int) -> None:
        """Change the learning rate if one is due after so many steps."""
        unit = self.frequency if self.by_step else self.frequency * steps_per_epoch
        if step % unit == 0:
            self.scheduler.step()


def own_optimizer(module: LightningModule) -> tuple[torch.optim.Optimizer, Schedule | None]:
    """What `configure_optimizers` returns: an optimiser, with a scheduler or without."""
    given: Any = module.configure_optimizers()  # Any: one of Lightning's many forms
    scheduler: Any = None
    if isinstance(given, Mapping):
        given, scheduler = given.get("optimizer"), given.get("lr_scheduler")
    elif isinstance(given, list | tuple) and len(given) == 1:
        given = given[0]
    elif isinstance(given, list | tuple) and [len(each) for each in given] == [1, 1]:
        given, scheduler = given[0][0], given[1][0]
    if not isinstance(given, torch.optim.Optimizer):
        raise ExperimentError(
            f"train.optimizer=module needs {type(module).__name__}.configure_optimizers to return "
            f"one optimizer, got {type(given).__name__}; use train.optimizer=sgd or adam"
        )
    return given, None if scheduler is None else _schedule(scheduler)


def _schedule(given: Any) -> Schedule:  # Any: a scheduler, or a mapping with one
    options: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = options["scheduler"]
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ExperimentError("ReduceLROnPlateau monitors a value: set execution.engine=lightning")
    by_step = options.get("interval", "epoch") == "step"
    return Schedule(scheduler, by_step, int(options.get("frequency", 1)))


class Gradient(Protocol):
    """The one hook for local equations: what the optimiser steps along.

    `grad(w, batch)` is the gradient of the client's loss at w; w0 is the model the round started
    from; memo is the client's own state, where the method keeps one, and what all clients share.
    With `PairedTraining`, the step's second batch is `batch.second`. The training loss reported
    for a step is that of its first call of `grad`, of which there must be one. Pure, for one
    client.
    """

    def __call__(
        self,
        grad: Callable[[Params, "LocalBatch"], Params],
        w: Params,
        batch: "LocalBatch",
        w0: Params,
        memo: Params,
    ) -> Params: ...


def plain_gradient(
    grad: Callable[[Params, "LocalBatch"], Params],
    w: Params,
    batch: "LocalBatch",
    w0: Params,  # noqa: ARG001  # part of the hook
    memo: Params,  # noqa: ARG001
) -> Params:
    """Follow the client's own loss and nothing else."""
    return grad(w, batch)


@dataclass(frozen=True)
class OnlyLeaves:
    """The plain gradient of the leaves of these names, and zero for all others."""

    names: frozenset[str]

    def __call__(
        self,
        grad: Callable[[Params, "LocalBatch"], Params],
        w: Params,
        batch: "LocalBatch",
        w0: Params,
        memo: Params,
    ) -> Params:
        g = plain_gradient(grad, w, batch, w0, memo)
        return {n: leaf if n in self.names else torch.zeros_like(leaf) for n, leaf in g.items()}


@dataclass(frozen=True)
class LocalBatch:
    """One client's batch; mask is False where the batch was padded (None: nothing was)."""

    x: Tensor
    y: Tensor
    mask: Tensor | None
    keys: dict[str, Tensor]  # of the module's dropout layers
    second: "LocalBatch | None" = None  # of a step that takes two batches
    loss: str = "example_losses"  # the module's method to differentiate; a hook may name another

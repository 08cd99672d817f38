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

# Optimisers that step each number by itself, so that stacked models can share one.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Training:
    """Settings of local training, the same for every client.

    A round is `epochs` passes over a client's n_k examples, in batches of `batch_size` (the last
    may be smaller), with a fresh optimiser each round.

    >>> Training(lr=0.1, epochs=5)
    Training(optimizer='sgd', lr=0.1, momentum=0.0, weight_decay=0.0, epochs=5, batch_size=10)
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
        """The same settings with two batches per step, for methods such as Per-FedAvg."""
        return PairedTraining(**asdict(self))

    def make_optimizer(
        self, module: LightningModule, params: Params, capturable: bool = False
    ) -> torch.optim.Optimizer:
        """A fresh optimiser over `params`, which stand for the module's parameters of these names.

        Elementwise optimisers step a stack of models exactly as they step each one, so `params` may
        have a leading client axis.

        Args:
            module: The module, whose own optimiser is rebuilt if `optimizer` is "module".
            params: Tensors to move, by name of a parameter.
            capturable: True: the optimiser is recorded in a CUDA graph.
        """
        if self.optimizer == "module":
            return _module_optimizer_over(module, params)
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
        """A fresh optimiser over the module's own parameters, with its scheduler if it has one.

        Only a module's own optimiser can have a scheduler; settings of an experiment have none.
        """
        if self.optimizer == "module":
            return module_optimizer(module)
        return self.make_optimizer(module, params), None


@dataclass(frozen=True)
class PairedTraining(Training):
    """Local training whose steps take two batches, for methods such as Per-FedAvg.

    Consecutive batches of an epoch form a step and an odd last batch is left out. A client with one
    batch per epoch splits it in halves; a client with one example takes no steps.
    """

    batches_per_step: ClassVar[int] = 2


def _module_optimizer_over(module: LightningModule, params: Params) -> torch.optim.Optimizer:
    """The module's own optimiser, with its class, groups and settings, over other tensors."""
    optimizer, schedule = module_optimizer(module)
    if schedule is not None:
        raise ExperimentError(
            f"the scheduler of {type(module).__name__} needs execution.engine=loop or lightning"
        )
    name_of = {id(p): name for name, p in module.named_parameters()}
    groups = [
        {**group, "params": [params[name_of[id(p)]] for p in group["params"] if p.requires_grad]}
        for group in optimizer.param_groups
    ]
    rebuild: Callable[..., torch.optim.Optimizer] = type(optimizer)
    return rebuild(groups)


@dataclass(frozen=True)
class Schedule:
    """A learning rate scheduler of a module, stepped as Lightning does.

    It begins anew in every round, with the client's optimiser.
    """

    scheduler: torch.optim.lr_scheduler.LRScheduler
    by_step: bool = False  # False: by epoch
    frequency: int = 1  # steps or epochs between two changes

    def after(self, step: int, steps_per_epoch: int) -> None:
        """Change the learning rate if a change is due after so many steps."""
        unit = self.frequency if self.by_step else self.frequency * steps_per_epoch
        if step % unit == 0:
            self.scheduler.step()


def module_optimizer(module: LightningModule) -> tuple[torch.optim.Optimizer, Schedule | None]:
    """What `configure_optimizers` returns: an optimiser, with a scheduler or without.

    Raises:
        ExperimentError: The module returns several optimisers or none, or a scheduler that monitors
            a value.
    """
    optimizer: Any = module.configure_optimizers()  # Any: one of Lightning's many forms
    scheduler: Any = None
    if isinstance(optimizer, Mapping):
        optimizer, scheduler = optimizer.get("optimizer"), optimizer.get("lr_scheduler")
    elif isinstance(optimizer, list | tuple) and len(optimizer) == 1:
        optimizer = optimizer[0]
    elif isinstance(optimizer, list | tuple) and [len(part) for part in optimizer] == [1, 1]:
        (optimizer,), (scheduler,) = optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ExperimentError(
            f"train.optimizer=module needs {type(module).__name__}.configure_optimizers to return "
            f"one optimizer, got {type(optimizer).__name__}; use train.optimizer=sgd or adam"
        )
    return optimizer, None if scheduler is None else _schedule(scheduler)


def _schedule(scheduler: Any) -> Schedule:  # Any: a scheduler, or a mapping with one
    """The schedule of a scheduler, or of Lightning's mapping with its interval and frequency."""
    is_mapping = isinstance(scheduler, Mapping)
    options: Mapping[str, Any] = scheduler if is_mapping else {"scheduler": scheduler}
    scheduler = options["scheduler"]
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ExperimentError("ReduceLROnPlateau monitors a value: set execution.engine=lightning")
    by_step = options.get("interval", "epoch") == "step"
    return Schedule(scheduler, by_step, int(options.get("frequency", 1)))


class Gradient(Protocol):
    """The hook for local equations of a method: the direction that the optimiser steps along.

    A hook is written for one client and must be a pure function of its arguments; the engine
    `vectorized` runs it over all clients at once with `torch.func.vmap`. It must call `grad` at
    least once, and the loss of the first call is reported as the loss of the step.

    FedProx, for example, adds the gradient of a proximal term:

    >>> def fedprox(grad, w, batch, w0, memo):
    ...     g = grad(w, batch)
    ...     return {name: g[name] + 0.5 * (w[name] - w0[name]) for name in g}
    >>> def grad_of_ones(w, batch):
    ...     return {name: torch.ones_like(leaf) for name, leaf in w.items()}
    >>> fedprox(grad_of_ones, {"w": torch.tensor([3.0])}, None, {"w": torch.tensor([1.0])}, {})
    {'w': tensor([2.])}

    Args:
        grad: `grad(w, batch)` is the gradient of the client's loss at w, leaf by leaf.
        w: the current params, leaves (...).
        batch: the batch of the step; with `PairedTraining`, its second batch is `batch.second`.
        w0: the params that the round started from.
        memo: the state of the client and what all clients share, where the method has any.
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
    """The gradient of the client's loss and nothing else, as in FedAvg."""
    return grad(w, batch)


@dataclass(frozen=True)
class OnlyLeaves:
    """A gradient hook: the plain gradient of the leaves of these names, zero for all others.

    >>> w = {"body": torch.ones(2), "head": torch.ones(2)}
    >>> OnlyLeaves(frozenset({"head"}))(lambda w, batch: w, w, None, w, {})
    {'body': tensor([0., 0.]), 'head': tensor([1., 1.])}
    """

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
    """One batch of one client, as a gradient hook receives it and hands it to `grad`.

    A hook may ask for another loss of the module: `grad(w, replace(batch, loss="other_losses"))`.
    """

    x: Tensor  # (B, channels, height, width)
    y: Tensor  # (B,) labels
    mask: Tensor | None  # (B,) False where the batch was padded; None: it was not
    keys: dict[str, Tensor]  # keys of the module's dropout layers, by buffer name
    second: "LocalBatch | None" = None  # the second batch of a step that takes two
    loss: str = "example_losses"  # the module's method to differentiate

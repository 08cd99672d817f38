"""How a client trains: optimiser, epochs and batches, and the hook for local equations."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.engines.rates import RateSchedule
from flray.errors import ExperimentError
from flray.models.bank import Params
from flray.values import require_at_least

# Optimisers that step each number by itself, so that stacked models can share one.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Training:
    """Settings of local training, the same for every client.

    A round is `epochs` passes over a client's n_k examples, in batches of `batch_size` (the last
    may be smaller, or is left out with `drop_last`), with a fresh optimiser each round.

    >>> Training(lr=0.1, epochs=5)  # doctest: +NORMALIZE_WHITESPACE
    Training(optimizer='sgd', lr=0.1, momentum=0.0, weight_decay=0.0, epochs=5, batch_size=10,
    drop_last=False)
    >>> Training(lr=0.1, epochs=5).paired().batches_per_step
    2
    >>> Training(lr=0.1).only({"head.bias"}).moves("body.bias")
    False
    >>> Training(momentum=0.9, optimizer="adam")
    Traceback (most recent call last):
    ValueError: momentum is SGD's; got 0.9 with adam
    """

    # Local optimiser; module: the model's own configure_optimizers
    optimizer: Literal["sgd", "adam", "module"] = "sgd"
    # Learning rate η of the local optimiser. A mapping: it changes from round to round
    lr: float | RateSchedule = 0.01
    momentum: float = 0.0  # Momentum of SGD
    weight_decay: float = 0.0  # Weight decay of the local optimiser
    epochs: int = 1  # Local epochs E per round
    batch_size: int = 10  # Batch size B
    # Leave out the last batch of an epoch if it is short; a client with fewer examples than a batch
    # takes no step
    drop_last: bool = False
    batches_per_step: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if isinstance(self.lr, RateSchedule):
            if self.optimizer == "module":
                raise ValueError(
                    "a schedule of lr does nothing with optimizer module, whose learning rate is "
                    "the module's own: leave lr out or choose optimizer sgd or adam"
                )
        elif not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be > 0 and finite, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is SGD's; got {self.momentum} with {self.optimizer}")
        require_at_least(self, weight_decay=0, epochs=1, batch_size=1)

    @property
    def eta(self) -> float:
        """The learning rate η as a number; that of a schedule is known after `at`."""
        assert not isinstance(self.lr, RateSchedule), "the round of this training is not known"
        return self.lr

    def at(self, t: int) -> "Training":
        """The settings of round t, whose learning rate is a number.

        >>> Training(lr=RateSchedule(0.1, decay=0.5)).at(3).lr
        0.025
        """
        return replace(self, lr=self.lr.at(t)) if isinstance(self.lr, RateSchedule) else self

    def over(self, rounds: int) -> "Training":
        """The settings in a run of so many rounds, which a cosine takes if it names no number."""
        lr = self.lr
        if isinstance(lr, RateSchedule) and lr.schedule == "cosine" and lr.rounds is None:
            return replace(self, lr=replace(lr, rounds=rounds))
        return self

    def paired(self) -> "PairedTraining":
        """The same settings with two batches per step."""
        return PairedTraining(**vars(self))

    def only(self, leaves: Collection[str]) -> "PartTraining":
        """The same settings for training of these leaves; all others keep their bits."""
        return PartTraining(**vars(self) | {"leaves": frozenset(leaves)})

    def moves(self, leaf: str) -> bool:
        """True if a leaf of this name is trained; engines leave the bits of others alone."""
        return True

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
                leaves, lr=self.eta, weight_decay=self.weight_decay, capturable=capturable
            )
        return torch.optim.SGD(
            leaves, lr=self.eta, momentum=self.momentum, weight_decay=self.weight_decay
        )

    def make_scheduled(
        self, module: LightningModule, params: Params
    ) -> "tuple[torch.optim.Optimizer, Schedule | None]":
        """A fresh optimiser over the module's own parameters, with its scheduler if it has one.

        Only a module's own optimiser can have a scheduler; settings of an experiment have none.
        """
        if self.optimizer == "module":
            optimizer, schedule = module_optimizer(module)
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ExperimentError(
                    "LBFGS asks for the loss several times in a step: set "
                    "execution.engine=lightning"
                )
            return optimizer, schedule
        return self.make_optimizer(module, params), None


@dataclass(frozen=True)
class PairedTraining(Training):
    """Local training whose steps take two batches, for methods such as Per-FedAvg.

    Consecutive batches of an epoch form a step and an odd last batch is left out. A client with one
    batch per epoch splits it in halves; a client with one example takes no steps.
    """

    batches_per_step: ClassVar[int] = 2

    def only(self, leaves: Collection[str]) -> "PartTraining":
        raise NotImplementedError("steps that take two batches train all leaves")


@dataclass(frozen=True)
class PartTraining(Training):
    """Local training of some leaves. Neither weight decay nor momentum moves the others, and
    running statistics among them stay as they were.

    A gradient hook sees all leaves; its direction counts for those that move.
    """

    leaves: frozenset[str] = frozenset()  # names of the leaves that move

    def moves(self, leaf: str) -> bool:
        return leaf in self.leaves


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
    if isinstance(optimizer, list | tuple) and len(optimizer) == 1:
        optimizer = optimizer[0]
    if isinstance(optimizer, Mapping):
        optimizer, scheduler = optimizer.get("optimizer"), optimizer.get("lr_scheduler")
    elif isinstance(optimizer, list | tuple) and [type(part) for part in optimizer] == [list, list]:
        optimizers, schedulers = optimizer
        if len(optimizers) == 1 and len(schedulers) <= 1:
            optimizer, scheduler = optimizers[0], next(iter(schedulers), None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ExperimentError(
            f"train.optimizer=module needs {type(module).__name__}.configure_optimizers to return "
            f"one optimizer, got {type(optimizer).__name__}; use train.optimizer=sgd or adam, or "
            "step several with manual optimization and execution.engine=lightning"
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


@dataclass(frozen=True)
class LocalBatch:
    """One batch of one client, as a gradient hook receives it and hands it to `grad`.

    A marked hook receives that of stacked clients, with a leading axis.

    A hook may ask for another loss of the module: `grad(w, replace(batch, loss="other_losses"))`.
    """

    x: Tensor  # (B, channels, height, width)
    y: Tensor  # (B,) labels
    mask: Tensor | None  # (B,) False where the batch was padded; None: it was not
    keys: dict[str, Tensor]  # keys of the module's dropout layers, by buffer name
    second: "LocalBatch | None" = None  # the second batch of a step that takes two
    loss: str = "example_losses"  # the module's method to differentiate
    weight: Tensor | None = None  # (B,) q of the loss Σ q ℓ / B; None: 1 for all


# grad(w, batch): the gradient of a client's loss at w, leaf by leaf.
LossGradient = Callable[[Params, LocalBatch], Params]


class Gradient(Protocol):
    """The hook for local equations of a method: the direction that the optimiser steps along.

    A hook is written for one client and must be a pure function of its arguments; the engine
    `vectorized` runs it over many clients with `torch.func.vmap`, or directly if it is marked
    (`flray.engines.affine`). It must call `grad` at least once, and the loss of the first call is
    reported as the loss of the step.

    FedProx, for example, adds the gradient of a proximal term:

    >>> def fedprox(grad, w, batch, w0, memo):
    ...     g = grad(w, batch)
    ...     return {name: g[name] + 0.5 * (w[name] - w0[name]) for name in g}
    >>> def grad_of_ones(w, batch):
    ...     return {name: torch.ones_like(leaf) for name, leaf in w.items()}
    >>> fedprox(grad_of_ones, {"w": torch.tensor([3.0])}, None, {"w": torch.tensor([1.0])}, {})
    {'w': tensor([2.])}

    Args:
        grad: the gradient of the client's loss.
        w: the current params, leaves (...).
        batch: the batch of the step; with `PairedTraining`, its second batch is `batch.second`.
        w0: the params that the round started from.
        memo: the state of the client and what all clients share, where the method has any.
    """

    def __call__(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params: ...


def plain_gradient(
    grad: LossGradient,
    w: Params,
    batch: LocalBatch,
    w0: Params,  # noqa: ARG001  # part of the hook
    memo: Params,  # noqa: ARG001
) -> Params:
    """The gradient of the client's loss and nothing else, as in FedAvg."""
    return grad(w, batch)

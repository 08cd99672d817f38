"""The loss of a batch as a function of params, for any LightningModule."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import functional_call

from flray.data.pixels import Examples
from flray.engines.plan import IndexPlan
from flray.engines.training import Gradient, LocalBatch
from flray.errors import ExperimentError
from flray.models.bank import Params
from flray.models.dropout import dropout_keys
from flray.models.predictor import Batch


class BatchLoss(nn.Module):
    """The mean loss of a module over a batch, as a function of its params.

    Padded examples do not count; losses are multiplied by the weights of the batch, if it has any.
    It wraps the module so that `functional_call` reaches its loss rather than its forward; modules
    without `example_losses` are asked for `training_step`.

    >>> from flray.models.mlp200 import Mlp200
    >>> loss = BatchLoss(Mlp200((1, 8, 8), 10))
    >>> w = {name: torch.zeros_like(p) for name, p in loss.module.named_parameters()}
    >>> batch = LocalBatch(torch.ones(2, 1, 8, 8), torch.tensor([0, 1]), None, {})
    >>> round(float(loss.at(w, batch)), 4)  # log 10, for ten equally likely classes
    2.3026
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.per_example = hasattr(module, "example_losses")
        # As Lightning decides whether to pass the number of the batch
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def forward(self, batch: LocalBatch) -> Tensor:
        """The mean loss of a batch with the module's own weights; () a scalar."""
        if not self.per_example:
            if batch.weight is not None:
                raise ExperimentError(
                    f"{type(self.module).__name__} must define example_losses(batch) -> (B,): this "
                    "method weights examples"
                )
            return self._training_step(batch)
        example_losses: Callable[[Batch], Tensor] = getattr(self.module, batch.loss)
        losses = example_losses((batch.x, batch.y))
        if losses.shape != batch.x.shape[:1]:
            raise ExperimentError(
                f"{type(self.module).__name__}.{batch.loss} must return one loss for each of "
                f"{len(batch.x)} examples, got the shape {tuple(losses.shape)}; do not average "
                "over examples, and average over all else"
            )
        if batch.weight is not None:
            losses = losses * batch.weight
        if batch.mask is None:
            return losses.mean()
        kept = torch.where(batch.mask, losses, torch.zeros_like(losses))
        return kept.sum() / batch.mask.sum().clamp(min=1)

    def _training_step(self, batch: LocalBatch) -> Tensor:
        index = (0,) if self.takes_index else ()
        output = self.module.training_step((batch.x, batch.y), *index)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(self.module).__name__}.training_step must return a loss, or a dict with "
                f"the key 'loss', got {type(output).__name__}"
            )
        if loss.numel() != 1:
            raise TypeError(
                f"{type(self.module).__name__}.training_step must return the loss of a batch, one "
                f"number, got the shape {tuple(loss.shape)}; return its mean"
            )
        return loss

    def at(self, w: Params, batch: LocalBatch) -> Tensor:
        """The loss with the module's params replaced by w and its dropout keys by the batch's."""
        state = {f"module.{k}": v for k, v in (w | batch.keys).items()}
        return cast(Tensor, functional_call(self, state, (batch,)))

    def gradient_at(self, w: Params, batch: LocalBatch) -> tuple[Params, Tensor]:
        """Gradient and value of the loss at w, of one client, by plain autograd.

        Leaves that the loss does not depend on have gradient 0. The loss is detached.
        """
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in w.items()}
        loss = self.at(leaves, batch)
        if not loss.requires_grad:
            raise ExperimentError(
                f"the loss of {type(self.module).__name__} depends on none of its parameters; "
                "leave out detach(), item() and no_grad() on the way to it"
            )
        wrt = list(leaves.values())
        gradients = torch.autograd.grad(loss, wrt, allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True)), loss.detach()


def direction_and_loss(
    hook: Gradient,
    gradient_at: Callable[[Params, LocalBatch], tuple[Params, Tensor]],
    w: Params,
    batch: LocalBatch,
    w0: Params,
    memo: Params,
) -> tuple[Params, Tensor]:
    """The direction of a hook, and the loss of its first call of `grad`: that of the step.

    >>> from flray.engines.training import plain_gradient
    >>> def square(w, batch):
    ...     return {"w": 2 * w["w"]}, w["w"] ** 2
    >>> direction_and_loss(plain_gradient, square, {"w": torch.tensor(3.0)}, None, {}, {})
    ({'w': tensor(6.)}, tensor(9.))
    """
    losses: list[Tensor] = []

    def grad(at: Params, batch: LocalBatch) -> Params:
        gradients, loss = gradient_at(at, batch)
        losses.append(loss)
        return gradients

    direction: object = hook(grad, w, batch, w0, memo)
    if not losses:
        raise ExperimentError(
            f"{_name(hook)} must call grad(w, batch), the gradient of the client's loss, at least "
            "once in each step, and has returned without; begin it with g = grad(w, batch) and "
            "return what the optimiser steps along, such as g with a term added"
        )
    if not isinstance(direction, dict):
        raise ExperimentError(
            f"{_name(hook)} must return a dict of tensors by parameter, as grad(w, batch) does, "
            f"got {type(direction).__name__}"
        )
    return direction, losses[0]


def along(direction: Params, leaf: str, hook: Gradient) -> Tensor:
    """What an optimiser moves a leaf along; raises an ExperimentError if the hook left it out."""
    if direction.get(leaf) is None:
        raise ExperimentError(
            f"{_name(hook)} must return a tensor for each parameter, as grad(w, batch) does, and "
            f"has none for {leaf}; for one that is not to move return zeros"
        )
    return direction[leaf]


def _name(hook: Gradient) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def step_batch(plan: IndexPlan, step: int, module: nn.Module, examples: Examples) -> LocalBatch:
    """The batch of one step of one client, with the second where the step takes two.

    Args:
        step: Number of the step, from 0.
        module: The module, whose dropout layers get the keys of the step.
        examples: Where example ids are looked up.
    """
    first, *second = (
        unpadded_batch(plan, (step, b), module, examples) for b in range(plan.batches_per_step)
    )
    return replace(first, second=second[0]) if second else first


def unpadded_batch(
    plan: IndexPlan, step_and_batch: tuple[int, int], module: nn.Module, examples: Examples
) -> LocalBatch:
    """One batch of one client without padding, on the device of the examples.

    Args:
        step_and_batch: Number of the step, and of the batch in the step.
        module: The module, whose dropout layers get the keys of the batch.
        examples: Where example ids are looked up; augmentation draws from the batch's key.
    """
    ids = torch.from_numpy(plan.ids[step_and_batch][plan.mask[step_and_batch]]).to(examples.device)
    key = torch.tensor(int(plan.keys[step_and_batch]), device=examples.device)
    x, y = examples.training_batch(ids[None], key[None])
    batch = LocalBatch(x[0], y[0], None, dropout_keys(module, key))
    if plan.weight is None:
        return batch
    weight = torch.from_numpy(plan.weight[step_and_batch][plan.mask[step_and_batch]])
    return replace(batch, weight=weight.to(device=examples.device, dtype=batch.x.dtype))

"""What the steps of stacked clients share: plans as tensors, slots, and the hook under `vmap`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.func import vmap

from flray.data.dataset import Ids
from flray.engines.engine import Block, BlockResult
from flray.engines.training import ELEMENTWISE, Gradient, LocalBatch, Training
from flray.errors import ExperimentError
from flray.models.bank import Params

# x, y, mask and dropout keys of a LocalBatch with a leading client axis: a pytree for vmap.
BatchParts = tuple[Tensor, Tensor, Tensor, Params]

# Gradient and loss of one client at given params, inside vmap.
GradientAt = Callable[[Params, LocalBatch], tuple[Params, Tensor]]


@dataclass(frozen=True)
class StackedPlan:
    """The plans of a block as tensors; K slots, S steps, b batches per step."""

    ids: Tensor  # (K, S, b, B)
    mask: Tensor  # (K, S, b, B)
    keys: Tensor  # (K, S, b)
    last_step: Ids  # (K,) -1 for a dummy and for a client without steps

    @classmethod
    def of(cls, block: Block, num_slots: int, device: torch.device) -> "StackedPlan":
        batches = block.plans[0].ids.shape[1:]  # (b, B)
        num_steps = max(plan.num_steps for plan in block.plans)
        ids = np.zeros((num_slots, num_steps, *batches), dtype=np.int64)
        mask = np.zeros((num_slots, num_steps, *batches), dtype=np.bool_)
        keys = np.zeros((num_slots, num_steps, batches[0]), dtype=np.int64)
        last = np.full(num_slots, -1, dtype=np.int64)
        for k, plan in enumerate(block.plans):
            ids[k, : plan.num_steps] = plan.ids
            mask[k, : plan.num_steps] = plan.mask
            keys[k, : plan.num_steps] = plan.keys
            last[k] = plan.num_steps - 1
        tensors = [torch.from_numpy(a).to(device) for a in (ids, mask, keys)]
        return cls(tensors[0], tensors[1], tensors[2], last)

    @property
    def num_steps(self) -> int:
        return self.ids.shape[1]

    def at(self, steps: Tensor) -> "StackedPlan":
        """Some of the steps, whose numbers are on the device."""
        ids, mask, keys = (t.index_select(1, steps) for t in (self.ids, self.mask, self.keys))
        return StackedPlan(ids, mask, keys, self.last_step)

    def clients_by_last_step(self) -> dict[int, Ids]:
        """Step -> the slots that finish with it, in the order of steps."""
        ends = np.unique(self.last_step[self.last_step >= 0])
        return {int(s): np.flatnonzero(self.last_step == s) for s in ends}


class Step(Protocol):
    """One local step of many clients, on tensors that stay in place from step to step."""

    @property
    def w(self) -> Params:
        """Leaves (slots, ...)."""
        ...

    @property
    def total_loss(self) -> Tensor:
        """(slots,) summed over the steps so far."""
        ...

    def start(self, block: Block, plan: StackedPlan) -> None:
        """Put a block in place."""
        ...

    def advance(self, num_steps: int) -> None: ...


def train_slots(step: Step, block: Block, plan: StackedPlan, into: BlockResult) -> None:
    """Train the clients of a block and write their models and losses into `into`."""
    step.start(block, plan)
    finishing = plan.clients_by_last_step()
    if any(not each.num_steps for each in block.plans):  # such clients keep their models
        for name, leaf in block.w0.items():
            into.params[name].copy_(leaf)
    device = next(iter(into.params.values())).device
    done = 0
    for s, slots in finishing.items():
        step.advance(s + 1 - done)
        done = s + 1
        places = torch.from_numpy(slots).to(device)
        # A finished client is frozen: momentum, FedProx or SCAFFOLD would still move it.
        for name, leaf in step.w.items():
            _copy_rows(into.params[name], leaf.detach(), places)
    count = np.maximum([each.num_steps for each in block.plans], 1)
    into.loss[:] = step.total_loss[: len(count)].cpu().numpy() / count


def _copy_rows(into: Tensor, leaf: Tensor, places: Tensor) -> None:
    if len(places) == len(into):  # all of them, so dummies come after
        into.copy_(leaf[: len(into)])
    else:
        into.index_copy_(0, places, leaf.index_select(0, places))


def fill(slots: Tensor, leaf: Tensor) -> None:
    """Copy the clients' rows into their slots, and the first row into those of dummies."""
    slots[: len(leaf)].copy_(leaf)
    slots[len(leaf) :].copy_(leaf[:1].expand_as(slots[len(leaf) :]))


def elementwise_optimizer(
    training: Training, module: LightningModule, leaves: Params, capturable: bool = False
) -> torch.optim.Optimizer:
    """An optimiser that steps a stack of models as it steps each one."""
    optimizer = training.make_optimizer(module, leaves, capturable)
    if not isinstance(optimizer, ELEMENTWISE):
        raise ExperimentError(
            f"engine vectorized cannot use {type(optimizer).__name__}: it does not step "
            "element by element; known: SGD, Adam, AdamW; choose execution.engine=loop"
        )
    return optimizer


@dataclass(frozen=True)
class StackedHook:
    """The algorithm's hook, written for one client, over all slots at once."""

    gradient: Gradient
    gradient_at: GradientAt
    module_name: str

    @cached_property
    def _all_clients(self) -> Callable[..., tuple[Params, Tensor]]:
        stacked: Callable[..., tuple[Params, Tensor]] = vmap(self._one_client)
        return stacked

    def __call__(
        self, w: Params, w0: Params, memo: Params, batches: tuple[BatchParts, ...]
    ) -> tuple[Params, Tensor]:
        """Directions (slots, ...) to step along, and the losses (slots,) of the steps."""
        try:
            found = self._all_clients(w, w0, memo, batches)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            first_line = str(error).split("\n")[0]
            raise ExperimentError(
                f"engine vectorized cannot run {self.module_name}: {first_line} "
                "Choose execution.engine=loop"
            ) from error
        return found

    def _one_client(
        self, w: Params, w0: Params, memo: Params, batches: tuple[BatchParts, ...]
    ) -> tuple[Params, Tensor]:
        losses = []  # of the calls of grad in this step
        first, *second = (LocalBatch(*parts) for parts in batches)
        batch = replace(first, second=second[0]) if second else first

        def grad(at: Params, batch: LocalBatch) -> Params:
            gradients, loss = self.gradient_at(at, batch)
            losses.append(loss)
            return gradients

        direction = self.gradient(grad, w, batch, w0, memo)
        return direction, losses[0]

"""Index plans of a block as tensors, with a slot for each client and dummies in slots left over."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flray.data.dataset import Ids
from flray.engines.engine import Block


@dataclass(frozen=True)
class StackedPlan:
    """The plans of a block as tensors: K slots, S steps, b batches per step, B examples per batch.

    Slots without a client, and steps that a client does not take, have a mask that is False.
    """

    ids: Tensor  # (K, S, b, B) example ids
    mask: Tensor  # (K, S, b, B)
    keys: Tensor  # (K, S, b) for dropout and augmentation
    last_step: Ids  # (K,) -1 for a dummy and for a client without steps
    weight: Tensor | None = None  # (K, S, b, B) of the losses; None: all count alike

    @classmethod
    def of(cls, block: Block, num_slots: int, device: torch.device) -> "StackedPlan":
        """The plans of a block of at most `num_slots` clients, on the device.

        S is the largest number of steps among them, so that shapes depend on the block; ids of
        steps and slots that do not count are 0, a valid id.
        """
        batches = block.plans[0].ids.shape[1:]  # (b, B)
        num_steps = max(plan.num_steps for plan in block.plans)
        ids = np.zeros((num_slots, num_steps, *batches), dtype=np.int64)
        mask = np.zeros((num_slots, num_steps, *batches), dtype=np.bool_)
        keys = np.zeros((num_slots, num_steps, batches[0]), dtype=np.int64)
        last = np.full(num_slots, -1, dtype=np.int64)
        weight = np.zeros(ids.shape) if block.plans[0].weight is not None else None
        for k, plan in enumerate(block.plans):
            ids[k, : plan.num_steps] = plan.ids
            mask[k, : plan.num_steps] = plan.mask
            keys[k, : plan.num_steps] = plan.keys
            last[k] = plan.num_steps - 1
            if weight is not None and plan.weight is not None:
                weight[k, : plan.num_steps] = plan.weight
        tensors = [torch.from_numpy(array).to(device) for array in (ids, mask, keys)]
        weights = None if weight is None else torch.from_numpy(weight).to(device)
        return cls(tensors[0], tensors[1], tensors[2], last, weights)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """ids, mask, keys and, where there are any, weights."""
        plan = (self.ids, self.mask, self.keys)
        return plan if self.weight is None else (*plan, self.weight)

    def copied(self) -> "StackedPlan":
        """The same plan in other memory."""
        ids, mask, keys, *weight = (tensor.clone() for tensor in self.tensors)
        return StackedPlan(ids, mask, keys, self.last_step, *weight)

    @property
    def num_steps(self) -> int:
        """S, the steps of the client that takes most."""
        return self.ids.shape[1]

    def clients_by_last_step(self) -> dict[int, Ids]:
        """Step -> the slots that finish with it, in the order of steps."""
        ends = np.unique(self.last_step[self.last_step >= 0])
        return {int(s): np.flatnonzero(self.last_step == s) for s in ends}

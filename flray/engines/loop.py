"""Engine `loop`: one client after another, one step after another; the plain reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torchmetrics import Metric

from flray.data.pixels import Examples
from flray.engines.engine import Block, BlockResult
from flray.engines.logged import Logged, logged, means
from flray.engines.losses import BatchLoss, along, direction_and_loss, step_batch
from flray.engines.plan import IndexPlan
from flray.engines.training import Gradient, Training
from flray.models.bank import Params, load_params, params_of, stack, trainable
from flray.models.generator import seeded_generator


@dataclass(frozen=True)
class Loop:
    """Runs any LightningModule, with BatchNorm statistics and without `example_losses` too.

    One client after another through the module itself: nothing is stacked, padded or recorded, so
    this engine is what the others are compared with.
    """

    module: LightningModule
    examples: Examples

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Train one client after another; the contract is that of `Engine.train`."""

        def train_client(plan: IndexPlan, w0: Params, memo: Params, extra: Params) -> float:
            start = Block((plan,), w0, memo)
            return self._train_client(start, extra, training, gradient)

        return train_one_by_one(self.module, self.examples.device, block, training, train_client)

    def _train_client(
        self, client: Block, extra: Params, training: Training, gradient: Gradient
    ) -> float:
        """Train the module and extra leaves in place; returns the mean loss over the steps.

        Args:
            client: the plan, and leaves without client axis.
        """
        (plan,), w0, memo = client.plans, client.w0, client.memo
        batch_loss, parameters = BatchLoss(self.module), trainable(self.module) | extra
        optimizer, schedule = training.make_scheduled(self.module, parameters)
        total = torch.zeros((), device=self.examples.device, dtype=torch.float64)
        # The module's own params, by name: they share its memory, so steps are seen in them.
        w = {name: p.detach() for name, p in parameters.items()}
        for step in range(plan.num_steps):
            batch = step_batch(plan, step, self.module, self.examples)
            at = batch_loss.gradient_at
            direction, loss = direction_and_loss(gradient, at, w, batch, w0, memo)
            total += loss
            for name, p in parameters.items():
                # An optimiser passes over a parameter without gradient, decay and momentum too
                p.grad = along(direction, name, gradient) if training.moves(name) else None
            optimizer.step()
            if schedule is not None:
                schedule.after(step + 1, plan.num_steps // training.epochs)
        return float(total) / max(plan.num_steps, 1)


def train_one_by_one(
    module: LightningModule,
    device: torch.device,
    block: Block,
    training: Training,
    train_client: Callable[[IndexPlan, Params, Params, Params], float],
) -> BlockResult:
    """Train the module anew for each client of a block.

    Each client starts from its row of the block with a generator of its own, so that no client
    depends on those before it. The module is left with the weights of the last one; buffers that
    do not travel, such as a counter of steps, are left as they were.

    Args:
        train_client: trains the module and the leaves beside it in place, from a plan, w0, memo
            and those leaves of the client, all without client axis, and returns the mean loss
            over its steps.
    """
    trained: list[Params] = []
    losses: list[float] = []
    logs: list[Logged] = []
    for k, plan in enumerate(block.plans):
        w0, memo = ({n: leaf[k] for n, leaf in rows.items()} for rows in (block.w0, block.memo))
        load_params(module, w0)
        extra = {name: w0[name].clone() for name in w0.keys() - params_of(module).keys()}
        module.train()  # Lightning leaves it in evaluation mode
        # A module's own nn.Dropout draws from torch's generator: by seed, round and client alone.
        seed = int(plan.keys[0, 0]) if plan.num_steps else None
        with seeded_generator(seed, device), logged(module) as values, restored_state(module):
            losses.append(train_client(plan, w0, memo, extra))
        logs.append(values)
        after = params_of(module) | extra
        moved = {n: after[n] if training.moves(n) else start for n, start in w0.items()}
        trained.append({n: leaf.clone() for n, leaf in moved.items()})
    return BlockResult(stack(trained), np.array(losses), means(logs))


@contextmanager
def restored_state(module: LightningModule) -> Iterator[None]:
    """Undo what is done inside the `with` block to the state that does not travel.

    These are buffers that are not persistent or of whole numbers, and what metrics have seen.
    """
    travelling = params_of(module)
    before = {n: b.clone() for n, b in module.named_buffers() if n not in travelling}
    try:
        yield
    finally:
        for name, buffer in before.items():
            layer, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(layer), leaf, buffer)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.reset()

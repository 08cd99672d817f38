"""Engine `loop`: one client after another, one step after another; the plain reference."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.data.pixels import Examples
from flray.engines.engine import Block, BlockResult
from flray.engines.logged import Logged, logged, means
from flray.engines.losses import BatchLoss, step_batch
from flray.engines.plan import IndexPlan
from flray.engines.training import Gradient, LocalBatch, Training
from flray.models.bank import Params, load_params, params_of, stack, trainable


class Loop:
    """Runs any LightningModule, with BatchNorm statistics and without `example_losses` too."""

    def __init__(self, module: LightningModule, examples: Examples) -> None:
        self.module = module
        self.examples = examples
        self.batch_loss = BatchLoss(module)

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        self.module.train()
        trained = []
        losses = []
        told: list[Logged] = []
        for k, plan in enumerate(block.plans):
            w0 = {name: leaf[k] for name, leaf in block.w0.items()}
            memo = {name: leaf[k] for name, leaf in block.memo.items()}
            with own_generator(plan, self.examples.device), logged(self.module) as values:
                params, loss = self._train_client(plan, w0, memo, training, gradient)
            trained.append(params)
            losses.append(loss)
            told.append(values)
        return BlockResult(stack(trained), np.array(losses), means(told))

    def _train_client(
        self, plan: IndexPlan, w0: Params, memo: Params, training: Training, gradient: Gradient
    ) -> tuple[Params, float]:
        load_params(self.module, w0)
        parameters = trainable(self.module)
        optimizer, schedule = training.make_scheduled(self.module, parameters)
        steps_per_epoch = plan.num_steps // training.epochs
        total = torch.zeros((), device=self.examples.device, dtype=torch.float64)
        losses: list[Tensor] = []  # of the calls of grad in one step

        # The module's own params, by name: they share its memory, so steps are seen in them.
        w = {name: p.detach() for name, p in parameters.items()}

        def grad(at: Params, batch: LocalBatch) -> Params:
            if at is w:
                gradients, loss = self.batch_loss.gradient_here(parameters, batch)
            else:
                gradients, loss = self.batch_loss.gradient_at(at, batch)
            losses.append(loss)
            return gradients

        for step in range(plan.num_steps):
            batch = step_batch(plan, step, self.module, self.examples)
            losses.clear()
            direction = gradient(grad, w, batch, w0, memo)
            total += losses[0]
            for name, p in parameters.items():
                p.grad = direction[name]
            optimizer.step()
            if schedule is not None:
                schedule.after(step + 1, steps_per_epoch)
        trained = {name: leaf.clone() for name, leaf in params_of(self.module).items()}
        return trained, float(total) / max(plan.num_steps, 1)


@contextmanager
def own_generator(plan: IndexPlan, device: torch.device) -> Iterator[None]:
    """Layers that draw from torch's generator (a user's nn.Dropout) get one seeded by the plan.

    The generator stays as it is for a plan without steps, which draws nothing.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if plan.num_steps:
            torch.random.manual_seed(int(plan.keys[0, 0]))
        yield

"""Engine `loop`: one client after another, one step after another; the plain reference."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from pytorch_lightning import LightningModule

from flray.client.engine import Block, BlockResult
from flray.client.losses import BatchLoss
from flray.client.plan import Plan
from flray.client.training import Gradient, LocalBatch, Training
from flray.data.pixels import Examples
from flray.models.bank import Params, load_params, params_of, stack, trainable
from flray.models.dropout import dropout_keys


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
        for k, plan in enumerate(block.plans):
            w0 = {name: leaf[k] for name, leaf in block.w0.items()}
            memo = {name: leaf[k] for name, leaf in block.memo.items()}
            with _own_generator(plan, self.examples.device):
                params, loss = self._train_client(plan, w0, memo, training, gradient)
            trained.append(params)
            losses.append(loss)
        return BlockResult(stack(trained), np.array(losses))

    def _train_client(
        self, plan: Plan, w0: Params, memo: Params, training: Training, gradient: Gradient
    ) -> tuple[Params, float]:
        load_params(self.module, w0)
        parameters = trainable(self.module)
        optimizer = training.make_optimizer(self.module, parameters)
        total = torch.zeros((), device=self.examples.device, dtype=torch.float64)

        def grad(w: Params, batch: LocalBatch) -> Params:
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in w.items()}
            loss = self.batch_loss.at(leaves, batch)
            total.add_(loss.detach())
            wrt = list(leaves.values())
            gradients = torch.autograd.grad(loss, wrt, allow_unused=True, materialize_grads=True)
            return dict(zip(leaves, gradients, strict=True))

        for step in range(plan.num_steps):
            w = {name: p.detach() for name, p in parameters.items()}
            direction = gradient(grad, w, self._batch(plan, step), w0, memo)
            for name, p in parameters.items():
                p.grad = direction[name]
            optimizer.step()
        trained = {name: leaf.clone() for name, leaf in params_of(self.module).items()}
        return trained, float(total) / max(plan.num_steps, 1)

    def _batch(self, plan: Plan, step: int) -> LocalBatch:
        device = self.examples.device
        real = plan.mask[step]
        ids = torch.from_numpy(plan.ids[step][real]).to(device)
        key = torch.tensor(int(plan.keys[step]), device=device)
        x, y = self.examples.training_batch(ids[None], key[None])
        return LocalBatch(x[0], y[0], None, dropout_keys(self.module, key))


@contextmanager
def _own_generator(plan: Plan, device: torch.device) -> Iterator[None]:
    """Layers that draw from torch's generator (a user's nn.Dropout) get one seeded by the plan."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.random.manual_seed(int(plan.keys[0]))
        yield

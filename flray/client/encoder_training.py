"""Training of encoders with Adam: centrally, and client after client with its state carried on."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.client.host import in_evaluation
from flray.data.pixels import Examples
from flray.engines.losses import BatchLoss
from flray.engines.training import LocalBatch
from flray.models.bank import Params, load_params, params_of, trainable

# What is carried from client to client beside the params, under names that no parameter can have.
EPOCH, STEP, MOMENTS = "adam/epoch", "adam/step", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class EncoderTraining:
    """Settings of Adam over batches of examples, with a rate that is halved now and then.

    FLT trains encoders this way, centrally and on clients.
    """

    epochs: int  # J of FLT, epochs per client or in all
    batch_size: int
    lr: float
    halve_every: int  # epochs after which the rate is halved; 0: never
    most_steps: int | None = None  # steps of a client's epoch at most; None: all of them

    def lr_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0.

        >>> training = EncoderTraining(epochs=5, batch_size=64, lr=1.0, halve_every=10)
        >>> training.lr_at(9), training.lr_at(10), training.lr_at(20)
        (1.0, 0.5, 0.25)
        """
        return self.lr * 0.5 ** (epoch // self.halve_every) if self.halve_every else self.lr


def fine_tune(
    module: LightningModule,
    examples: Examples,
    ids: Tensor,
    carried: Params,
    training: EncoderTraining,
) -> Params:
    """Train the module on one client's examples, in their order, from where another left off.

    Returns what the next client goes on from: the encoder's params, Adam's moments and step, and
    the number of epochs so far. It shares no memory with `carried`, which is not changed.

    Args:
        module: changed in place.
        ids: (n,) example ids of the client, on the device of the examples.
        carried: as returned for the client before; params alone if nobody has trained yet.
    """
    load_params(module, carried)
    optimizer = torch.optim.Adam(trainable(module).values(), lr=training.lr)
    _restore(optimizer, module, carried)
    first = int(carried[EPOCH]) if EPOCH in carried else 0
    batches = torch.split(ids, training.batch_size)[: training.most_steps]
    for epoch in range(first, first + training.epochs):
        run_epoch(module, optimizer, examples, batches, training.lr_at(epoch))
    params = {name: leaf.clone() for name, leaf in params_of(module).items()}
    epochs = torch.tensor(first + training.epochs)
    return {**params, **_state_of(optimizer, module), EPOCH: epochs}


def run_epoch(
    module: LightningModule,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    batches: Iterable[Tensor],
    lr: float,
) -> float:
    """Train the module for one epoch; returns the mean loss over its examples.

    Losses are those before each step, as they come, weighted by the size of their batch.

    Args:
        module: Changed in place.
        optimizer: Over the parameters of the module; its state goes on from epoch to epoch.
        examples: Where ids are looked up; pixels are not augmented.
        batches: Example ids of each step, on the device of the examples; at least one batch.
        lr: The learning rate of the epoch, which replaces that of the optimiser.
    """
    module.train()
    for group in optimizer.param_groups:
        group["lr"] = lr
    batch_loss = BatchLoss(module)
    total = torch.zeros((), device=examples.device, dtype=torch.float64)
    num_examples = 0
    for ids in batches:
        loss = batch_loss(LocalBatch(*examples.batch(ids), None, {}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(ids)
        num_examples += len(ids)
    return float(total) / num_examples


def mean_loss(module: LightningModule, examples: Examples, ids: Tensor) -> float:
    """The mean loss over the examples, in evaluation mode.

    Args:
        module: The module, which is left in evaluation mode.
        examples: Where ids are looked up.
        ids: (n,) example ids on the device of the examples, n > 0.
    """
    batch_loss = BatchLoss(module)
    total = torch.zeros((), device=examples.device, dtype=torch.float64)
    for loss in in_evaluation(
        module,
        examples,
        ids,
        lambda batch: batch_loss(LocalBatch(*batch, None, {})) * len(batch[1]),
    ):
        total += loss
    return float(total) / len(ids)


def _restore(optimizer: torch.optim.Optimizer, module: LightningModule, carried: Params) -> None:
    """Give Adam copies of the moments that are carried, and its step."""
    for name, p in trainable(module).items():
        if f"{MOMENTS[0]}/{name}" not in carried:
            continue
        # torch.tensor copies, and Adam reads its step on the CPU.
        optimizer.state[p] = {"step": torch.tensor(float(carried[STEP]))}
        for moment in MOMENTS:
            received = carried[f"{moment}/{name}"]
            optimizer.state[p][moment] = received.to(p, copy=True)


def _state_of(optimizer: torch.optim.Optimizer, module: LightningModule) -> Params:
    """Adam's moments by name, and its step, which all parameters share."""
    state: Params = {}
    for name, p in trainable(module).items():
        if adam := optimizer.state.get(p):  # none for a parameter that the loss does not reach
            state |= {f"{moment}/{name}": adam[moment] for moment in MOMENTS}
            state[STEP] = adam["step"]
    return state

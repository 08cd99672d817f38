"""Engine `lightning`: a real `Trainer.fit` for each client, with the user's callbacks."""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from flray.data.pixels import Examples
from flray.engines.engine import Block, BlockResult
from flray.engines.loop import train_one_by_one
from flray.engines.losses import BatchLoss, along, direction_and_loss, step_batch, unpadded_batch
from flray.engines.plan import IndexPlan
from flray.engines.training import Gradient, LocalBatch, Training
from flray.models.bank import Params, trainable
from flray.models.predictor import Batch

MakeCallback = Callable[[], Callback]


@dataclass(frozen=True)
class Lightning:
    """Runs whatever Lightning runs: callbacks, schedulers, hooks.

    Costs about 15 ms per client more than `Loop`, and agrees with it bit by bit. Lightning computes
    the gradient at (w, batch) in every step, so layers with running statistics see that pass even
    where the hook asks for other gradients only.
    """

    module: LightningModule
    examples: Examples
    callbacks: tuple[MakeCallback, ...] = ()  # built anew for each client and round

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Train each client with a Trainer of its own; the contract is that of `Engine.train`.

        Trainers log nothing, keep no checkpoints and do not validate. The logging of Lightning is
        set to errors for the whole process.
        """
        # Otherwise each Trainer logs the devices of the machine.
        for name in ("pytorch_lightning", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)

        def train_client(plan: IndexPlan, w0: Params, memo: Params, extra: Params) -> float:
            local = LocalEquation(plan, self.examples, training, gradient, w0, memo, extra)
            if plan.num_steps:
                self._fit(local, training)
            return local.mean_loss()

        return train_one_by_one(self.module, self.examples.device, block, training, train_client)

    def _fit(self, local: "LocalEquation", training: Training) -> None:
        """Run `Trainer.fit` over the planned batches; the local equation is the last callback."""
        device = self.examples.device
        make_trainer, make_environment = lightning_of(self.module)
        trainer = make_trainer(
            max_epochs=training.epochs,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            callbacks=[*(make() for make in self.callbacks), local],
            plugins=[make_environment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
        batches = PlannedBatches(local.plan, self.module, self.examples, training.epochs)
        with _optimizer_set(self.module, training, local.extra), warnings.catch_warnings():
            # Lightning itself calls torch in a deprecated way.
            warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")
            # Advice on the use of a Trainer, repeated for each client and round.
            warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning\.pytorch)\..*")
            trainer.fit(self.module, batches)
        self.module.to(device)  # Lightning leaves a module on the CPU
        self.module.trainer = None  # a module that logs in forward is evaluated without one


def lightning_of(
    module: LightningModule,
) -> tuple[Callable[..., Trainer], Callable[[], LightningEnvironment]]:
    """Trainer and environment of the package that a module's class comes from.

    There are two, `pytorch_lightning` and `lightning`, whose Trainers refuse each other's modules.
    """
    if isinstance(module, LightningModule):
        return Trainer, LightningEnvironment
    fabric = importlib.import_module("lightning.fabric.plugins.environments")
    return importlib.import_module("lightning.pytorch").Trainer, fabric.LightningEnvironment


@dataclass
class PlannedBatches:
    """The first batch of each step of a plan; each pass over them is the next epoch.

    What a Trainer takes for a data loader: batches are (x, y) without padding. The second batch of
    a paired step reaches the hook through `LocalEquation`.
    """

    plan: IndexPlan
    module: LightningModule
    examples: Examples
    epochs: int
    epoch: int = 0

    def __len__(self) -> int:
        return self.plan.num_steps // self.epochs

    def __iter__(self) -> Iterator[Batch]:
        first = self.epoch * len(self)
        self.epoch += 1
        for step in range(first, first + len(self)):
            batch = unpadded_batch(self.plan, (step, 0), self.module, self.examples)
            yield batch.x, batch.y


@dataclass
class LocalEquation(Callback):
    """A callback that replaces the gradient by the algorithm's direction, before each step.

    Lightning's own gradient is used if the hook asks for it, so a plain step costs no second pass.
    """

    plan: IndexPlan
    examples: Examples
    training: Training
    gradient: Gradient
    w0: Params
    memo: Params
    extra: Params  # leaves beside the module's, which steps change
    losses: list[Tensor] = field(default_factory=list)  # of the first call of grad in each step
    loss: Tensor | None = None  # of the batch, once Lightning has computed it

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Give the module's dropout layers the keys of the step."""
        step = trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
        self.loss = None
        self.batch = step_batch(self.plan, step, pl_module, self.examples)
        for name, layer_key in self.batch.keys.items():
            pl_module.get_buffer(name).copy_(layer_key)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Remember the loss that Lightning has computed."""
        self.loss = loss.detach()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        loss = self.loss
        if loss is None:  # Lightning would leave out the batch, and so change what is trained
            raise TypeError(
                f"{type(pl_module).__name__}.training_step must return a loss, or a dict with the "
                "key 'loss', got NoneType"
            )
        parameters = trainable(pl_module) | self.extra
        w = {name: p.detach() for name, p in parameters.items()}
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in parameters.items()
        }

        def gradient_at(at: Params, batch: LocalBatch) -> tuple[Params, Tensor]:
            is_known = at is w and batch is self.batch and batch.weight is None
            if is_known:  # Lightning has computed this one
                return gradients, loss
            return BatchLoss(pl_module).gradient_at(at, batch)

        direction, first_loss = direction_and_loss(
            self.gradient, gradient_at, w, self.batch, self.w0, self.memo
        )
        self.losses.append(first_loss.double())
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in parameters.items():
            if id(p) in stepped:  # the others are another optimiser's, which asks again
                is_moved = self.training.moves(name)
                p.grad = along(direction, name, self.gradient) if is_moved else None

    def mean_loss(self) -> float:
        """The mean loss over the steps so far; 0 without steps."""
        return float(torch.stack(self.losses).sum()) / len(self.losses) if self.losses else 0.0


@contextmanager
def _optimizer_set(module: LightningModule, training: Training, extra: Params) -> Iterator[None]:
    """Make the experiment's optimiser the module's inside the `with` block, unless it is that."""
    if training.optimizer == "module":
        yield
        return
    # An attribute of the instance hides the method of its class, for Lightning too.
    parameters = trainable(module) | extra
    module.configure_optimizers = lambda: training.make_optimizer(module, parameters)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_optimizers

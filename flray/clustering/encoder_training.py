"""Pre-training of an encoder on the server: epochs, checkpoints between them, the best one kept."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from flray.client.encoder_training import mean_loss, run_epoch
from flray.client.host import restored_torch_settings
from flray.data.dataset import Ids
from flray.data.pixels import Examples
from flray.files import replace_file
from flray.models.bank import Params, params_of
from flray.models.generator import seeded_generator

_log = logging.getLogger("flray")


@dataclass(frozen=True)
class Epoch:
    """Losses and duration of one epoch of pre-training."""

    epoch: int  # number of the epoch, from 1
    epochs: int
    lr: float
    train_loss: float  # mean over the epoch's examples, while training
    validation_loss: float
    seconds: float = field(default=0.0, compare=False)


OnEpoch = Callable[[Epoch], None]


def log_epoch(epoch: Epoch) -> None:
    """Report an epoch to the log of flray."""
    _log.info(
        "encoder: epoch %d/%d, train loss %.5f, validation loss %.5f, %s",
        epoch.epoch,
        epoch.epochs,
        epoch.train_loss,
        epoch.validation_loss,
        time_left(epoch),
    )


def time_left(epoch: Epoch) -> str:
    """How long the epochs that remain will take.

    >>> time_left(Epoch(2, 5, 0.1, 1.0, 1.0, seconds=30.0))
    '1:30 left'
    """
    left = round(epoch.seconds * (epoch.epochs - epoch.epoch))
    return f"{left // 60}:{left % 60:02d} left"


@dataclass(frozen=True)
class Progress:
    """The file that keeps the state of a training after each epoch.

    A state is used only by a training of the same key on the same kind of device.
    """

    path: Path
    key: str  # key of the encoder
    device: str  # cpu or cuda

    def read(self) -> dict[str, Any] | None:  # Any: what torch.save wrote
        """The state that an earlier training has left; None: nothing that can be used."""
        if not self.path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            return state if (state["key"], state["device"]) == (self.key, self.device) else None
        except (OSError, RuntimeError, LookupError, UnpicklingError) as error:
            _log.warning(
                "%s cannot be read, the encoder is trained from its start: %s", self.path, error
            )
            return None

    def write(self, state: dict[str, Any]) -> None:
        """Replace the file."""
        marked = {"key": self.key, "device": self.device, **state}
        replace_file(self.path, partial(torch.save, marked))


@dataclass
class EncoderRun:
    """A training between two epochs; mutable, and kept by `Progress`."""

    module: LightningModule
    optimizer: Optimizer
    device: torch.device
    epoch: int = 0  # epochs done
    lowest: float = math.inf  # validation loss
    kept: Params | None = None  # params after the epoch with the lowest validation loss

    def train_epoch(self, examples: Examples, order: Ids, batch_size: int, lr: float) -> float:
        """Train for one epoch over the examples in this order; the mean loss."""
        batches = torch.split(torch.from_numpy(order).to(self.device), batch_size)
        self.epoch += 1
        return run_epoch(self.module, self.optimizer, examples, batches, lr)

    def judge(self, examples: Examples, judged: Ids) -> float:
        """The loss on the validation examples; keeps the params if it is the lowest so far."""
        loss = mean_loss(self.module, examples, torch.from_numpy(judged).to(self.device))
        if loss < self.lowest:
            params = params_of(self.module)
            self.lowest = loss
            self.kept = {name: leaf.cpu().clone() for name, leaf in params.items()}
        return loss

    def state(self) -> dict[str, Any]:  # Any: tensors, numbers and state dicts
        """Everything that the next epochs depend on."""
        return {
            "epoch": self.epoch,
            "lowest": self.lowest,
            "kept": self.kept,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": _generators(self.device),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, torch's generators included."""
        self.epoch, self.lowest, self.kept = (state[k] for k in ("epoch", "lowest", "kept"))
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generators"][0])
        if self.device.type != "cpu":
            torch.cuda.set_rng_state(state["generators"][1], self.device)


def _generators(device: torch.device) -> list[Tensor]:
    """The states of torch's generators that layers may draw from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.cuda.get_rng_state(device)]


@contextmanager
def same_bits(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block, torch computes the same result every time on one kind of device."""
    exact = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with restored_torch_settings(), seeded_generator(seed, device), exact:
        torch.set_num_threads(1)  # their number changes the last bits of a convolution on a CPU
        yield

"""An encoder trained centrally, before any federation: what FLT's clients embed their data with.

Jamali-Rad, Abdizadeh, Singh: Federated Learning With Taskonomy for Non-IID Data. IEEE TNNLS 2022,
arXiv 2103.15947, section IV. Enc1 knows the clients' kind of data, Enc2 a foreign dataset. Once
trained, an encoder is kept on disk by a hash of its configuration.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flray.client.embedding import PixelScale, rescaled
from flray.client.encoder_training import EncoderTraining, mean_loss, run_epoch, seeded_generator
from flray.client.host import restored_torch_settings
from flray.columns import PARAMS_SHA256
from flray.data import DATASETS
from flray.data.dataset import Dataset, Ids
from flray.data.pixels import Examples, tensor_over
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import Params, build_seeded, digest, params_of, stack
from flray.randomness import generator, torch_seed
from flray.values import FROM_DATASET, Seed

FORMAT = 2  # of training and files: raise it when the same configuration gives other params
NAME_LENGTH = 16  # of a folder in the cache, of the 64 digits of a key
PARAMS_FILE, RECORD_FILE = "encoder.safetensors", "encoder.json"
UNFINISHED_FILE = "unfinished.pt"  # the state after an epoch, from which training goes on
_NEEDED = ("key", *FROM_DATASET, PARAMS_SHA256)  # of a record, to use it

_log = logging.getLogger("flray")


@dataclass(frozen=True)
class Epoch:
    """How pre-training went in one epoch."""

    epoch: int  # from 1
    epochs: int
    lr: float
    train_loss: float  # mean over the epoch's examples, while training
    validation_loss: float
    seconds: float = field(default=0.0, compare=False)


OnEpoch = Callable[[Epoch], None]


@dataclass(frozen=True)
class ImageKind:
    """What a module is built for."""

    image_shape: tuple[int, ...]  # channels, height, width
    num_classes: int


def log_epoch(epoch: Epoch) -> None:
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


def server_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Encoder:
    """An autoencoder of a dataset's training images; test images are never looked at.

    The epoch with the lowest loss on the validation images is kept, which are drawn from the
    training images and not trained on.
    """

    # Any: what a registry or `package.module:Name` holds.

    # Dataset whose training images the encoder is trained on
    dataset: Annotated[Any, "dataset", DATASETS]
    # Model with `encode(x)`, built for the images of the dataset
    model: Annotated[Any, "model", MODELS, FROM_DATASET]
    epochs: int = 40  # Number of epochs; the one with the lowest validation loss is kept
    batch_size: int = 64  # Examples per step
    lr: float = 1e-3  # Learning rate of Adam
    halve_every: int = 10  # Epochs after which the learning rate is halved; 0: never
    # Scale of pixels. unit: [0, 1]; signed: [-1, 1], FLT's choice for CIFAR
    pixels: PixelScale = "unit"
    # Share of the training images for validation; 0: train on all and judge by them
    validation: float = 0.1
    seed: Seed = 0  # Seed of the training

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("halve_every", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be > 0, got {self.lr}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be in [0, 1), got {self.validation}")
        target = _target(self.model)
        if isinstance(target, type) and not hasattr(target, "encode"):
            fit = ", ".join(sorted(name for name, m in MODELS.items() if hasattr(m, "encode")))
            raise ValueError(f"model must have encode(x), got {target.__name__}; choose {fit}")

    def load_or_train(self, device: str, on_epoch: OnEpoch = log_epoch) -> Params:
        """The trained params on the CPU, from the cache or into it."""
        if (cached := self._read_params()) is not None:
            return cached
        epochs: list[Epoch] = []

        def note(epoch: Epoch) -> None:
            epochs.append(epoch)
            on_epoch(epoch)

        dataset: Dataset = self.dataset.load()
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = self.folder / UNFINISHED_FILE
        params = self.train(device, note, dataset, progress)
        self._write(params, _kind_of(dataset), epochs, device)
        progress.unlink(missing_ok=True)
        return params

    def epochs_done(self) -> int:
        """How many epochs an earlier training that was cut short has left to go on from."""
        checkpoint = _read_progress(self.folder / UNFINISHED_FILE, self.key(), "cpu")
        return 0 if checkpoint is None else int(checkpoint["epoch"])

    @property
    def dataset_name(self) -> str:
        """The registered name of the dataset, or else the path of its class."""
        target = _target(self.dataset)
        return next((name for name, known in DATASETS.items() if known is target), _path(target))

    def train(
        self,
        device: str,
        on_epoch: OnEpoch = log_epoch,
        dataset: Dataset | None = None,
        progress: Path | None = None,
    ) -> Params:
        """The trained params on the CPU; the same ones for the same seed and kind of device.

        Args:
            dataset: the loaded one, where somebody has it already.
            progress: the file that keeps the state after each epoch, to go on from.
        """
        dataset = dataset or self.dataset.load()
        place = torch.device(device)
        with same_bits(torch_seed(self.seed, "encoder layers"), place):
            return self._best_epoch(dataset, place, on_epoch, progress)

    def kind(self) -> ImageKind:
        """Of the dataset, which need not be there once the encoder is in the cache."""
        record = self._read_record()
        if record is None:
            return _kind_of(self.dataset.load())
        return ImageKind(tuple(record["image_shape"]), record["num_classes"])

    def module(self, kind: ImageKind) -> LightningModule:
        """The module before training, its weights from the seed."""
        wanted = inspect.signature(self.model).parameters
        given = {k: v for k, v in dataclasses.asdict(kind).items() if k in wanted}
        try:
            return build_seeded(lambda: self.model(**given), torch_seed(self.seed, "encoder"))
        except ValueError as error:
            raise ExperimentError(f"encoder model {_path(_target(self.model))}: {error}") from error

    def training(self, epochs: int) -> EncoderTraining:
        return EncoderTraining(epochs, self.batch_size, self.lr, self.halve_every)

    def examples(self, images: NDArray[Any], labels: Ids, device: torch.device) -> Examples:
        """Images as the encoder sees them: pixels on its scale, not the dataset's."""
        every = torch.arange(len(images), device=device)
        ones = torch.ones(images.shape[1], 1, 1, device=device)
        placed = [tensor_over(array).to(device) for array in (images, labels)]
        return rescaled(Examples(placed[0], every, placed[1], ones, ones, "none"), self.pixels)

    def configuration(self) -> dict[str, Any]:  # Any: JSON
        """Everything that decides the result on one kind of device."""
        numbers = ("epochs", "batch_size", "lr", "halve_every", "pixels", "validation", "seed")
        return {
            "format": FORMAT,
            "dataset": _described(self.dataset),
            "model": _described(self.model),
            **{name: getattr(self, name) for name in numbers},
        }

    def key(self) -> str:
        text = json.dumps(self.configuration(), sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """Where the cache has it, or would."""
        return cache_folder() / "encoders" / self.key()[:NAME_LENGTH]

    def is_cached(self) -> bool:
        return self._read_params() is not None

    def parts(self, num_train: int) -> tuple[Ids, Ids]:
        """The training images to train on, and those by which the best epoch is chosen."""
        if self.validation == 0:
            return np.arange(num_train), np.arange(num_train)
        if num_train < 2:
            raise ExperimentError(
                "an encoder needs at least 2 training images, one of them for validation, "
                f"got {num_train}; choose another encoder.dataset, or encoder.validation=0"
            )
        num_judged = min(max(round(self.validation * num_train), 1), num_train - 1)
        order = generator(self.seed, "encoder validation").permutation(num_train)
        return np.sort(order[num_judged:]), np.sort(order[:num_judged])

    def _best_epoch(
        self, dataset: Dataset, device: torch.device, on_epoch: OnEpoch, progress: Path | None
    ) -> Params:
        module = self.module(_kind_of(dataset)).to(device)
        examples = self.examples(dataset.images, dataset.labels, device)
        optimizer = torch.optim.Adam(module.parameters(), lr=self.lr)
        training = self.training(self.epochs)
        trained, judged = self.parts(dataset.num_train)
        lowest, first = math.inf, 0
        kept: Params | None = None
        held = None if progress is None else _read_progress(progress, self.key(), device.type)
        if held is not None:
            first, lowest, kept = held["epoch"], held["lowest"], held["kept"]
            module.load_state_dict(held["module"])
            optimizer.load_state_dict(held["optimizer"])
            set_generators(held["generators"], device)
        for epoch in range(first, self.epochs):
            begin = perf_counter()
            order = generator(self.seed, "encoder order", epoch).permutation(trained)
            batches = torch.split(_placed(order, device), self.batch_size)
            lr = training.lr_at(epoch)
            train_loss = run_epoch(module, optimizer, examples, batches, lr)
            validation_loss = mean_loss(module, examples, _placed(judged, device))
            if validation_loss < lowest:
                lowest, kept = validation_loss, _copied(module)
            if progress is not None:
                state = {
                    "key": self.key(),
                    "device": device.type,
                    "epoch": epoch + 1,
                    "lowest": lowest,
                    "kept": kept,
                    "module": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "generators": generators(device),
                }
                _replace(progress, partial(torch.save, state))
            seconds = perf_counter() - begin
            on_epoch(Epoch(epoch + 1, self.epochs, lr, train_loss, validation_loss, seconds))
        if kept is None:
            raise ExperimentError(
                f"the encoder's loss is not finite in any of {self.epochs} epochs; "
                f"lower its lr, got {self.lr}"
            )
        return kept

    def _read_params(self) -> Params | None:
        """What the cache holds, or None where it has nothing that can be used."""
        record = self._read_record()
        if record is None:
            return None
        path = self.folder / PARAMS_FILE
        try:
            params = load_file(path)
        except (OSError, SafetensorError) as error:
            _log.warning("encoder in %s cannot be read, it is trained anew: %s", path, error)
            return None
        if _sha256(params) != record[PARAMS_SHA256]:
            _log.warning("encoder in %s is not the one that was written, it is trained anew", path)
            return None
        return params

    def _read_record(self) -> dict[str, Any] | None:  # Any: JSON
        path = self.folder / RECORD_FILE
        if not path.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            needed = {name: record[name] for name in _NEEDED}
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.warning("encoder record %s cannot be read, it is trained anew: %s", path, error)
            return None
        return needed if needed["key"] == self.key() else None

    def _write(self, params: Params, kind: ImageKind, epochs: list[Epoch], device: str) -> None:
        record = {
            "key": self.key(),
            "configuration": self.configuration(),
            **dataclasses.asdict(kind),
            "epochs": [dataclasses.asdict(epoch) for epoch in epochs],
            PARAMS_SHA256: _sha256(params),
            "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
            "torch": torch.__version__,
        }
        text = json.dumps(record, indent=1, default=repr)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The record last: where it is, the params are too.
        _replace(self.folder / PARAMS_FILE, lambda path: save_file(params, path))
        _replace(self.folder / RECORD_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def _read_progress(path: Path, key: str, kind: str) -> dict[str, Any] | None:  # Any: of torch.save
    """What a training of this key on this kind of device has left; None: nothing usable."""
    if not path.is_file():
        return None
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint if (checkpoint["key"], checkpoint["device"]) == (key, kind) else None
    except (OSError, RuntimeError, LookupError, UnpicklingError) as error:
        _log.warning("%s cannot be read, the encoder is trained from its start: %s", path, error)
        return None


def generators(device: torch.device) -> list[Tensor]:
    """The states of torch's generators that layers may draw from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.cuda.get_rng_state(device)]


def set_generators(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.cuda.set_rng_state(states[1], device)


def cache_folder() -> Path:
    """FLRAY_CACHE, or flray's folder among the user's caches."""
    if own := os.environ.get("FLRAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flray"


def _kind_of(dataset: Dataset) -> ImageKind:
    return ImageKind(dataset.image_shape, dataset.num_classes)


def _described(component: Any) -> dict[str, Any]:  # Any: a dataset, or a class of models; JSON
    """The path of its class and its whole configuration, defaults included."""
    if isinstance(component, functools.partial | type):
        parameters = inspect.signature(_target(component)).parameters.values()
        fields = {p.name: p.default for p in parameters if p.default is not p.empty}
        fields |= getattr(component, "keywords", {})
    elif dataclasses.is_dataclass(component) and not isinstance(component, type):
        fields = dataclasses.asdict(component)
    else:
        fields = vars(component)
    return {"class": _path(_target(component)), **fields}


def _target(component: object) -> Callable[..., Any]:  # Any: what it builds
    """The class behind an instance, or behind a class that is built later."""
    if isinstance(component, functools.partial):
        return component.func
    return component if isinstance(component, type) else type(component)


def _path(target: Callable[..., Any]) -> str:
    return f"{target.__module__}:{target.__qualname__}"


def _placed(ids: Ids, device: torch.device) -> Tensor:
    return torch.from_numpy(ids).to(device)


def _copied(module: LightningModule) -> Params:
    return {name: leaf.cpu().clone() for name, leaf in params_of(module).items()}


def _sha256(params: Params) -> str:
    return digest(stack([params]), 0)


@contextmanager
def same_bits(seed: int, device: torch.device) -> Iterator[None]:
    """The same result every time on one kind of device, whoever asks for it."""
    exact = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with restored_torch_settings(), seeded_generator(seed, device), exact:
        torch.set_num_threads(1)  # their number changes the last bits of a convolution on a CPU
        yield


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Fill a file of this process's own, then put it in the place of `path`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors leaves a file that only its owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

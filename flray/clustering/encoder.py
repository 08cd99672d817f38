"""An encoder trained centrally, before any federation: what FLT's clients embed their data with.

Jamali-Rad, Abdizadeh, Singh: Federated Learning With Taskonomy for Non-IID Data. IEEE TNNLS 2022,
arXiv 2103.15947, section IV. Enc1 knows the clients' kind of data, Enc2 a foreign dataset. Once
trained, an encoder is kept on disk by a hash of its configuration.
"""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule

from flray.client.embedding import PixelScale, rescaled
from flray.client.encoder_training import EncoderTraining
from flray.clustering.encoder_cache import EncoderCache, described
from flray.clustering.encoder_training import (
    EncoderRun,
    Epoch,
    OnEpoch,
    Progress,
    log_epoch,
    same_bits,
)
from flray.data import DATASETS
from flray.data.dataset import Dataset, Ids
from flray.data.pixels import Examples, tensor_over
from flray.errors import ExperimentError
from flray.execution.federation import Federation
from flray.imports import class_of, digests_of_own_modules, path_of
from flray.models import MODELS
from flray.models.bank import Params, build_seeded
from flray.randomness import generator, torch_seed
from flray.values import FROM_IMAGES, Seed, require_above_zero, require_at_least, require_share

WHERE = "algorithm.clustering.signature.encoder"  # where experiments have an encoder
_JPEG = "dataset.files=cifar100_jpeg"
# What to type where the dataset of a shipped encoder is missing
SUBSTITUTES = {
    "cifar100": "dataset=cifar100_jpeg",
    "cifar100_subset": _JPEG,
    "cifar20": _JPEG,
    "emnist": "dataset=fashion_mnist",
}
Component = TypeVar("Component")
FORMAT = 2  # version of training and files: raise it when a configuration gives other params


@dataclass(frozen=True)
class ImageKind:
    """The shape and the number of classes that a module is built for."""

    image_shape: tuple[int, ...]  # channels, height, width
    num_classes: int


def server_device() -> str:
    """The device on which the server trains and applies encoders."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Encoder:
    """An autoencoder of a dataset's training images; test images are never looked at.

    The epoch with the lowest loss on the validation images is kept, which are drawn from the
    training images and not trained on. Two encoders with equal fields are the same encoder.

    >>> from flray.data.datasets.digits import Digits
    >>> from flray.models.conv_ae import ConvAe
    >>> encoder = Encoder(Digits(), ConvAe, epochs=2)
    >>> encoder.dataset_name, len(encoder.key())
    ('digits', 64)
    """

    # Any: what a registry or `package.module:Name` holds.

    # Dataset whose training images the encoder is trained on
    dataset: Annotated[Any, "dataset", DATASETS]
    # Model with `encode(x)`, built for the images of the dataset
    model: Annotated[Any, "model", MODELS, FROM_IMAGES]
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
        require_at_least(self, epochs=1, batch_size=1, halve_every=0, seed=0)
        require_above_zero(self, "lr")
        require_share(self, "validation")
        target = class_of(self.model)
        if isinstance(target, type) and not hasattr(target, "encode"):
            fit = ", ".join(sorted(name for name, m in MODELS.items() if hasattr(m, "encode")))
            raise ValueError(f"model must have encode(x), got {target.__name__}; choose {fit}")

    def require(self, fed: Federation | None = None) -> None:
        """Refuse an encoder of other images than the clients', or that cannot be trained.

        Args:
            fed: The clients; None: their images are not known.
        """
        try:
            shape = self.kind().image_shape
        except ExperimentError as error:
            reason = str(error).replace("type dataset.", f"type {WHERE}.dataset.")
            substitute = SUBSTITUTES.get(self.dataset_name)
            other = f", or take other images with {WHERE}.{substitute}" if substitute else ""
            raise ExperimentError(
                f"{WHERE} is not trained yet and cannot be: {reason}{other}, or train it with "
                f"`flray pretrain` where the data are and copy it to {self.folder}"
            ) from error
        input_shape = None if fed is None else fed.input_shape
        if input_shape not in (None, shape):
            raise ExperimentError(
                f"the encoder is pre-trained on images {shape} (channels, height, width), the "
                f"clients hold images {input_shape}; choose another encoder.dataset, or its size"
            )

    def load_or_train(self, device: str, on_epoch: OnEpoch = log_epoch) -> Params:
        """The trained params on the CPU, from the cache or into it.

        A training that was cut short goes on after its last epoch.
        """
        if (cached := self.cache.read_params()) is not None:
            return cached
        epochs: list[Epoch] = []

        def note(epoch: Epoch) -> None:
            epochs.append(epoch)
            on_epoch(epoch)

        dataset: Dataset = self.dataset.load()
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = self.cache.progress(torch.device(device).type)
        params = self.train(device, note, dataset, progress)
        facts = {
            "configuration": self.configuration(),
            **dataclasses.asdict(_kind_of(dataset)),
            "epochs": [dataclasses.asdict(epoch) for epoch in epochs],
            "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
            "torch": torch.__version__,
        }
        self.cache.write(params, facts)
        progress.path.unlink(missing_ok=True)
        return params

    def epochs_done(self) -> int:
        """How many epochs an earlier training that was cut short has left to go on from."""
        state = self.cache.progress("cpu").read()
        return 0 if state is None else int(state["epoch"])

    @property
    def dataset_name(self) -> str:
        """The registered name of the dataset, or else the path of its class."""
        target = class_of(self.dataset)
        names = (name for name, registered in DATASETS.items() if registered is target)
        return next(names, path_of(target))

    def train(
        self,
        device: str,
        on_epoch: OnEpoch = log_epoch,
        dataset: Dataset | None = None,
        progress: Progress | None = None,
    ) -> Params:
        """The params of the best epoch on the CPU, the same for the same seed and kind of device.

        Args:
            dataset: the loaded one, if it has been loaded already.
            progress: keeps the state after each epoch, to go on from.
        """
        loaded: Dataset = dataset or self.dataset.load()
        trained, judged = self.parts(loaded.num_train)
        target = torch.device(device)
        with same_bits(torch_seed(self.seed, "encoder layers"), target):
            module = self.module(_kind_of(loaded)).to(target)
            examples = self.examples(loaded.images, loaded.labels, target)
            run = EncoderRun(module, torch.optim.Adam(module.parameters(), lr=self.lr), target)
            if progress is not None and (state := progress.read()) is not None:
                run.restore(state)
            for epoch in range(run.epoch, self.epochs):
                begin = perf_counter()
                order = generator(self.seed, "encoder order", epoch).permutation(trained)
                lr = self.training(self.epochs).lr_at(epoch)
                train_loss = run.train_epoch(examples, order, self.batch_size, lr)
                validation_loss = run.judge(examples, judged)
                if progress is not None:
                    progress.write(run.state())
                seconds = perf_counter() - begin
                on_epoch(Epoch(epoch + 1, self.epochs, lr, train_loss, validation_loss, seconds))
        if run.kept is None:
            raise ExperimentError(
                f"the encoder's loss is not finite in any of {self.epochs} epochs; "
                f"lower its lr, got {self.lr}"
            )
        return run.kept

    def kind(self) -> ImageKind:
        """The kind of the dataset's images; the dataset is not loaded if the encoder is cached."""
        record = self.cache.read_record()
        if record is None:
            return self.kind_and_size[0]
        return ImageKind(tuple(record["image_shape"]), record["num_classes"])

    @cached_property
    def kind_and_size(self) -> tuple[ImageKind, int]:
        """The kind and number of the images to train on, for which the dataset is loaded once."""
        dataset: Dataset = self.dataset.load()
        return _kind_of(dataset), dataset.num_train

    def module(self, kind: ImageKind) -> LightningModule:
        """The module before training, its weights from the seed."""
        accepted = inspect.signature(self.model).parameters
        facts = {k: v for k, v in dataclasses.asdict(kind).items() if k in accepted}
        try:
            return build_seeded(lambda: self.model(**facts), torch_seed(self.seed, "encoder"))
        except ValueError as error:
            name = path_of(class_of(self.model))
            raise ExperimentError(f"encoder model {name}: {error}") from error

    def training(self, epochs: int) -> EncoderTraining:
        """Batches and learning rates of the pre-training, for another number of epochs."""
        return EncoderTraining(epochs, self.batch_size, self.lr, self.halve_every)

    def examples(self, images: NDArray[Any], labels: Ids, device: torch.device) -> Examples:
        """Images (n, channels, height, width) on the encoder's scale of pixels, on a device."""
        ids = torch.arange(len(images), device=device)
        ones = torch.ones(images.shape[1], 1, 1, device=device)
        placed = [tensor_over(array).to(device) for array in (images, labels)]
        return rescaled(Examples(placed[0], ids, placed[1], ones, ones, "none"), self.pixels)

    def configuration(self) -> dict[str, Any]:  # Any: JSON
        """Everything that decides the result on one kind of device."""
        numbers = ("epochs", "batch_size", "lr", "halve_every", "pixels", "validation", "seed")
        classes = {"dataset": described(self.dataset), "model": described(self.model)}
        digests = digests_of_own_modules(classes)
        files = {"files": digests} if digests else {}  # keys of flray's own classes have none
        return {"format": FORMAT, **classes, **{k: getattr(self, k) for k in numbers}, **files}

    def key(self) -> str:
        """SHA-256 of the configuration."""
        text = json.dumps(self.configuration(), sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def cache(self) -> EncoderCache:
        """Where the trained encoder is kept."""
        return EncoderCache(self.key())

    @property
    def folder(self) -> Path:
        """The folder of the cache that has the encoder, or will have it."""
        return self.cache.folder

    def is_cached(self) -> bool:
        """True if the trained encoder can be read from the cache."""
        return self.cache.read_params() is not None

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


def with_encoders(component: Component, change: Callable[[Encoder], Encoder]) -> Component:
    """The component with each encoder changed that it, or a dataclass in its fields, has."""
    if not dataclasses.is_dataclass(component) or isinstance(component, type):
        return component
    if isinstance(component, Encoder):
        return cast(Component, change(component))
    parts = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}
    changed = {name: with_encoders(part, change) for name, part in parts.items()}
    changed = {name: part for name, part in changed.items() if part is not parts[name]}
    return dataclasses.replace(component, **changed) if changed else component


def encoders_of(*components: object) -> list[Encoder]:
    """The encoders of these components, each of them once."""
    encoders: dict[str, Encoder] = {}
    for component in components:
        with_encoders(component, lambda encoder: encoders.setdefault(encoder.key(), encoder))
    return list(encoders.values())


def _kind_of(dataset: Dataset) -> ImageKind:
    return ImageKind(dataset.image_shape, dataset.num_classes)

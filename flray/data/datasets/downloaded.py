"""Published datasets, read through torchvision from the folder FLRAY_DATA."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Dataset, Ids, Normalization
from flray.data.options import Normalize, PixelOptions
from flray.errors import ExperimentError

# FLIS normalises Fashion-MNIST with MNIST's mean and std, and so do we.
_MNIST_STANDARD = Normalization((0.1307,), (0.3081,))
_CIFAR10_STANDARD = Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


@dataclass(frozen=True)
class Mnist(PixelOptions):
    """60,000 + 10,000 handwritten digits (LeCun et al. 1998)."""

    download: bool = False

    def load(self) -> Dataset:
        return _load("mnist", "MNIST", self, self.download, _MNIST_STANDARD)


@dataclass(frozen=True)
class FashionMnist(PixelOptions):
    """60,000 + 10,000 pieces of clothing (Xiao et al. 2017, arXiv 1708.07747)."""

    download: bool = False

    def load(self) -> Dataset:
        return _load("fashion_mnist", "FashionMNIST", self, self.download, _MNIST_STANDARD)


@dataclass(frozen=True)
class Cifar10(PixelOptions):
    """50,000 + 10,000 small photographs (Krizhevsky 2009)."""

    normalize: Normalize = "half"  # FLT's choice
    download: bool = False

    def load(self) -> Dataset:
        return _load("cifar10", "CIFAR10", self, self.download, _CIFAR10_STANDARD)


def data_folder() -> Path:
    return Path(os.environ.get("FLRAY_DATA", "~/.cache/flray")).expanduser()


def _load(
    name: str, torchvision_name: str, pixels: PixelOptions, download: bool, standard: Normalization
) -> Dataset:
    parts = [_read(name, torchvision_name, is_train, download) for is_train in (True, False)]
    return Dataset(
        name=name,
        images=np.ascontiguousarray(
            np.concatenate([_channels_first(np.asarray(part.data)) for part in parts])
        ),
        labels=_as_ids([part.targets for part in parts]),
        num_train=len(parts[0].targets),
        num_classes=len(parts[0].classes),
        normalization=pixels.normalization(standard),
        augment=pixels.augment,
    )


def _read(
    name: str, torchvision_name: str, is_train: bool, download: bool
) -> Any:  # torchvision ships no types
    import torchvision.datasets  # seconds to import, and the actors never load a dataset

    folder = data_folder()
    read = getattr(torchvision.datasets, torchvision_name)
    try:
        return read(folder, train=is_train, download=download)
    except (RuntimeError, OSError) as error:
        asked = f"the download failed: {error}" if download else "or say dataset.download=true"
        raise ExperimentError(
            f"dataset {name} was not found in {folder}; "
            f"set FLRAY_DATA to the folder that holds it, {asked}"
        ) from error


def _channels_first(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(N, H, W) or (N, H, W, C) to (N, C, H, W)."""
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def _as_ids(targets: list[Any]) -> Ids:  # tensors for MNIST, lists for CIFAR
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in targets])

"""Datasets that are one file NAME.npz each in the folder FLRAY_DATA."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_memory
from flray.data.dataset import Dataset
from flray.data.datasets.downloaded import CIFAR100_STANDARD, SVHN_STANDARD, Mnist
from flray.data.datasets.folder import LabelledImages, data_folder, join_rows, not_found
from flray.data.datasets.own_files import Columns
from flray.data.options import Normalize, PixelOptions, measured
from flray.data.resize import bilinear
from flray.values import require_at_least

_USPS_SIZE = 16
_USPS_IMAGES = 9298


@dataclass(frozen=True)
class Usps(PixelOptions):
    """7,291 + 2,007 digits from envelopes, 16x16 (Hull 1994); `size: 28` for MNIST's models."""

    size: int = _USPS_SIZE  # Height and width in pixels; 28 for the models of MNIST

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, size=_USPS_SIZE)
        check_memory(_USPS_IMAGES, 4 * self.size)  # resized as float32, and copied

    def load(self) -> Dataset:
        rows = read_rows("usps", ("x_train", "y_train", "x_test", "y_test"))
        resized = [LabelledImages(self._resized(part.images), part.labels) for part in rows]
        return join_rows("usps", resized, 10, self, measured(resized[0].images))

    def _resized(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.rint(bilinear(images.astype(np.float32), self.size)).astype(np.uint8)


@dataclass(frozen=True)
class Cifar100Jpeg(PixelOptions):
    """CIFAR-100 in another order, its images once through JPEG at quality 95."""

    normalize: Normalize = "half"  # Scale of pixels, as for cifar100

    def load(self) -> Dataset:
        name = "cifar100_jpeg"
        return join_rows(name, read_rows(name), 100, self, CIFAR100_STANDARD)


@dataclass(frozen=True)
class SvhnRecut(PixelOptions):
    """SVHN's digits cut anew out of the photographs: its counts, not its pixels."""

    normalize: Normalize = "standard"  # Scale of pixels, as for svhn

    def load(self) -> Dataset:
        return join_rows("svhn_recut", read_rows("svhn_recut"), 10, self, SVHN_STANDARD)


@dataclass(frozen=True)
class MnistWriters(PixelOptions):
    """MNIST, image by image, with NIST's number of its writer as the source of an image.

    539 people wrote the training images, 297 others the test images. From QMNIST: Yadav and Bottou
    2019, arXiv 1905.10498.
    """

    # Download MNIST if it is missing; mnist_writers.npz must be in the data folder
    download: bool = False

    def load(self) -> Dataset:
        writers = read_arrays("mnist_writers", ("train_writer", "test_writer"))
        dataset = Mnist(self.normalize, self.augment, self.download).load()
        source = np.concatenate(writers).astype(np.int64)
        return replace(dataset, name="mnist_writers", source=source)


def read_rows(
    name: str, keys: tuple[str, ...] = ("train_x", "train_y", "test_x", "test_y")
) -> list[LabelledImages]:
    """The training rows and the test rows of NAME.npz, images as bytes."""
    train, train_labels, test, test_labels = read_arrays(name, keys)
    return [
        LabelledImages(train.astype(np.uint8, copy=False), train_labels),
        LabelledImages(test.astype(np.uint8, copy=False), test_labels),
    ]


def read_arrays(name: str, keys: tuple[str, ...]) -> list[NDArray[np.generic]]:
    """The arrays of NAME.npz called `keys`."""
    file = data_folder() / f"{name}.npz"
    if not file.is_file():
        raise not_found(name, file.name, "; there is no download for it")
    columns = Columns.read(str(file))
    return [columns[key] for key in keys]

"""Published datasets, read through torchvision from the folder FLRAY_DATA."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from flray.data.checks import check_choice
from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.folder import LabelledImages, data_folder, join_rows, not_found, reading
from flray.data.options import Normalize, PixelOptions, measured

# FLIS normalises Fashion-MNIST with MNIST's mean and std, and so do we.
MNIST_STANDARD = Normalization((0.1307,), (0.3081,))
CIFAR10_STANDARD = Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CIFAR100_STANDARD = Normalization((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
SVHN_STANDARD = Normalization((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))

Variant = Literal["balanced", "byclass", "letters"]
_EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "letters": 26}


@dataclass(frozen=True)
class Mnist(PixelOptions):
    """60,000 + 10,000 handwritten digits (LeCun et al. 1998)."""

    download: bool = False  # Download the files if they are missing from the data folder

    def load(self) -> Dataset:
        rows = _read("mnist", "MNIST", _BY_TRAIN, self.download)
        return join_rows("mnist", rows, 10, self, MNIST_STANDARD)


@dataclass(frozen=True)
class FashionMnist(PixelOptions):
    """60,000 + 10,000 pieces of clothing (Xiao et al. 2017, arXiv 1708.07747)."""

    download: bool = False  # Download the files if they are missing from the data folder

    def load(self) -> Dataset:
        rows = _read("fashion_mnist", "FashionMNIST", _BY_TRAIN, self.download)
        return join_rows("fashion_mnist", rows, 10, self, MNIST_STANDARD)


@dataclass(frozen=True)
class Emnist(PixelOptions):
    """Handwritten digits and letters (Cohen et al. 2017, arXiv 1702.05373).

    `balanced`: 47 classes of 2,400 + 400, where capital and small letters that look alike are one;
    `byclass`: all 62, as often as they were written; `letters`: 26, capital and small alike.
    """

    # Which EMNIST: balanced (47 classes), byclass (62) or letters (26)
    variant: Variant = "balanced"
    download: bool = False  # Download the files if they are missing from the data folder

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, get_args(Variant))

    def load(self) -> Dataset:
        choices = [{**choice, "split": self.variant} for choice in _BY_TRAIN]
        first = int(self.variant == "letters")  # its files count from 1
        # The files hold images as columns: on their side and mirrored.
        rows = [
            LabelledImages(part.images.transpose(0, 2, 1), np.asarray(part.labels) - first)
            for part in _read("emnist", "EMNIST", choices, self.download)
        ]
        num_classes = _EMNIST_CLASSES[self.variant]
        return join_rows("emnist", rows, num_classes, self, measured(rows[0].images))


@dataclass(frozen=True)
class Cifar10(PixelOptions):
    """50,000 + 10,000 small photographs (Krizhevsky 2009)."""

    normalize: Normalize = "half"  # Scale of pixels; half is [-1, 1], the choice of FLT
    download: bool = False  # Download the files if they are missing from the data folder

    def load(self) -> Dataset:
        rows = _read("cifar10", "CIFAR10", _BY_TRAIN, self.download)
        return join_rows("cifar10", rows, 10, self, CIFAR10_STANDARD)


@dataclass(frozen=True)
class Cifar100(PixelOptions):
    """50,000 + 10,000 small photographs of 100 classes, the fine ones (Krizhevsky 2009)."""

    normalize: Normalize = "half"  # Scale of pixels; half is [-1, 1], the choice of FLT
    download: bool = False  # Download the files if they are missing from the data folder

    def load(self) -> Dataset:
        rows = _read("cifar100", "CIFAR100", _BY_TRAIN, self.download)
        return join_rows("cifar100", rows, 100, self, CIFAR100_STANDARD)


@dataclass(frozen=True)
class Svhn(PixelOptions):
    """73,257 + 26,032 digits of house numbers, the cropped ones (Netzer et al. 2011)."""

    # Scale of pixels; standard is the choice of FLIS, the only paper with SVHN
    normalize: Normalize = "standard"
    download: bool = False  # Download the files if they are missing from the data folder

    def load(self) -> Dataset:
        rows = _read("svhn", "SVHN", [{"split": "train"}, {"split": "test"}], self.download)
        return join_rows("svhn", rows, 10, self, SVHN_STANDARD)


_Choice = dict[str, Any]  # Any: torchvision ships no types
_BY_TRAIN: list[_Choice] = [{"train": True}, {"train": False}]
_NOT_THERE = "Dataset not found"  # how torchvision's messages start; or a checksum differs
_IDX = "{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte"
# What torchvision reads, below FLRAY_DATA; braces hold alternatives, as in a shell.
_FILES = {
    "mnist": f"MNIST/raw/{_IDX}",
    "fashion_mnist": f"FashionMNIST/raw/{_IDX}",
    "emnist": "EMNIST/raw/emnist-{split}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte",
    "cifar10": "cifar-10-batches-py/{{data_batch_1,...,data_batch_5,test_batch,batches.meta}}",
    "cifar100": "cifar-100-python/{{train,test,meta}}",
    "svhn": "{{train,test}}_32x32.mat",
}


def _read(
    name: str, torchvision_name: str, choices: list[_Choice], download: bool
) -> list[LabelledImages]:
    """Training rows and test rows; `choices` are the arguments that ask torchvision for each."""
    import torchvision.datasets  # seconds to import, and the actors never load a dataset

    read, folder = getattr(torchvision.datasets, torchvision_name), data_folder()
    files = _FILES[name].format(**choices[0])
    with reading(name, folder / files):
        try:
            parts = [read(folder, download=download, **choice) for choice in choices]
        except (RuntimeError, OSError) as error:
            told = " ".join(str(error).split())
            if download:
                raise not_found(name, files, f"; the download failed: {told}") from error
            if told.startswith(_NOT_THERE):
                raise not_found(name, files, ", or type dataset.download=true") from error
            raise
    return [
        LabelledImages(
            np.asarray(part.data), part.targets if hasattr(part, "targets") else part.labels
        )
        for part in parts
    ]

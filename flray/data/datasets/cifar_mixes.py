"""Datasets that FLT pre-trains encoders on: classes of CIFAR-100, alone or beside CIFAR-10.

Jamali-Rad, Abdizadeh, Singh (FLT): the paper names "CIFAR20" and CIFAR100; which classes they are
is in the authors' code.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from flray.data.checks import check_choice
from flray.data.dataset import Dataset
from flray.data.datasets.downloaded import (
    CIFAR10_STANDARD,
    CIFAR100_STANDARD,
    Cifar10,
    Cifar100,
)
from flray.data.datasets.prepared import Cifar100Jpeg
from flray.data.options import Normalize, PixelOptions

Files = Literal["cifar100", "cifar100_jpeg"]

BESIDE_CIFAR10 = (11, 20, 22, 31, 37, 51, 54, 65, 86, 90)  # boy, chair, clock, elephant, ...
SUBSET = (3, 8, 13, 15, 20, 22, 25, 29, 31, 37, 43, 46, 51, 54, 65, 84, 85, 86, 90, 92)


@dataclass(frozen=True)
class Cifar100Subset(PixelOptions):
    """The 20 classes of CIFAR-100 that FLT's foreign encoder (Enc2) for CIFAR-10 has seen."""

    normalize: Normalize = "half"  # Scale of pixels, as for cifar100
    files: Files = "cifar100"  # Dataset from which the images are taken
    download: bool = False  # Download CIFAR-100 if it is missing from the data folder

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("files", self.files, get_args(Files))

    def load(self) -> Dataset:
        return replace(
            classes_of(_cifar100(self.files, self.download), SUBSET),
            name="cifar100_subset",
            normalization=self.normalization(CIFAR100_STANDARD),
            augment=self.augment,
        )


@dataclass(frozen=True)
class Cifar20(PixelOptions):
    """CIFAR-10 and, as classes 10 to 19, ten of CIFAR-100: FLT's Enc1 for CIFAR-10."""

    normalize: Normalize = "half"  # Scale of pixels, as for cifar10
    files: Files = "cifar100"  # Dataset from which the images of classes 10 to 19 are taken
    # Download CIFAR-10 and CIFAR-100 if they are missing from the data folder
    download: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("files", self.files, get_args(Files))

    def load(self) -> Dataset:
        known = Cifar10(download=self.download).load()
        others = classes_of(_cifar100(self.files, self.download), BESIDE_CIFAR10)
        parts = [
            (dataset.images[rows], dataset.labels[rows] + first)
            for train in (True, False)
            for dataset, first in ((known, 0), (others, known.num_classes))
            for rows in [dataset.train_ids if train else dataset.test_ids]
        ]
        return Dataset(
            name="cifar20",
            images=np.concatenate([images for images, _ in parts]),
            labels=np.concatenate([labels for _, labels in parts]),
            num_train=known.num_train + others.num_train,
            num_classes=known.num_classes + others.num_classes,
            normalization=self.normalization(CIFAR10_STANDARD),
            augment=self.augment,
        )


def _cifar100(files: Files, download: bool) -> Dataset:
    return (Cifar100Jpeg() if files == "cifar100_jpeg" else Cifar100(download=download)).load()


def classes_of(dataset: Dataset, classes: tuple[int, ...]) -> Dataset:
    """The images of some classes in their order, which are numbered from 0 in the order given."""
    number = np.full(dataset.num_classes, -1)
    number[list(classes)] = np.arange(len(classes))
    kept = np.flatnonzero(number[dataset.labels] >= 0)
    return replace(
        dataset,
        images=dataset.images[kept],
        labels=number[dataset.labels[kept]],
        num_train=int((kept < dataset.num_train).sum()),
        num_classes=len(classes),
        source=None if dataset.source is None else dataset.source[kept],
    )

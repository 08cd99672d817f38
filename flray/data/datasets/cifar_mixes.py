"""Datasets that FLT pre-trains encoders on: classes of CIFAR-100, alone or beside CIFAR-10.

Jamali-Rad, Abdizadeh, Singh (FLT): the paper names "CIFAR20" and CIFAR100; which classes they are
is in the authors' code.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flray.data.dataset import Dataset
from flray.data.datasets.downloaded import (
    CIFAR10_STANDARD,
    CIFAR100_STANDARD,
    Cifar10,
    Cifar100,
)
from flray.data.datasets.prepared import Cifar100Jpeg
from flray.data.options import Normalize, PixelOptions

BESIDE_CIFAR10 = (11, 20, 22, 31, 37, 51, 54, 65, 86, 90)  # boy, chair, clock, elephant, ...
SUBSET = (3, 8, 13, 15, 20, 22, 25, 29, 31, 37, 43, 46, 51, 54, 65, 84, 85, 86, 90, 92)


@dataclass(frozen=True)
class _Cifar100Options(PixelOptions):
    """Options of datasets with images of CIFAR-100."""

    normalize: Normalize = "half"  # Scale of pixels, as for cifar10 and cifar100
    # Dataset from which the images of CIFAR-100's classes are taken
    files: Literal["cifar100", "cifar100_jpeg"] = "cifar100"
    # Download CIFAR-100, and CIFAR-10 for cifar20, if they are missing from the data folder
    download: bool = False

    def classes_of_cifar100(self, classes: tuple[int, ...]) -> Dataset:
        """The images of these classes, which are numbered from 0 in the order given."""
        is_jpeg = self.files == "cifar100_jpeg"
        cifar100 = Cifar100Jpeg() if is_jpeg else Cifar100(download=self.download)
        return classes_of(cifar100.load(), classes)


@dataclass(frozen=True)
class Cifar100Subset(_Cifar100Options):
    """The 20 classes of CIFAR-100 that FLT's foreign encoder (Enc2) for CIFAR-10 has seen."""

    def load(self) -> Dataset:
        return replace(
            self.classes_of_cifar100(SUBSET),
            name="cifar100_subset",
            normalization=self.normalization(CIFAR100_STANDARD),
            augment=self.augment,
        )


@dataclass(frozen=True)
class Cifar20(_Cifar100Options):
    """CIFAR-10 and, as classes 10 to 19, ten of CIFAR-100: FLT's Enc1 for CIFAR-10."""

    def load(self) -> Dataset:
        cifar10 = Cifar10(download=self.download).load()
        others = self.classes_of_cifar100(BESIDE_CIFAR10)
        return replace(
            joined(cifar10, others),
            name="cifar20",
            normalization=self.normalization(CIFAR10_STANDARD),
            augment=self.augment,
        )


def joined(first: Dataset, second: Dataset) -> Dataset:
    """The images of two datasets; the classes of the second are numbered after those of the first.

    >>> from flray.data.datasets.digits import Digits
    >>> digits = Digits(size=8).load()
    >>> both = joined(digits, digits)
    >>> both.num_classes, both.num_train == 2 * digits.num_train
    (20, True)
    """
    parts = [
        (dataset.images[rows], dataset.labels[rows] + offset)
        for train in (True, False)
        for dataset, offset in ((first, 0), (second, first.num_classes))
        for rows in [dataset.train_ids if train else dataset.test_ids]
    ]
    return replace(
        first,
        images=np.concatenate([images for images, _ in parts]),
        labels=np.concatenate([labels for _, labels in parts]),
        num_train=first.num_train + second.num_train,
        num_classes=first.num_classes + second.num_classes,
        source=None,
    )


def classes_of(dataset: Dataset, classes: tuple[int, ...]) -> Dataset:
    """The images of these classes in their order; the classes are numbered from 0 as given.

    >>> from flray.data.datasets.digits import Digits
    >>> classes_of(Digits(size=8).load(), (7, 3)).num_classes
    2
    """
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

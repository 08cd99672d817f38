"""Published datasets, read through torchvision from the folder FLRAY_DATA."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.folder import LabelledImages, data_folder, join_rows, not_found, reading
from flray.data.options import Normalize, PixelOptions, measured

# FLIS normalises Fashion-MNIST with MNIST's mean and std, and so do we.
MNIST_STANDARD = Normalization((0.1307,), (0.3081,))
CIFAR10_STANDARD = Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CIFAR100_STANDARD = Normalization((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
SVHN_STANDARD = Normalization((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))

_IDX = "{train,t10k}-{images-idx3,labels-idx1}-ubyte"
_NOT_THERE = "Dataset not found"  # how torchvision's messages start; or a checksum differs


@dataclass(frozen=True)
class Published:
    """Facts about a dataset of torchvision that do not depend on its configuration."""

    name: str  # in the registry
    torchvision_class: str
    files: str  # below FLRAY_DATA; braces hold alternatives, as in a shell
    num_classes: int
    standard: Normalization | None  # of its training images. None: it is measured
    choice: str = "train"  # the argument that asks torchvision for one of both parts
    parts: tuple[object, object] = (True, False)  # its values for the training and the test part


@dataclass(frozen=True)
class TorchvisionOptions(PixelOptions):
    """Options of datasets that torchvision reads, and how they are read."""

    published: ClassVar[Published]
    download: bool = False  # Download the files if they are missing from the data folder

    def load(self) -> Dataset:
        """Read the dataset from FLRAY_DATA, downloading it first if `download` is set."""
        return self.join(self.read(self.published.files), self.published.num_classes)

    def join(self, rows: list[LabelledImages], num_classes: int) -> Dataset:
        """The dataset of training rows and test rows."""
        standard = self.published.standard or measured(rows[0].images)
        return join_rows(self.published.name, rows, num_classes, self, standard)

    def read(self, files: str, **arguments: Any) -> list[LabelledImages]:  # Any: torchvision's own
        """Training rows and test rows as torchvision has them."""
        import torchvision.datasets  # seconds to import, and the actors never load a dataset

        name, folder = self.published.name, data_folder()
        make = getattr(torchvision.datasets, self.published.torchvision_class)
        choices = [{self.published.choice: part, **arguments} for part in self.published.parts]
        with reading(name, folder / files):
            try:
                parts = [make(folder, download=self.download, **choice) for choice in choices]
            except (RuntimeError, OSError) as error:
                message = " ".join(str(error).split())
                if self.download:
                    raise not_found(name, files, f"; the download failed: {message}") from error
                if message.startswith(_NOT_THERE):
                    raise not_found(name, files, ", or type dataset.download=true") from error
                raise
        labels = [part.targets if hasattr(part, "targets") else part.labels for part in parts]
        images = [np.asarray(part.data) for part in parts]
        return [LabelledImages(*of_part) for of_part in zip(images, labels, strict=True)]


@dataclass(frozen=True)
class Mnist(TorchvisionOptions):
    """60,000 + 10,000 handwritten digits (LeCun et al. 1998)."""

    published = Published("mnist", "MNIST", f"MNIST/raw/{_IDX}", 10, MNIST_STANDARD)


@dataclass(frozen=True)
class FashionMnist(TorchvisionOptions):
    """60,000 + 10,000 pieces of clothing (Xiao et al. 2017, arXiv 1708.07747)."""

    published = Published(
        "fashion_mnist", "FashionMNIST", f"FashionMNIST/raw/{_IDX}", 10, MNIST_STANDARD
    )


@dataclass(frozen=True)
class Cifar10(TorchvisionOptions):
    """50,000 + 10,000 small photographs (Krizhevsky 2009)."""

    published = Published(
        "cifar10",
        "CIFAR10",
        "cifar-10-batches-py/{data_batch_1,...,data_batch_5,test_batch,batches.meta}",
        10,
        CIFAR10_STANDARD,
    )
    normalize: Normalize = "half"  # Scale of pixels; half is [-1, 1], the choice of FLT


@dataclass(frozen=True)
class Cifar100(TorchvisionOptions):
    """50,000 + 10,000 small photographs of 100 classes, the fine ones (Krizhevsky 2009)."""

    published = Published(
        "cifar100", "CIFAR100", "cifar-100-python/{train,test,meta}", 100, CIFAR100_STANDARD
    )
    normalize: Normalize = "half"  # Scale of pixels; half is [-1, 1], the choice of FLT


@dataclass(frozen=True)
class Svhn(TorchvisionOptions):
    """73,257 + 26,032 digits of house numbers, the cropped ones (Netzer et al. 2011)."""

    published = Published(
        "svhn",
        "SVHN",
        "{train,test}_32x32.mat",
        10,
        SVHN_STANDARD,
        choice="split",
        parts=("train", "test"),
    )
    # Scale of pixels; standard is the choice of FLIS, the only paper with SVHN
    normalize: Normalize = "standard"


_EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "letters": 26}


@dataclass(frozen=True)
class Emnist(TorchvisionOptions):
    """Handwritten digits and letters (Cohen et al. 2017, arXiv 1702.05373).

    `balanced`: 47 classes of 2,400 + 400, where capital and small letters that look alike are one;
    `byclass`: all 62, as often as they were written; `letters`: 26, capital and small alike.
    """

    published = Published(
        "emnist",
        "EMNIST",
        "EMNIST/raw/emnist-VARIANT-{train,test}-{images-idx3,labels-idx1}-ubyte",
        _EMNIST_CLASSES["balanced"],
        standard=None,
    )
    # Which EMNIST: balanced (47 classes), byclass (62) or letters (26)
    variant: Literal["balanced", "byclass", "letters"] = "balanced"

    def load(self) -> Dataset:
        first = int(self.variant == "letters")  # its files count from 1
        files = self.published.files.replace("VARIANT", self.variant)
        # The files hold images as columns: on their side and mirrored.
        rows = [
            LabelledImages(part.images.transpose(0, 2, 1), np.asarray(part.labels) - first)
            for part in self.read(files, split=self.variant)
        ]
        return self.join(rows, _EMNIST_CLASSES[self.variant])

"""MNIST and Fashion-MNIST as one dataset of 20 classes, for splits that need many classes."""

from dataclasses import dataclass, replace

from flray.data.dataset import Dataset
from flray.data.datasets.cifar_mixes import joined
from flray.data.datasets.downloaded import MNIST_STANDARD, FashionMnist, Mnist
from flray.data.options import PixelOptions


@dataclass(frozen=True)
class MnistFashion(PixelOptions):
    """120,000 + 20,000 images: the digits as classes 0 to 9, clothing as classes 10 to 19."""

    download: bool = False  # Download both datasets if they are missing from the data folder

    def load(self) -> Dataset:
        digits, clothing = (kind(download=self.download).load() for kind in (Mnist, FashionMnist))
        return replace(
            joined(digits, clothing),
            name="mnist_fashion",
            normalization=self.normalization(MNIST_STANDARD),
            augment=self.augment,
        )

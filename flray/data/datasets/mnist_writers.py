"""MNIST with the writer of each image (QMNIST: Yadav and Bottou 2019, arXiv 1905.10498)."""

from dataclasses import dataclass, replace

import numpy as np

from flray.data.dataset import Dataset
from flray.data.datasets.downloaded import Mnist
from flray.data.datasets.prepared import read_arrays
from flray.data.options import PixelOptions


@dataclass(frozen=True)
class MnistWriters(PixelOptions):
    """MNIST, image by image; the source of an image is NIST's number of its writer.

    539 people wrote the training images, 297 others the test images.
    """

    # Download MNIST if it is missing; mnist_writers.npz must be in the data folder
    download: bool = False

    def load(self) -> Dataset:
        writers = read_arrays("mnist_writers", ("train_writer", "test_writer"))
        dataset = Mnist(self.normalize, self.augment, self.download).load()
        source = np.concatenate(writers).astype(np.int64)
        return replace(dataset, name="mnist_writers", source=source)

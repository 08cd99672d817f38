"""A dataset: all images as uint8 in one array, clients are index arrays into it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Normalization:
    """x -> (x / 255 - mean) / std, a value per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """Images and labels; rows below `num_train` are the training part, the others the test part."""

    name: str
    images: NDArray[np.uint8]  # (N, channels, height, width)
    labels: Ids  # (N,)
    num_train: int
    num_classes: int
    normalization: Normalization
    augment: str = "none"  # none | crop_flip, applied to training batches only
    source: Ids | None = None  # (N,) who or what made the image, where the dataset knows

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def train_ids(self) -> Ids:
        return np.arange(self.num_train)

    @property
    def test_ids(self) -> Ids:
        return np.arange(self.num_train, len(self.labels))

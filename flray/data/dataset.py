"""A dataset: all images in one array, of uint8 or of floats; clients are index arrays into it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Normalization:
    """x -> (x / 255 - mean) / std, a value per channel; floats are not divided by 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """Images and labels; rows below `num_train` are the training part, the others the test part."""

    name: str
    images: NDArray[Any]  # (N, channels, height, width); Any: uint8, or floats as they are
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
    def largest_pixel(self) -> int:
        """What pixels are divided by before they are normalised."""
        return 255 if self.images.dtype == np.uint8 else 1

    @property
    def train_ids(self) -> Ids:
        return np.arange(self.num_train)

    @property
    def test_ids(self) -> Ids:
        return np.arange(self.num_train, len(self.labels))

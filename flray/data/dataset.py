"""A dataset: all images in one array, of uint8 or of floats; clients are index arrays into it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Normalization:
    """x -> (x / 255 - mean) / std, a value per channel; floats are not divided by 255.

    Mean 0.5 and std 0.5 map the pixels 0 and 255 to -1 and 1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """N images with their labels, in memory: the training part first, then the test part.

    Everything else refers to images by their row, an id in 0..N-1; the arrays are never changed.

    >>> tiny = Dataset(
    ...     name="tiny",
    ...     images=np.zeros((5, 1, 2, 2), np.uint8),
    ...     labels=np.array([0, 1, 0, 1, 1]),
    ...     num_train=3,
    ...     num_classes=2,
    ...     normalization=Normalization(mean=(0.0,), std=(1.0,)),
    ... )
    >>> tiny.image_shape, tiny.train_ids, tiny.test_ids
    ((1, 2, 2), array([0, 1, 2]), array([3, 4]))
    """

    name: str
    images: NDArray[Any]  # (N, channels, height, width); Any: uint8, or floats as they are
    labels: Ids  # (N,) classes 0..num_classes-1
    num_train: int  # rows 0..num_train-1 are the training part
    num_classes: int
    normalization: Normalization
    augment: str = "none"  # none | crop_flip, applied to training batches only
    source: Ids | None = None  # (N,) writer or group of each image. None: not known

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def largest_pixel(self) -> int:
        """What pixels are divided by before they are normalised."""
        return 255 if self.images.dtype == np.uint8 else 1

    @property
    def train_ids(self) -> Ids:
        """Rows of the training part."""
        return np.arange(self.num_train)

    @property
    def test_ids(self) -> Ids:
        """Rows of the test part."""
        return np.arange(self.num_train, len(self.labels))

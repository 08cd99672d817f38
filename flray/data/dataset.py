"""A dataset: all images in one array; clients are index arrays into it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Normalization:
    """What is done to pixels before they reach a model: x -> (x / 255 - mean) / std.

    Both have one value per channel. Images of floats are not divided by 255.

    >>> half = Normalization(mean=(0.5,), std=(0.5,))
    >>> [(x / 255 - half.mean[0]) / half.std[0] for x in (0, 255)]
    [-1.0, 1.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """N images with their labels, in memory: the training part first, then the test part.

    Datasets of the registry return one from `load()`; `flray.from_tensors` makes one of arrays.
    Everything else refers to images by their row, an id in 0..N-1, and the arrays are never
    changed. Who holds which image is not part of the dataset: that is a `Split`.

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
    num_train: int  # rows 0..num_train-1 are the training part, the others the test part
    num_classes: int
    normalization: Normalization
    augment: str = "none"  # none | crop_flip, applied to training batches only
    source: Ids | None = None  # (N,) writer or group of each image. None: not known

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def largest_pixel(self) -> int:
        """What pixels are divided by before they are normalised: 255 for bytes, 1 for floats."""
        return 255 if self.images.dtype == np.uint8 else 1

    @property
    def train_ids(self) -> Ids:
        """Rows of the training part."""
        return np.arange(self.num_train)

    @property
    def test_ids(self) -> Ids:
        """Rows of the test part."""
        return np.arange(self.num_train, len(self.labels))

"""A dataset: all examples in one array of any shape; clients are index arrays into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    source: Ids | None = None  # (N,) writer, group or client of each example. None: not known
    client_names: tuple[str, ...] = ()  # (C,) of the clients that the data have, by source
    groups: Ids | None = None  # (C,) the known kind of each client, an index into group_names
    group_names: tuple[str, ...] = ()
    # (N,) further columns of the examples by name; `time` has two, the first and the last instant
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of an example; (channels, height, width) of an image."""
        return self.images.shape[1:]

    @property
    def num_outputs(self) -> int:
        """Numbers that a model gives for an example, or for each position of a sequence."""
        return self.num_classes or int(np.prod(self.labels.shape[1:]))

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

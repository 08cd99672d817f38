"""A dataset: all examples in one array of any shape; clients are index arrays into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.errors import ExperimentError

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
    """N examples with their targets, in memory: the training part first, then the test part.

    `images` are inputs and `labels` are targets, both of any shape. Datasets of the registry return
    one from `load()`; `flray.from_tensors` makes one of arrays. Everything else refers to examples
    by their row, an id in 0..N-1, and the arrays are never changed. Who holds which example is not
    part of the dataset: that is a `Split`.

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
    # (N, ...) inputs, images as (N, channels, height, width); Any: uint8, tokens, or floats
    images: NDArray[Any]
    labels: Ids  # (N,) classes 0..num_classes-1; or (N, ...) classes of sequences, or floats
    num_train: int  # rows 0..num_train-1 are the training part, the others the test part
    num_classes: int  # 0: targets are numbers
    normalization: Normalization
    augment: str = "none"  # none | crop_flip, applied to training batches only
    source: Ids | None = None  # (N,) writer, group or client of each example. None: not known
    client_names: tuple[str, ...] = ()  # (C,) of the clients that the data have, by source
    groups: Ids | None = None  # (C,) the known kind of each client, an index into group_names
    group_names: tuple[str, ...] = ()
    # (N,) further columns of the examples by name; `time` has two, the first and the last instant
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # (channels,) True: scaled to mean 0 and std 1 on the training examples. None: none of them
    scaled: NDArray[np.bool_] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of an example."""
        return self.images.shape[1:]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image; refuses data that are no images."""
        if len(self.input_shape) != 3:
            raise ExperimentError(
                f"images (channels, height, width) are needed here, and the examples of "
                f"{self.name} have the shape {self.input_shape}; use what takes any input, such as "
                "the models linear, mlp, cnn1d and gru, or the split natural"
            )
        channels, height, width = self.input_shape
        return channels, height, width

    @property
    def has_classes(self) -> bool:
        """True if an example has one class; False for numbers and sequences."""
        return self.num_classes > 0 and self.labels.ndim == 1

    def name_of(self, owner: int) -> str:
        """The name of an owner of examples, or its number in `source`."""
        return self.client_names[owner] if self.client_names else str(owner)

    @property
    def num_outputs(self) -> int:
        """Numbers that a model gives for an example, or for each position of a sequence."""
        return self.num_classes or int(np.prod(self.labels.shape[1:]))

    def standardised(self, rows: Ids) -> "Dataset":
        """The dataset whose normalization scales the channels `scaled` by what the rows hold."""
        assert self.scaled is not None, "nothing of these data is scaled"
        values = self.images[rows].astype(np.float64).swapaxes(0, 1).reshape(len(self.scaled), -1)
        std = np.where(self.scaled & (values.std(1) > 0), values.std(1), 1.0)
        mean = np.where(self.scaled, values.mean(1), 0.0)
        return replace(self, normalization=Normalization(tuple(mean), tuple(std)))

    @property
    def train_ids(self) -> Ids:
        """Rows of the training part."""
        return np.arange(self.num_train)

    @property
    def test_ids(self) -> Ids:
        """Rows of the test part."""
        return np.arange(self.num_train, len(self.labels))

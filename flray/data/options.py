"""The options that all datasets of images share."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_literals
from flray.data.dataset import Normalization

Normalize = Literal["unit", "half", "standard"]
Augment = Literal["none", "crop_flip"]
_CHUNK = 1 << 22  # pixels counted at a time, which bounds memory


@dataclass(frozen=True)
class PixelOptions:
    """Options of all datasets of images: how pixels reach the model.

    >>> PixelOptions(normalize="half").normalization(Normalization((0.1307,), (0.3081,)))
    Normalization(mean=(0.5,), std=(0.5,))
    """

    # Scale of pixels. unit: [0, 1]; half: [-1, 1]; standard: mean 0 and standard deviation 1
    normalize: Normalize = "unit"
    # Augmentation of training images. crop_flip: random crops and horizontal flips
    augment: Augment = "none"

    def __post_init__(self) -> None:
        check_literals(self)

    def normalization(self, standard: Normalization) -> Normalization:
        """The normalization asked for.

        Args:
            standard: The dataset's own mean and standard deviation, for `normalize: standard`; its
                length is the number of channels.
        """
        channels = len(standard.mean)
        if self.normalize == "unit":
            return Normalization((0.0,) * channels, (1.0,) * channels)
        if self.normalize == "half":
            return Normalization((0.5,) * channels, (0.5,) * channels)
        return standard


def measured(images: NDArray[np.uint8]) -> Normalization:
    """The mean and std of one-channel images that have no published ones.

    >>> measured(np.array([0, 255], np.uint8))
    Normalization(mean=(0.5,), std=(0.5,))
    """
    flat = images.reshape(-1)
    counts = np.zeros(256, np.int64)
    for start in range(0, len(flat), _CHUNK):
        counts += np.bincount(flat[start : start + _CHUNK], minlength=256)
    values, share = np.arange(256) / 255, counts / len(flat)
    mean = float((share * values).sum())
    std = float(np.sqrt((share * (values - mean) ** 2).sum()))
    return Normalization((round(mean, 4),), (round(std, 4),))

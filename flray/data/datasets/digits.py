"""Handwritten digits that come with scikit-learn: real images without any download."""

from dataclasses import dataclass

import numpy as np

from flray.data.checks import check_memory
from flray.data.dataset import Dataset
from flray.data.options import PixelOptions, measured
from flray.data.resize import bilinear
from flray.values import require_at_least

_EVERY = 5  # there is no official test part: images 4, 9, 14, ... are ours
_NUM_IMAGES = 1797
_WHITE = 16  # the largest pixel value of the 8x8 images


@dataclass(frozen=True)
class Digits(PixelOptions):
    """1,797 images of 8x8 pixels, resized; every fifth image is in the test part.

    >>> dataset = Digits(size=8).load()
    >>> dataset.images.shape, dataset.num_train
    ((1797, 1, 8, 8), 1438)
    """

    size: int = 28  # Height and width in pixels; the 8 x 8 images are resized to it

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, size=8)
        check_memory(_NUM_IMAGES, 4 * self.size)  # resized as float32, and copied

    def load(self) -> Dataset:
        from sklearn.datasets import load_digits  # seconds to import, and seldom needed

        digits = load_digits()
        pixels = bilinear((digits.images / _WHITE * 255).astype(np.float32), self.size)
        is_test = np.arange(len(pixels)) % _EVERY == _EVERY - 1
        order = np.argsort(is_test, kind="stable")  # training rows first
        images = np.rint(pixels[order]).astype(np.uint8)[:, None]
        num_train = int((~is_test).sum())
        return Dataset(
            name="digits",
            images=images,
            labels=digits.target[order].astype(np.int64),
            num_train=num_train,
            num_classes=10,
            normalization=self.normalization(measured(images[:num_train])),
            augment=self.augment,
        )

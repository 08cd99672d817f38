"""Planted classes and groups of any size, for tests and for experiments with known truth."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flray.cores import usable_cores
from flray.data.checks import check_memory
from flray.data.dataset import Dataset, Ids
from flray.data.options import PixelOptions, measured
from flray.data.resize import Pixels, bilinear
from flray.randomness import generator
from flray.values import Seed, require_at_least

_COARSE = 7  # smooth fields are 7x7 normal noise, upsampled
_GREY, _CONTRAST = 127.5, 40.0  # a standard deviation of the prototype in grey levels
_CHUNK = 4096  # images of a stream of random numbers, drawn by one thread
_IN_CACHE = 64  # images computed at a time, so that a core keeps them in its cache


@dataclass(frozen=True)
class Synthetic(PixelOptions):
    """Grey images with planted classes and groups.

    An image is the prototype of its (group, class), plus a smooth field of its own, plus pixel
    noise. Classes and groups take turns, so both are balanced in both parts.

    >>> dataset = Synthetic(num_train=6, num_test=2, num_classes=2, size=4).load()
    >>> dataset.images.shape, dataset.labels.tolist()
    ((8, 1, 4, 4), [0, 1, 0, 1, 0, 1, 0, 1])
    """

    num_classes: int = 10  # Number of classes
    num_train: int = 2000  # Number of training images
    num_test: int = 500  # Number of test images
    size: int = 28  # Height and width of an image in pixels
    # Number of groups with prototypes of their own; the group of an image is its source
    num_groups: int = 1
    # Standard deviation of the smooth field of an image, relative to its prototype
    variation: float = 2.0
    noise: float = 0.5  # Standard deviation of the pixel noise, relative to the prototype
    seed: Seed = 0  # Seed of the images; it does not depend on the seed of the run

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, num_classes=1, num_train=1, size=1, num_groups=1)
        require_at_least(self, num_test=0, variation=0, noise=0, seed=0)
        check_memory(self.num_train + self.num_test, self.size)

    def load(self) -> Dataset:
        rows = np.concatenate([np.arange(self.num_train), np.arange(self.num_test)])
        labels = rows % self.num_classes
        groups = rows // self.num_classes % self.num_groups
        cells = groups * self.num_classes + labels
        train = self._draw(cells[: self.num_train], "synthetic.train")
        test = self._draw(cells[self.num_train :], "synthetic.test")
        images = np.concatenate([train, test])
        return Dataset(
            name="synthetic",
            images=images,
            labels=labels,
            num_train=self.num_train,
            num_classes=self.num_classes,
            normalization=self.normalization(measured(images[: self.num_train])),
            augment=self.augment,
            source=groups if self.num_groups > 1 else None,
        )

    def _draw(self, cells: Ids, purpose: str) -> NDArray[np.uint8]:
        """An image (1, size, size) for each cell, a cell being a (group, class)."""
        num_cells = self.num_groups * self.num_classes
        coarse = _normal(generator(self.seed, "synthetic.prototypes"), num_cells, _COARSE)
        images = np.empty((len(cells), 1, self.size, self.size), np.uint8)

        def draw_chunk(start: int) -> None:
            chunk = cells[start : start + _CHUNK]
            rng = generator(self.seed, purpose, start)
            fields = coarse[chunk] + _normal(rng, len(chunk), _COARSE) * np.float32(self.variation)
            for k in range(0, len(chunk), _IN_CACHE):
                smooth = bilinear(fields[k : k + _IN_CACHE], self.size)
                pixels = smooth + _normal(rng, len(smooth), self.size) * np.float32(self.noise)
                grey = np.clip(np.rint(_GREY + _CONTRAST * pixels), 0, 255)
                images[start + k : start + k + len(smooth), 0] = grey.astype(np.uint8)

        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(draw_chunk, range(0, len(cells), _CHUNK)))
        return images


def smooth_images(
    num: int, shape: tuple[int, int, int], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """(num, *shape) smooth random fields, independent for each channel: images of nothing.

    Each is stretched from black to white, so that it has the contrast of a picture.
    """
    channels, height, width = shape
    fields = bilinear(_normal(rng, num * channels, _COARSE), max(height, width))
    flat = fields[:, :height, :width].reshape(num, -1)
    low, high = flat.min(1, keepdims=True), flat.max(1, keepdims=True)
    grey: Pixels = np.rint(255 * (flat - low) / (high - low))
    return grey.reshape(num, channels, height, width).astype(np.uint8)


def _normal(rng: np.random.Generator, num: int, size: int) -> Pixels:
    return rng.standard_normal((num, size, size), dtype=np.float32)

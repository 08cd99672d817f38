"""The image pipelines of REPA's clients, in elementwise numpy: the same bits on every machine.

REPA names only "blurred" and "black and white"; the list and its strengths are ours.
Pipelines take and give images (n, channels, height, width) in [0, 1], clipped by `apply_pipeline`.
"""

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.data.resize import Pixels
from flray.errors import ExperimentError
from flray.randomness import generator

Pipeline = Literal[
    "identity",
    "blur",
    "grayscale",
    "invert",
    "hue",
    "brightness_contrast",
    "solarize",
    "posterize",
    "rotate",
    "noise",
]
PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)
NEED_COLOUR: tuple[Pipeline, ...] = ("grayscale", "hue")

Pixel = TypeVar("Pixel", np.uint8, np.float32)

_BLUR_SIZE, _BLUR_SIGMA = 5, 1.5
_LUMA = np.array([0.2989, 0.587, 0.114], np.float32)  # weights of red, green and blue (ITU-R 601)
_HUE_SHIFT = 0.3  # as a share of a full turn
_STRONGER = np.float32(1.6)
_SOLARIZE_FROM = 0.5
_POSTERIZE_MASK = 0b11000000  # the two highest bits
_NOISE_STD = np.float32(0.1)


def apply_pipeline(
    name: Pipeline, images: NDArray[np.uint8], rows: Ids, seed: int
) -> NDArray[np.uint8]:
    """The images (n, channels, height, width) after this pipeline.

    Args:
        name: One of PIPELINES; those of NEED_COLOUR need three channels.
        images: Bytes; not changed.
        rows: (n,) their rows in the dataset.
        seed: Seed of the noise, which depends on it and on the row of an image alone.

    >>> apply_pipeline("invert", np.array([[[[0, 200]]]], np.uint8), np.array([0]), seed=0).tolist()
    [[[[255, 55]]]]
    """
    pixels: Pixels = images.astype(np.float32) / np.float32(255)
    changed = _noise(pixels, rows, seed) if name == "noise" else _CHANGES[name](pixels)
    return np.rint(np.clip(changed, 0, 1) * 255).astype(np.uint8)


def quarter_turns(images: NDArray[Pixel], num: int) -> NDArray[Pixel]:
    """Images (..., height, width) turned counter-clockwise by num * 90 degrees.

    >>> quarter_turns(np.array([[[1, 2], [3, 4]]], np.uint8), 1).tolist()
    [[[2, 4], [1, 3]]]
    """
    if images.shape[-1] != images.shape[-2]:
        raise ExperimentError(f"only square images can be rotated, got {images.shape[-2:]}")
    return np.ascontiguousarray(np.rot90(images, num, axes=(-2, -1)))


def _blur(x: Pixels) -> Pixels:
    """Gaussian blur over 5 x 5 pixels, mirrored at the edges."""
    away = np.arange(_BLUR_SIZE) - _BLUR_SIZE // 2
    weights = np.exp(-(away**2) / (2 * _BLUR_SIGMA**2))
    weights = (weights / weights.sum()).astype(np.float32)
    return _smooth(_smooth(x, weights, axis=2), weights, axis=3)


def _smooth(x: Pixels, weights: Pixels, axis: int) -> Pixels:
    """The weighted mean of each pixel and its neighbours along an axis, mirrored at the edges."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (len(weights) // 2, len(weights) // 2)
    padded = np.pad(x, pads, mode="reflect")
    smooth = np.zeros_like(x)
    for shift, weight in enumerate(weights):
        smooth += weight * padded.take(np.arange(shift, shift + x.shape[axis]), axis)
    return smooth


def _luminance(x: Pixels) -> Pixels:
    """(n, 1, height, width) the brightness of each pixel; the mean of channels without colours."""
    if x.shape[1] != len(_LUMA):
        mean: Pixels = x.mean(axis=1, keepdims=True)
        return mean
    red, green, blue = _LUMA
    grey: Pixels = red * x[:, :1] + green * x[:, 1:2] + blue * x[:, 2:]
    return grey


def _hue(x: Pixels) -> Pixels:
    """Hue shifted, value and chroma kept; hue is counted in sixths of a turn."""
    red, green, blue = x[:, 0], x[:, 1], x[:, 2]
    value = x.max(axis=1)
    chroma = value - x.min(axis=1)
    divisor = np.where(chroma > 0, chroma, 1)
    hue = np.where(
        value == red,
        (green - blue) / divisor,
        np.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    ) + np.float32(6 * _HUE_SHIFT)
    # A channel falls from value to value - chroma as the hue goes away from its colour.
    distances = [(hue + first) % 6 for first in (5, 3, 1)]
    falls = [np.clip(np.minimum(k, 4 - k), 0, 1) for k in distances]
    return np.stack([value - chroma * fall for fall in falls], axis=1)


def _brightness_contrast(x: Pixels) -> Pixels:
    """Brighter by a factor, then more contrast around the mean brightness of the image."""
    bright = np.clip(_STRONGER * x, 0, 1)
    mean = _luminance(bright).mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
    contrasty: Pixels = _STRONGER * bright + (1 - _STRONGER) * mean.astype(np.float32)
    return contrasty


def _posterize(x: Pixels) -> Pixels:
    """Keep the two highest bits of each byte."""
    kept = np.rint(x * 255).astype(np.uint8) & np.uint8(_POSTERIZE_MASK)
    return kept.astype(np.float32) / np.float32(255)


def _noise(x: Pixels, rows: Ids, seed: int) -> Pixels:
    """Add normal noise, a function of the seed and the row of the image."""
    drawn = [
        generator(seed, "pipeline.noise", int(row)).standard_normal(x.shape[1:], dtype=np.float32)
        for row in rows
    ]
    return x + _NOISE_STD * np.stack(drawn)


_CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "identity": lambda x: x,
    "blur": _blur,
    "grayscale": lambda x: np.broadcast_to(_luminance(x), x.shape),
    "invert": lambda x: 1 - x,
    "hue": _hue,
    "brightness_contrast": _brightness_contrast,
    "solarize": lambda x: np.where(x >= _SOLARIZE_FROM, 1 - x, x),  # inverts the bright pixels
    "posterize": _posterize,
    "rotate": lambda x: quarter_turns(x, 1),
}

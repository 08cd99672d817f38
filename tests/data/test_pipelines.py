"""Image pipelines, against torchvision's where it has one and by hand where not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import functional as F

from flray.data.pipelines import NEED_COLOUR, PIPELINES, apply_pipeline

Bytes = NDArray[np.uint8]
ROWS = np.arange(40)


def photographs(channels: int = 3) -> Bytes:
    """Smooth colours, pure colours and greys, and every extreme."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, channels, 8, 8), dtype=np.uint8)
    images[:10] = images[:10, :, :1, :1]  # one colour each
    images[10:20] = images[10:20, :1]  # greys
    images[20:24] = rng.choice(np.array([0, 255], np.uint8), (4, channels, 8, 8))
    return images


def brighter_then_stronger(x: Tensor) -> Tensor:
    return F.adjust_contrast(F.adjust_brightness(x, 1.6), 1.6)


REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "blur": lambda x: F.gaussian_blur(x, [5, 5], [1.5, 1.5]),
    "grayscale": lambda x: F.rgb_to_grayscale(x, 3),
    "invert": F.invert,
    "hue": lambda x: F.adjust_hue(x, 0.3),
    "brightness_contrast": brighter_then_stronger,
    "solarize": lambda x: F.solarize(x, 0.5),
    "posterize": lambda x: F.posterize((x * 255).round().to(torch.uint8), 2) / 255,
    "rotate": lambda x: F.rotate(x, 90),
}


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_pipeline_is_torchvisions(name: str) -> None:
    images = photographs()
    ours = apply_pipeline(name, images, ROWS, 0)
    wanted = REFERENCE[name](torch.from_numpy(images) / 255).numpy() * 255
    assert ours.dtype == np.uint8
    assert np.abs(ours - wanted).max() < 0.501  # rounded to a whole grey level
    assert np.array_equal(ours, images) == (name == "identity")


def test_every_pipeline_but_the_noise_has_a_reference() -> None:
    assert set(PIPELINES) - set(REFERENCE) == {"noise"}
    assert PIPELINES[0] == "identity"


def test_noise_has_the_strength_asked_for_and_is_clipped() -> None:
    grey = np.full((40, 3, 32, 32), 128, np.uint8)
    change = apply_pipeline("noise", grey, ROWS, 0) / 255 - 128 / 255
    assert abs(change.mean()) < 0.001
    assert abs(change.std() - 0.1) < 0.001
    black = apply_pipeline("noise", np.zeros_like(grey), ROWS, 0)
    assert 0.45 < (black == 0).mean() < 0.55


def test_noise_belongs_to_the_image_and_the_seed() -> None:
    images = photographs()
    noisy = apply_pipeline("noise", images, ROWS, 0)
    some = np.array([30, 7, 11])
    assert np.array_equal(apply_pipeline("noise", images[some], some, 0), noisy[some])
    assert not np.array_equal(apply_pipeline("noise", images, ROWS, 1), noisy)
    same_image = np.repeat(images[30:31], 2, axis=0)
    first, second = apply_pipeline("noise", same_image, np.array([0, 1]), 0)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", sorted(set(PIPELINES) - set(NEED_COLOUR)))
def test_pipelines_without_colour_take_one_channel(name: str) -> None:
    grey = photographs(1)
    as_colour = apply_pipeline(name, np.repeat(grey, 3, axis=1), ROWS, 0)
    changed = apply_pipeline(name, grey, ROWS, 0)
    assert changed.shape == grey.shape
    if name != "noise":
        # The weights of red, green and blue sum to 0.9999, which a mean over them feels.
        assert np.abs(changed[:, 0].astype(int) - as_colour[:, 0]).max() <= 1


def test_pipelines_leave_their_input_alone() -> None:
    images = photographs()
    for name in PIPELINES:
        apply_pipeline(name, images, ROWS, 0)
    assert np.array_equal(images, photographs())


@pytest.mark.parametrize("channels", [2, 4])
def test_brightness_of_other_channels_than_colours_is_their_mean(channels: int) -> None:
    """Channels that are all alike are one grey image, whatever their number."""
    grey = np.random.default_rng(0).integers(0, 256, (3, 1, 5, 5)).astype(np.uint8)
    rows = np.arange(3)
    alike = apply_pipeline("brightness_contrast", grey.repeat(channels, 1), rows, 0)
    one = apply_pipeline("brightness_contrast", grey, rows, 0).repeat(channels, 1)
    assert np.abs(alike.astype(int) - one).max() <= 1

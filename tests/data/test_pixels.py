"""Examples on a device: the same bits, however they are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flray.client.embedding import rescaled
from flray.data.pixels import PAD, Examples, _reflected, has_room


def examples(dtype: torch.dtype = torch.float32) -> Examples:
    pixels = torch.arange(5 * 2 * 6 * 6).mul(37).remainder(256).to(torch.uint8).view(5, 2, 6, 6)
    mean = torch.tensor([0.13, 0.4], dtype=dtype).view(-1, 1, 1)
    ids = torch.tensor([4, 0, 2, 1, 3, 3])
    return Examples(pixels, ids, ids + 10, mean, mean + 0.2, "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_normalised_beforehand_have_the_bits_of_batches(dtype: torch.dtype) -> None:
    placed = examples(dtype)
    kept = placed.with_normalised()
    ids, keys = torch.tensor([[0, 5, 2], [1, 1, 4]]), torch.tensor([3, 4])
    for mine, theirs in (
        (placed.batch(ids), kept.batch(ids)),
        (placed.training_batch(ids, keys), kept.training_batch(ids, keys)),
    ):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert mine[0].dtype == dtype
    assert torch.equal(placed.images, kept.images)


def test_an_encoder_sees_other_pixels_than_the_normalised_ones() -> None:
    kept, ids = examples().with_normalised(), torch.arange(6)
    unit = rescaled(kept, "unit").batch(ids)[0]
    assert torch.equal(unit, rescaled(replace(kept, normalised=None), "unit").batch(ids)[0])
    assert not torch.equal(unit, kept.batch(ids)[0])


def test_a_gpu_keeps_normalised_images_that_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1600, 2000))
    assert has_room(torch.device("cuda"), 100)  # a sixteenth of what is free
    assert not has_room(torch.device("cuda"), 101)
    assert not has_room(torch.device("cpu"), 1)


@pytest.mark.parametrize("size", range(1, 8))
def test_crops_are_those_of_a_padded_image_whatever_its_size(size: int) -> None:
    """numpy's reflect goes back and forth where an image is smaller than the padding."""
    padded = np.pad(np.arange(size), PAD, mode="reflect")
    for offset in range(2 * PAD + 1):
        rows = _reflected(torch.tensor(offset), size)
        assert rows.tolist() == padded[offset : offset + size].tolist()

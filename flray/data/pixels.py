"""Examples on a device: pixels gathered by index, normalised, cropped and flipped."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.data.dataset import Dataset
from flray.data.split import Split
from flray.randomness import counter_hash

PAD = 4  # pixels added on each side before a random crop, as in the code of FLIS

# Images are kept normalised on a GPU, which spares a step four kernels, where they take at most one
# part in so many of the memory that is free: processes that share it leave room for each other.
PARTS_OF_FREE_MEMORY = 16


@dataclass(frozen=True)
class Examples:
    """All examples of a split on one device; batches are gathered by example id.

    >>> images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> ids, labels, one = torch.tensor([1, 0]), torch.tensor([7, 8]), torch.ones(1, 1, 1)
    >>> examples = Examples(images, ids, labels, mean=0 * one, std=one, augment="none")
    >>> x, y = examples.batch(torch.tensor([0]))  # example 0 is image 1 with label 7
    >>> x.flatten().tolist(), y.tolist()
    ([1.0], [7])
    """

    images: Tensor  # (N, channels, height, width) uint8, or floats of the user's own
    image_ids: Tensor  # (R,)
    labels: Tensor  # (R,)
    mean: Tensor  # (channels, 1, 1)
    std: Tensor
    augment: str
    largest: int = 255  # what a pixel is divided by; floats are taken as they are
    normalised: Tensor | None = None  # the images, each pixel with the bits it has in a batch

    @property
    def device(self) -> torch.device:
        """The device of images, ids and labels."""
        return self.images.device

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images (..., channels, height, width) and labels (...) of the examples."""
        if self.normalised is None:
            return self._normalise(self._pixels(ids)), self.labels[ids]
        return _rows(self.normalised, self.image_ids[ids]), self.labels[ids]

    def training_batch(
        self, ids: Tensor, keys: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `batch`, augmented; ids are (clients, B), keys (clients,) one per client and step.

        Equal keys give equal crops and flips on every device. Keys are ignored without
        augmentation.

        Args:
            memory: of the shape and type of the images that are returned, which may be written
                there; None: memory of their own.
        """
        if self.normalised is not None and self.augment != "crop_flip":
            return self.batch(ids)
        pixels = self._pixels(ids)
        if self.augment == "crop_flip":
            pixels = crop_flip(pixels, keys)
        return self._normalise(pixels, memory), self.labels[ids]

    def with_normalised(self) -> "Examples":
        """The same examples, whose images are normalised beforehand instead of in each batch."""
        return replace(self, normalised=self._normalise(self.images.clone()))

    def narrowed(self, dtype: torch.dtype) -> "Examples":
        """The same examples with everything that is scaled, and its scale, in another precision."""
        names = ("images", "mean", "std", "normalised")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})

    def _pixels(self, ids: Tensor) -> Tensor:
        return _rows(self.images, self.image_ids[ids])

    def _normalise(self, pixels: Tensor, memory: Tensor | None = None) -> Tensor:
        if pixels.dtype == torch.int64:
            return pixels  # tokens
        if memory is None or pixels.dtype == memory.dtype:
            x = pixels.to(self.mean.dtype)
        else:
            x = memory.copy_(pixels)
        return x.div_(self.largest).sub_(self.mean).div_(self.std)


def _rows(images: Tensor, ids: Tensor) -> Tensor:
    """Images (..., channels, height, width) of ids (...)."""
    return images.index_select(0, ids.flatten()).view(*ids.shape, *images.shape[1:])


def place_examples(
    dataset: Dataset, split: Split, device: torch.device, dtype: torch.dtype
) -> Examples:
    """Copy the images of dataset and split to a device; batches are computed in `dtype`.

    Images of float64 are normalised in float64 first: what is far from 0 would lose its digits.
    """
    wide = torch.float64 if dataset.images.dtype == np.float64 else dtype
    per_channel = (-1, *(1 for _ in dataset.images.shape[2:]))
    images = tensor_over(dataset.images).to(device)
    if split.new_images is not None:
        images = torch.cat([images, tensor_over(split.new_images).to(device)])
    examples = Examples(
        images=images,
        image_ids=tensor_over(split.image_ids).to(device),
        labels=_targets(split.labels, dtype).to(device),
        mean=torch.tensor(dataset.normalization.mean, dtype=wide, device=device).view(per_channel),
        std=torch.tensor(dataset.normalization.std, dtype=wide, device=device).view(per_channel),
        augment=dataset.augment,
        largest=255 if dataset.images.dtype == np.uint8 else 1,
    )
    is_kept = dataset.augment == "none" and has_room(device, images.numel() * dtype.itemsize)
    if is_kept or wide != dtype:
        examples = examples.with_normalised()
    return examples if wide == dtype else examples.narrowed(dtype)


def has_room(device: torch.device, num_bytes: int) -> bool:
    """True if a GPU can keep its images normalised, so many bytes; a CPU normalises batches."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes * PARTS_OF_FREE_MEMORY <= free


def _targets(targets: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Classes as they are, numbers in the precision of the models."""
    tensor = tensor_over(targets)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tensor_over(array: NDArray[Any]) -> Tensor:
    """A tensor over the array's own memory, read-only where the array came from another process.

    Nothing is copied, so nobody may write into it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def crop_flip(pixels: Tensor, keys: Tensor) -> Tensor:
    """Pad images by PAD pixels, crop them back to size at random, and flip half of them.

    What happens to an image is a function of its client's key and its position in the batch, so
    padding a batch changes nothing for the others.

    Args:
        pixels: (clients, B, channels, height, width); the result has the same shape.
        keys: (clients,) integers, a new one for each step.

    >>> pixels = torch.arange(64).view(1, 1, 1, 8, 8)
    >>> crop_flip(pixels, torch.tensor([3])).shape
    torch.Size([1, 1, 1, 8, 8])
    """
    num_clients, batch, channels, height, width = pixels.shape
    position = torch.arange(batch, device=pixels.device)
    draws = counter_hash(
        keys[:, None, None], position[:, None] * 3 + torch.arange(3, device=keys.device)
    )
    down, right = draws[..., :2].remainder(2 * PAD + 1).unbind(-1)  # (clients, B) each
    flip = draws[..., 2].remainder(2)
    rows = _reflected(down, height)  # (clients, B, height)
    columns = _reflected(right, width)
    columns = torch.where(flip[..., None] == 1, columns.flip(-1), columns)
    flat = pixels.reshape(num_clients * batch, channels, height, width)
    item = torch.arange(len(flat), device=pixels.device)[:, None, None]
    rows, columns = rows.view(-1, height, 1), columns.view(-1, 1, width)
    # Advanced indices around the channel slice put channels last.
    cropped = flat[item, :, rows, columns].movedim(-1, 1)
    return cropped.reshape(pixels.shape)


def _reflected(offset: Tensor, size: int) -> Tensor:
    """Source index of each pixel after a shift by offset - PAD, reflected at the edges."""
    index = torch.arange(size, device=offset.device) + offset[..., None] - PAD
    period = max(2 * (size - 1), 1)  # there and back
    index = index.remainder(period)
    return torch.minimum(index, period - index)

"""The folder FLRAY_DATA: finding a dataset's files there, and joining what they hold."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flray.data.dataset import Dataset, Normalization
from flray.data.options import PixelOptions
from flray.errors import ExperimentError


@dataclass(frozen=True)
class LabelledImages:
    """The training or the test rows of a dataset as its files hold them."""

    images: NDArray[np.uint8]  # (N, height, width), (N, height, width, 3) or channels first
    labels: ArrayLike


def data_folder() -> Path:
    """The folder of all datasets: FLRAY_DATA, or ~/.cache/flray."""
    return Path(os.environ.get("FLRAY_DATA", "~/.cache/flray")).expanduser()


def not_found(name: str, files: str, end: str) -> ExperimentError:
    """The error of a dataset whose files are missing.

    Args:
        files: paths below the data folder.
        end: end of the message with its punctuation: what else can be done.
    """
    source = "FLRAY_DATA" if "FLRAY_DATA" in os.environ else "the default without FLRAY_DATA"
    return ExperimentError(
        f"dataset {name} was not found: looked for {files} in {data_folder()} ({source}); "
        f"set FLRAY_DATA to the folder that holds them{end}"
    )


_OF_DAMAGE = (
    *(OSError, EOFError, BadZipFile, ZlibError, ImportError),  # of a file system of fsspec's
    *(ValueError, TypeError, LookupError, RuntimeError, AssertionError),  # torchvision's too
)


@contextmanager
def reading(name: str, files: Path | str) -> Iterator[None]:
    """Within the block, turn what readers raise of damaged files into an error that names them."""
    try:
        yield
    except ExperimentError:
        raise
    except _OF_DAMAGE as cause:
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise ExperimentError(
            f"dataset {name}: {files} cannot be read ({reason}); replace it, or set FLRAY_DATA to "
            "another folder"
        ) from cause


def join_rows(
    name: str,
    rows: list[LabelledImages],
    num_classes: int,
    pixels: PixelOptions,
    standard: Normalization,
) -> Dataset:
    """The dataset of training rows and test rows.

    Args:
        rows: the training rows, then the test rows.
        pixels: the normalization and augmentation that the user asks for.
        standard: the dataset's own mean and std, for `normalize: standard`.

    >>> part = LabelledImages(np.zeros((3, 8, 8), np.uint8), [0, 1, 1])
    >>> zero = Normalization((0.0,), (1.0,))
    >>> join_rows("tiny", [part, part], 2, PixelOptions(), zero).images.shape
    (6, 1, 8, 8)
    """
    train, test = rows
    images = np.concatenate([channels_first(part.images) for part in (train, test)])
    return Dataset(
        name=name,
        images=np.ascontiguousarray(images),
        labels=np.concatenate([np.asarray(part.labels, dtype=np.int64) for part in (train, test)]),
        num_train=len(train.images),
        num_classes=num_classes,
        normalization=pixels.normalization(standard),
        augment=pixels.augment,
    )


def channels_first(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Any of the three layouts to (N, channels, height, width)."""
    if images.ndim == 3:
        return images[:, None]
    return images.transpose(0, 3, 1, 2) if images.shape[3] == _COLOURS else images


_COLOURS = 3

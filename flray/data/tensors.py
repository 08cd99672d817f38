"""Datasets of tensors or arrays in memory: `flray.from_tensors`."""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from flray.data.checks import check_finite
from flray.data.dataset import Dataset, Normalization
from flray.errors import ExperimentError


def from_tensors(
    x_train: ArrayLike,
    y_train: ArrayLike,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    name: str = "tensors",
) -> Dataset:
    """A dataset of images and labels that are in memory, as tensors or arrays.

    Bytes are divided by 255, floats reach the model as they are. Without a test part every split
    must cut one off (`split.test=own_split`).

    Args:
        x_train: (N, channels, height, width), (N, height, width) or (N, features).
        y_train: (N,) whole numbers from 0.
        x_test: Images of the same shape. None: there is no test part.
        y_test: Their labels; None if and only if x_test is.
        name: Name of the dataset in tables and files.

    Raises:
        ExperimentError: Shapes or labels do not fit, or a number is not finite.

    >>> data = from_tensors(torch.zeros(4, 8, 8), torch.tensor([0, 1, 2, 1]))
    >>> data.image_shape, data.num_classes, data.num_train
    ((1, 8, 8), 3, 4)
    """
    images, labels = _part("train", x_train, y_train)
    num_train = len(images)
    if (x_test is None) != (y_test is None):
        missing = "x_test" if x_test is None else "y_test"
        raise ExperimentError(
            f"a test part is x_test and y_test, got no {missing}; give both or neither"
        )
    if x_test is not None and y_test is not None:
        test, test_labels = _part("test", x_test, y_test)
        if test.shape[1:] != images.shape[1:]:
            raise ExperimentError(
                f"training images are {images.shape[1:]} and test images {test.shape[1:]}: "
                "both must have one shape (channels, height, width)"
            )
        if test.dtype != images.dtype:
            raise ExperimentError(
                f"training images are {images.dtype} and test images {test.dtype}: both must be "
                "bytes (uint8) or both other numbers"
            )
        images = np.concatenate([images, test])
        labels = np.concatenate([labels, test_labels])
    channels = images.shape[1]
    scale = Normalization((0.0,) * channels, (1.0,) * channels)
    return Dataset(name, images, labels, num_train, int(labels.max()) + 1, scale)


def digest_of(dataset: Dataset) -> str:
    """SHA-256 of examples, targets, their owners and where the test part begins."""
    sha = hashlib.sha256(repr((dataset.num_train, dataset.num_classes)).encode())
    arrays = [dataset.images, dataset.labels, dataset.source, dataset.groups]
    for array in (array for array in arrays if array is not None):
        sha.update(repr((array.shape, array.dtype.str)).encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def as_array(values: ArrayLike) -> NDArray[Any]:  # Any: of any kind of number
    """The array of a tensor, a list or an array; bfloat16, which NumPy does not know, as float32.

    >>> as_array([[1, 2], [3]])
    Traceback (most recent call last):
    flray.errors.ExperimentError: expected an array, a tensor or rows of one length, got rows of ...
    """
    if isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        return np.asarray(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ExperimentError(
            "expected an array, a tensor or rows of one length, got rows of several lengths "
            f"({error})"
        ) from error


def _part(
    part: str, x: ArrayLike, y: ArrayLike
) -> tuple[NDArray[np.uint8] | NDArray[np.float32], NDArray[np.int64]]:
    """Images and labels of the part `train` or `test`, as many of the one as of the other."""
    what = "training images" if part == "train" else "test images"
    images, labels = _images(what, x), _labels(y)
    if len(images) != len(labels):
        raise ExperimentError(
            f"expected one label for each of {len(images)} {what}, got {len(labels)} labels; "
            f"x_{part} and y_{part} must have one length"
        )
    return images, labels


def _images(what: str, values: ArrayLike) -> NDArray[np.uint8] | NDArray[np.float32]:
    """(N, channels, height, width), bytes as they are and other numbers as finite float32."""
    array = as_array(values)
    if array.ndim == 2:
        array = array[:, None, None]
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4 or not len(array):
        raise ExperimentError(
            "images must be (N, channels, height, width), (N, height, width) or (N, features), "
            f"got the shape {np.shape(array)}"
        )
    if array.dtype == np.uint8:
        return array
    images = array.astype(np.float32)
    check_finite(what, images)
    return images


def _labels(values: ArrayLike) -> NDArray[np.int64]:
    array = as_array(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and array.min() < 0):
        raise ExperimentError(
            f"labels must be whole numbers from 0, one for each image, got {array.dtype} of the "
            f"shape {array.shape}"
        )
    return array.astype(np.int64)

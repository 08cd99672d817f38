"""The fields that all datasets share, and those that all splits share."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_at_least, check_literals, check_share
from flray.data.dataset import Normalization
from flray.errors import ExperimentError

Normalize = Literal["unit", "half", "standard"]
Augment = Literal["none", "crop_flip"]
TestRule = Literal["own_split", "proportional", "all_of_labels"]
ServerSource = Literal["train", "test", "synthetic"]
_CHUNK = 1 << 22  # pixels counted at a time, which bounds memory


@dataclass(frozen=True)
class PixelOptions:
    """How pixels reach the model: `unit` [0, 1], `half` [-1, 1], `standard` mean 0 and std 1."""

    # Scale of pixels. unit: [0, 1]; half: [-1, 1]; standard: mean 0 and standard deviation 1
    normalize: Normalize = "unit"
    # Augmentation of training images. crop_flip: random crops and horizontal flips
    augment: Augment = "none"

    def __post_init__(self) -> None:
        check_literals(self)

    def normalization(self, standard: Normalization) -> Normalization:
        """The normalization asked for; `standard` is the dataset's own mean and std."""
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


@dataclass(frozen=True)
class PartOptions:
    """How what each client was dealt is cut into parts."""

    validation: float = 0.1  # Share of a client's data that is its validation part
    # Test examples of a client. own_split: cut from its own data; proportional: test images with
    # the labels it trains on, in the same proportions; all_of_labels: all test images of these
    # labels
    test: TestRule = "proportional"
    # Share of a client's data that is its test part, with test: own_split
    test_fraction: float = 0.2
    # Test images per client with test: proportional, shared between clients. None: every test image
    # belongs to one client
    test_size: int | None = None
    server: int = 0  # Number of public images held by the server, balanced over classes if possible
    # Source of the public images. train: drawn at random, held by no client. test: the last ones of
    # each class, as FLIS's code takes them; they stay in the test sets, so whatever uses them has
    # seen test images. synthetic: made by the server from random numbers, without any image of the
    # dataset
    server_from: ServerSource = "train"
    holdout: int = 0  # Number of clients, drawn at random, that hold data but never train

    def __post_init__(self) -> None:
        check_literals(self)
        check_share("validation", self.validation)
        check_share("test_fraction", self.test_fraction)
        check_at_least(self, 0, "server", "holdout")
        check_at_least(self, 1, "test_size")
        if self.test == "own_split" and self.validation + self.test_fraction >= 1:
            raise ExperimentError(
                f"validation + test_fraction must be below 1, or nothing is left to train on; "
                f"got {self.validation} + {self.test_fraction}"
            )
        if self.test_size is not None and self.test != "proportional":
            raise ExperimentError(
                f"test_size only means something with test: proportional, got test: {self.test}; "
                f"leave test_size out"
            )

    def check_somebody_trains(self, num_clients: int) -> None:
        if self.holdout >= num_clients:
            raise ExperimentError(
                f"holdout must be smaller than clients, or nobody trains; "
                f"got holdout {self.holdout} of {num_clients} clients"
            )


@dataclass(frozen=True)
class SplitOptions(PartOptions):
    """How many clients there are, and how what each was dealt is cut into parts."""

    clients: int = field(kw_only=True)  # Number of clients M

    def __post_init__(self) -> None:
        check_at_least(self, 1, "clients")
        super().__post_init__()
        self.check_somebody_trains(self.clients)

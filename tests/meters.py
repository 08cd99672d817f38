"""A small regression: each client's targets are a line of its inputs, with one of two slopes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from flray.client.scores import MeanScore
from flray.data.dataset import Dataset, Normalization
from flray.data.split import Split
from flray.models.mlp import Linear
from flray.models.predictor import Predictor

SIZES = (12, 30, 7, 20, 9, 16)  # examples of each client


@dataclass(frozen=True)
class Meters:
    """Loads of six meters; meter 5 has an offset that no common line has."""

    noise: float = 0.1

    def load(self) -> Dataset:
        rng, owner = np.random.default_rng(3), np.repeat(np.arange(len(SIZES)), SIZES)
        x = rng.normal(size=(len(owner), 3)).astype(np.float32)
        slopes = np.array([[1.0, 2.0, -1.0], [0.5, 2.5, -1.0]])[owner % 2]
        y = (x * slopes).sum(1) + self.noise * rng.normal(size=len(owner)) + 4 * (owner == 5)
        scale = Normalization((0.0,), (1.0,))
        return Dataset("meters", x, y[:, None].astype(np.float32), len(x), 0, scale)


@dataclass(frozen=True)
class Owners:
    """The examples of each meter, every third for testing and every fourth for validation."""

    validation: float = 0.25

    def split(self, dataset: Dataset, seed: int) -> Split:
        ids = np.arange(len(dataset.labels))
        owned = np.split(ids, np.cumsum(SIZES)[:-1])
        test = tuple(part[::3] for part in owned)
        validation = tuple(np.setdiff1d(part[::4], part[::3]) for part in owned)
        used = [np.union1d(a, b) for a, b in zip(test, validation, strict=True)]
        train = tuple(np.setdiff1d(a, b) for a, b in zip(owned, used, strict=True))
        groups = np.arange(len(SIZES)) % 2
        return Split(ids, dataset.labels, train, validation, test, groups=groups)


class Pinball(MeanScore):
    """The pinball loss of the median, half of the absolute error."""

    name = "pinball"

    def of_examples(self, output, targets):
        return 0.5 * (output - targets).abs()


class OwnScores(Linear):
    """A line that knows how often it is within 1 of the target."""

    def scores(self, batch):
        x, y = batch
        return {"within": ((self(x) - y).abs() < 1).double()[:, 0]}


@dataclass(frozen=True)
class Tokens:
    """Six tokens of five kinds for each example, and six that follow at random."""

    def load(self) -> Dataset:
        x, y = np.random.default_rng(0).integers(0, 5, (2, sum(SIZES), 6))
        return Dataset("tokens", x, y, len(x), 5, Normalization((0.0,), (1.0,)))


class Copying(Predictor):
    """Expects each token again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * nn.functional.one_hot(x, 5).to(self.scale.dtype)

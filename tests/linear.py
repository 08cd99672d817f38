"""A linear model with two parameters, so that federated rounds can be followed by hand.

The prediction is slope * x + offset and the loss of an example half the squared error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from flray.data.dataset import Dataset, Normalization
from flray.engines.training import Training
from flray.execution.federation import Federation
from flray.models.bank import ModelBank
from flray.models.mixing import Aggregation

from scenarios import federation_over, host_over, ragged_split

Pairs = Sequence[tuple[int, int]]  # (x, y) of a client's examples
Vector = NDArray[np.float64]

START = np.array([0.5, -0.25])  # slope and offset that everybody starts from


class Linear(LightningModule):
    """Two layers of a parameter each: slope.weight and offset.weight."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Linear(1, 1, bias=False)
        self.offset = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.slope.weight.fill_(START[0])
            self.offset.weight.fill_(START[1])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        predicted: Tensor = self.slope(x) + self.offset(torch.ones_like(x))
        return predicted

    def example_losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return 0.5 * (self(x)[:, 0] - y).square()


def linear_federation(
    clients: Sequence[Pairs],
    training: Training,
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
    **keywords: Any,
) -> Federation:
    """Clients with these examples, in float64; everybody takes part in every round."""
    joined = [pair for of_client in clients for pair in of_client]
    pairs = np.array(joined, dtype=np.int64).reshape(-1, 2)
    split = ragged_split([len(of_client) for of_client in clients], pairs[:, 1])
    images = pairs[:, 0].astype(np.uint8)[:, None, None, None]
    scale = Normalization((0.0,), (1 / 255,))  # pixels are x
    dataset = Dataset("linear", images, pairs[:, 1], len(pairs), 10, scale)
    host = host_over(Linear(), dataset, split, dtype=torch.float64)
    return federation_over(host, training, aggregation=aggregation, **keywords)


def run_rounds(algorithm: Any, fed: Federation, rounds: int) -> list[Any]:
    """The state before round 1 and after each round."""
    states = [algorithm.init(fed).state]
    for t in range(1, rounds + 1):
        cohort = algorithm.cohort(states[-1], t, fed)
        states.append(algorithm.round(states[-1], cohort, fed).state)
    return states


def vector(bank: ModelBank, client: int = 0) -> Vector:
    """Slope and offset of the model that the client uses."""
    row = bank.row(int(bank.owner[client]))
    return np.array([float(row["slope.weight"]), float(row["offset.weight"])])


def gradient(w: Vector, own: Pairs) -> Vector:
    """Of the mean loss of the examples: (mean r x, mean r) with r = slope x + offset - y."""
    x, y = np.array(own, dtype=float).T
    r = w[0] * x + w[1] - y
    return np.array([(r * x).mean(), r.mean()])


def local_sgd(w: Vector, own: Pairs, num_steps: int, lr: float, momentum: float = 0.0) -> Vector:
    """Steps of SGD on all examples at once, as torch does them."""
    velocity = np.zeros(2)
    for _ in range(num_steps):
        velocity = momentum * velocity + gradient(w, own)
        w = w - lr * velocity
    return w


def optimum(clients: Sequence[Pairs]) -> Vector:
    """Least squares over all examples of all clients."""
    x, y = np.array([pair for own in clients for pair in own], dtype=float).T
    found: Vector = np.linalg.lstsq(np.stack([x, np.ones_like(x)], axis=1), y, rcond=None)[0]
    return found

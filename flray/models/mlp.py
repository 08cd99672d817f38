"""Linear models and multi-layer perceptrons for inputs of any shape."""

from itertools import pairwise
from math import prod

from torch import nn

from flray.models.predictor import Predictor
from flray.values import require_sizes


class Linear(Predictor):
    """One linear layer: softmax regression for classes, least squares for numbers.

    >>> sum(p.numel() for p in Linear((3,), 2).parameters())
    8
    """

    takes = "numbers"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_outputs))


class Mlp(Predictor):
    """Hidden layers of ReLU units, as many and as wide as `hidden` says.

    >>> sum(p.numel() for p in Mlp((3,), 1, hidden=(4, 2)).parameters())  # 16 + 10 + 3
    29
    """

    takes = "numbers"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        hidden: tuple[int, ...] = (64, 64),  # Units of each hidden layer
    ) -> None:
        super().__init__()
        require_sizes(hidden=hidden)
        widths = [prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))

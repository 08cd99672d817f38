"""MLP-200 of FLT (Jamali-Rad et al.): one hidden layer of 200 units."""

from torch import nn

from flray.models.classifier import Classifier
from flray.models.dropout import KeyedDropout
from flray.values import require_sizes


class Mlp200(Classifier):
    """Images (B, channels, height, width) to logits (B, classes).

    >>> sum(p.numel() for p in Mlp200((1, 28, 28), 10).parameters())  # 785 * 200 + 201 * 10
    159010
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        hidden: int = 200,  # Number of hidden units
        # Dropout rate of the hidden layer; FLT's code has 0.5, its paper none
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_sizes(hidden=hidden)
        channels, height, width = image_shape
        # Dropout between linear layer and ReLU, as FLT's code has it.
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, hidden),
            KeyedDropout(dropout),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )

"""Models of sequences: convolutions over time, and recurrent layers."""

from torch import Tensor, nn

from flray.models.predictor import Predictor
from flray.values import require_sizes
from flray.wording import counted


class Cnn1d(Predictor):
    """Two convolutions over time with pooling, the mean over time, and a linear layer.

    >>> import torch
    >>> Cnn1d((6, 64), 5)(torch.zeros(2, 6, 64)).shape
    torch.Size([2, 5])
    """

    takes = "numbers"

    def __init__(
        self,
        input_shape: tuple[int, ...],  # channels, instants
        num_outputs: int,
        channels: int = 32,  # Channels of the first convolution; the second has twice as many
        kernel: int = 5,  # Instants that a convolution sees
    ) -> None:
        super().__init__()
        require_sizes(channels=channels, kernel=kernel)
        num_channels, num_instants = _two_axes(input_shape, "(channels, instants)")
        least = 1 + kernel % 2  # padding for an even kernel adds an instant, and two become one
        if num_instants < least:
            raise ValueError(
                f"inputs must have at least {counted(least, 'instant')} with kernel {kernel}, "
                f"got {num_instants}"
            )
        self.layers = nn.Sequential(
            nn.Conv1d(num_channels, channels, kernel, padding=kernel // 2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(channels, 2 * channels, kernel, padding=kernel // 2),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * channels, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(x).mean(2))
        return output


class Gru(Predictor):
    """A recurrent network over (B, instants, channels): the last state gives classes or numbers.

    >>> import torch
    >>> Gru((168, 1), 24, hidden=8)(torch.zeros(2, 168, 1)).shape
    torch.Size([2, 24])
    """

    takes = "numbers"

    def __init__(
        self,
        input_shape: tuple[int, ...],  # instants, channels
        num_outputs: int,
        hidden: int = 64,  # Units of the recurrent layer
    ) -> None:
        super().__init__()
        require_sizes(hidden=hidden)
        _, num_channels = _two_axes(input_shape, "(instants, channels)")
        self.recurrent = nn.GRU(num_channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(x)
        output: Tensor = self.head(states[:, -1])
        return output


class CharGru(Predictor):
    """Characters (B, length) to logits of the next ones (B, length, characters).

    >>> import torch
    >>> CharGru((80,), 65, hidden=16)(torch.zeros(2, 80, dtype=torch.int64)).shape
    torch.Size([2, 80, 65])
    """

    takes = "tokens"

    def __init__(
        self,
        input_shape: tuple[int, ...],  # characters of a sequence; any length works
        num_outputs: int,
        embedding: int = 8,  # Numbers that stand for a character
        hidden: int = 128,  # Units of the recurrent layer
    ) -> None:
        super().__init__()
        require_sizes(embedding=embedding, hidden=hidden)
        self.embedding = nn.Embedding(num_outputs, embedding)
        self.recurrent = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(x))
        output: Tensor = self.head(states)
        return output


def _two_axes(input_shape: tuple[int, ...], axes: str) -> tuple[int, int]:
    """The shape of a sequence, which has two axes; their names are for the message."""
    if len(input_shape) != 2:
        raise ValueError(
            f"inputs must be {axes}, got the shape {input_shape}; the models linear and mlp take "
            "any shape"
        )
    return input_shape[0], input_shape[1]

"""CNN of FL+HC (Briggs, Fan, Andras 2020), after McMahan 2017: two 5x5 convolutions, 512 units."""

from typing import Literal

from torch import nn

from flray.models.classifier import Classifier


class FlhcCnn(Classifier):
    """Images (B, channels, height, width) to logits (B, classes).

    >>> sum(p.numel() for p in FlhcCnn((1, 28, 28), 10).parameters())
    1663370
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        # Padding of the convolutions. same: as in McMahan 2017; the paper of FL+HC does not say
        padding: Literal["valid", "same"] = "same",
    ) -> None:
        super().__init__()
        self.layers = two_convolutions(image_shape, num_classes, 512, padding)


def two_convolutions(
    image_shape: tuple[int, int, int], num_classes: int, hidden: int, padding: str
) -> nn.Sequential:
    """5x5 convolutions with 32 and 64 channels, each pooled by 2, then one hidden layer.

    >>> two_convolutions((1, 28, 28), 10, 512, "valid")[7]
    Linear(in_features=1024, out_features=512, bias=True)
    """
    channels, height, width = image_shape
    lost = 4 if padding == "valid" else 0  # pixels per convolution
    rows, columns = (((side - lost) // 2 - lost) // 2 for side in (height, width))
    if min(rows, columns) < 1:
        least = 4 + 3 * lost
        raise ValueError(f"images must be at least {least}x{least}, got {height}x{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * rows * columns, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )

"""CNN of FL+HC (Briggs, Fan, Andras 2020), after McMahan 2017: two 5x5 convolutions, 512 units."""

from typing import Literal

from torch import Tensor, nn

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
        channels, height, width = image_shape
        sides = [_side_after_two_stages(side, padding) for side in (height, width)]
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * sides[0] * sides[1], 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def _side_after_two_stages(side: int, padding: str) -> int:
    """
    >>> _side_after_two_stages(28, "valid"), _side_after_two_stages(28, "same")
    (4, 7)
    """
    lost = 4 if padding == "valid" else 0
    return ((side - lost) // 2 - lost) // 2

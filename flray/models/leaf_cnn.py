"""CNN of LEAF (Caldas et al. 2018), as FLT uses it: two 5x5 convolutions, 2048 units."""

from torch import Tensor, nn

from flray.models.classifier import Classifier


class LeafCnn(Classifier):
    """Images (B, channels, height, width) to logits (B, classes).

    >>> sum(p.numel() for p in LeafCnn((1, 28, 28), 62).parameters())
    6603710
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        rows, columns = (side // 2 // 2 for side in (height, width))
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * rows * columns, 2048),
            nn.ReLU(),
            nn.Linear(2048, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits

"""ResNet-9 as FLIS (Morafah et al.) uses it on CIFAR-100: group norm, and biases beside it.

FLIS ends with 4x4 max pooling, one pixel at 32x32; other sizes are pooled to one pixel likewise.
"""

from torch import Tensor, nn

from flray.models.classifier import Classifier

GROUPS = 32  # of channels that are normalised together
SHRINKAGE = 8  # three poolings by 2


class Residual(nn.Module):
    """x + layers(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.layers(x)
        return x + change


class ResNet9(Classifier):
    """Images (B, channels, height, width), at least 8 x 8, to logits (B, classes).

    >>> sum(p.numel() for p in ResNet9((3, 32, 32), 100).parameters())
    6621540
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        if min(height, width) < SHRINKAGE:
            raise ValueError(f"images must be at least 8x8 for ResNet-9, got {image_shape}")
        self.layers = nn.Sequential(
            *_convolution(channels, 64),
            *_convolution(64, 128),
            nn.MaxPool2d(2),
            Residual(*_convolution(128, 128), *_convolution(128, 128)),
            *_convolution(128, 256),
            nn.MaxPool2d(2),
            *_convolution(256, 512),
            nn.MaxPool2d(2),
            Residual(*_convolution(512, 512), *_convolution(512, 512)),
            nn.MaxPool2d((height // SHRINKAGE, width // SHRINKAGE)),
            nn.Flatten(),
            nn.Linear(512, num_classes),
        )


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
        nn.GroupNorm(GROUPS, outputs),
        nn.ReLU(),
    )

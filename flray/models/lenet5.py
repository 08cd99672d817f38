"""LeNet-5 as FLIS ("simple-cnn") and FLT (CIFAR) use it: ReLU and max pooling."""

from typing import Literal

from torch import nn

from flray.models.classifier import Classifier


class LeNet5(Classifier):
    """Images (B, channels, height, width) to logits (B, classes).

    >>> sum(p.numel() for p in LeNet5((3, 32, 32), 10).parameters())
    62006
    >>> [name for name, _ in LeNet5((1, 28, 28), 10, norm="batch").named_buffers()][:2]
    ['layers.1.running_mean', 'layers.1.running_var']
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        # Normalisation after each convolution. batch: batch normalisation, as FedBN needs it; it
        # keeps running statistics, which the engines loop and lightning train
        norm: Literal["none", "batch"] = "none",
    ) -> None:
        super().__init__()
        normed = norm == "batch"
        channels, height, width = image_shape
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        if min(rows, columns) < 1:
            raise ValueError(f"images must be at least 16x16, got {height}x{width}")
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5),
            *([nn.BatchNorm2d(6)] if normed else []),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            *([nn.BatchNorm2d(16)] if normed else []),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )

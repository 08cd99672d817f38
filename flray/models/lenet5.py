"""LeNet-5 as FLIS ("simple-cnn") and FLT (CIFAR) use it: ReLU and max pooling."""

from torch import nn

from flray.models.classifier import Classifier


class LeNet5(Classifier):
    """Images (B, channels, height, width) to logits (B, classes).

    >>> sum(p.numel() for p in LeNet5((3, 32, 32), 10).parameters())
    62006
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )

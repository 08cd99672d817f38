"""CNN of LEAF (Caldas et al. 2018), as FLT uses it: two 5x5 convolutions, 2048 units."""

from flray.models.classifier import Classifier
from flray.models.flhc_cnn import two_convolutions


class LeafCnn(Classifier):
    """Images (B, channels, height, width) to logits (B, classes).

    >>> sum(p.numel() for p in LeafCnn((1, 28, 28), 62).parameters())
    6603710
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.layers = two_convolutions(image_shape, num_classes, 2048, "same")

"""What the classifiers of the papers share: cross-entropy per example."""

from torch import Tensor
from torch.nn import functional as F

from flray.models.predictor import Predictor


class Classifier(Predictor):
    """Base class of classifiers of images: logits (B, classes) as output, cross-entropy as loss.

    A subclass builds `layers` for `image_shape` and `num_classes`, or defines `forward`.

    >>> import torch
    >>> from torch import nn
    >>> class Linear(Classifier):
    ...     def __init__(self, image_shape, num_classes):
    ...         super().__init__()
    ...         num_pixels = image_shape[0] * image_shape[1] * image_shape[2]
    ...         self.layers = nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, num_classes))
    >>> model = Linear((1, 8, 8), 4)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 4])
    >>> losses = model.losses(torch.zeros(2, 4), torch.tensor([0, 3]))
    >>> losses.exp().round()  # log 4, for four equally likely classes
    tensor([4., 4.])
    """

    takes = "numbers"

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B,) cross-entropy of logits (B, classes) and labels (B,)."""
        # Without a branch, which torch.fx could not trace.
        return F.cross_entropy(output, targets, reduction="none")

"""What the classifiers of the papers share: cross-entropy per example."""

from typing import Protocol

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # images (B, channels, height, width), labels (B,)


class HasExampleLosses(Protocol):
    """A module with a loss per example, which `vectorized` needs to stack clients."""

    def example_losses(self, batch: Batch) -> Tensor:
        """(B,) the loss of each example; `training_step` returns their mean."""
        ...


class HasLosses(Protocol):
    """A module whose losses follow from its output, so that evaluation needs one forward pass."""

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        """(B,) the loss of each example."""
        ...


class Classifier(LightningModule):
    """Base class of classifiers: logits (B, classes) as output, cross-entropy as loss.

    A subclass builds `layers` for `image_shape` and `num_classes`, or defines `forward`; the
    engines differentiate `example_losses`.

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

    layers: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, channels, height, width)."""
        logits: Tensor = self.layers(x)
        return logits

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        """(B,) cross-entropy of logits (B, classes) and labels (B,)."""
        return F.cross_entropy(output, labels, reduction="none")

    def example_losses(self, batch: Batch) -> Tensor:
        """(B,) cross-entropy of each example of the batch."""
        x, y = batch
        return self.losses(self(x), y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.example_losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For use outside flray, and for `train.optimizer: module`."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

"""What models of any task share: a loss that follows from the kind of the targets."""

from typing import Literal, Protocol

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # inputs (B, ...), targets (B,) or (B, ...)


class HasExampleLosses(Protocol):
    """A module with a loss per example, which `vectorized` needs to stack clients."""

    def example_losses(self, batch: Batch) -> Tensor:
        """(B,) the loss of each example; `training_step` returns their mean."""
        ...


class HasLosses(Protocol):
    """A module whose losses follow from its output, so that evaluation needs one forward pass."""

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B,) the loss of each example."""
        ...


class Predictor(LightningModule):
    """Base class of models that classify, predict numbers, or continue sequences.

    A subclass builds `layers` for `input_shape` and `num_outputs`, or defines `forward`; the
    engines differentiate `example_losses`. Targets that are floats get the squared error, whole
    numbers cross-entropy; several targets of an example are averaged.

    >>> model = Predictor()
    >>> model.losses(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]))  # (0 + 4) / 2
    tensor([2.])
    >>> model.losses(torch.zeros(1, 5, 4), torch.zeros(1, 5, dtype=torch.int64)).exp().round()
    tensor([4.])
    """

    # What the model can read. numbers: floats, to which whole numbers are converted, and one
    # prediction for each example; tokens: sequences of whole numbers below num_outputs, and one for
    # each position; any: whatever the data have
    takes: Literal["any", "numbers", "tokens"] = "any"
    layers: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes) or (B, positions, classes), or numbers (B, ...), of inputs."""
        output: Tensor = self.layers(x)
        return output

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B,) the loss of each example.

        Args:
            output: (B, classes) or (B, positions, classes) logits, or (B, ...) numbers.
            targets: (B,) or (B, positions) classes, or (B, ...) numbers.
        """
        if targets.is_floating_point():
            losses = (output.view_as(targets) - targets).square()
        else:
            by_class = output.movedim(-1, 1)  # (B, classes, positions)
            losses = F.cross_entropy(by_class, targets, reduction="none")
        return losses if targets.ndim == 1 else losses.flatten(1).mean(1)

    def example_losses(self, batch: Batch) -> Tensor:
        """(B,) the loss of each example of the batch."""
        x, y = batch
        return self.losses(self(x), y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.example_losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For use outside flray, and for `train.optimizer: module`."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

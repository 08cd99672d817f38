"""What the classifiers of the papers share: cross-entropy per example."""

from typing import Protocol

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # images (B, channels, height, width), labels (B,)


class HasExampleLosses(Protocol):
    """What a module must offer to be stacked: a loss for each example, (B,)."""

    def example_losses(self, batch: Batch) -> Tensor: ...


class HasLosses(Protocol):
    """What spares evaluation a second forward pass."""

    def losses(self, output: Tensor, labels: Tensor) -> Tensor: ...


class Classifier(LightningModule):
    """Logits as output; `example_losses` is what the engines differentiate."""

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels, reduction="none")

    def example_losses(self, batch: Batch) -> Tensor:
        x, y = batch
        return self.losses(self(x), y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.example_losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For use outside flray, and for `train.optimizer: module`."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

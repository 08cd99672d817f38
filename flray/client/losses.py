"""The loss of a batch as a function of params, for any LightningModule."""

from typing import cast

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from flray.client.training import LocalBatch
from flray.models.bank import Params
from flray.models.classifier import HasExampleLosses


class BatchLoss(nn.Module):
    """Wraps a module so that `functional_call` reaches its loss rather than its forward."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.per_example = hasattr(module, "example_losses")

    def forward(self, batch: LocalBatch) -> Tensor:
        if not self.per_example:
            return self._training_step(batch)
        losses = cast(HasExampleLosses, self.module).example_losses((batch.x, batch.y))
        if batch.mask is None:
            return losses.mean()
        kept = torch.where(batch.mask, losses, torch.zeros_like(losses))
        return kept.sum() / batch.mask.sum().clamp(min=1)

    def _training_step(self, batch: LocalBatch) -> Tensor:
        output = self.module.training_step((batch.x, batch.y), 0)
        return cast(Tensor, output["loss"] if isinstance(output, dict) else output)

    def at(self, w: Params, batch: LocalBatch) -> Tensor:
        """The loss with the module's params replaced by w and its dropout keys by the batch's."""
        state = {f"module.{k}": v for k, v in (w | batch.keys).items()}
        return cast(Tensor, functional_call(self, state, (batch,)))

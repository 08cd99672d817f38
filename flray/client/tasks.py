"""The tasks: pure functions of (a host's data, models, a job), run wherever a host is."""

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.client.engine import Block, BlockResult
from flray.client.host import Host
from flray.client.plan import plan_client
from flray.client.training import Gradient, Training
from flray.data.dataset import Ids
from flray.models.bank import Params, load_params
from flray.models.classifier import Batch, HasExampleLosses, HasLosses

SCORE_BATCH = 1000  # examples a forward pass; large, for no gradient is kept


@dataclass(frozen=True)
class TrainJob:
    """A block of clients, and the row of the bank that each starts from."""

    clients: Ids  # (K,)
    rows: Ids  # (K,)
    memo: Params = field(default_factory=dict)  # leaves (K, ...)


@dataclass(frozen=True)
class Train:
    """Local training of the clients of a block in round t."""

    training: Training
    gradient: Gradient
    t: int

    def __call__(self, host: Host, bank: Params, job: TrainJob) -> BlockResult:
        rows = torch.from_numpy(job.rows).to(host.examples.device)
        train = host.timeline.at(self.t).train
        plans = tuple(
            plan_client(train[i], self.training, host.seed, self.t, int(i)) for i in job.clients
        )
        w0 = {name: leaf.index_select(0, rows) for name, leaf in bank.items()}
        return host.engine.train(Block(plans, w0, job.memo), self.training, self.gradient)


@dataclass(frozen=True)
class ScoreJob:
    """One model and the examples to judge it on."""

    row: int
    examples: Ids  # (R,)


@dataclass(frozen=True)
class ExampleScores:
    correct: NDArray[np.bool_]  # (R,)
    loss: NDArray[np.float64]  # (R,) NaN for a module without example_losses


class Score:
    """Is the model right on each example, and at what loss; in evaluation mode."""

    def __call__(self, host: Host, bank: Params, job: ScoreJob) -> ExampleScores:
        host.module.eval()
        load_params(host.module, {name: leaf[job.row] for name, leaf in bank.items()})
        ids = torch.from_numpy(job.examples).to(host.examples.device)
        correct, losses = [], []
        with torch.no_grad():
            for some in torch.split(ids, SCORE_BATCH):
                x, y = host.examples.batch(some)
                output = host.module(x)
                correct.append(_correct(output, y))
                losses.append(_losses(host.module, output, (x, y)))
        return ExampleScores(
            torch.cat(correct).cpu().numpy(), torch.cat(losses).double().cpu().numpy()
        )


def _correct(output: Tensor, labels: Tensor) -> Tensor:
    """Never, for a module that gives no row of class scores for an example: an autoencoder."""
    if output.dim() != 2:
        return torch.zeros_like(labels, dtype=torch.bool)
    return output.argmax(-1) == labels


def _losses(module: LightningModule, output: Tensor, batch: Batch) -> Tensor:
    if hasattr(module, "losses"):  # spares a second forward pass
        return cast(HasLosses, module).losses(output, batch[1])
    if hasattr(module, "example_losses"):
        return cast(HasExampleLosses, module).example_losses(batch)
    return output.new_full((len(output),), torch.nan)

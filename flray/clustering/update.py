"""Signatures read off a model: what a client's training does to it, or the model itself."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flray.clustering.points import Points
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, Params


@dataclass(frozen=True)
class Update:
    """Δ = w − w0 after the client's own training from its model (FL+HC, Alg. 1 l. 8).

    One vector per client, (m, p) for a model with p parameters. Every client is sent its model and
    returns the trained one, which is not kept.

    >>> Update(epochs=2).epochs
    2
    """

    epochs: int | None = None  # Epochs of the training that gives the update. None: `train.epochs`

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be >= 1 or null, got {self.epochs}")

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        trained = probe(fed, bank, cohort, self.epochs)
        rows = bank.owner[trained.clients]
        return Points.vectors(trained.clients, updates(trained, bank.params, rows)), memory


@dataclass(frozen=True)
class Weights:
    """w itself after the client's own training from its model, (m, p) for p parameters."""

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        trained = probe(fed, bank, cohort)
        return Points.vectors(trained.clients, flatten(trained.params)), memory


def probe(fed: Federation, bank: ModelBank, cohort: Cohort, epochs: int | None = None) -> Trained:
    """Train the cohort from its models; the trained models are returned, but not kept by anybody.

    Args:
        epochs: None: `train.epochs`.
    """
    training = fed.training if epochs is None else replace(fed.training, epochs=epochs)
    probe_cohort = Cohort(cohort.t, cohort.clients, is_probe=True)
    trained = fed.train(bank, probe_cohort, plain_gradient, training=training)
    exchanged = len(cohort.clients) * bank.bytes_per_model
    fed.meter.count_transfer("signature", down=exchanged, up=exchanged)
    return trained


def flatten(params: Params) -> Tensor:
    """(K, p) the params of K models as vectors, leaves in name order.

    >>> flatten({"b": torch.tensor([[1.0]]), "a": torch.tensor([[[2.0, 3.0]]])})
    tensor([[2., 3., 1.]])
    """
    return torch.cat([params[name].flatten(1) for name in sorted(params)], dim=1)


def updates(trained: Trained, bank: Params, rows: Ids) -> Tensor:
    """(K, p) flattened models minus the rows of the bank they started from.

    Some models and one leaf at a time: thousands of models are not held a third time.
    """
    sizes = {name: leaf.shape[1:].numel() for name, leaf in sorted(trained.models.bank.items())}
    any_leaf = next(iter(trained.models.bank.values()))
    result = any_leaf.new_empty(len(rows), sum(sizes.values()))
    for positions, models in trained.in_parts():
        start = torch.from_numpy(rows[positions]).to(any_leaf.device)
        columns = torch.split(result[positions], list(sizes.values()), dim=1)
        for part, name in zip(columns, sizes, strict=True):
            part.copy_((models[name] - bank[name].index_select(0, start)).flatten(1))
    return result

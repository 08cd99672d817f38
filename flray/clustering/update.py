"""Signatures read off a model: what a client's training does to it, or the model itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flray.client.sketching import SketchRows
from flray.clustering.points import Points
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import (
    Layers,
    ModelBank,
    Params,
    flat_rows,
    leaves_of_layers,
    num_bytes,
)
from flray.values import require_at_least

HELD_BYTES = 2**30  # models that are held at a time where clients send sketches


@dataclass(frozen=True)
class Update:
    """Δ = w − w0 after the client's own training from its model (FL+HC, Alg. 1 l. 8).

    One vector per client, (m, p) for p parameters of the chosen layers, without statistics of
    BatchNorm. Every client is sent its model and returns these layers of the trained one, which is
    not kept.
    """

    epochs: int | None = None  # Epochs of the training that gives the update. None: `train.epochs`
    layers: Layers = "all"  # Layers that are sent and compared: all, first, last, or their names

    def __post_init__(self) -> None:
        require_at_least(self, epochs=1)

    def require(self, fed: Federation) -> None:
        """Refuse an experiment whose model does not have the layers."""
        leaves_of_layers(fed.learned(fed.initial), self.layers)

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        w0 = chosen_leaves(fed.learned(bank.params), self.layers)
        trained = probe(fed, bank, cohort, self.epochs, w0)
        rows = bank.owner[trained.clients]
        return Points.vectors(trained.clients, updates(trained, w0, rows)), memory

    def sketched(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params, dim: int
    ) -> tuple[Points, Params]:
        """Sketches (m, dim) of the updates, which clients send with `embed: sketch`."""
        question = _sketch_question(fed, bank, self.layers, dim)
        if question is None:
            return Update.__call__(self, fed, bank, cohort, memory)
        clients, sketches = sketched_models(fed, bank, cohort, question, self.epochs)
        start = question(np.arange(bank.num_rows))(bank.params)["sketch"]  # S w0, (U, dim)
        rows = torch.from_numpy(bank.owner[clients]).to(start.device)
        # S is linear: S Δ = S w - S w0, both in float64
        return _as_sent(clients, sketches - start[rows], bank), memory


@dataclass(frozen=True)
class Weights:
    """w itself after the client's own training from its model, (m, p) for p parameters."""

    layers: Layers = "all"  # Layers that are sent and compared: all, first, last, or their names

    def require(self, fed: Federation) -> None:
        """Refuse an experiment whose model does not have the layers."""
        leaves_of_layers(fed.learned(fed.initial), self.layers)

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        leaves = chosen_leaves(fed.learned(bank.params), self.layers)
        trained = probe(fed, bank, cohort, sent=leaves)
        return Points.vectors(trained.clients, flatten(trained.leaves(list(leaves)))), memory

    def sketched(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params, dim: int
    ) -> tuple[Points, Params]:
        """Sketches (m, dim) of the weights, which clients send with `embed: sketch`."""
        question = _sketch_question(fed, bank, self.layers, dim)
        if question is None:
            return self(fed, bank, cohort, memory)
        return _as_sent(*sketched_models(fed, bank, cohort, question), bank), memory


def chosen_leaves(params: Params, layers: Layers) -> Params:
    """The leaves of these layers.

    >>> list(chosen_leaves({"0.weight": torch.zeros(1), "2.weight": torch.zeros(1)}, "last"))
    ['2.weight']
    """
    names = leaves_of_layers(params, layers)
    return {name: leaf for name, leaf in params.items() if name in names}


def probe(
    fed: Federation,
    bank: ModelBank,
    cohort: Cohort,
    epochs: int | None = None,
    sent: Params | None = None,
) -> Trained:
    """Train the cohort from its models; the trained models are returned, but not kept by anybody.

    Args:
        epochs: None: `train.epochs`.
        sent: leaves of the bank that clients send back, for the bytes. None: all.
    """
    training = fed.training if epochs is None else replace(fed.training, epochs=epochs)
    probe_cohort = Cohort(cohort.t, cohort.clients, is_probe=True)
    trained = fed.train(bank, probe_cohort, plain_gradient, training=training)
    up = bank.bytes_per_model if sent is None else num_bytes(sent, bank.num_rows)
    num = len(cohort.clients)
    fed.meter.count_transfer("signature", down=num * bank.bytes_per_model, up=num * up)
    return trained


Sketching = Callable[[Ids], SketchRows]  # the question about some slots of a block


def _sketch_question(
    fed: Federation, bank: ModelBank, layers: Layers, dim: int
) -> Sketching | None:
    """The question for sketches of these layers; None if they have at most `dim` numbers."""
    leaves = chosen_leaves(fed.learned(bank.params), layers)
    if sum(leaf[0].numel() for leaf in leaves.values()) <= dim:
        return None
    return partial(SketchRows, names=sorted(leaves), dim=dim, seed=fed.seed)


def sketched_models(
    fed: Federation,
    bank: ModelBank,
    cohort: Cohort,
    question: Sketching,
    epochs: int | None = None,
) -> tuple[Ids, Tensor]:
    """The clients that answered, and (m, dim) float64 sketches of the models that they trained.

    Some clients train at a time, so that the models of all clients are never held together.
    """
    nobody = question(np.arange(0))(bank.params)
    # Bytes of a sketch in the precision of the model
    sent = {"sketch": _like(bank).new_empty(bank.num_rows, nobody["sketch"].shape[1])}
    length = max(fed.block, HELD_BYTES // bank.bytes_per_model)
    clients, sketches = [cohort.clients[:0]], [nobody["sketch"]]
    for first in range(0, len(cohort.clients), length):
        part = Cohort(cohort.t, cohort.clients[first : first + length])
        trained = probe(fed, bank, part, epochs, sent)
        positions = np.arange(len(trained.clients))
        clients.append(trained.clients)
        sketches.append(trained.models.answers(positions, question, nobody)["sketch"])
    return np.concatenate(clients), torch.cat(sketches)


def _as_sent(clients: Ids, sketches: Tensor, bank: ModelBank) -> Points:
    """The sketches in the precision of the model, in which clients send them."""
    return Points.vectors(clients, sketches.to(_like(bank).dtype))


def _like(bank: ModelBank) -> Tensor:
    return next(iter(bank.params.values()))


def flatten(params: Params) -> Tensor:
    """(K, p) the params of K models as vectors, leaves in name order.

    >>> flatten({"b": torch.tensor([[1.0]]), "a": torch.tensor([[[2.0, 3.0]]])})
    tensor([[2., 3., 1.]])
    """
    return torch.cat([flat_rows(params[name]) for name in sorted(params)], dim=1)


def updates(trained: Trained, bank: Params, rows: Ids) -> Tensor:
    """(K, p) flattened models minus the rows of the bank they started from.

    Some models and one leaf at a time: thousands of models are not held a third time.

    Args:
        bank: the leaves that are compared, (U, ...).
        rows: (K,) the row of the bank that each model started from.
    """
    sizes = {name: leaf.shape[1:].numel() for name, leaf in sorted(bank.items())}
    any_leaf = next(iter(trained.models.bank.values()))
    result = any_leaf.new_empty(len(rows), sum(sizes.values()))
    for positions, models in trained.in_parts(bank):
        start = torch.from_numpy(rows[positions]).to(any_leaf.device)
        columns = torch.split(result[positions], list(sizes.values()), dim=1)
        for part, name in zip(columns, sizes, strict=True):
            part.copy_(flat_rows(models[name] - bank[name].index_select(0, start)))
    return result

"""The seam of engines: a block of clients with their models in, trained models out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flray.engines.plan import IndexPlan
from flray.engines.training import Gradient, Training
from flray.models.bank import Params


@dataclass(frozen=True)
class Block:
    """K clients that are trained together: their plans, and the models and memos they start from.

    Row k of every leaf belongs to plans[k]. An engine reads a block and never changes it. A model
    may have leaves beside the module's, such as a second set of weights: the gradient hook sees
    them in w, and they move along what it returns for them.
    """

    plans: tuple[IndexPlan, ...]  # one per client, which decides every batch
    w0: Params  # models, leaves (K, ...)
    memo: Params  # state that the gradient hook reads, leaves (K, ...); {} if there is none


@dataclass(frozen=True)
class BlockResult:
    """Trained models and losses of a block of K clients, in the order of its plans."""

    params: Params  # leaves (K, ...); {} once they stay with the host that trained them
    loss: NDArray[np.float64]  # (K,) mean over the client's steps; not finite if it diverged
    # By name, (K,) the mean of the values that the module logged; NaN for a client without any.
    logged: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    # Written by the host: (K,) by leaf, the largest absolute value of each model, and its number.
    largest: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    host: int = 0


class Engine(Protocol):
    """Trains a block of clients. Engines differ in speed and in what modules they accept.

    `Loop` is the reference; in float64 the others agree with it to 1e-10.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> from flray.data.pixels import place_examples
    >>> from flray.data.splits.iid import Iid
    >>> from flray.engines.plan import plan_clients
    >>> from flray.engines.training import plain_gradient
    >>> from flray.engines.vectorized import Vectorized
    >>> from flray.models.bank import params_of
    >>> from flray.models.mlp200 import Mlp200
    >>> dataset = Synthetic(num_train=60, size=8).load()
    >>> split = Iid(clients=3).split(dataset, 0)
    >>> examples = place_examples(dataset, split, torch.device("cpu"), torch.float32)
    >>> module, training = Mlp200((1, 8, 8), 10), Training(lr=0.1, epochs=2)
    >>> plans = plan_clients(split.train, training, seed=0, t=1, clients=split.clients)
    >>> w0 = {n: leaf.clone().expand(3, *leaf.shape) for n, leaf in params_of(module).items()}
    >>> engine = Vectorized(module, examples, num_slots=3)
    >>> result = engine.train(Block(plans, w0, {}), training, plain_gradient)
    >>> result.params["layers.4.bias"].shape, result.loss.shape
    (torch.Size([3, 10]), (3,))
    """

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Train each client from its row of `block.w0` on the batches of its plan.

        The bits of a client's result do not depend on the other clients of the block. Clients
        whose plan has no steps keep their models and have loss 0.

        Args:
            gradient: what the optimiser steps along, `plain_gradient` for the loss alone.
        """
        ...


@dataclass(frozen=True)
class InTf32:
    """An engine whose float32 products and convolutions run in TF32 on a GPU.

    TF32 keeps 10 of the 23 bits of a factor. Only training uses it: what is evaluated, averaged and
    clustered is computed in float32, also in the process of the engine.
    """

    engine: Engine

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Train a block as the engine does; torch's settings are restored afterwards."""
        cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
        allowed = cudnn.allow_tf32
        torch.set_float32_matmul_precision("high")
        cudnn.allow_tf32 = True
        try:
            return self.engine.train(block, training, gradient)
        finally:
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32 = allowed

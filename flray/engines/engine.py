"""What an engine is: it trains a block of clients, one model each, to the same result as others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.engines.plan import IndexPlan
from flray.engines.training import Gradient, Training
from flray.models.bank import Params


@dataclass(frozen=True)
class Block:
    """K clients trained together: their plans, and the models and memos they start from."""

    plans: tuple[IndexPlan, ...]  # one per client, which decides every batch
    w0: Params  # leaves (K, ...)
    memo: Params  # leaves (K, ...), empty where the method keeps none

    @property
    def clients(self) -> Ids:
        """(K,) the clients, in the order of their plans."""
        return np.array([plan.client for plan in self.plans], dtype=np.int64)

    def some(self, part: slice) -> "Block":
        """A part of the clients, over the same memory."""
        w0, memo = (
            {name: leaf[part] for name, leaf in leaves.items()} for leaves in (self.w0, self.memo)
        )
        return Block(self.plans[part], w0, memo)


@dataclass(frozen=True)
class BlockResult:
    """Trained models of a block, in the order of its clients."""

    params: Params  # leaves (K, ...); {} once they stay with the host that trained them
    loss: NDArray[np.float64]  # (K,) mean over the client's steps; not finite if it diverged
    # (K,) by name: what the module logged, a mean over the client's steps; NaN: nothing.
    logged: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    # Written by the host: (K,) by leaf, the largest absolute value of each model, and its number.
    largest: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    host: int = 0

    @classmethod
    def empty_like(cls, block: Block) -> "BlockResult":
        """Memory of the shapes of the block's models, to be written into."""
        params = {name: leaf.new_empty(leaf.shape) for name, leaf in block.w0.items()}
        return cls(params, np.empty(len(block.plans)))

    def copy_unmoved(self, block: Block) -> None:
        """Write the results of clients that take no steps: their first models, and loss 0."""
        for name, leaf in block.w0.items():
            self.params[name].copy_(leaf)
        self.loss[:] = 0

    def some(self, part: slice) -> "BlockResult":
        """A part of the clients, over the same memory."""
        return BlockResult({n: leaf[part] for n, leaf in self.params.items()}, self.loss[part])


class Engine(Protocol):
    """Trains a block of clients. Engines differ in speed and in what modules they accept."""

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Train each client from its row of `block.w0` by the batches of its plan.

        The result of a client does not depend on the others of the block; the block is unchanged.
        """
        ...

"""Index plans: which example is in which batch of which step, decided before anything executes.

All engines take their batches from plans, so that none of them draws an order of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.engines.training import Training
from flray.randomness import Generators, step_keys


@dataclass(frozen=True)
class IndexPlan:
    """The local steps of one client in one round: which examples are in which batch.

    Every step has the same number of batches, `Training.batches_per_step`.
    """

    client: int
    ids: Ids  # (steps, batches, B) example ids; padded with the client's first example
    mask: NDArray[np.bool_]  # (steps, batches, B) False where padded
    keys: Ids  # (steps, batches) for dropout and augmentation
    # (steps, batches, B) by which losses are multiplied; None: all count alike
    weight: NDArray[np.float64] | None = None

    @property
    def num_steps(self) -> int:
        """Optimiser steps in all epochs of the round."""
        return len(self.ids)

    @property
    def batches_per_step(self) -> int:
        """Batches that a step takes: 1, or 2 with `Training.paired`."""
        return int(self.ids.shape[1])

    def weighted(self, examples: Ids, weights: NDArray[np.float64]) -> "IndexPlan":
        """This plan over positions 0..n-1 as one over the n examples with these weights.

        >>> plans = plan_clients([np.arange(2)], Training(batch_size=2), 0, 1, np.array([3]))
        >>> plan = plans[0].weighted(np.array([7, 9]), np.array([0.25, 0.75]))
        >>> sorted(zip(plan.ids.ravel().tolist(), plan.weight.ravel().tolist()))
        [(7, 0.25), (9, 0.75)]
        """
        return replace(self, ids=examples[self.ids], weight=weights[self.ids])


def batch_orders(
    num_examples: int, training: Training, streams: Iterable[np.random.Generator]
) -> Ids:
    """(K, steps, batches, B) positions in the examples of K clients that have equally many.

    Each epoch is a permutation drawn from the client's stream; -1 where a batch is short.

    Args:
        num_examples: Examples of each of these clients.
        training: Epochs, batch size and batches per step.
        streams: The random stream of each client; it is advanced by one permutation per epoch.

    >>> order = batch_orders(5, Training(epochs=2, batch_size=3), [np.random.default_rng(0)])[0]
    >>> order.shape, sorted(order[:2].flatten().tolist())
    ((4, 1, 3), [-1, 0, 1, 2, 3, 4])
    >>> pairs = batch_orders(3, Training(batch_size=3).paired(), [np.random.default_rng(0)])[0]
    >>> (pairs >= 0).tolist()
    [[[True, True, False], [True, False, False]]]
    """
    together, size, epochs = training.batches_per_step, training.batch_size, training.epochs
    if num_examples > size:
        num_batches, width = -(-num_examples // size), size
    else:  # one batch, split where a step takes more
        num_batches, width = together, -(-num_examples // together)
    drawn = np.array([[s.permutation(num_examples) for _ in range(epochs)] for s in streams])
    num = len(drawn)
    positions = np.full((num, epochs, num_batches * width), -1, dtype=np.int64)
    positions[:, :, :num_examples] = drawn
    num_used = together * int(steps_per_epoch(np.array(num_examples), training))
    order = np.full((num, epochs, num_used, size), -1, dtype=np.int64)
    order[..., :width] = positions[:, :, : num_used * width].reshape(num, epochs, num_used, width)
    return order.reshape(num, epochs * num_used // together, together, size)


def plan_clients(
    examples: Sequence[Ids], training: Training, seed: int, t: int, clients: Ids
) -> tuple[IndexPlan, ...]:
    """The plans of several clients for round t, in the order of `clients`.

    A plan depends on seed, round, client and its examples alone, not on the other clients.

    Args:
        examples: The example ids of each client.
        training: Epochs, batch size and batches per step.
        clients: (K,) client ids, in the order of `examples`.

    >>> ids = [np.array([5, 6, 7]), np.array([8])]
    >>> first, second = plan_clients(ids, Training(batch_size=2), 0, 1, np.array([3, 4]))
    >>> first.num_steps, second.num_steps, sorted(first.ids[first.mask].tolist())
    (2, 1, [5, 6, 7])
    """
    sizes = np.array([len(ids) for ids in examples])
    streams = Generators(seed, ("order", "step"), t, clients=clients)
    plans: dict[int, IndexPlan] = {}
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        order = batch_orders(int(size), training, (streams.of("order", int(k)) for k in alike))
        mask = order >= 0
        if not mask.all():
            order = np.where(mask, order, 0)
        num_keys = order.shape[1] * order.shape[2]
        for k, positions, is_there in zip(alike.tolist(), order, mask, strict=True):
            keys = step_keys(streams.of("step", k), num_keys).reshape(positions.shape[:2])
            plans[k] = IndexPlan(int(clients[k]), examples[k][positions], is_there, keys)
    return tuple(plans[k] for k in range(len(clients)))


def steps_per_epoch(num_examples: Ids, training: Training) -> Ids:
    """Steps per epoch of clients with so many examples.

    >>> sizes, training = np.array([0, 1, 2, 10, 11, 25, 40]), Training(batch_size=10)
    >>> steps_per_epoch(sizes, training).tolist()
    [0, 1, 1, 1, 2, 3, 4]
    >>> steps_per_epoch(sizes, training.paired()).tolist()
    [0, 0, 1, 1, 1, 1, 2]
    >>> steps_per_epoch(sizes, Training(batch_size=10, drop_last=True)).tolist()
    [0, 0, 0, 1, 1, 2, 4]
    """
    together, size = training.batches_per_step, training.batch_size
    num_batches = num_examples // size if training.drop_last else -(-num_examples // size)
    fewest = max(together, size) if training.drop_last else together
    return np.where(num_examples > size, num_batches // together, num_examples >= fewest)


def num_local_steps(num_examples: Ids, training: Training) -> Ids:
    """(n,) steps in all epochs of a round, for clients with so many examples each."""
    return training.epochs * steps_per_epoch(num_examples, training)

"""Index plans: which example is in which batch of which step, decided before anything executes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flray.client.training import Training
from flray.data.dataset import Ids
from flray.randomness import generator, step_keys


@dataclass(frozen=True)
class Plan:
    """The local steps of one client in one round."""

    client: int
    ids: Ids  # (steps, B) example ids; padded with the client's first example
    mask: NDArray[np.bool_]  # (steps, B) False where padded
    keys: Ids  # (steps,) for dropout and augmentation

    @property
    def num_steps(self) -> int:
        return len(self.ids)


def batch_order(num_examples: int, training: Training, rng: np.random.Generator) -> Ids:
    """(steps, B) places into the client's examples, -1 where the last batch of an epoch is short.

    >>> order = batch_order(5, Training(epochs=2, batch_size=3), np.random.default_rng(0))
    >>> order.shape, sorted(order[:2].flatten().tolist())
    ((4, 3), [-1, 0, 1, 2, 3, 4])
    """
    per_epoch = -(-num_examples // training.batch_size)
    order = np.full((training.epochs, per_epoch * training.batch_size), -1, dtype=np.int64)
    for epoch in range(training.epochs):
        order[epoch, :num_examples] = rng.permutation(num_examples)
    return order.reshape(training.epochs * per_epoch, training.batch_size)


def plan_client(examples: Ids, training: Training, seed: int, t: int, client: int) -> Plan:
    order = batch_order(len(examples), training, generator(seed, "order", t, client))
    mask = order >= 0
    keys = step_keys(seed, t, client, len(order))
    return Plan(client, examples[np.where(mask, order, 0)], mask, keys)


def num_local_steps(num_examples: Ids, training: Training) -> Ids:
    """Steps of clients with so many examples: epochs times batches, the last one short."""
    steps: Ids = training.epochs * -(-num_examples // training.batch_size)
    return steps

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
    ids: Ids  # (steps, batches, B) example ids; padded with the client's first example
    mask: NDArray[np.bool_]  # (steps, batches, B) False where padded
    keys: Ids  # (steps, batches) for dropout and augmentation

    @property
    def num_steps(self) -> int:
        return len(self.ids)

    @property
    def batches_per_step(self) -> int:
        return int(self.ids.shape[1])


def batch_order(num_examples: int, training: Training, rng: np.random.Generator) -> Ids:
    """(steps, batches, B) places into the client's examples, -1 where a batch is short.

    >>> order = batch_order(5, Training(epochs=2, batch_size=3), np.random.default_rng(0))
    >>> order.shape, sorted(order[:2].flatten().tolist())
    ((4, 1, 3), [-1, 0, 1, 2, 3, 4])
    >>> pairs = batch_order(3, Training(batch_size=3).paired(), np.random.default_rng(0))
    >>> (pairs >= 0).tolist()
    [[[True, True, False], [True, False, False]]]
    """
    together, size, epochs = training.batches_per_step, training.batch_size, training.epochs
    if num_examples > size:
        num_batches, width = -(-num_examples // size), size
    else:  # one batch, split where a step takes more
        num_batches, width = together, -(-num_examples // together)
    places = np.full((epochs, num_batches * width), -1, dtype=np.int64)
    for epoch in range(epochs):
        places[epoch, :num_examples] = rng.permutation(num_examples)
    num_used = together * int(steps_per_epoch(np.array(num_examples), training))
    order = np.full((epochs, num_used, size), -1, dtype=np.int64)
    order[:, :, :width] = places[:, : num_used * width].reshape(epochs, num_used, width)
    return order.reshape(-1, together, size)


def plan_client(examples: Ids, training: Training, seed: int, t: int, client: int) -> Plan:
    order = batch_order(len(examples), training, generator(seed, "order", t, client))
    mask = order >= 0
    keys = step_keys(seed, t, client, order.shape[0] * order.shape[1])
    return Plan(client, examples[np.where(mask, order, 0)], mask, keys.reshape(order.shape[:2]))


def steps_per_epoch(num_examples: Ids, training: Training) -> Ids:
    """Steps per epoch of clients with so many examples.

    >>> sizes, training = np.array([0, 1, 2, 10, 11, 25, 40]), Training(batch_size=10)
    >>> steps_per_epoch(sizes, training).tolist()
    [0, 1, 1, 1, 2, 3, 4]
    >>> steps_per_epoch(sizes, training.paired()).tolist()
    [0, 0, 1, 1, 1, 1, 2]
    """
    together, size = training.batches_per_step, training.batch_size
    of_batches = -(-num_examples // size) // together
    return np.where(num_examples > size, of_batches, num_examples >= together)


def num_local_steps(num_examples: Ids, training: Training) -> Ids:
    """Steps of clients with so many examples in all epochs of a round."""
    return training.epochs * steps_per_epoch(num_examples, training)

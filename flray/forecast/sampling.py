"""An engine that measures a few steps of the blocks it is given and predicts the rest.

It takes the place of a run's engine, so that a rehearsal passes through the whole round loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flray.engines.engine import Block, BlockResult, Engine
from flray.engines.training import Gradient, Training
from flray.randomness import generator

SMALL_STEP = 1e-4  # Change of every parameter in a rehearsed round
SPREAD = 0.1  # Standard deviation of that change among clients, relative to it
MEASURED_S = 1.0  # About how long measuring a kind of block may take
MOST_TIMES = 5  # Times that a short measurement is repeated at most


@dataclass(frozen=True)
class Rate:
    """The time that blocks of one kind take: linear in their client steps.

    `flray plan --save-profile` writes rates to a file, so that a run can be planned elsewhere.
    """

    seconds: float  # Seconds per block
    seconds_per_step: float  # Seconds per client step

    def of(self, num_steps: int) -> float:
        """Seconds of a block with so many client steps.

        >>> Rate(seconds=2.0, seconds_per_step=0.5).of(10)
        7.0
        """
        return self.seconds + self.seconds_per_step * num_steps


class Seconds(NamedTuple):
    """Seconds of a block, or of all blocks of a round."""

    predicted: float  # in the run
    rehearsed: float  # in the rehearsal


@dataclass(frozen=True)
class Sampling:
    """An engine for rehearsals: measures the first block of each kind, and trains no client.

    Every client is moved by a small step, so norms and angles of updates are defined. Steps differ
    a little, so a clustering has points to compare, which are near each other by any distance.
    """

    engine: Engine
    rates: dict[str, Rate] = field(default_factory=dict)  # measured here or before, by kind
    blocks: list[Seconds] = field(default_factory=list)  # seconds of each block so far

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Note what the block would take and return its models, moved by a small step.

        The loss of every client is 1. A block without steps costs nothing.
        """
        begin, predicted = perf_counter(), 0.0
        num_steps = sum(plan.num_steps for plan in block.plans)
        if num_steps:
            kind = kind_of(block, training, gradient)
            if kind not in self.rates:
                self.rates[kind] = self._measured(block, training, gradient)
            predicted = self.rates[kind].of(num_steps)
        rng = generator(0, "rehearsal", *(plan.client for plan in block.plans))
        moved = {name: _moved(leaf, rng) for name, leaf in block.w0.items()}
        if num_steps:
            self.blocks.append(Seconds(predicted, perf_counter() - begin))
        return BlockResult(moved, np.ones(len(block.plans)))

    def _measured(self, block: Block, training: Training, gradient: Gradient) -> Rate:
        """The line through the times of one step of each client and of as many as time allows.

        Short times are the median of several.
        """

        def measure(share: float, times: int) -> tuple[int, float]:
            part = some_steps(block, share)
            train = partial(self.engine.train, part, training, gradient)
            seconds = median(timed(train) for _ in range(times))
            return sum(plan.num_steps for plan in part.plans), seconds

        _, first = measure(0.0, 2)  # one step each: libraries load, graphs are captured
        steps, seconds = measure(0.0, _times_in(MEASURED_S / 2, first))
        whole = sum(plan.num_steps for plan in block.plans)
        share = min(1.0, steps / whole * MEASURED_S / max(seconds, 1e-6))
        more, longer = measure(share, _times_in(MEASURED_S, seconds * share * whole / steps))
        if more == steps:  # too few steps for a difference
            return Rate(0.0, longer / more)
        per_step = max((longer - seconds) / (more - steps), 0.0)
        return Rate(max(seconds - per_step * steps, 0.0), per_step)


def _times_in(seconds: float, seconds_each: float) -> int:
    """How often something can be measured in so many seconds, at least once."""
    return min(MOST_TIMES, max(1, int(seconds / max(seconds_each, 1e-6))))


def _moved(leaf: Tensor, rng: np.random.Generator) -> Tensor:
    """A leaf (K, ...) after a small step, which differs by model and row; integers do not move."""
    if not leaf.is_floating_point():
        return leaf
    rows = leaf.shape[: min(leaf.dim(), 2)]
    steps = SMALL_STEP * (1 + SPREAD * rng.standard_normal(rows))
    return leaf + torch.from_numpy(steps).to(leaf).view(*rows, *[1] * (leaf.dim() - len(rows)))


def kind_of(block: Block, training: Training, gradient: Gradient) -> str:
    """The kind of a block: the time of blocks of one kind depends on their steps only.

    A kind has one number of parameters, one local equation, one size of batches, and up to the same
    power of two of clients.
    """
    num_params = sum(leaf[0].numel() for leaf in block.w0.values())
    name = getattr(gradient, "__name__", type(gradient).__name__)
    clients = 1 << (len(block.plans) - 1).bit_length()
    batch = f"{training.batches_per_step} x {training.batch_size}"
    return f"{num_params} parameters, {name}, batches {batch}, up to {clients} clients"


def some_steps(block: Block, share: float) -> Block:
    """The first steps of each client, at least one.

    Args:
        share: The part of each client's steps to keep, 0 to 1, rounded up.
    """
    plans = []
    for plan in block.plans:
        end = min(plan.num_steps, max(1, ceil(share * plan.num_steps)))
        weight = None if plan.weight is None else plan.weight[:end]
        ids, mask, keys = plan.ids[:end], plan.mask[:end], plan.keys[:end]
        plans.append(replace(plan, ids=ids, mask=mask, keys=keys, weight=weight))
    return replace(block, plans=tuple(plans))


def timed(work: Callable[[], object]) -> float:
    """Seconds of some work, a GPU's included: kernels that were only launched are waited for."""
    begin = perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - begin

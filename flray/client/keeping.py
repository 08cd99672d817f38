"""Trained models that stay with the host that trained them, and what the host is asked of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from flray.client.host import Host
from flray.client.tasks import Train, TrainJob
from flray.data.dataset import Ids
from flray.engines.engine import BlockResult
from flray.models.bank import Params, rows_of
from flray.models.fixed_point import Terms, Weights, largest_values

Question = Callable[[Params], Params]  # of the models of a block, leaves (K, ...)


@dataclass(frozen=True)
class KeptBlock:
    """What a host says of a block whose models it keeps."""

    loss: NDArray[np.float64]  # (K,)
    largest: dict[str, Weights]  # (K,) by leaf, the largest absolute value
    place: int  # of the host among those of the executor
    logged: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # (K,) as the engine's
    sums: Params | None = None  # of the models, where they were expected


@dataclass(frozen=True)
class ExpectedSums:
    """Sums over a cohort that will probably be asked for: hosts send them with their training."""

    clients: Ids  # (K,) the cohort in ascending order; the places of the terms are in it
    terms: Terms

    def of_block(self, clients: Ids) -> Terms:
        """The terms of a block of clients, in ascending order, at their places in the block."""
        slots = np.minimum(np.searchsorted(clients, self.clients), len(clients) - 1)
        return self.terms.at(np.where(clients[slots] == self.clients, slots, -1))


@dataclass(frozen=True)
class TrainAndKeep:
    """Local training of a block whose models stay with the host."""

    train: Train
    most: int  # trainings whose models a host keeps
    # Tells this training from others, of other experiments too. Not a seed: nothing depends on it.
    call: str = field(default_factory=lambda: uuid4().hex)
    expected: ExpectedSums | None = None

    def __call__(self, host: Host, bank: Params, job: TrainJob) -> KeptBlock:
        """Train a block and keep its models; those of the oldest training make room."""
        result = self.train(host, bank, job)
        kept = host.kept.setdefault(self.call, {})
        kept[block_number(job)] = result.params
        for call in list(host.kept)[: -self.most]:
            del host.kept[call]
        found = kept_block(result, host.place)
        if self.expected is None:
            return found
        return replace(found, sums=self.expected.of_block(job.clients)(result.params))


def kept_block(result: BlockResult, place: int = 0) -> KeptBlock:
    return KeptBlock(result.loss, largest_values(result.params), place, result.logged)


def block_number(job: TrainJob) -> int:
    """Names a block among those of one training."""
    return int(job.clients[0])


@dataclass(frozen=True)
class AskJob:
    """A question about the models of one block."""

    call: str
    block: int
    question: Question
    place: int  # of the host that has them


class Ask:
    """Answer a question about models that were kept; a host without them raises LookupError."""

    def __call__(self, host: Host, bank: Params, job: AskJob) -> Params:
        kept = host.kept.get(job.call, {})
        if job.block not in kept:
            raise LookupError("this host does not have the models of the block (any more)")
        return job.question(kept[job.block])


@dataclass(frozen=True)
class ModelRows:
    """The models themselves, or some of their leaves; not copied where all are asked for."""

    places: Ids
    names: Sequence[str]

    def __call__(self, models: Params) -> Params:
        found = {}
        for name in self.names:
            is_whole = np.array_equal(self.places, np.arange(len(models[name])))
            found[name] = models[name] if is_whole else rows_of(models[name], self.places)
        return found

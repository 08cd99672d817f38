"""What came back from training: numbers of each client, and models that may be elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flray.client.keeping import (
    Ask,
    AskJob,
    ModelRows,
    Question,
    TrainAndKeep,
    block_number,
)
from flray.client.tasks import TrainJob
from flray.columns import TRAIN_LOSS
from flray.data.dataset import Ids
from flray.errors import ClientFailure
from flray.execution.executor import Executor, Failed
from flray.models.bank import Params
from flray.models.fixed_point import Terms, Weights

ATTEMPTS = 3  # at a question, before each but the first of which lost models are trained again
PART_BYTES = 2**27  # of models that are brought here at a time, where they need not all be held


class Blocks(Protocol):
    """Models in the blocks in which they were trained."""

    def ask(self, questions: Mapping[int, Question]) -> dict[int, Params]:
        """The answers, by number of the block."""
        ...


@dataclass(frozen=True)
class HeldBlocks:
    """In this process."""

    models: Sequence[Params]

    def ask(self, questions: Mapping[int, Question]) -> dict[int, Params]:
        return {b: question(self.models[b]) for b, question in questions.items()}


@dataclass(frozen=True)
class HostedBlocks:
    """With the hosts that trained them.

    A host that dies loses nothing: a block is a function of (bank, round, clients) and is trained
    again, on any host, to the same bits.
    """

    executor: Executor
    task: TrainAndKeep
    bank: Params
    jobs: Sequence[TrainJob]
    places: list[int]  # of the hosts; changed in place where a block is trained again
    sums: Sequence[Params | None]  # that came with the training of each block
    last_exponents: dict[str, Ids]  # of the last sums asked for; changed in place

    def ask(self, questions: Mapping[int, Question]) -> dict[int, Params]:
        answers = self._known(questions)
        failed: dict[int, Failed] = {}
        for _ in range(ATTEMPTS):
            self._train_again(list(failed))
            waiting = [b for b in questions if b not in answers]
            if not waiting:
                return answers
            jobs = [self._job(b, questions[b]) for b in waiting]
            outputs = dict(zip(waiting, self.executor.map(Ask(), {}, jobs), strict=True))
            failed = {b: found for b, found in outputs.items() if isinstance(found, Failed)}
            answers |= {b: found for b, found in outputs.items() if not isinstance(found, Failed)}
            if not failed:
                return {b: answers[b] for b in questions}
        first = next(iter(failed.values()))
        raise ClientFailure(f"trained models were lost {ATTEMPTS} times: {first.reason}")

    def _known(self, questions: Mapping[int, Question]) -> dict[int, Params]:
        """The sums that are asked for and were expected; notes what is asked for."""
        found: dict[int, Params] = {}
        for b, question in questions.items():
            if not isinstance(question, Terms):
                continue
            self.last_exponents.update(question.exponents)
            sums, expected = self.sums[b], self.task.expected
            if sums is None or expected is None:
                continue
            if question.equals(expected.of_block(self.jobs[b].clients)):
                found[b] = sums
        return found

    def _job(self, b: int, question: Question) -> AskJob:
        return AskJob(self.task.call, block_number(self.jobs[b]), question, self.places[b])

    def _train_again(self, blocks: Sequence[int]) -> None:
        jobs = [self.jobs[b] for b in blocks]
        outputs = self.executor.map(self.task, self.bank, jobs) if jobs else []
        for b, output in zip(blocks, outputs, strict=True):
            if not isinstance(output, Failed):
                self.places[b] = output.place


@dataclass(frozen=True)
class TrainedModels:
    """Models of K clients: model k is number slot[k] of block block[k]."""

    blocks: Blocks
    block: Ids  # (K,)
    slot: Ids  # (K,)
    largest: dict[str, Weights]  # (K,) by leaf, the largest absolute value
    nobody: Params  # leaves (0, ...)

    def of(self, places: Ids) -> "TrainedModels":
        largest = {name: values[places] for name, values in self.largest.items()}
        return TrainedModels(
            self.blocks, self.block[places], self.slot[places], largest, self.nobody
        )

    def rows(self, places: Ids, names: Sequence[str]) -> Params:
        """The leaves (n, ...) of the models at these places, brought here."""
        if not names:
            return {}
        block, slot = self.block[places], self.slot[places]
        questions = {int(b): ModelRows(slot[block == b], names) for b in np.unique(block)}
        answers = self.blocks.ask(questions) if questions else {}
        if len(answers) == 1:
            return next(iter(answers.values()))
        back = np.empty(len(places), np.int64)
        back[np.concatenate([places[:0], *(np.flatnonzero(block == b) for b in answers)])] = (
            np.arange(len(places))
        )
        is_sorted = bool((np.diff(back) > 0).all())
        joined = {
            name: torch.cat([self.nobody[name], *(found[name] for found in answers.values())])
            for name in names
        }
        return (
            joined if is_sorted else {n: leaf[torch.from_numpy(back)] for n, leaf in joined.items()}
        )

    def sums(self, terms: Terms) -> Params:
        """Weighted sums, each of which hosts add up of the models they have."""
        used = np.unique(np.concatenate(terms.positions))
        questions = {}
        for b in np.unique(self.block[used]):
            slots = np.where(self.block == b, self.slot, -1)
            questions[int(b)] = terms.at(slots)
        if not questions:
            return terms(self.nobody)
        first, *others = self.blocks.ask(questions).values()
        if not others:
            return first
        total = {
            name: leaf + others[0][name] for name, leaf in first.items()
        }  # received: read-only
        for each in others[1:]:
            for name, leaf in total.items():
                leaf.add_(each[name])
        return total


@dataclass(frozen=True)
class Trained:
    """What K clients returned from local training: models, losses and numbers of steps.

    Row k of every array and leaf belongs to clients[k], in ascending order; clients that failed
    and were dropped are missing. The models may still be with the hosts that trained them:
    `Federation.mix` sums them there, `params` and `leaves` bring them here.

    >>> models = TrainedModels(
    ...     HeldBlocks([{"w": torch.tensor([[1.0], [3.0]])}]),
    ...     block=np.array([0, 0]),
    ...     slot=np.array([0, 1]),
    ...     largest={"w": np.array([1.0, 3.0])},
    ...     nobody={"w": torch.empty(0, 1)},
    ... )
    >>> trained = Trained(np.array([2, 7]), models, np.array([0.5, 1.5]), np.array([4, 0]))
    >>> trained.params["w"].tolist()
    [[1.0], [3.0]]
    >>> trained.metrics(), trained.with_steps().clients  # client 7 took no step
    ({'train_loss': 0.5}, array([2]))
    """

    clients: Ids  # (K,) ascending
    models: TrainedModels
    loss: NDArray[np.float64]  # (K,) mean training loss over the client's steps
    num_steps: Ids  # (K,) optimiser steps of the client

    @cached_property
    def params(self) -> Params:
        """The models, leaves (K, ...). Brings them all here; means do not need that."""
        return self.leaves(list(self.models.nobody))

    def leaves(self, names: Sequence[str]) -> Params:
        """These leaves of the models, (K, ...)."""
        return self.models.rows(np.arange(len(self.clients)), names)

    def in_parts(self) -> Iterator[tuple[slice, Params]]:
        """The models, some at a time: their places, and their leaves."""
        leaves = self.models.nobody.values()
        bytes_each = sum(leaf.shape[1:].numel() * leaf.element_size() for leaf in leaves)
        length = max(1, PART_BYTES // max(1, bytes_each))
        for first in range(0, len(self.clients), length):
            places = np.arange(first, min(first + length, len(self.clients)))
            found = self.models.rows(places, list(self.models.nobody))
            yield slice(first, first + length), found

    def with_steps(self) -> "Trained":
        """The clients that took a step; one without examples, or with too few, takes none."""
        kept = np.flatnonzero(self.num_steps)
        if len(kept) == len(self.clients):
            return self
        return Trained(
            self.clients[kept], self.models.of(kept), self.loss[kept], self.num_steps[kept]
        )

    def metrics(self) -> dict[str, float]:
        """The column `train_loss`, the mean over clients that took a step; {} if none did."""
        losses = self.loss[self.num_steps > 0]
        return {TRAIN_LOSS: float(losses.mean())} if len(losses) else {}

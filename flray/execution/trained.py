"""What clients return from local training; their models may still be with the hosts."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from flray.client.keeping import Ask, AskJob, ModelRows, Question
from flray.client.tasks import ClientsJob, Train
from flray.columns import TRAIN_LOSS
from flray.data.dataset import Ids
from flray.engines.engine import BlockResult
from flray.errors import ClientFailure
from flray.execution.executor import Executor, Failed
from flray.models.bank import Params, rows_of
from flray.models.fixed_point import Terms, WeightArray

ATTEMPTS = 3  # attempts to answer a question; lost models are trained again between them
PART_BYTES = 2**27  # models that are brought here at a time, where they need not all be held


@dataclass(frozen=True)
class TrainedModels:
    """Models of K clients in the blocks in which they were trained, here or with hosts.

    Methods that average ask for `sums`, which hosts add up of the models they have; `rows` brings
    models here. A host that dies loses nothing: a block is a function of (bank, round, clients) and
    is trained again, on any host, to the same bits.
    """

    executor: Executor
    task: Train
    bank: Params  # models that the clients started from
    done: list[tuple[ClientsJob, BlockResult]]  # replaced in place where a block is trained again
    index: Ids  # (K,) position of each model among those of all blocks

    def part(self, positions: Ids) -> "TrainedModels":
        """The models at these positions."""
        return replace(self, index=self.index[positions])

    @cached_property
    def largest(self) -> dict[str, WeightArray]:
        """(K,) by leaf, the largest absolute value of each model."""
        blocks = [result.largest for _, result in self.done]
        return {
            n: np.concatenate([[], *(block[n] for block in blocks)])[self.index] for n in self.bank
        }

    @cached_property
    def _slots(self) -> tuple[Ids, Ids]:
        """(K,) the block of each model, as a position in `done`, and (K,) its slot in the block."""
        sizes = [len(job.clients) for job, _ in self.done]
        slots = np.concatenate([self.index[:0], *map(np.arange, sizes)])
        return np.repeat(np.arange(len(sizes)), sizes)[self.index], slots[self.index]

    def rows(self, places: Ids, names: Sequence[str]) -> Params:
        """The leaves (n, ...) of the models at these positions, brought here.

        Args:
            places: (n,) positions among the K models, in any order.
            names: Names of the leaves; [] for none.

        Raises:
            ClientFailure: Models were lost again and again.
        """
        nobody = {name: self.bank[name][:0] for name in names}
        return self.answers(places, partial(ModelRows, names=names), nobody) if names else {}

    def answers(self, places: Ids, question: Callable[[Ids], Question], nobody: Params) -> Params:
        """What hosts answer about the models at these positions, a row per model.

        Args:
            places: (n,) positions among the K models, in any order.
            question: Makes the question about some slots of a block.
            nobody: The answer about no model, leaves (0, ...).
        """
        block, slot = (values[places] for values in self._slots)
        answers = self._ask({int(b): question(slot[block == b]) for b in np.unique(block)})
        if len(answers) == 1:
            return next(iter(answers.values()))
        brought = np.argsort(block, kind="stable")  # positions in the order of the answers
        back, is_sorted = np.argsort(brought), bool((np.diff(brought) > 0).all())
        joined = {
            name: torch.cat([leaf, *(rows[name] for rows in answers.values())])
            for name, leaf in nobody.items()
        }
        return joined if is_sorted else {name: rows_of(leaf, back) for name, leaf in joined.items()}

    def sums(self, terms: Terms) -> Params:
        """Weighted sums, each of which hosts add up of the models they have.

        Exact whatever the blocks and hosts: terms are added in fixed point
        (`flray.models.fixed_point`).
        """
        block, slot = self._slots
        used = np.unique(block[np.concatenate(terms.positions)])
        questions = {int(b): terms.at(np.where(block == b, slot, -1)) for b in used}
        if not questions:
            return terms({name: leaf[:0] for name, leaf in self.bank.items()})
        first, *others = self._ask(questions).values()
        total = dict(first)
        for k, sums in enumerate(others):
            for name, leaf in sums.items():
                # The first answer may be read-only memory; the sum of two is our own.
                total[name] = total[name].add_(leaf) if k else total[name] + leaf
        return total

    def _ask(self, questions: Mapping[int, Question]) -> dict[int, Params]:
        """The answers about the models of blocks, both by index of the block."""
        if not self.task.num_kept:
            return {b: question(self.done[b][1].params) for b, question in questions.items()}
        answers: dict[int, Params] = {}
        lost: dict[int, Failed] = {}
        for _ in range(ATTEMPTS):
            self._train_again(list(lost))
            missing = [b for b in questions if b not in answers]
            outputs = self.executor.map(Ask(), {}, [self._job(b, questions[b]) for b in missing])
            lost = {}
            for b, output in zip(missing, outputs, strict=True):
                if isinstance(output, Failed):
                    lost[b] = output
                else:
                    answers[b] = output
            if not lost:
                return {b: answers[b] for b in questions}
        reason = next(iter(lost.values())).reason
        raise ClientFailure(f"trained models were lost {ATTEMPTS} times: {reason}")

    def _job(self, b: int, question: Question) -> AskJob:
        job, result = self.done[b]
        return AskJob(self.task.call, int(job.clients[0]), question, result.host)

    def _train_again(self, blocks: Sequence[int]) -> None:
        jobs = [self.done[b][0] for b in blocks]
        outputs = self.executor.map(self.task, self.bank, jobs) if jobs else []
        for b, job, output in zip(blocks, jobs, outputs, strict=True):
            if not isinstance(output, Failed):
                self.done[b] = job, output


@dataclass(frozen=True)
class Trained:
    """What K clients return from local training: models, losses and numbers of steps.

    Row k of every array and leaf belongs to clients[k], in ascending order; clients that failed
    and were dropped are missing. The models may still be with the hosts that trained them:
    `Federation.mix` sums them there, `params` and `leaves` bring them here.

    >>> from flray.models.mixing import HeldModels
    >>> models = HeldModels({"w": torch.tensor([[1.0], [3.0]])})
    >>> trained = Trained(np.array([2, 7]), models, np.array([0.5, 1.5]), np.array([4, 0]))
    >>> trained.leaves(["w"])["w"].tolist()
    [[1.0], [3.0]]
    >>> trained.metrics()  # client 7 took no step
    {'train_loss': 0.5}
    """

    clients: Ids  # (K,) ascending
    models: TrainedModels  # positions are those of the clients
    loss: NDArray[np.float64]  # (K,) mean training loss over the client's steps
    num_steps: Ids  # (K,) optimiser steps of the client

    @cached_property
    def params(self) -> Params:
        """The models, leaves (K, ...). Brings them all here; means do not need that."""
        return self.leaves(list(self.models.bank))

    def leaves(self, names: Sequence[str]) -> Params:
        """These leaves of the models, (K, ...)."""
        return self.models.rows(np.arange(len(self.clients)), names)

    def in_parts(self, names: Collection[str] | None = None) -> Iterator[tuple[slice, Params]]:
        """The models, some at a time: their positions, and their leaves of these names, or all."""
        bank = {n: leaf for n, leaf in self.models.bank.items() if names is None or n in names}
        bytes_each = sum(leaf.shape[1:].numel() * leaf.element_size() for leaf in bank.values())
        length = max(1, PART_BYTES // max(1, bytes_each))
        for first in range(0, len(self.clients), length):
            positions = np.arange(first, min(first + length, len(self.clients)))
            yield slice(first, first + length), self.models.rows(positions, list(bank))

    def with_steps(self) -> "Trained":
        """The clients that took a step; one without examples, or with too few, takes none."""
        kept = np.flatnonzero(self.num_steps)
        if len(kept) == len(self.clients):
            return self
        models, loss = self.models.part(kept), self.loss[kept]
        return Trained(self.clients[kept], models, loss, self.num_steps[kept])

    def metrics(self) -> dict[str, float]:
        """The column `train_loss`, the mean over clients that took a step; {} if none did."""
        losses = self.loss[self.num_steps > 0]
        return {TRAIN_LOSS: float(losses.mean())} if len(losses) else {}

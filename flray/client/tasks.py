"""Tasks of clients: pure functions of (a host, models, a job) that any host can run.

A task is sent to hosts once per call and must be picklable; jobs are the parts of its work. The
bank that it is called with has leaves (U, ...) and must not be changed: processes share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.client.host import Host, in_evaluation
from flray.client.scoring import (
    ExampleScores,
    PartScore,
    ScoreJob,
    part_score,
    score_models,
    score_shared,
)
from flray.data.dataset import Ids
from flray.data.split import Part
from flray.engines.engine import Block, BlockResult
from flray.engines.plan import plan_clients
from flray.engines.training import Gradient, Training, plain_gradient
from flray.errors import ExperimentError
from flray.models.bank import Params, load_params, rows_on
from flray.models.fixed_point import largest_values
from flray.randomness import torch_seed

# Parts of a client's own examples: those that an algorithm may use, and with them the test part,
# which only marked runs may read.
TrainingPart = Literal["train", "validation"]
JudgedPart = Literal["train", "validation", "test"]
PredictionKind = Literal["hard", "soft"]

# Clients of a job that only predicts: their scores do not depend on each other, and few jobs are
# quicker than many where a hundred thousand clients are asked.
SCORED_AT_ONCE = 1000

DIVERGED_IN_TUNING = (
    "its loss or weights became NaN or infinite in the fine-tuning of the evaluation; "
    "lower evaluate.fine_tune.lr"
)


@dataclass(frozen=True)
class ClientsJob:
    """A block of K clients, which a host works on together.

    >>> job = ClientsJob(np.array([3, 5]), rows=np.array([0, 1]))
    >>> [single.clients.tolist() for single in job.alone()], job.alone()[1].rows
    ([[3], [5]], array([1]))
    """

    clients: Ids  # (K,) ascending
    # (K,) the row of the bank that each client uses; empty where a task uses none or all of them
    rows: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    memo: Params = field(default_factory=dict)  # read by the gradient, leaves (K, ...)
    # A weight of each training example of each client, in its order; (): all count alike
    weights: tuple[NDArray[np.float64], ...] = ()
    # Rounds whose training data each client trains on; (): the round of the task
    rounds: tuple[tuple[int, ...], ...] = ()

    def part(self, positions: slice | Ids) -> "ClientsJob":
        """The job of the clients at these positions, with all that it has for them."""
        memo = {name: leaf[positions] for name, leaf in self.memo.items()}
        chosen = np.arange(len(self.clients))[positions]
        weights = tuple(self.weights[k] for k in chosen) if self.weights else ()
        rounds = tuple(self.rounds[k] for k in chosen) if self.rounds else ()
        return ClientsJob(self.clients[positions], self.rows[positions], memo, weights, rounds)

    def in_parts(self, size: int) -> "list[ClientsJob]":
        """Jobs of at most `size` clients each, in the order of the clients.

        >>> [part.clients.tolist() for part in ClientsJob(np.arange(5)).in_parts(2)]
        [[0, 1], [2, 3], [4]]
        """
        return [self.part(slice(k, k + size)) for k in range(0, len(self.clients), size)]

    def alone(self) -> "list[ClientsJob]":
        """A job for each client, to find the one that fails when a block of them does."""
        return self.in_parts(1)


@dataclass(frozen=True)
class Train:
    """Local training of the clients of a block in round t, each from its row of the bank.

    Returns losses and, by default, the models. With `num_kept` the models stay with the host,
    which answers questions about them (`flray.client.keeping`). The model of a client does not
    depend on the other clients of the block.
    """

    training: Training
    gradient: Gradient
    t: int
    is_probe: bool = False  # not part of the round: batches come in another order
    shared: Params = field(default_factory=dict)  # leaves (...), the same for all clients
    num_kept: int = 0  # trainings whose models a host keeps; the oldest makes room
    # Tells this training from others, of other experiments too. Not a seed: nothing depends on it.
    call: str = field(default_factory=lambda: uuid4().hex)

    def __call__(self, host: Host, bank: Params, job: ClientsJob) -> BlockResult:
        """Train the block, and keep or return its models."""
        trained = host.engine.train(self.block(host, bank, job), self.training, self.gradient)
        trained = replace(trained, largest=largest_values(trained.params), host=host.number)
        if not self.num_kept:
            return trained
        host.kept.setdefault(self.call, {})[int(job.clients[0])] = trained.params
        for oldest in list(host.kept)[: -self.num_kept]:
            del host.kept[oldest]
        return replace(trained, params={})

    def block(self, host: Host, bank: Params, job: ClientsJob) -> Block:
        """The engine's input: every batch of every client, and the models they start from.

        Models and memo are on the device of the host's data, whatever device they come from.
        """
        device = host.examples.device
        split = host.timeline.at(self.t)
        seed = torch_seed(host.seed, "probe") if self.is_probe else host.seed
        examples = [split.trained_on(i) for i in job.clients]
        if job.rounds:
            pairs = zip(job.clients, job.rounds, strict=True)
            examples = [host.timeline.trained_on(i, rounds) for i, rounds in pairs]
        at = [np.arange(len(ids)) for ids in examples] if job.weights else examples
        plans = plan_clients(at, self.training, seed, self.t, job.clients)
        if job.weights:
            with_weights = zip(plans, examples, job.weights, strict=True)
            plans = tuple(plan.weighted(ids, weights) for plan, ids, weights in with_weights)
        # Only the rows that are used move: a whole bank may not fit on the device.
        w0 = {name: rows_on(leaf, job.rows, device) for name, leaf in bank.items()}
        return Block(plans, w0, self._memo(job, device))

    def _memo(self, job: ClientsJob, device: torch.device) -> Params:
        """The job's memo, and what is shared as a view with a row for each of its clients."""
        if both := sorted(job.memo.keys() & self.shared.keys()):
            raise ExperimentError(
                f"memo and shared must have different names, both have {both[0]!r}; rename one of "
                "them where the algorithm calls fed.train"
            )
        num = len(job.clients)
        memo = {name: leaf.to(device) for name, leaf in job.memo.items()}
        return memo | {
            n: leaf.to(device).expand(num, *leaf.shape) for n, leaf in self.shared.items()
        }


def is_finite(trained: BlockResult) -> NDArray[np.bool_]:
    """(K,) True where a client's loss and all its params are finite numbers.

    Args:
        trained: A result of the task `Train`, which records the largest value of each leaf.
    """
    finite: NDArray[np.bool_] = np.isfinite(trained.loss)
    for values in trained.largest.values():
        finite &= np.isfinite(values)
    return finite


class Score:
    """Correctness and loss of each model on each of its examples, in evaluation mode.

    A job is a list of models and examples to score together, not a block of clients.
    """

    def __call__(self, host: Host, bank: Params, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
        return score_models(host, bank, jobs)


@dataclass(frozen=True)
class Judge:
    """Loss and accuracy of every model of the bank on each client's own part in round t.

    Returns (2, U) for each client: mean losses and accuracies of the U models, NaN for a client
    without examples.
    """

    part: JudgedPart
    t: int
    clients_at_once: ClassVar = SCORED_AT_ONCE

    def __call__(self, host: Host, bank: Params, job: ClientsJob) -> list[NDArray[np.float64]]:
        split = host.timeline.at(self.t)
        part, is_trained = getattr(split, self.part), self.part == "train"
        examples = [split.trained_on(i) if is_trained else part[i] for i in job.clients]
        correct, losses = score_shared(host.without_scores, bank, examples)
        sizes = np.array([len(ids) for ids in examples])
        return list(np.stack([_means(losses, sizes), _means(correct, sizes)]).transpose(2, 0, 1))


@dataclass(frozen=True)
class ClientLosses:
    """Losses of U models on the n training examples of a client, in the order of its data."""

    loss: NDArray[np.float64]  # (n, U)
    labels: Ids  # (n,)


@dataclass(frozen=True)
class ExampleLosses:
    """The loss of every model of the bank on each training example of a client in round t."""

    t: int
    clients_at_once: ClassVar = SCORED_AT_ONCE

    def __call__(self, host: Host, bank: Params, job: ClientsJob) -> list[ClientLosses]:
        split = host.timeline.at(self.t)
        examples = [split.trained_on(i) for i in job.clients]
        _, losses = score_shared(host.without_scores, bank, examples)
        ends = np.cumsum([len(ids) for ids in examples])[:-1]
        of_clients = zip(np.split(np.ascontiguousarray(losses.T), ends), examples, strict=True)
        return [ClientLosses(values, split.labels[ids]) for values, ids in of_clients]


def _means(values: NDArray[Any], sizes: Ids) -> NDArray[np.float64]:
    """(U, K) means of so many values (U, n) each, with the bits of `mean`; NaN of no values.

    >>> _means(np.array([[1.0, 3.0, 5.0]]), sizes=np.array([2, 0, 1]))
    array([[ 2., nan,  5.]])
    """
    starts = np.cumsum(sizes) - sizes
    # As a sum starts with 0: reduceat would start with the first value, which may change a bit.
    with_zeros = np.insert(values.astype(np.float64), starts, 0.0, axis=1)
    sums = np.add.reduceat(with_zeros, starts + np.arange(len(sizes)), axis=1)
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = sums / sizes
    return means


@dataclass(frozen=True)
class Predict:
    """Predictions of each client's model on the server's public examples, in evaluation mode.

    Returns (R, classes) for each client, R public examples. `hard`: one-hot rows of the predicted
    class; `soft`: class probabilities. Of sequences the rows of all positions are joined; numbers
    are (R, numbers) as they are predicted.
    """

    kind: PredictionKind
    t: int

    def __call__(self, host: Host, bank: Params, job: ClientsJob) -> list[Tensor]:
        """(R, classes) of each client on the CPU, in the precision of the models."""
        ids = host.on_device(host.timeline.at(self.t).server)
        predictions = []
        for u in job.rows.tolist():
            load_params(host.module, {name: leaf[u] for name, leaf in bank.items()})
            rows = in_evaluation(
                host.module,
                host.examples,
                ids,
                lambda batch: self._rows(host.module(batch[0]), batch[1]),
            )
            predictions.append(torch.cat(rows))
        return list(torch.stack(predictions).cpu())  # one wait for a GPU

    def _rows(self, scores: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point() and scores.numel() == targets.numel():
            return scores.reshape(len(scores), -1)
        if scores.shape[:-1] != targets.shape:
            raise ExperimentError(
                "predictions on public examples need a model with a row of class scores "
                f"for each example, got an output of shape {tuple(scores.shape)}"
            )
        if self.kind == "soft":
            return scores.softmax(-1).flatten(1)
        classes = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])
        return classes.flatten(1).to(scores.dtype)


@dataclass(frozen=True)
class TuneAndScore:
    """Train a copy of each client's model on the client's own training part and score it.

    The tuned models stay on the host and are dropped with the block. The order of batches has a
    seed of its own, so neither the round nor a probe is repeated. The output of a client whose
    tuned model is not finite is an error.
    """

    training: Training
    t: int
    parts: tuple[Part, ...]

    def __call__(
        self, host: Host, bank: Params, job: ClientsJob
    ) -> list[dict[Part, PartScore] | Exception]:
        """For each client its scores by part, or an error in their place if its tuning diverged."""
        reseeded = replace(host, seed=torch_seed(host.seed, "fine-tune evaluation"))
        tuned = Train(self.training, plain_gradient, self.t)(reseeded, bank, job)
        split, finite = host.timeline.at(self.t), is_finite(tuned)
        jobs = [
            ScoreJob(k, split.part_of(int(i), part))
            for k, i in enumerate(job.clients)
            for part in self.parts
            if finite[k]
        ]
        params = {name: leaf.contiguous() for name, leaf in tuned.params.items()}
        scores = iter(score_models(host, params, jobs))
        return [
            {part: part_score(host.scores, next(scores)) for part in self.parts}
            if is_scored
            else FloatingPointError(DIVERGED_IN_TUNING)
            for is_scored in finite
        ]

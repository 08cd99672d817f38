"""The tasks: pure functions of (a host's data, models, a job), run wherever a host is."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.client.host import Host
from flray.client.scoring import SCORE_BATCH, ExampleScores, ScoreJob, score_models
from flray.data.dataset import Ids
from flray.data.split import Part
from flray.engines.engine import Block, BlockResult
from flray.engines.plan import plan_clients
from flray.engines.training import Gradient, Training, plain_gradient
from flray.errors import ExperimentError
from flray.models.bank import Params, load_params
from flray.randomness import torch_seed


class ByClient(Protocol):
    """A job over clients, which can be split to find the one that fails."""

    @property
    def clients(self) -> Ids: ...

    def alone(self) -> list[Self]:
        """A job for each client."""
        ...


@dataclass(frozen=True)
class ClientsJob:
    """A block of clients, for a task that needs nothing else of them."""

    clients: Ids  # (K,)

    def alone(self) -> "list[ClientsJob]":
        return [ClientsJob(self.clients[k : k + 1]) for k in range(len(self.clients))]


@dataclass(frozen=True)
class TrainJob:
    """A block of clients, and the row of the bank that each starts from."""

    clients: Ids  # (K,)
    rows: Ids  # (K,)
    memo: Params = field(default_factory=dict)  # leaves (K, ...)

    def alone(self) -> "list[TrainJob]":
        return [
            TrainJob(self.clients[k], self.rows[k], {n: leaf[k] for n, leaf in self.memo.items()})
            for k in (slice(i, i + 1) for i in range(len(self.clients)))
        ]


@dataclass(frozen=True)
class Train:
    """Local training of the clients of a block in round t."""

    training: Training
    gradient: Gradient
    t: int
    is_probe: bool = False  # beside the round's own training, with an order of its own
    shared: Params = field(default_factory=dict)  # leaves (...), the same for all clients

    def __call__(self, host: Host, bank: Params, job: TrainJob) -> BlockResult:
        return host.engine.train(self.block(host, bank, job), self.training, self.gradient)

    def block(self, host: Host, bank: Params, job: TrainJob) -> Block:
        """What the engine is to do: every batch of every client, from its row of the bank.

        Models and memo are on the device of the host's data, whatever device they come from.
        """
        device = host.examples.device
        split = host.timeline.at(self.t)
        seed = torch_seed(host.seed, "probe") if self.is_probe else host.seed
        own = [split.trained_on(i) for i in job.clients]
        plans = plan_clients(own, self.training, seed, self.t, job.clients)
        # Only the rows that are used move: a whole bank may not fit on the device.
        w0 = {name: _rows(leaf, job.rows, device) for name, leaf in bank.items()}
        return Block(plans, w0, self._memo(job, device))

    def _memo(self, job: TrainJob, device: torch.device) -> Params:
        """The job's memo, and what is shared as a view with a row for each of its clients."""
        if both := sorted(job.memo.keys() & self.shared.keys()):
            raise ExperimentError(
                f"memo and shared must have different names, both have {both[0]!r}; rename one of "
                "them where the algorithm calls fed.train"
            )
        num = len(job.clients)
        own = {name: leaf.to(device) for name, leaf in job.memo.items()}
        return own | {
            n: leaf.to(device).expand(num, *leaf.shape) for n, leaf in self.shared.items()
        }


def _rows(leaf: Tensor, rows: Ids, device: torch.device) -> Tensor:
    """Rows of a leaf of the bank on a device; a row that all use is there once, as a view."""
    if len(rows) and (rows == rows[0]).all():
        first = int(rows[0])
        return leaf[first : first + 1].to(device).expand(len(rows), *leaf.shape[1:])
    return leaf.index_select(0, torch.from_numpy(rows).to(leaf.device)).to(device)


class Score:
    """Is each model right on each of its examples, and at what loss; in evaluation mode."""

    def __call__(self, host: Host, bank: Params, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
        return score_models(host, bank, jobs)


# Parts of a client's own examples: those that an algorithm may use, and with them the test part,
# which only marked runs may read.
TrainingPart = Literal["train", "validation"]
JudgedPart = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Judged:
    """How good each of U models is on one client's own examples."""

    loss: NDArray[np.float64]  # (U,) mean over the examples; NaN for a client without any
    accuracy: NDArray[np.float64]  # (U,)


@dataclass(frozen=True)
class Judge:
    """Every model of the bank on each client's own part in round t; in evaluation mode."""

    part: JudgedPart
    t: int

    def __call__(self, host: Host, bank: Params, job: ClientsJob) -> list[Judged]:
        own = getattr(host.timeline.at(self.t), self.part)
        num_models = len(next(iter(bank.values())))
        jobs = [ScoreJob(u, own[i]) for i in job.clients for u in range(num_models)]
        scores = score_models(host, bank, jobs)
        of_clients = [scores[k : k + num_models] for k in range(0, len(scores), num_models)]
        return [
            Judged(
                np.array([_mean(of_model.loss) for of_model in of_client]),
                np.array([_mean(of_model.correct) for of_model in of_client]),
            )
            for of_client in of_clients
        ]


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else np.nan


PredictionKind = Literal["hard", "soft"]


@dataclass(frozen=True)
class Predict:
    """What each client's model says of the server's public examples; in evaluation mode.

    `hard`: one-hot rows of the predicted class. `soft`: class probabilities.
    """

    kind: PredictionKind
    t: int

    def __call__(self, host: Host, bank: Params, job: TrainJob) -> list[Tensor]:
        """(R, classes) of each client of the job, R public examples."""
        ids = torch.from_numpy(host.timeline.at(self.t).server).to(host.examples.device)
        host.module.eval()
        models = ({name: leaf[u] for name, leaf in bank.items()} for u in job.rows.tolist())
        return [self._of_model(host, params, ids) for params in models]

    def _of_model(self, host: Host, params: Params, ids: Tensor) -> Tensor:
        load_params(host.module, params)
        rows = []
        with torch.no_grad():
            for some in torch.split(ids, SCORE_BATCH):
                output = host.module(host.examples.batch(some)[0])
                if output.dim() != 2:
                    raise ExperimentError(
                        "predictions on public examples need a model with a row of class scores "
                        f"for each example, got an output of shape {tuple(output.shape)}"
                    )
                rows.append(self._rows(output))
        return torch.cat(rows).float().cpu()

    def _rows(self, scores: Tensor) -> Tensor:
        if self.kind == "soft":
            return scores.softmax(-1)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])


@dataclass(frozen=True)
class PartScore:
    """How one client's model did on one part."""

    correct: int
    total: int
    loss: float  # mean over the examples; NaN without any, or for a module without example_losses


TunedScores = dict[Part, PartScore] | None  # None: the tuned model is not finite


@dataclass(frozen=True)
class TuneAndScore:
    """Train a copy of each client's model on the client's own training part and score it.

    The tuned models stay on the host and are dropped with the block. The order of batches has a
    seed of its own, so neither the round nor a probe is repeated.
    """

    training: Training
    t: int
    parts: tuple[Part, ...]

    def __call__(self, host: Host, bank: Params, job: TrainJob) -> list[TunedScores]:
        own_order = replace(host, seed=torch_seed(host.seed, "fine-tune evaluation"))
        block = Train(self.training, plain_gradient, self.t).block(own_order, bank, job)
        tuned = host.engine.train(block, self.training, plain_gradient)
        split, finite = host.timeline.at(self.t), finite_models(tuned)
        jobs = [
            ScoreJob(k, split.part_of(int(i), part))
            for k, i in enumerate(job.clients)
            for part in self.parts
            if finite[k]
        ]
        found = iter(score_models(host, tuned.params, jobs))
        return [
            {part: _part_score(next(found)) for part in self.parts} if is_finite else None
            for is_finite in finite
        ]


def _part_score(found: ExampleScores) -> PartScore:
    return PartScore(int(found.correct.sum()), len(found.correct), _mean(found.loss))


def finite_models(result: BlockResult) -> NDArray[np.bool_]:
    """(K,) True where a client's loss and all its params are finite numbers."""
    finite: NDArray[np.bool_] = np.isfinite(result.loss)
    for leaf in result.params.values():
        finite &= leaf.flatten(1).isfinite().all(1).cpu().numpy()
    return finite

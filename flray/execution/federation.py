"""The federation as an algorithm sees it: clients, their sizes, and tasks to run on them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flray.client.engine import BlockResult
from flray.client.plan import num_local_steps
from flray.client.tasks import ExampleScores, Score, ScoreJob, Train, TrainJob
from flray.client.training import Gradient, Training
from flray.data.dataset import Ids
from flray.errors import ClientFailure
from flray.execution.executor import Executor
from flray.models.bank import ModelBank, Params
from flray.models.mixing import Aggregation
from flray.randomness import generator

OnClientFailure = Literal["raise", "drop"]


@dataclass(frozen=True)
class Cohort:
    """The clients of round t, in ascending order."""

    t: int
    clients: Ids


@dataclass(frozen=True)
class Trained:
    """What came back from the clients of a round, in ascending client order."""

    clients: Ids  # (K,)
    params: Params  # leaves (K, ...)
    loss: NDArray[np.float64]  # (K,) mean training loss over the client's steps
    num_steps: Ids  # (K,)

    def metrics(self) -> dict[str, float]:
        """What every method reports of its local training."""
        return {"train_loss": float(self.loss.mean())} if len(self.loss) else {}


@dataclass
class Meter:
    """What a round cost: bytes by kind, steps, failures, seconds by phase. Read and reset by it."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - begin

    def count_transfer(self, kind: str, down: int = 0, up: int = 0) -> None:
        """Bytes a real system would have sent to clients (down) and received from them (up)."""
        self.counts[f"bytes_down_{kind}"] += down
        self.counts[f"bytes_up_{kind}"] += up

    def read_and_reset(self) -> dict[str, float]:
        row: dict[str, float] = dict(self.counts)
        row |= {f"seconds_{name}": value for name, value in self.seconds.items()}
        self.counts.clear()
        self.seconds.clear()
        return row


@dataclass(frozen=True)
class Federation:
    clients: Ids  # those that may train, ascending
    num_clients: int  # M, holdout clients included
    num_examples: Ids  # (M,) n_k, training examples
    initial: Params  # the model everybody starts from, leaves (1, ...)
    executor: Executor
    training: Training
    aggregation: Aggregation
    participation: float  # rho
    block: int
    seed: int
    on_client_failure: OnClientFailure = "raise"
    meter: Meter = field(default_factory=Meter)

    def initial_bank(self) -> ModelBank:
        return ModelBank(self.initial, np.zeros(self.num_clients, dtype=np.int64))

    def generator(self, purpose: str, *where: int) -> np.random.Generator:
        return generator(self.seed, purpose, *where)

    def sample(self, t: int, members: Ids) -> Ids:
        """A cohort of max(rho |members|, 1) of the members, keyed by round and smallest member."""
        size = max(int(self.participation * len(members)), 1)
        chosen = self.generator("cohort", t, int(members.min())).choice(
            members, size, replace=False
        )
        return np.sort(chosen)

    def weights(self) -> NDArray[np.float64]:
        """(M,) how much each client counts in a mean: n_k, or 1."""
        uniform = self.aggregation.weights == "uniform"
        return np.ones(self.num_clients) if uniform else self.num_examples.astype(np.float64)

    def train(
        self, bank: ModelBank, cohort: Cohort, gradient: Gradient, memo: Params | None = None
    ) -> Trained:
        """Local training of the cohort, each from its row of the bank; memo leaves (K, ...)."""
        jobs = [
            TrainJob(
                cohort.clients[some],
                bank.owner[cohort.clients[some]],
                {name: leaf[some] for name, leaf in (memo or {}).items()},
            )
            for some in _slices(len(cohort.clients), self.block)
        ]
        task = Train(self.training, gradient, cohort.t)
        with self.meter.phase("train"):
            results = self.executor.map(task, bank.params, jobs)
        trained = self._joined(cohort.clients, results)
        self.meter.counts["client_steps"] += int(trained.num_steps.sum())
        return self._without_failed(trained, cohort.t)

    def score(self, bank: ModelBank, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
        return self.executor.map(Score(), bank.params, jobs)

    def _joined(self, clients: Ids, results: Sequence[BlockResult]) -> Trained:
        names = results[0].params
        return Trained(
            clients=clients,
            params={name: torch.cat([r.params[name] for r in results]) for name in names},
            loss=np.concatenate([r.loss for r in results]),
            num_steps=num_local_steps(self.num_examples[clients], self.training),
        )

    def _without_failed(self, trained: Trained, t: int) -> Trained:
        finite = np.isfinite(trained.loss)
        for leaf in trained.params.values():
            finite &= leaf.flatten(1).isfinite().all(1).cpu().numpy()
        if finite.all():
            return trained
        failed = trained.clients[~finite].tolist()
        if self.on_client_failure == "raise":
            raise ClientFailure(
                f"in round {t} the loss or weights of client {failed[0]} became NaN or infinite"
                f" ({len(failed)} of {len(finite)} clients: {failed[:10]}); lower train.lr, or set"
                " on_client_failure=drop to go on without such clients"
            )
        self.meter.counts["clients_dropped"] += len(failed)
        keep = torch.from_numpy(finite)
        params = {name: leaf[keep.to(leaf.device)] for name, leaf in trained.params.items()}
        return Trained(
            trained.clients[finite], params, trained.loss[finite], trained.num_steps[finite]
        )


def _slices(length: int, size: int) -> list[slice]:
    """
    >>> _slices(5, 3)
    [slice(0, 3, None), slice(3, 6, None)]
    """
    return [slice(start, start + size) for start in range(0, length, size)]

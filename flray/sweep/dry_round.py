"""A round in which no client trains, which shows the metrics that an algorithm's rounds return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from flray.algorithms.algorithm import Algorithm
from flray.client.engine import BlockResult
from flray.client.host import Host
from flray.client.tasks import Train, TrainJob
from flray.execution.executor import CLIENT_ERRORS, Failed, Job, Output
from flray.execution.federation import Federation, Meter
from flray.models.bank import Params


def metrics_of_round(
    algorithm: Algorithm[Any],  # Any: the state is the algorithm's own
    fed: Federation,
    t: int,
    state: Any = None,
) -> frozenset[str]:
    """The names of the metrics that round t returns; empty where it cannot be told.

    That is so for rounds which ask clients for more than training.

    Args:
        state: before the round; None: that of `init`.
    """
    dry = replace(fed, executor=Untrained(), meter=Meter(), heard=[])
    try:
        before = algorithm.init(dry).state if state is None else state
        outcome = algorithm.round(before, algorithm.cohort(before, t, dry), dry)
    except CLIENT_ERRORS:  # of a round that means something only with models that were trained
        return frozenset()
    return frozenset(outcome.metrics)


@dataclass(frozen=True)
class Untrained:
    """An executor that answers a training job with the models it starts from, and nothing else."""

    clients_per_job: int | None = None
    retries: int = 0

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        if not isinstance(task, Train):
            raise RuntimeError(f"a dry round has no clients that could run {type(task).__name__}")
        return [cast("Output", _unchanged(bank, cast("TrainJob", job))) for job in jobs]

    def close(self) -> None:
        """Nothing was started."""


def _unchanged(bank: Params, job: TrainJob) -> BlockResult:
    rows = torch.from_numpy(job.rows)
    params = {name: leaf.index_select(0, rows.to(leaf.device)) for name, leaf in bank.items()}
    return BlockResult(params, np.zeros(len(job.clients)))

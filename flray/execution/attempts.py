"""Attempts at a job: retries, and splitting a failing block to find the client to blame."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from flray.client.host import Host
from flray.client.keeping import KeptBlock
from flray.client.tasks import ByClient, TrainJob
from flray.execution.executor import Executor, Failed, Output
from flray.models.bank import Params

Blocks = TypeVar("Blocks", bound=ByClient)


def run_isolating_failures(
    executor: Executor,
    task: Callable[[Host, Params, Blocks], Output],
    bank: Params,
    jobs: Sequence[Blocks],
) -> tuple[list[tuple[Blocks, Output]], dict[int, Failed]]:
    """Run the jobs; a block that keeps failing is split to find the client to blame."""
    done, open_jobs = _attempt(executor, task, bank, jobs)
    for _ in range(executor.retries):
        more, open_jobs = _attempt(executor, task, bank, [job for job, _ in open_jobs])
        done += more
    alone = [single for job, _ in open_jobs if len(job.clients) > 1 for single in job.alone()]
    failed_alone = [(job, failed) for job, failed in open_jobs if len(job.clients) == 1]
    for _ in range(executor.retries + 1):
        more, failures = _attempt(executor, task, bank, alone)
        done += more
        alone = [job for job, _ in failures]
    failed_alone += failures
    guilty = [(job, failed) for job, failed in failed_alone if not failed.of_host]
    for suspect in [job for job, failed in failed_alone if failed.of_host]:
        # One at a time, with nobody beside it whose fault it may be.
        more, failures = _attempt(executor, task, bank, [suspect])
        done += more
        guilty += failures
    return done, {int(job.clients[0]): failed for job, failed in guilty}


def _attempt(
    executor: Executor,
    task: Callable[[Host, Params, Blocks], Output],
    bank: Params,
    jobs: Sequence[Blocks],
) -> tuple[list[tuple[Blocks, Output]], list[tuple[Blocks, Failed]]]:
    outputs = executor.map(task, bank, jobs) if jobs else []
    pairs = list(zip(jobs, outputs, strict=True))
    done = [(job, output) for job, output in pairs if not isinstance(output, Failed)]
    return done, [(job, output) for job, output in pairs if isinstance(output, Failed)]


def not_finite(done: Sequence[tuple[TrainJob, KeptBlock]]) -> dict[int, Failed]:
    error = FloatingPointError("its loss or weights became NaN or infinite; lower train.lr")
    failed: dict[int, Failed] = {}
    for job, found in done:
        finite = np.isfinite(np.stack([found.loss, *found.largest.values()])).all(0)
        failed |= {int(i): Failed(error) for i in job.clients[~finite]}
    return failed

"""How a task is sent to clients: in blocks, repeated, and split to find the client that fails."""

from collections.abc import Callable, Sequence

from flray.client.host import Host
from flray.client.tasks import ClientsJob
from flray.execution.executor import Executor, Failed, Job, Output
from flray.models.bank import Params


def ask(
    executor: Executor,
    task: Callable[[Host, Params, ClientsJob], Output],
    params: Params,
    jobs: Sequence[ClientsJob],
) -> tuple[list[tuple[ClientsJob, Output]], dict[int, Failed]]:
    """Put a question to the clients of all jobs. Every question of a federation takes this way.

    Returns the outputs of the jobs that were done, in the order of clients, and failures by client.
    A block that keeps failing is split into single clients, to find the one to blame.

    >>> import numpy as np
    >>> from flray.execution.executor import Inline
    >>> def task(host, params, job):
    ...     if 2 in job.clients:
    ...         raise ValueError("client 2 has no data")
    ...     return (10 * job.clients).tolist()
    >>> jobs = ClientsJob(np.arange(4)).in_parts(3)  # clients 0, 1, 2 and client 3
    >>> done, failed = ask(Inline(host=None), task, {}, jobs)
    >>> [output for _, output in done]
    [[0], [10], [30]]
    >>> failed[2].reason
    'ValueError: client 2 has no data'

    Args:
        task: run on hosts with (host, params, job).
        params: models that the task reads; sent once, not once per job.
        jobs: blocks of clients, which are worked on at the same time where there are many hosts.
    """
    outputs = list(zip(jobs, attempt(executor, task, params, jobs), strict=True))
    singles = [
        single
        for job, output in outputs
        if isinstance(output, Failed) and len(job.clients) > 1
        for single in job.alone()
    ]
    outputs += zip(singles, attempt(executor, task, params, singles), strict=True)
    done: list[tuple[ClientsJob, Output]] = []
    failed: dict[int, Failed] = {}
    for job, output in outputs:
        if isinstance(output, Failed) and len(job.clients) > 1:
            continue  # tried one by one
        if isinstance(output, Failed) and output.of_host:
            # Alone, so that another job on the same GPU cannot be the cause.
            (output,) = executor.map(task, params, [job])
        if isinstance(output, Failed):
            failed[int(job.clients[0])] = output
        else:
            done.append((job, output))
    return sorted(done, key=lambda pair: int(pair[0].clients[0])), failed


def attempt(
    executor: Executor,
    task: Callable[[Host, Params, Job], Output],
    params: Params,
    jobs: Sequence[Job],
) -> list[Output | Failed]:
    """The outputs of the jobs in their order; failed jobs are repeated `executor.retries` times.

    For jobs of any kind: those that are no blocks of clients cannot be split. A job that still
    fails has a `Failed` in the place of its output.
    """
    outputs = executor.map(task, params, jobs) if jobs else []
    for _ in range(executor.retries):
        again = [k for k, output in enumerate(outputs) if isinstance(output, Failed)]
        if not again:
            break
        repeated = executor.map(task, params, [jobs[k] for k in again])
        for k, output in zip(again, repeated, strict=True):
            outputs[k] = output
    return outputs

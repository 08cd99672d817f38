"""Executors run jobs on hosts, in this process or on actors, and return outputs in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from flray.client.host import Host
from flray.errors import CLIENT_ERRORS, ExperimentError, line_of, one_line_message
from flray.models.bank import Params

Job = TypeVar("Job")
Output = TypeVar("Output")


def ignore() -> None:
    """Do nothing about an answer."""


@dataclass(frozen=True)
class Failed:
    """Stands for the output of a job that failed.

    `of_host` tells a process or GPU that failed, which the job of another client may have caused,
    from an error that the client's own code raised.

    >>> Failed(ValueError("batch is empty")).reason
    'ValueError: batch is empty'
    """

    error: BaseException
    of_host: bool = False

    @property
    def reason(self) -> str:
        """The error in one line, with the line of the user's own code that raised it."""
        line = line_of(self.error)
        return one_line_message(self.error) + (f" ({line})" if line else "")


class Executor(Protocol):
    """Runs jobs on hosts: `Inline` in this process, `RayPool` on client actors.

    A task is a pure function of (host, bank, job), so which host runs a job, when and how often
    does not change its output.

    >>> executor: Executor = Inline(host=None)  # a task that needs no host
    >>> executor.map(lambda host, bank, job: job + bank["w"], {"w": 1}, [10, 20])
    [11, 21]
    """

    @property
    def clients_per_job(self) -> int | None:
        """Largest number of clients in a job. None: `execution.block`."""
        ...

    @property
    def trainings_kept(self) -> int:
        """Number of trainings whose models hosts keep and answer questions about.

        0: models come back with the outputs.
        """
        ...

    @property
    def retries(self) -> int:
        """How often a failed block is tried again before its clients are tried one by one.

        Retries are for hosts that fail; an error of a client's code fails every time.
        """
        ...

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        """The outputs of the jobs in their order, `Failed` for those that failed.

        Errors of `CLIENT_ERRORS` and lost hosts are failures; an `ExperimentError`, or any other
        error, is raised.

        Args:
            task: Called on a host with (host, bank, job).
            bank: Models for all jobs; sent once, not once per job.
            jobs: A job with an attribute `host` runs on the host of that number.
        """
        ...

    def close(self) -> None:
        """Release the hosts; the executor cannot be used afterwards. May be called again."""
        ...


@dataclass(frozen=True)
class Inline:
    """Runs all jobs in this process, one after another.

    Used for `execution.executor: inline`, for rehearsals and forecasts, and wherever a test needs a
    host without Ray.
    """

    host: Host
    clients_per_job: int | None = None
    trainings_kept: int = 0  # models are in this process anyway
    retries: int = 0  # what failed here would fail again
    on_answer: Callable[[], None] = ignore  # called when a job has ended

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        """The outputs of the jobs in their order; see `Executor.map`."""
        return [self._run(task, bank, job) for job in jobs]

    def _run(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, job: Job
    ) -> Output | Failed:
        """The output of one job, or its failure."""
        output: Output | Failed
        try:
            output = task(self.host, bank, job)
        except ExperimentError:
            raise
        except CLIENT_ERRORS as error:
            output = Failed(error)
        self.on_answer()
        return output

    def close(self) -> None:
        """Do nothing: no process was started."""


class LazyExecutor:
    """Starts an executor when it is first used.

    A row of a sweep that finds all its results in the cache starts no actors.
    """

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start

    @cached_property
    def _executor(self) -> Executor:
        return self._start()

    @property
    def clients_per_job(self) -> int | None:
        """As the executor has it, which is started to know."""
        return self._executor.clients_per_job

    @property
    def trainings_kept(self) -> int:
        """As the executor has it, which is started to know."""
        return self._executor.trainings_kept

    @property
    def retries(self) -> int:
        """As the executor has it, which is started to know."""
        return self._executor.retries

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        """The outputs of the jobs; without jobs nothing is started."""
        return self._executor.map(task, bank, jobs) if jobs else []

    def close(self) -> None:
        """Close the executor if it was started."""
        if "_executor" in vars(self):  # it was started
            self._executor.close()

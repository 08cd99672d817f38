"""Executors: spread jobs over hosts and bring the outputs back in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flray.client.host import Host
from flray.errors import ExperimentError
from flray.models.bank import Params

Job = TypeVar("Job")
Output = TypeVar("Output")

# What a client's own code may raise: its module, its loss, its data.
CLIENT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Failed:
    """Stands for the output of a job that failed.

    >>> Failed(ValueError("batch is empty")).reason
    'ValueError: batch is empty'
    """

    error: BaseException
    of_host: bool = False  # its process or GPU failed, which another's job may have caused

    @property
    def reason(self) -> str:
        """The type of the error and the last line of its message."""
        text = str(self.error).strip().split("\n")
        return f"{type(self.error).__name__}: {text[-1]}" if text[-1] else type(self.error).__name__


class Executor(Protocol):
    """Runs jobs on hosts, in this process or on actors, and returns the outputs in order."""

    @property
    def clients_per_job(self) -> int | None:
        """Most clients of a job. None: `execution.block`."""
        ...

    @property
    def trainings_kept(self) -> int:
        """Trained models stay with hosts, which answer questions about so many trainings.

        0: models come back with the outputs.
        """
        ...

    @property
    def retries(self) -> int:
        """How often a failed block is tried again before its clients are tried one by one."""
        ...

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        """The outputs of the jobs in their order; the bank is sent once, not once a job.

        A job with a `place` goes to the host of that number, where hosts have numbers.
        """
        ...

    def close(self) -> None:
        """Release the hosts; the executor cannot be used afterwards."""
        ...


@dataclass(frozen=True)
class Inline:
    """Everything in this process, one job after another."""

    host: Host
    clients_per_job: int | None = None
    trainings_kept: int = 0  # models are here anyway
    retries: int = 0  # what failed here would fail again

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        return [self._run(task, bank, job) for job in jobs]

    def _run(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, job: Job
    ) -> Output | Failed:
        try:
            return task(self.host, bank, job)
        except ExperimentError:
            raise
        except CLIENT_ERRORS as error:
            return Failed(error)

    def close(self) -> None:
        """Nothing was started."""


class LazyExecutor:
    """Starts an executor once it has something to do: a row that finds everything starts none."""

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start
        self._started: Executor | None = None

    @property
    def _executor(self) -> Executor:
        self._started = self._started or self._start()
        return self._started

    @property
    def clients_per_job(self) -> int | None:
        return self._executor.clients_per_job

    @property
    def trainings_kept(self) -> int:
        return self._executor.trainings_kept

    @property
    def retries(self) -> int:
        return self._executor.retries

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        return self._executor.map(task, bank, jobs) if jobs else []

    def close(self) -> None:
        if self._started is not None:
            self._started.close()

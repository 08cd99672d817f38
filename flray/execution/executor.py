"""Executors: spread jobs over hosts and bring the outputs back in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flray.client.host import Host
from flray.models.bank import Params

Job = TypeVar("Job")
Output = TypeVar("Output")


class Executor(Protocol):
    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output]:
        """The outputs of the jobs in their order; the bank is sent once, not once a job."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Inline:
    """Everything in this process, one job after another."""

    host: Host

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output]:
        return [task(self.host, bank, job) for job in jobs]

    def close(self) -> None:
        """Nothing was started."""

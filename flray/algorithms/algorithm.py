"""What an algorithm is: four methods over a state that is data."""

from typing import Protocol, TypeVar

from flray.data.dataset import Ids
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank

State = TypeVar("State")
Metrics = dict[str, float]


class Algorithm(Protocol[State]):
    """A frozen dataclass whose fields are its configuration."""

    def init(self, fed: Federation) -> State: ...

    def cohort(self, state: State, t: int, fed: Federation) -> Cohort: ...

    def round(self, state: State, cohort: Cohort, fed: Federation) -> tuple[State, Metrics]: ...

    def deploy(self, state: State, clients: Ids, fed: Federation) -> ModelBank:
        """The model each of the clients uses at test time, in the bank's `owner`."""
        ...

"""What an algorithm is: five methods over a state that is data."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.points import Points
from flray.data.dataset import Ids
from flray.engines.training import Gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params

State = TypeVar("State")
Metrics = dict[str, float]


@dataclass(frozen=True)
class Outcome(Generic[State]):
    """What `init` and `round` return: the new state, and what is recorded of it."""

    state: State
    metrics: Metrics = field(default_factory=dict)  # columns of the round's row
    clusterings: tuple[Clustering, ...] = ()  # in the order in which they were decided


class Algorithm(Protocol[State]):
    """A frozen dataclass whose fields are its configuration."""

    @property
    def gradient(self) -> Gradient:
        """What the optimiser of a client steps along."""
        ...

    def init(self, fed: Federation) -> Outcome[State]: ...

    def cohort(self, state: State, t: int, fed: Federation) -> Cohort: ...

    def round(self, state: State, cohort: Cohort, fed: Federation) -> Outcome[State]: ...

    def deploy(self, state: State, clients: Ids, fed: Federation) -> ModelBank:
        """The model each of the clients uses at test time, in the bank's `owner`.

        `fed` is the federation of the state's last round, so clients may be asked (IFCA).
        """
        ...

    def partition(self, state: State) -> Ids:
        """(M,) the cluster of each client, -1 for none: what `clusters` and ARI describe."""
        ...


@runtime_checkable
class Branching(Algorithm[State], Protocol[State]):
    """One that is FedAvg for some rounds, then clusters by a pipeline and goes on by what it found.

    Up to the clustering its rounds are FedAvg's, state and metrics. So experiments that differ in
    later stages only share this prefix and branch from it: a sweep computes the prefix once.
    """

    @property
    def clustering(self) -> Pipeline: ...

    @property
    def rounds_before(self) -> int:
        """Rounds of FedAvg before the (first) clustering."""
        ...

    @property
    def observed_by(self) -> tuple[str, ...]:
        """The fields that `observe` reads, beside the pipeline's signature."""
        ...

    @property
    def state_decides(self) -> bool:
        """True if rounds after the clustering depend on the state alone and on no field of the
        algorithm, as long as nobody joins."""
        ...

    def observe(self, bank: ModelBank, t: int, fed: Federation) -> tuple[Points, Params]:
        """Signatures of the clients after round t, and the signature's memory."""
        ...

    def branch(
        self, bank: ModelBank, observed: tuple[Points, Params], found: Clustering, fed: Federation
    ) -> State:
        """The state after round `rounds_before` in which clients go on as the clustering says."""
        ...


@runtime_checkable
class Separable(Protocol):
    """A branching algorithm some of whose clients never hear others once they were clustered.

    Another clustering in which such clients go on in the same way need not train them again. Where
    all clients are divided so, each stays in its cluster and in its row of the deployed bank.
    """

    def components(self, state: Any, fed: Federation) -> list[tuple[Ids, object]]:  # Any: its own
        """Clients that hear each other and nobody else, with all that decides how they go on
        beside their models; every client is in one component. Empty: there is no such division.
        """
        ...


@runtime_checkable
class Places(Protocol):
    """An algorithm that can put clients it has never heard of into the clusters it has."""

    def assign(
        self,
        state: Any,  # Any: its own
        clients: Ids,
        fed: Federation,
    ) -> tuple[Ids, Ids]:
        """The clients that answered, in ascending order, and the cluster of each of them.

        Nothing changes by it. Ids may be those of clients made up to resemble others.
        """
        ...


@runtime_checkable
class Requires(Protocol):
    """An algorithm or a stage that does not work with every experiment."""

    def require(self, fed: Federation) -> None:
        """Raise an ExperimentError if the experiment lacks what it needs. Asks no client."""
        ...


def check_requirements(component: object, fed: Federation) -> None:
    """Refuse an experiment that lacks what the algorithm or one of its stages needs."""
    if isinstance(component, Requires):
        component.require(fed)
    if is_dataclass(component):
        for each in fields(component):
            check_requirements(getattr(component, each.name), fed)


def cluster(algorithm: Branching[State], bank: ModelBank, fed: Federation) -> Outcome[State]:
    """Collect signatures, cluster the clients and build the state after it. Not a round."""
    t = algorithm.rounds_before
    observed = algorithm.observe(bank, t, fed)
    found = algorithm.clustering.decide(observed[0], fed, t)
    return Outcome(algorithm.branch(bank, observed, found, fed), clusterings=(found,))

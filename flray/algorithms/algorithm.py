"""What an algorithm is: five methods over a state that is data.

`Algorithm` is what every method implements; `Branching`, `Places` and `Requires` are what some
methods implement beside it. docs/adding_an_algorithm.md has a complete example.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from flray.clustering.pipeline import Clustering, Pipeline
from flray.data.dataset import Ids
from flray.engines.training import Gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params

State = TypeVar("State")
Metrics = dict[str, float]


@dataclass(frozen=True)
class Outcome(Generic[State]):
    """What `init` and `round` of an algorithm return: the new state, and what is recorded.

    Metrics become columns of the round's row, as they are named; names of columns that the run
    records itself are refused, except `train_loss`. Clusterings become files of evidence and are
    scored; a clustering in `init` is recorded as one after round 0.

    >>> Outcome("w1", {"train_loss": 0.5}).metrics, Outcome("w0").clusterings
    ({'train_loss': 0.5}, ())
    """

    state: State  # replaces the state that the method was given, which is not changed
    metrics: Metrics = field(default_factory=dict)  # columns of the round's row
    clusterings: tuple[Clustering, ...] = ()  # in the order in which they were decided


class Algorithm(Protocol[State]):
    """A federated method: a frozen dataclass whose fields are its keys in YAML.

    The server calls `init` once, then for each round t = 1..T `cohort`, `round` and, where models
    are evaluated, `deploy` and `partition`. All that a method remembers is its state, which is
    data (a frozen dataclass of banks, tables and arrays), so that a run can be resumed from it.
    Methods do not change what they are given and draw random numbers from `fed.generator` alone.

    >>> from flray.algorithms.fedavg import FedAvg
    >>> from flray.data.events import make_timeline
    >>> from flray.data.split import Split
    >>> from flray.engines.training import Training
    >>> from flray.models.mixing import Aggregation
    >>> import numpy as np, torch
    >>> ids = np.split(np.arange(12), 3)  # of three clients, all of whom take part
    >>> timeline = make_timeline(Split(np.arange(12), np.arange(12), ids, ids, ids), ())
    >>> fed = Federation(
    ...     timeline=timeline, initial={"w": torch.zeros(1, 2)}, executor=None,
    ...     training=Training(), aggregation=Aggregation(), participation=1.0, block=3, seed=0,
    ... )
    >>> state = FedAvg().init(fed).state
    >>> FedAvg().cohort(state, 1, fed).clients, FedAvg().partition(state)
    (array([0, 1, 2]), array([0, 0, 0]))
    """

    @property
    def gradient(self) -> Gradient:
        """What the optimiser of a client steps along; `plain_gradient` is local SGD.

        A method with a local equation of its own defines it as a method or as an attribute, with
        the arguments of `flray.engines.training.Gradient`, and passes it to `fed.train`.
        """
        ...

    def init(self, fed: Federation) -> Outcome[State]:
        """The state before round 1; `fed` is the federation of round 1.

        May ask clients, for instance to cluster before training; what that costs is counted in
        round 1.
        """
        ...

    def cohort(self, state: State, t: int, fed: Federation) -> Cohort:
        """The clients that train in round t, in ascending order; there may be none.

        `fed.sample` and `fed.sample_clusters` draw them. `fed` is the federation of round t.
        """
        ...

    def round(self, state: State, cohort: Cohort, fed: Federation) -> Outcome[State]:
        """The state after the cohort has trained.

        Most methods call `fed.train`, then `fed.mix`, or both in `fed.average`. The given state is
        not changed: a run that is resumed calls `round` with the same state again. A method that
        changes one of its tensors in place is refused.
        """
        ...

    def deploy(self, state: State, clients: Ids, fed: Federation) -> ModelBank:
        """The model that each of the clients uses at test time, in the bank's `owner`.

        Owners of other clients are not read. `fed` is the federation of the state's last round, so
        clients may be asked (IFCA).
        """
        ...

    def partition(self, state: State) -> Ids:
        """(M,) the cluster of each client, -1 for none; `clusters` and ARI are computed from it.

        Methods with one model for all return zeros.
        """
        ...


@runtime_checkable
class Branching(Algorithm[State], Protocol[State]):
    """A method that is FedAvg for some rounds, clusters once by a pipeline, and trains on from it.

    Up to the clustering its rounds have the state and metrics of FedAvg, so `clustered.cluster` of
    FedAvg's bank gives the state after it. Experiments that differ only in later stages share this
    prefix, and a sweep computes it once. All that a sweep needs to know of the rounds after the
    clustering is `spent_fields`.

    >>> from flray.algorithms.cfl import Cfl
    >>> from flray.algorithms.flhc import Flhc
    >>> isinstance(Flhc(), Branching), isinstance(Cfl(), Branching)  # CFL clusters many times
    (True, False)
    """

    @property
    def clustering(self) -> Pipeline:
        """The five stages by which clients are clustered."""
        ...

    @property
    def rounds_before(self) -> int:
        """Rounds of FedAvg before the (first) clustering."""
        ...

    @property
    def spent_fields(self) -> tuple[str, ...] | None:
        """Fields that only the clustering reads, beside `rounds_before` and `clustering`.

        Once all clients have a cluster, and as long as nobody joins, later rounds depend on the
        state and on the other fields alone, and a client hears those that `state.relation` names,
        without one the clients of its cluster. None: no such promise, for instance because clients
        are clustered again.
        """
        ...

    def branch(
        self, bank: ModelBank, clustering: Clustering, memory: Params, fed: Federation
    ) -> State:
        """The state after round `rounds_before`, in which clients continue as clustered.

        Args:
            bank: one row, the joint model.
            memory: what the signature stage keeps for its next call.
        """
        ...


@runtime_checkable
class Places(Protocol):
    """An algorithm that finds the cluster of any client, also of one that is not in the state.

    `evaluate.robustness` needs it; methods without it are refused there.
    """

    def nearest_clusters(
        self,
        state: Any,
        clients: Ids,
        fed: Federation,  # Any: the algorithm's own
    ) -> tuple[Ids, Ids]:
        """The clients that answered, in ascending order, and the cluster of each of them.

        The state does not change. Ids may be those of clients made up to resemble others.
        """
        ...

    def partition(self, state: Any) -> Ids:  # Any: the algorithm's own
        """(M,) the cluster of each client, with the numbers of `nearest_clusters`; -1: none."""
        ...


@runtime_checkable
class Requires(Protocol):
    """An algorithm or a stage that does not work with every experiment.

    Called once before a run starts, for the algorithm and, recursively, its fields.
    """

    def require(self, fed: Federation) -> None:
        """Raise an ExperimentError if the experiment lacks what it needs. Asks no client."""
        ...


def check_requirements(component: object, fed: Federation) -> None:
    """Refuse an experiment that lacks what the algorithm or one of its stages needs.

    Raises:
        ExperimentError: As the component's own `require` raises it, or because distances between
            all clients would not fit in memory.
    """
    if isinstance(component, Requires):
        component.require(fed)
    if isinstance(component, Branching):
        component.clustering.require_room(len(fed.clients))
    if is_dataclass(component):
        for attribute in fields(component):
            check_requirements(getattr(component, attribute.name), fed)

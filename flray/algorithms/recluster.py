"""Clustering as an event: when clients are clustered again, and what becomes of their clusters."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from flray.algorithms.algorithm import Branching
from flray.algorithms.change import Dynamic, Flags
from flray.algorithms.clustered import ClusteredState
from flray.algorithms.regrouping import Regrouping, Then, regrouped_bank
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Points
from flray.clustering.update import flatten
from flray.data.dataset import Ids
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, Params
from flray.values import Unbounded, require_at_least

When = Literal["once", "every", "on_drift", "auto"]


@dataclass(frozen=True)
class Watch:
    """What the server remembers from round to round to tell when a clustering is due.

    >>> Watch(Flags.none(3)).is_clustered
    False
    """

    flags: Flags  # clients whose data seem to have changed
    memory: Params = field(default_factory=dict)  # what the signature keeps for its next call
    is_clustered: bool = False  # clients have been clustered
    steps: Points | None = None  # the last step of each cluster's model; `clients` are clusters
    has_turned: bool = True  # a step has turned since the last clustering
    is_steady: bool = False  # no step turned in the last round


class WatchedState(ClusteredState, Protocol):
    """A state of models and clusters from which clients may be clustered again."""

    @property
    def watch(self) -> Watch | None:
        """None: clients are clustered once, or not yet."""
        ...


@dataclass(frozen=True)
class Reclustered:
    """Clients that have been clustered again: their clusters, and the models of these."""

    clustering: Clustering
    labels: Ids  # (M,) -1: none
    bank: ModelBank
    points: Points  # the new signatures
    anchor: ModelBank  # the model that signatures were computed with
    watch: Watch


@dataclass(frozen=True)
class Recluster:
    """When clients are clustered again after the first clustering, and what follows from it.

    `every` counts rounds, `on_drift` waits for changed data of clients, `auto` for the steps of the
    clusters' models, w_c^t - w_c^(t-1). A step has turned if its cosine with the cluster's last one
    is below `steady`. Clients are clustered in the first round in which no step turns after one has
    turned: for the first time after `rounds_before` rounds at the earliest, and again when steps
    have found a new direction after a drift. Cohorts that change make steps turn too. The server
    has the models anyway, so nothing is sent but the signatures of each clustering.

    All clients that are present send a new signature, from the same model as in the first
    clustering, so that signatures of different clusters can be compared. `anew`: they are clustered
    by all stages, and new clusters are matched to the old ones by the clients they have in common.
    `split`: each cluster is clustered by itself. `merge`: clusters are clustered by their mean
    signatures, so a threshold is compared with distances of means. `move`: clients go to the
    cluster with the nearest mean; after a drift only those that changed. A cluster that is matched
    keeps its model, a new one starts from the model that most of its clients had, and merged
    clusters from the mean of their models.

    >>> [Recluster(when="every", every=3).is_due(Watch(Flags.none(2)), since) for since in (5, 6)]
    [False, True]
    """

    # When clients are clustered again. once: never; every: at an interval; on_drift: when data of
    # clients seem to have changed; auto: when updates of clusters stop turning, for the first time
    # after `rounds_before` rounds or later
    when: When = "once"
    # What becomes of clusters. anew: all are found anew; split: each may be divided; merge: some
    # may be joined; move: clients change between them
    then: Then = "anew"
    every: int = 5  # Rounds from one clustering to the next, with when: every
    until: int | None = None  # Last round after which clients are clustered again. None: no last
    # What tells a drift, with when: on_drift. events: a client reports that its data changed; loss:
    # its training loss has jumped; update: the server finds that its params change more than before
    drift_by: Literal["events", "loss", "update"] = "loss"
    # Factor by which a loss or update norm must exceed the client's last one to be a drift
    jump: Unbounded = 2.0
    # Least cosine of a cluster's update with its last one for it not to have turned, with auto
    steady: float = 0.7

    def __post_init__(self) -> None:
        require_at_least(self, every=1)
        Dynamic(jump=self.jump)  # checks it
        if not -1 <= self.steady <= 1:
            raise ValueError(f"steady must be a cosine, between -1 and 1, got {self.steady}")
        if self.when != "every" and self.every != type(self).every:
            raise ValueError(
                f"every is read with when: every alone, got every {self.every} with when: "
                f"{self.when}; set when: every, or leave every out"
            )

    @property
    def drift(self) -> Dynamic:
        """The flags that are raised with `when: on_drift`."""
        return Dynamic(flags=self.drift_by, jump=self.jump)

    def spent(self, *others: str) -> tuple[str, ...] | None:
        """`Branching.spent_fields` of a method with these others; None if clusters change."""
        return (*others, "recluster") if self.when == "once" else None

    def start(self, fed: Federation) -> Watch | None:
        """What is remembered before the first clustering."""
        return Watch(Flags.none(fed.num_clients)) if self.when == "auto" else None

    def after_first(self, memory: Params, fed: Federation) -> Watch | None:
        """What is remembered after the first clustering, and forgotten by every later one."""
        if self.when == "once":
            return None
        return Watch(Flags.none(fed.num_clients), memory, is_clustered=True, has_turned=False)

    def is_joint(self, watch: Watch | None, rounds_before: int, t: int) -> bool:
        """True if clients have no clusters yet in round t."""
        return not watch.is_clustered if self.when == "auto" and watch else t <= rounds_before

    def is_first_due(self, watch: Watch | None, rounds_before: int, t: int) -> bool:
        """True if clients without clusters are clustered after round t."""
        if self.when != "auto":
            return t == rounds_before
        return t >= rounds_before and watch is not None and watch.is_steady

    def is_due(self, watch: Watch, rounds_since: int, t: int = 0) -> bool:
        """True if clients are clustered again after round t, so many rounds after the first."""
        if self.when == "once" or (self.until is not None and t > self.until):
            return False
        if self.when == "every":
            return rounds_since % self.every == 0
        if self.when == "auto":
            return watch.has_turned and watch.is_steady
        return self.drift.is_due(watch.flags, t)

    def watched(
        self, state: WatchedState, bank: ModelBank, trained: Trained, fed: Federation
    ) -> Watch | None:
        """What is remembered after a round that led from the state to the bank."""
        watch = state.watch
        if watch is not None and self.when == "on_drift":
            flags = self.drift.updated(watch.flags, trained, state.bank, fed)
            return replace(watch, flags=flags)
        if watch is None or self.when != "auto":
            return watch
        banks = (replace(b, params=fed.learned(b.params)) for b in (state.bank, bank))
        steps = steps_of_clusters(state.labels, *banks)
        cosine = least_cosine(watch.steps, steps)  # NaN compares False
        return replace(
            watch,
            steps=steps if watch.steps is None else watch.steps.updated_by(steps),
            has_turned=watch.has_turned or cosine < self.steady,
            is_steady=cosine >= self.steady,
        )

    def again(
        self, algorithm: Branching[Any], state: WatchedState, anchor: ModelBank, fed: Federation
    ) -> Reclustered | None:
        """Cluster the clients that are present again; None if it is not due, or nobody answered.

        Args:
            anchor: the model that signatures are computed with, the same for all clients.
        """
        watch, pipeline = state.watch, algorithm.clustering
        if watch is None or not self.is_due(watch, fed.t - algorithm.rounds_before, fed.t):
            return None
        # Updates can be compared if they start from one model.
        anchor = state.bank if getattr(pipeline.signature, "reads_bank", False) else anchor
        points, memory = pipeline.observe(fed, anchor, Cohort(fed.t, fed.clients), watch.memory)
        if not points.num_clients:
            return None
        old = state.labels.copy()
        old[fed.holdout] = -1  # they are placed again, and nobody depends on them
        movers = np.flatnonzero(watch.flags.raised) if self.when == "on_drift" else None
        clustering, labels = Regrouping(pipeline, points, old, fed, movers).after(self.then)
        weights = fed.weights() * np.isin(np.arange(fed.num_clients), fed.clients)
        bank = regrouped_bank(state.bank, old, labels, weights if self.then == "merge" else None)
        now = self.after_first(memory, fed)
        assert now is not None  # it is not `once`
        return Reclustered(clustering, labels, bank, points, anchor, now)


def steps_of_clusters(labels: Ids, before: ModelBank, after: ModelBank) -> Points:
    """The change of each cluster's model in a round, of clusters whose model changed.

    >>> before = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, np.array([0, 0, 1]))
    >>> after = ModelBank({"w": torch.tensor([[3.0], [5.0]])}, np.array([0, 0, 1]))
    >>> steps = steps_of_clusters(np.array([4, 4, 2]), before, after)
    >>> steps.clients, steps.values
    (array([4]), tensor([[2.]]))
    """
    clusters, members = np.unique(labels, return_index=True)
    steps = flatten(after.of_clients(members)) - flatten(before.of_clients(members))
    has_moved = (clusters >= 0) & steps.any(dim=1).cpu().numpy()
    return Points.vectors(clusters[has_moved], steps[torch.from_numpy(has_moved).to(steps.device)])


def least_cosine(before: Points | None, now: Points) -> float:
    """The least cosine of the steps of the clusters that both have; NaN if there is none.

    >>> before = Points.vectors(np.arange(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> least_cosine(before, Points.vectors(np.array([1, 7]), torch.tensor([[3.0, 4.0]] * 2)))
    0.8
    """
    common = np.intersect1d([] if before is None else before.clients, now.clients)
    if before is None or not len(common):
        return float("nan")
    a, b = (points.of(common).values.double() for points in (before, now))
    return float(torch.nn.functional.cosine_similarity(a, b.to(a.device)).min())

"""What clustered methods share: to cluster all clients once, and to place those that come later."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from flray.algorithms.algorithm import Branching, Outcome
from flray.clustering.pipeline import Clustering
from flray.data.dataset import Ids
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank
from flray.models.mixing import Relation

State = TypeVar("State")


class ClusteredState(Protocol):
    """A state, which is a dataclass, with models and the clusters of clients."""

    @property
    def bank(self) -> ModelBank:
        """The models; all members of a cluster use the same row."""
        ...

    @property
    def labels(self) -> Ids:
        """(M,) the cluster of each client; -1: none yet."""
        ...


Clustered = TypeVar("Clustered", bound=ClusteredState)


def cluster(
    algorithm: Branching[State],
    bank: ModelBank,
    fed: Federation,
    clients: Ids | None = None,
    t: int | None = None,
) -> Outcome[State]:
    """Collect signatures, cluster the clients and return the state after the clustering.

    This is not a round: `round` calls it after a round, or `init` before round 1.

    Args:
        algorithm: The method, whose pipeline clusters and whose `branch` makes the state.
        bank: The models that signatures are computed with; one row, the joint model.
        fed: The federation; costs of signatures are counted in its meter.
        clients: Those that are asked for a signature. None: all that may train.
        t: The round before the clustering. None: `rounds_before`.
    """
    t = algorithm.rounds_before if t is None else t
    cohort = Cohort(max(t, 1), fed.clients if clients is None else clients)
    signatures, memory = algorithm.clustering.observe(fed, bank, cohort, {})
    clustering = algorithm.clustering.decide(signatures, fed, t)
    return Outcome(algorithm.branch(bank, clustering, memory, fed), clusterings=(clustering,))


def mix_clusters(
    labels: Ids, trained: Trained, bank: ModelBank, shared: frozenset[str], fed: Federation
) -> ModelBank:
    """Average in clusters; the leaves named `shared` are averaged over all clients that were heard.

    All rows have the same shared leaves, those of clients without a cluster too.

    Args:
        labels: (M,) the cluster of each client; -1: none.
        bank: the models before the round, whose shared leaves are equal in all rows.
    """
    separate = replace(bank, params={n: v for n, v in bank.params.items() if n not in shared})
    mixed = fed.mix(Relation.of_clusters(labels), trained, separate)
    if not shared:
        return mixed
    common = replace(bank, params={n: leaf for n, leaf in bank.params.items() if n in shared})
    joint = fed.mix(Relation.joint(fed.num_clients), trained, common)
    _, user = np.unique(mixed.owner, return_index=True)  # (U,) a client of each row
    joint = joint.with_rows(joint.owner[user], mixed.owner)
    return replace(
        mixed,
        params={n: (mixed.params | joint.params)[n] for n in bank.params},
        moments=dict(sorted((mixed.moments | joint.moments).items())),
    )


def labels_of(clustering: Clustering, num_clients: int) -> Ids:
    """(M,) the cluster of each client, -1 for those that were not clustered.

    For the field `labels` of a state, from a clustering of some of the M clients.
    """
    labels = np.full(num_clients, -1, np.int64)
    labels[clustering.clients] = clustering.labels
    return labels


def unplaced(labels: Ids, *clients: Ids) -> Ids:
    """Those of the clients that have no cluster, ascending as the clients are.

    >>> unplaced(np.array([0, -1, 1, -1]), np.array([0, 1]), np.array([2, 3]))
    array([1, 3])
    """
    new = [ids[labels[ids] < 0] for ids in clients]  # few: sorting all clients would take longer
    return new[0] if len(new) == 1 else np.union1d(*new)


def place(
    state: Clustered,
    clients: Ids,
    clusters_of: Callable[[Ids], tuple[Ids, Ids]],
    members: Ids | None = None,
) -> Clustered:
    """Put those of the clients that have no cluster into one, with the model of its members.

    A client that does not answer keeps its model; it does not train, and a later round asks again.

    >>> from dataclasses import dataclass
    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Example:
    ...     bank: ModelBank
    ...     labels: Ids
    >>> bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, owner=np.array([0, 1, 0]))
    >>> state = Example(bank, labels=np.array([0, 1, -1]))
    >>> state = place(state, np.arange(3), lambda new: (new, np.array([1])))
    >>> state.labels, state.bank.owner
    (array([0, 1, 1]), array([0, 1, 1]))

    Args:
        clusters_of: the method's own rule; returns the clients that answered, in ascending order,
            and their clusters. Not called without clients to place.
        members: clients whose models newcomers may get: a newcomer gets the model of the first
            member of its cluster. None: all clients that had a cluster before.
    """
    new = unplaced(state.labels, clients)
    if not len(new):
        return state
    answered, clusters = clusters_of(new)
    if not len(answered):
        return state
    labels = state.labels.copy()
    labels[answered] = clusters
    if members is None:
        members = np.flatnonzero(state.labels >= 0)
    bank = state.bank.joined(answered, labels, members)
    return replace(state, labels=labels, bank=bank)  # type: ignore[type-var]  # a dataclass

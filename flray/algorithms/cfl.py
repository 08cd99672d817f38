"""CFL: FedAvg in clusters, each of which is split in two once its clients pull apart.

Sattler, Müller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints. IEEE TNNLS 2020, arXiv 1910.01991. Algorithms 1 to 3.

Deviates: as in the authors' code the two parts come from complete linkage (the paper's optimal
bipartition is `linkage: single`) and no bound on the cross-similarity is asked for. Unlike there,
all indices are client ids, the mean is weighted by n_i and only updates of the round enter it.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from flray.algorithms.algorithm import Outcome
from flray.algorithms.clustered import place, unplaced
from flray.clustering import DistanceStage, PartitionStage
from flray.clustering.distances import Cosine
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Clustering, Pipeline, nearest_cluster
from flray.clustering.points import Points
from flray.clustering.update import updates
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation
from flray.values import Unbounded, require_at_least


@dataclass(frozen=True)
class Bipartition(Pipeline):
    """1 - cos of updates, complete linkage, two parts."""

    distance: DistanceStage = field(default_factory=Cosine)
    partition: PartitionStage = field(
        default_factory=lambda: Hierarchical(linkage="complete", number=2)
    )


@dataclass(frozen=True)
class Fork:
    """A split that happened: where its parts went, for clients that come later."""

    parent: int  # the label that was split
    children: Ids  # (C,) the labels of its parts; the first is the parent's
    joint: ModelBank  # one row: w of the cluster that was split
    means: Points  # (C, p) the mean Δ of each part's clients


@dataclass(frozen=True)
class CflState:
    """State of CFL: a model per cluster, and the tree of splits so far."""

    bank: ModelBank  # a row for each cluster
    labels: Ids  # (M,) the cluster of each client; -1: to be placed
    updates: ClientTable  # the last Δ of each client, where not everybody is heard in each round
    forks: tuple[Fork, ...] = ()  # in the order in which they happened


@dataclass(frozen=True)
class Cfl:
    """A cluster is split in a round in which its mean update is small and some update is large.

    Then the joint model is stationary, but clients still pull in different directions. With
    `participation` below 1 a part of each cluster is sampled: norms and means are those of the
    updates heard, similarities those of each member's last update. Members that were never heard,
    clients that join later and holdout clients go down the tree of splits: from the model of each
    they train once, not as a round, and follow the part whose mean update is nearest.

        algorithm: {name: cfl, rounds_before: 10, mean_norm: 0.4, max_norm: 1.6}
    """

    refused_keys: ClassVar = {
        "recluster": "clusters are split by a rule of their own, see mean_norm and max_norm"
    }
    returns_clusterings: ClassVar = True

    mean_norm: Unbounded = 0.4  # Norm ε1 of the mean update below which a cluster may be split
    max_norm: Unbounded = 1.6  # Norm ε2 that its largest update must exceed as well
    rounds_before: int = 20  # Rounds of FedAvg before the first that may split
    min_members: int = 3  # Fewest members of a cluster that may be split
    clustering: Bipartition = field(default_factory=Bipartition)  # How a cluster is divided in two

    def __post_init__(self) -> None:
        require_at_least(self, mean_norm=0, max_norm=0, rounds_before=0, min_members=2)

    gradient = staticmethod(plain_gradient)  # Δθ_i = SGD(θ) - θ

    def init(self, fed: Federation) -> Outcome[CflState]:
        bank = fed.initial_bank()
        any_leaf = next(iter(fed.initial.values()))
        size = sum(leaf.numel() for leaf in fed.learned(fed.initial).values())
        updates = ClientTable.empty({"update": any_leaf.new_zeros(1, size)}, fed.num_clients)
        return Outcome(CflState(bank, bank.owner, updates))

    def cohort(self, state: CflState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample_clusters(t, state.labels))

    def round(self, state: CflState, cohort: Cohort, fed: Federation) -> Outcome[CflState]:
        trained = fed.train(state.bank, cohort, self.gradient)
        fed.count_models(state.bank, cohort, trained)
        rows = state.bank.owner[trained.clients]
        w0 = fed.learned(state.bank.params)
        heard = Points.vectors(trained.clients, updates(trained, w0, rows))
        seen = state.updates.updated(heard.clients, {"update": heard.values})
        clusterings: list[Clustering] = []
        if cohort.t > self.rounds_before:
            state, clusterings = self._split(state, heard, seen, fed)
        # In each cluster, as it is now: θ_c <- θ_c + sum_i n_i / n_c Δθ_i
        bank = fed.mix(Relation.of_clusters(state.labels), trained, state.bank)
        kept = seen if fed.participation < 1 else state.updates
        state = self._place(replace(state, bank=bank, updates=kept), fed)
        return Outcome(state, trained.metrics(), tuple(clusterings))

    def deploy(self, state: CflState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: CflState) -> Ids:
        return state.labels

    def _split(
        self, state: CflState, heard: Points, seen: ClientTable, fed: Federation
    ) -> tuple[CflState, list[Clustering]]:
        """Split each cluster that is ready for it; members without an update are left to place."""
        labels, forks, clusterings = state.labels.copy(), list(state.forks), []
        clients = np.intersect1d(seen.clients, fed.clients)
        for parent in np.unique(state.labels[heard.clients]):
            members = clients[state.labels[clients] == parent]
            fresh = heard.of(members)
            if len(members) < self.min_members or not self._is_ready(fresh, fed):
                continue
            deltas = Points.vectors(members, seen.of_clients(members)["update"])
            parts = self.clustering.decide(deltas, fed, fed.t)  # c1, c2 by 1 - cos(Δθ_i, Δθ_j)
            clusterings.append(parts)
            new = labels.max() + np.unique(parts.labels)  # the first part keeps its parent's label
            children = np.where(np.unique(parts.labels) == 0, parent, new)
            labels[state.labels == parent] = -1
            labels[members] = children[parts.labels]
            joint = state.bank.of_some(members)
            means = Points.vectors(children, deltas.cluster_means(parts.labels))
            forks.append(Fork(int(parent), children, joint, means))
        return replace(state, labels=labels, forks=tuple(forks)), clusterings

    def _is_ready(self, updates: Points, fed: Federation) -> bool:
        """True if a cluster with these updates is to be split."""
        weights = fed.weights(updates.clients)
        mean = torch.from_numpy(weights / weights.sum()).to(updates.values) @ updates.values
        norms = torch.stack([mean.norm(), updates.values.norm(dim=1).max()]).tolist()
        # ||sum_i n_i / n Δθ_i|| < ε1 and max_i ||Δθ_i|| > ε2
        return bool(norms[0] < self.mean_norm and norms[1] > self.max_norm)

    def _place(self, state: CflState, fed: Federation) -> CflState:
        """Let the clients that are present without a cluster go down the tree of splits."""

        def leaves_of_tree(new: Ids) -> tuple[Ids, Ids]:
            at = np.full(fed.num_clients, -1, np.int64)  # the label each has come to
            at[new] = 0  # the root
            for fork in state.forks:
                here = np.flatnonzero(at == fork.parent)
                deltas, _ = self.clustering.observe(fed, fork.joint, Cohort(fed.t, here), {})
                at[here] = -1
                if deltas.num_clients:
                    nearest = nearest_cluster(self.clustering.distance, fork.means, deltas)
                    at[deltas.clients] = fork.children[nearest]
            answered = np.flatnonzero(at >= 0)
            return answered, at[answered]

        return place(state, unplaced(state.labels, fed.clients, fed.holdout), leaves_of_tree)

"""The pipeline: signature → embed → distance → relate → partition, each replaceable."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flray.clustering import DistanceStage, EmbedStage, PartitionStage, RelateStage, SignatureStage
from flray.clustering.checks import (
    require_at_most_clients,
    require_distances,
    require_embedded,
    require_labels,
    require_observed,
    require_relations,
    require_room,
)
from flray.clustering.distances import L2
from flray.clustering.embeds import NoEmbed
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.metadata import Metadata
from flray.clustering.partitions import Given, KMeans, Random, Spectral
from flray.clustering.points import Matrix, Partition, Points
from flray.clustering.related import Related
from flray.clustering.relations import NoRelation
from flray.clustering.two_level import TwoLevel
from flray.clustering.update import Update
from flray.data.dataset import Ids
from flray.errors import ExperimentError, located
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params

Evidence = dict[str, NDArray[Any]]  # what a clustering was decided by, array by name

LARGEST_D = 2_000  # clients up to which D is computed though the partition takes points
LARGEST_KEPT = 1_000_000  # numbers of a clustering's points in its evidence


@dataclass(frozen=True)
class Clustering:
    """A clustering of m clients and what it was decided by; every array is in their order.

    >>> points = Points.vectors(np.array([2, 5, 7]), torch.tensor([[0.0], [1.0], [9.0]]))
    >>> partition = Partition(np.array([0, 0, 1]))
    >>> clustering = Clustering(points.clients, points, L2()(points), None, partition)
    >>> clustering.labels, clustering.together[0]  # client 2 is with client 5
    (array([0, 0, 1]), array([ True,  True, False]))
    """

    clients: Ids  # (m,) ascending
    points: Points  # after the embedding
    distance: Matrix | None  # D (m, m); None: left out, where points suffice and clients are many
    relation: Matrix | None  # R (m, m)
    partition: Partition
    observed: Points | None = None  # the signatures; None: `points` are the signatures

    @property
    def signatures(self) -> Points:
        """The points as clients sent them, before the embedding."""
        return self.points if self.observed is None else self.observed

    @property
    def labels(self) -> Ids:
        """(m,) the cluster of each client, numbered from 0."""
        return self.partition.labels

    @property
    def together(self) -> NDArray[np.bool_]:
        """(m, m) True if client j is in the cluster of client i; symmetric unless they overlap."""
        if self.partition.overlapping and self.relation is not None:
            return self.relation > 0
        return np.equal.outer(self.labels, self.labels)

    def evidence(self) -> Evidence:
        """The arrays that the run directory keeps of the clustering, by name."""
        arrays: Evidence = {"clients": self.clients, "labels": self.labels}
        optional = {"D": self.distance, "R": self.relation, "linkage": self.partition.linkage}
        arrays |= {name: array for name, array in optional.items() if array is not None}
        if self.partition.overlapping:
            arrays["overlapping"] = np.array(True)
        return arrays | self._kept_points()

    def _kept_points(self) -> Evidence:
        """The points, or if they are too large their first principal coordinates."""
        points, owner = self.points, {"point_owner": self.points.owner}
        if points.values.numel() <= LARGEST_KEPT:
            return {"points": points.array(), **owner}
        coordinates = points.principal
        kept = coordinates[:, : max(LARGEST_KEPT // len(coordinates), 1)]
        share = 1.0
        if kept.shape != coordinates.shape:
            share = float(np.square(kept).sum() / np.square(coordinates).sum())
        return {
            "points": kept,
            **owner,
            "projected_from": np.array(points.values.shape[1]),
            "variance_kept": np.array(share),
        }


@dataclass(frozen=True)
class Pipeline:
    """A clustering of clients in five replaceable stages.

    | stage | called with | returns |
    |---|---|---|
    | signature | fed, bank, cohort, memory | `Points` of m clients, memory |
    | embed | points, seed | `Points` in other coordinates |
    | distance | points | D (m, m), symmetric, 0 on the diagonal |
    | relate | D | R (m, m) >= 0, 1 on the diagonal, or None |
    | partition | `Related` | `Partition` with m labels |

    A partition with `takes_points` uses the points alone. Above LARGEST_D clients, and without a
    relation, D is then not computed, so memory does not grow with the square of the clients.

    The pipelines of algorithms differ in their defaults alone. `observe` asks clients for
    signatures, `decide` runs the other stages at the server, `place` assigns newcomers.

    >>> pipeline = Pipeline()
    >>> points = Points.vectors(np.arange(3), torch.tensor([[0.0], [0.5], [9.0]]))
    >>> D = pipeline.distance(pipeline.embed(points, 0))
    >>> related = Related(points, D, pipeline.relate(D), np.random.default_rng(0), None)
    >>> pipeline.partition(related).labels  # merges up to the threshold 1.0
    array([0, 0, 1])
    """

    # What the server learns of a client
    signature: SignatureStage = field(default_factory=Update)
    # Coordinates in which signatures are compared
    embed: EmbedStage = field(default_factory=NoEmbed)
    # Distance D between clients
    distance: DistanceStage = field(default_factory=L2)
    # Relation R between clients, made from D
    relate: RelateStage = field(default_factory=NoRelation)
    # How D or R becomes clusters
    partition: PartitionStage = field(default_factory=lambda: Hierarchical(threshold=1.0))

    def __post_init__(self) -> None:
        if isinstance(self.partition, Given) and not isinstance(self.signature, Metadata):
            # Groups place newcomers too, so no client is asked to train.
            object.__setattr__(self, "signature", Metadata())
        ward_on_distances = (
            isinstance(self.partition, Hierarchical | TwoLevel)
            and self.partition.linkage == "ward"
            and getattr(self.partition, "on", "distance") == "distance"
        )
        if ward_on_distances and not getattr(self.distance, "euclidean", True):
            raise ValueError(
                "ward merges clusters by squared L2 distances and needs distance l2, got "
                f"{type(self.distance).__name__}; choose linkage single, complete or average, or "
                "partition.on=relation"
            )

        for stage in (self.distance, self.partition):
            if getattr(stage, "takes_vectors", False) and getattr(self.signature, "is_set", False):
                raise ValueError(
                    f"{type(stage).__name__} needs one vector a client, and "
                    f"{type(self.signature).__name__} sends several points; choose a signature "
                    "that sends one (update, weights, k: 1) or stages for sets (distance matching, "
                    "min_pair or wasserstein, partition hierarchical)"
                )
        has_metric = hasattr(uncached(self.distance), "metric")
        if getattr(self.partition, "takes_metric", False) and not has_metric:
            raise ValueError(
                f"{type(self.partition).__name__} needs distance l1, l2 or cosine, got "
                f"{type(self.distance).__name__}; choose one of them or partition hdbscan"
            )
        if getattr(self.partition, "needs_relation", False) and isinstance(self.relate, NoRelation):
            raise ValueError(
                f"{type(self.partition).__name__} needs a relation between clients, got relate: "
                "none; choose threshold or kernel"
            )

    def needs_distances(self, num_clients: int) -> bool:
        """True if D is computed to cluster so many clients."""
        takes_points = getattr(self.partition, "takes_points", False)
        has_relation = not isinstance(self.relate, NoRelation)
        return has_relation or not takes_points or num_clients <= LARGEST_D

    def require_room(self, num_clients: int) -> None:
        """Refuse to cluster so many clients if their distances do not fit in memory."""
        if self.needs_distances(num_clients):
            require_room(num_clients)

    def require_number(self, num_clients: int) -> None:
        """Refuse to find more clusters than there are clients."""
        if isinstance(self.partition, KMeans | Spectral | Random | Hierarchical | TwoLevel):
            number = self.partition.number
            require_at_most_clients(number if isinstance(number, int) else 1, num_clients)

    def can_divide(self, num_clients: int) -> bool:
        """True if so many clients can be as many clusters as the partition is to find."""
        number = getattr(uncached(self.partition), "number", None)
        return not isinstance(number, int) or number <= num_clients

    def distances(self, points: Points) -> Matrix | None:
        """D (m, m) of embedded points; None if the partition does without it.

        Raises a ValueError if the distance stage returns something else than distances, and an
        ExperimentError if D cannot fit in memory.
        """
        if not self.needs_distances(points.num_clients):
            return None
        require_room(points.num_clients)
        distance: Matrix = run_stage("distance", self.distance, points)
        require_distances(distance, points, uncached(self.distance))
        return distance

    def observe(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        """Ask the cohort for its signatures; clients that fail and are dropped are left out.

        An embed with a method `on_client` (sketch) is applied by the clients.
        """
        signature = self.signature
        if hasattr(self.embed, "on_client"):
            signature = self.embed.on_client(signature)
        with fed.meter.phase("signature"):
            observed = run_stage("signature", signature, fed, bank, cohort, memory)
        require_observed(observed, uncached(self.signature))
        points, memory = observed
        return points, memory

    def decide(self, points: Points, fed: Federation, t: int) -> Clustering:
        """Cluster the clients by their signatures, after round t.

        Raises an ExperimentError if nobody answered or a stage refuses its input.
        """
        if not points.num_clients:
            raise ExperimentError(
                f"clustering after round {t}: no client answered with a signature, all of them "
                "failed; on_client_failure=raise shows why"
            )
        with fed.meter.phase("cluster"):
            try:
                return self._decide(points, fed, t)
            except ValueError as error:
                raise ExperimentError(f"clustering after round {t}: {error}") from error

    def place(self, known: Points, labels: Ids, new: Points, seed: int) -> Ids:
        """(n,) the cluster whose mean is nearest to each of n newcomers; the means do not change.

        Both are compared in the embedding of the known points, if it can be applied to others, and
        as signatures if it cannot (umap).

        >>> known = Points.vectors(np.arange(2), torch.tensor([[0.0], [10.0]]))
        >>> new = Points.vectors(np.array([5]), torch.tensor([[9.0]]))
        >>> Pipeline().place(known, np.array([0, 1]), new, seed=0)
        array([1])

        Args:
            labels: (m,) the clusters of the known points' clients, 0 to C - 1.
        """
        if hasattr(self.embed, "transform"):
            new = run_stage("embed", self.embed.transform, known, new, seed)
            known = run_stage("embed", self.embed, known, seed)
        means = Points.vectors(np.unique(labels), known.cluster_means(labels))
        return nearest_cluster(self.distance, means, new)

    def _decide(self, points: Points, fed: Federation, t: int) -> Clustering:
        """Run the stages after the signature."""
        embedded: Points = run_stage("embed", self.embed, points, fed.seed)
        require_embedded(embedded, points, uncached(self.embed))
        distance = self.distances(embedded)
        relation = None if distance is None else run_stage("relate", self.relate, distance)
        require_relations(relation, points, uncached(self.relate))
        related = Related(
            points=embedded,
            distance=distance,
            relation=relation,
            rng=fed.generator("partition", t),
            label_counts=lambda: fed.oracle.label_counts(points.clients),
            groups=lambda: fed.oracle.groups(points.clients),
            measure=uncached(self.distance),
        )
        partition = run_stage("partition", self.partition, related)
        require_labels(partition, points, self.partition)
        return Clustering(points.clients, embedded, distance, relation, partition, points)


def run_stage(kind: str, stage: Any, *inputs: Any) -> Any:  # Any: arguments differ by kind
    """What a stage, or a method of it, returns; errors of the user's own code in it name it."""
    component = uncached(getattr(stage, "__self__", stage))
    with located(f"{kind} {type(component).__name__}"):
        return stage(*inputs)


def uncached(stage: Any) -> Any:  # Any: a stage
    """The stage itself, also where a sweep has wrapped it to look its results up in a cache."""
    return getattr(stage, "stage", stage)


def nearest_cluster(distance: Any, means: Points, new: Points) -> Ids:  # Any: a distance stage
    """(n,) the cluster whose mean is nearest to the mean of each of n newcomers.

    >>> means = Points.vectors(np.arange(2), torch.tensor([[0.0], [10.0]]))
    >>> nearest_cluster(L2(), means, Points.vectors(np.array([7]), torch.tensor([[9.0]])))
    array([1])
    """
    both = np.arange(means.num_clients + new.num_clients)
    stacked = torch.cat([means.values, new.means().to(means.values)])
    between: Matrix = run_stage("distance", distance, Points.vectors(both, stacked))
    closest: Ids = between[means.num_clients :, : means.num_clients].argmin(1)
    return closest

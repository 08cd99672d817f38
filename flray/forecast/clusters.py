"""The clusters that a rehearsal assumes, because it does not train clients far enough to find any.

Clusters decide how many clients train after a clustering, where each of them samples its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Algorithm, Branching
from flray.clustering.points import Partition
from flray.clustering.related import Related
from flray.data.split import Split
from flray.errors import ExperimentError


@dataclass(frozen=True)
class AssumedClusters:
    """A partition stage that assumes `number` clusters of equal size.

    The partition it stands for is computed too, because its time counts, and is returned if
    nothing is assumed: it has more than one cluster, or clients were not trained for it, unless
    `is_said`; or only some of the clients are clustered.

    >>> one = lambda related: Partition(np.zeros(4, int))
    >>> stage = AssumedClusters(one, number=2, num_clients=4)
    >>> stage(None).labels, stage.assumed
    (array([0, 0, 1, 1]), [2])
    """

    partition: Any  # Any: a partition stage
    number: int
    num_clients: int  # Clients that may train
    is_said: bool = False  # True if the user said the number
    has_trained: Callable[[], bool] = lambda: True  # False before clients train
    assumed: list[int] = field(default_factory=list)  # number of clusters, of each time it was used

    @property
    def takes_points(self) -> bool:
        """True if the partition uses the points alone."""
        return getattr(self.partition, "takes_points", False)

    def __call__(self, related: Related) -> Partition:
        partition: Partition = self.partition(related)
        labels = partition.labels
        is_unknown = self.has_trained() and not labels.any() and not partition.overlapping
        if len(labels) != self.num_clients or not (self.is_said or is_unknown):
            return partition
        self.assumed.append(self.number)
        return Partition(np.arange(len(labels)) * self.number // len(labels), partition.linkage)


def with_assumed_clusters(
    algorithm: Algorithm[Any],  # Any: the state is the algorithm's own
    split: Split,
    number: int | None,
    has_trained: Callable[[], bool],
) -> tuple[Algorithm[Any], list[int]]:
    """The algorithm with a clustering for a rehearsal, and where its assumptions will be noted.

    Only methods that are FedAvg up to a clustering change. A rehearsal is no result, so planted
    groups may be counted without marking anything.

    Args:
        number: Clusters that the user expects. None: as many as the split has groups, else one.
        has_trained: False as long as no client has trained.

    Raises:
        ExperimentError: There are fewer clients than clusters.
    """
    if not isinstance(algorithm, Branching):
        return algorithm, []
    clients = split.clients
    if number is not None and number > len(clients):
        raise ExperimentError(f"clusters must be at most the {len(clients)} clients, got {number}")
    groups = np.zeros(1) if split.groups is None else split.groups[clients]
    pipeline = algorithm.clustering
    assumed = AssumedClusters(
        partition=pipeline.partition,
        number=number or len(np.unique(groups)),
        num_clients=len(clients),
        is_said=number is not None,
        has_trained=has_trained,
    )
    changed = {"clustering": replace(pipeline, partition=assumed)}
    return replace(algorithm, **changed), assumed.assumed  # type: ignore[type-var]  # a dataclass

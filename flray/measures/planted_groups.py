"""How well the clusters of a clustering match the planted groups."""

from dataclasses import dataclass

from flray.measures.measure import ClusteringContext, Measure, Numbers
from flray.measures.scores import partition_scores


@dataclass(frozen=True)
class PlantedGroups(Measure):
    """`partition_scores` of a clustering; left out where the split plants no groups."""

    def __call__(self, context: ClusteringContext) -> Numbers:
        groups, clustering = context.split.groups, context.clustering
        if groups is None:
            return {}
        return partition_scores(clustering.labels, groups[clustering.clients])

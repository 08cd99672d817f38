"""Records of clusterings: their evidence in the run directory, their numbers in the round's row."""

from collections.abc import Sequence

import numpy as np

from flray.clustering.pipeline import Clustering
from flray.columns import CLUSTERING, CLUSTERING_CLUSTERS, CLUSTERING_OVERLAPPING
from flray.data.events import Timeline
from flray.measures.measure import ClusteringContext, Measurement
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow


def record_clusterings(
    directory: RunDirectory, timeline: Timeline, t: int, clusterings: Sequence[Clustering]
) -> None:
    """Write what the clusterings after round t were decided by to the run directory.

    Each is a file of clusterings/ with points, D, R, labels and tree, as far as the method has
    them, and the planted groups of its clients.

    Args:
        timeline: The split of each round, for the planted groups.
        t: The round, 0 for a clustering before round 1.
        clusterings: The clusterings of this round in their order; the last one counts.
    """
    groups = timeline.at(max(t, 1)).groups
    for number, clustering in enumerate(clusterings):
        arrays = clustering.evidence()
        if groups is not None:
            arrays["groups"] = groups[clustering.clients]
        directory.append_clustering(t, arrays, len(clusterings) - 1 - number)


def clustering_row(context: ClusteringContext, measurements: Sequence[Measurement]) -> RoundRow:
    """The columns of a clustering: its size, and the numbers of all measures.

    Names begin with `clustering_`, so that they do not mix with columns of the round itself.
    """
    clustering = context.clustering
    row: RoundRow = {CLUSTERING_CLUSTERS: len(np.unique(clustering.labels))}
    row |= {CLUSTERING_OVERLAPPING: True} if clustering.partition.overlapping else {}
    for measure in measurements:
        row |= {CLUSTERING + name: value for name, value in measure(context).items()}
    return row

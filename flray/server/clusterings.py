"""Records of clusterings, and how good one is: by groups, labels, and clients made up for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Places
from flray.clustering.distances import Cosine
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Matrix, Points
from flray.columns import (
    CLUSTERING,
    CLUSTERING_CLUSTERS,
    CLUSTERING_OVERLAPPING,
    DATA_CORRELATION,
    DRIFT_CORRELATION,
)
from flray.data.events import Timeline
from flray.data.similar import Robustness, similar_id
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.execution.federation import Federation, Meter
from flray.measures.scores import (
    cosines,
    label_scores,
    overlap_errors,
    pair_correlation,
    partition_scores,
    robustness_scores,
)
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow


def record_clusterings(
    directory: RunDirectory, timeline: Timeline, t: int, clusterings: Sequence[Clustering]
) -> RoundRow:
    """Keep what clusterings after round t were decided by; scores of the last by the truth.

    Errors that compare clusters with sets of labels are left out where these define no groups.
    """
    split = timeline.at(max(t, 1))
    row: RoundRow = {}
    for number, found in enumerate(clusterings):
        arrays = found.evidence()
        scores: dict[str, float] = {}
        if split.has_label_groups:
            scores |= overlap_errors(found.together, split.label_counts(found.clients))
        if split.groups is not None:
            arrays |= {"groups": split.groups[found.clients]}
            scores |= partition_scores(found.labels, arrays["groups"])
        row = {CLUSTERING_CLUSTERS: len(np.unique(found.labels))}
        row |= {CLUSTERING_OVERLAPPING: True} if found.partition.overlapping else {}
        row |= {CLUSTERING + name: value for name, value in scores.items()}
        directory.append_clustering(t, arrays, len(clusterings) - 1 - number)
    return row


def label_row(found: Clustering, split: Split, fed: Federation) -> RoundRow:
    """Columns of a clustering after round fed.t that say how it follows the clients' labels."""
    counts = split.label_counts(found.clients)
    rng = fed.generator("similarity", fed.t)
    return dict(label_scores(_similarity(found), counts, found.labels, rng))


def drift_row(found: Clustering, split: Split, drift: Matrix) -> RoundRow:
    """Correlation of signatures with the clients' ways to see images, alone and with their labels.

    NaN where clients do not differ. The similarity of data that differ in both is the sum of both.

    Args:
        drift: (M, M) similarity of all clients.
    """
    sent, seen = _similarity(found), drift[np.ix_(found.clients, found.clients)]
    both = seen + cosines(split.label_counts(found.clients))
    return {
        DRIFT_CORRELATION: pair_correlation(sent, seen),
        DATA_CORRELATION: pair_correlation(sent, both),
    }


def _similarity(found: Clustering) -> Matrix:
    """(m, m) cosine similarity of the clients' signatures as they were sent (REPA, Fig. 1: e_i)."""
    return 1.0 - Cosine()(Points.vectors(found.clients, found.signatures.means()))


def robustness_row(
    algorithm: object,
    state: Any,  # Any: the algorithm's own, after the clustering
    found: Clustering,
    fed: Federation,
    split: Split,
    options: Robustness,
) -> RoundRow:
    """REPA's Algorithm 1 for each cluster; what it costs is not counted, it is no part of a run."""
    if not isinstance(algorithm, Places):
        raise ExperimentError(
            f"evaluate.robustness needs an algorithm that places clients it never heard of, "
            f"{type(algorithm).__name__} does not; known: repa, wd; or set it to null"
        )
    clusters = np.unique(found.labels)
    members = [found.clients[found.labels == c] for c in clusters]
    asked = np.array(
        [
            [
                similar_id(fed.num_clients, options.draws, int(r), j)
                for j, r in enumerate(
                    fed.generator("robustness", fed.t, int(own.min())).choice(own, options.draws)
                )
            ]
            for own in members
        ]
    )  # (C, n)
    sizes = np.array([len(ids) for ids in split.similar], np.int64)
    among = replace(fed, meter=Meter(), num_examples=np.concatenate([fed.num_examples, sizes]))
    with fed.meter.phase("robustness"):
        answered, place = algorithm.nearest_clusters(state, np.unique(asked), among)
    landed = dict(zip(answered.tolist(), place.tolist(), strict=True))
    successes = np.array(
        [[landed.get(int(p)) == c for p in row] for c, row in zip(clusters, asked, strict=True)]
    )
    return dict(robustness_scores(successes, np.array([len(own) for own in members])))

"""Records of clusterings, and scores of them by planted groups, labels and made-up clients."""

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
from flray.data.dataset import Ids
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
    """Record the evidence of the clusterings after round t and score them by ground truth.

    Returns:
        Columns of the round's row, for the last of the clusterings. Errors that compare clusters
        with sets of labels are left out if these define no groups.
    """
    split = timeline.at(max(t, 1))
    row: RoundRow = {}
    for number, clustering in enumerate(clusterings):
        arrays = clustering.evidence()
        scores: dict[str, float] = {}
        if split.has_label_groups:
            scores |= overlap_errors(clustering.together, split.label_counts(clustering.clients))
        if split.groups is not None:
            arrays |= {"groups": split.groups[clustering.clients]}
            scores |= partition_scores(clustering.labels, arrays["groups"])
        row = {CLUSTERING_CLUSTERS: len(np.unique(clustering.labels))}
        row |= {CLUSTERING_OVERLAPPING: True} if clustering.partition.overlapping else {}
        row |= {CLUSTERING + name: value for name, value in scores.items()}
        directory.append_clustering(t, arrays, len(clusterings) - 1 - number)
    return row


def label_row(clustering: Clustering, split: Split, fed: Federation) -> RoundRow:
    """How far the signatures and the clusters of a clustering agree with the clients' labels."""
    counts = split.label_counts(clustering.clients)
    rng = fed.generator("similarity", fed.t)
    return dict(label_scores(_similarity(clustering), counts, clustering.labels, rng))


def drift_row(clustering: Clustering, split: Split, drift: Matrix) -> RoundRow:
    """Correlation of signatures with the drift between clients, alone and added to their labels.

    NaN if clients do not differ. Data that differ in both have the sum of both similarities.

    Args:
        drift: (M, M) similarity of how all clients see images.
    """
    sent, seen = _similarity(clustering), drift[np.ix_(clustering.clients, clustering.clients)]
    both = seen + cosines(split.label_counts(clustering.clients))
    return {
        DRIFT_CORRELATION: pair_correlation(sent, seen),
        DATA_CORRELATION: pair_correlation(sent, both),
    }


def _similarity(clustering: Clustering) -> Matrix:
    """(m, m) cosine similarity of the clients' signatures as they were sent (REPA, Fig. 1: e_i)."""
    return 1.0 - Cosine()(Points.vectors(clustering.clients, clustering.signatures.means()))


def robustness_row(
    algorithm: object,
    state: Any,  # Any: the algorithm's own, after the clustering
    clustering: Clustering,
    fed: Federation,
    split: Split,
    options: Robustness,
) -> RoundRow:
    """Robustness of each cluster by REPA's Algorithm 1; its cost is not counted as the run's."""
    if not isinstance(algorithm, Places):
        raise ExperimentError(
            f"evaluate.robustness needs an algorithm that places clients it never heard of, "
            f"{type(algorithm).__name__} does not; known: repa, wd; or set it to null"
        )
    clusters = np.unique(clustering.labels)
    members = [clustering.clients[clustering.labels == c] for c in clusters]
    asked = np.array([_similar_clients(ids, fed, options) for ids in members])  # (C, n)
    sizes = np.array([len(ids) for ids in split.similar], np.int64)
    among = replace(fed, meter=Meter(), num_examples=np.concatenate([fed.num_examples, sizes]))
    with fed.meter.phase("robustness"):
        answered, assigned = algorithm.assign(state, np.unique(asked), among)
    cluster_of = dict(zip(answered.tolist(), assigned.tolist(), strict=True))
    successes = np.array(
        [[cluster_of.get(int(i)) == c for i in row] for c, row in zip(clusters, asked, strict=True)]
    )
    return dict(robustness_scores(successes, np.array([len(ids) for ids in members])))


def _similar_clients(members: Ids, fed: Federation, options: Robustness) -> list[int]:
    """Ids of `options.draws` made-up clients, each similar to a random member of a cluster."""
    rng = fed.generator("robustness", fed.t, int(members.min()))
    originals = rng.choice(members, options.draws)
    return [
        similar_id(fed.num_clients, options.draws, int(i), draw) for draw, i in enumerate(originals)
    ]

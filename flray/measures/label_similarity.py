"""How well a clustering follows the labels that its clients hold.

Radovič, Pejović: REPA, arXiv 2309.14088, Fig. 1 (correlation) and eq. 7, Fig. 2 (uniformity).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flray.client.embedding import fitted_k_means
from flray.clustering.points import Matrix
from flray.columns import (
    LABEL_CORRELATION,
    UNIFORMITY,
    UNIFORMITY_LABELS,
    UNIFORMITY_RANDOM,
    Column,
)
from flray.data.events import Timeline
from flray.measures.measure import ClusteringContext, Measure, Numbers, RunData
from flray.values import ROUNDING

correlation_column = partial(
    Column,
    group="correlation with",
    note="Correlation (REPA, Fig. 1): of the cosine of two clients' signatures with how alike "
    "their labels are, their ways to see images, or both.",
    is_main=True,
)
_column = partial(
    Column,
    group="uniformity",
    note="Uniformity (REPA, eq. 7, Fig. 2): how alike the labels of clients in one cluster are; "
    "for as many random clusters, and for k-means of the labels themselves.",
)


@dataclass(frozen=True)
class LabelSimilarity(Measure):
    """`evaluate.similarity`: clusters and signatures against the clients' label counts.

    `label_correlation` is Pearson's, over pairs of clients, between the similarity of what they
    sent and the cosine of their label counts (Fig. 1); NaN where one of them does not vary.
    `uniformity` is that of the clusters; beside it those of as many clusters that are drawn at
    random, and that k-means makes of the label counts themselves (Fig. 2).
    """

    columns: ClassVar[Mapping[str, Column]] = {
        LABEL_CORRELATION: correlation_column("correlation with labels", "labels"),
        UNIFORMITY: _column("uniformity (eq. 7)", " ", is_main=True),
        UNIFORMITY_RANDOM: _column("uniformity of random clusters", "(random)"),
        UNIFORMITY_LABELS: _column("uniformity by labels", "(of labels)"),
    }

    def prepare(self, data: RunData) -> Timeline:
        data.timeline.at(1).require_classes("evaluate.similarity", "set it to false")
        return data.timeline

    def __call__(self, context: ClusteringContext) -> Numbers:
        labels = context.clustering.labels
        counts = context.split.label_counts(context.clustering.clients)
        rng = context.fed.generator("similarity", context.fed.t)
        number = len(np.unique(labels))
        random_labels = rng.integers(number, size=len(labels))
        similarity = cosines(counts)
        uniform, num_singletons = uniformity(similarity, labels)
        seed = int(rng.integers(2**31))
        by_counts = fitted_k_means(counts.astype(np.float64), number, starts=10, seed=seed).labels_
        return {
            LABEL_CORRELATION: pair_correlation(context.signature_similarity(), similarity),
            UNIFORMITY: uniform,
            "singletons": num_singletons,
            UNIFORMITY_RANDOM: uniformity(similarity, random_labels)[0],
            UNIFORMITY_LABELS: uniformity(similarity, by_counts)[0],
        }


def cosines(vectors: NDArray[Any]) -> Matrix:  # Any: counts or floats
    """(m, m) cosine similarity of the rows; 0 for a row of zeros.

    >>> cosines(np.array([[3, 4], [4, 3], [0, 0]]))[0].tolist()
    [1.0, 0.96, 0.0]
    """
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(length == 0, 1.0, length)
    return units @ units.T


def pair_correlation(one: Matrix, other: Matrix) -> float:
    """Pearson's correlation of two similarities over the pairs i < j.

    >>> pair_correlation(np.array([[1, 3, 5], [3, 1, 4], [5, 4, 1]]), -np.eye(3))
    nan
    """
    pairs = np.triu_indices(len(one), 1)
    x, y = one[pairs], other[pairs]
    if len(x) < 2 or min(np.ptp(x), np.ptp(y)) < ROUNDING:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def uniformity(similarity: Matrix, labels: ArrayLike) -> tuple[float, int]:
    """REPA's eq. 7, and the number of clusters with one client, which it leaves undefined.

    The mean over the other clusters of the mean similarity of their pairs i < j; NaN where there
    are no such clusters.

    >>> similarity = np.array([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> uniformity(similarity, [0, 0, 1])
    (0.5, 1)
    """
    clusters = np.asarray(labels)
    members = [np.flatnonzero(clusters == c) for c in np.unique(clusters)]
    within = [similarity[np.ix_(c, c)][np.triu_indices(len(c), 1)] for c in members if len(c) > 1]
    mean = float(np.mean([pairs.mean() for pairs in within])) if within else float("nan")
    return mean, len(members) - len(within)

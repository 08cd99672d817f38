"""Clusters against the truth: planted groups, and the sets of labels that clients hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flray.columns import EQUAL_FN, EQUAL_FP, OVERLAP_FN, OVERLAP_FP, Column
from flray.data.dataset import Ids
from flray.measures.measure import ClusteringContext, Measure, Numbers
from flray.measures.scores import partition_scores

_HALF, _SAME = "half the labels:", "same labels:"
_NOTE = (
    "False positives and negatives (FLIS, Fig. 3): wrong and missing companions of a client, a "
    "mean over clients and clusterings, where those with half of its labels, or with the same "
    "labels, belong to it."
)
_error = partial(Column, note=_NOTE, is_mean=True)


@dataclass(frozen=True)
class PlantedGroups(Measure):
    """`partition_scores` of a clustering; left out where the split plants no groups.

    Columns are `clustering_ari`, `clustering_nmi` and the others of `partition_scores`.
    """

    def __call__(self, context: ClusteringContext) -> Numbers:
        groups, clustering = context.split.groups, context.clustering
        if groups is None:
            return {}
        return partition_scores(clustering.labels, groups[clustering.clients])


@dataclass(frozen=True)
class LabelSets(Measure):
    """Clustering errors by label sets; left out where these sets do not tell clients apart.

    They look at all pairs of clients, so they are left out without D too.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        OVERLAP_FP: _error("false positives", "false pos.", group=_HALF, is_main=True),
        OVERLAP_FN: _error("false negatives", "false neg.", group=_HALF, is_main=True),
        EQUAL_FP: _error("false positives", "false pos.", group=_SAME),
        EQUAL_FN: _error("false negatives", "false neg.", group=_SAME),
    }

    def __call__(self, context: ClusteringContext) -> Numbers:
        clustering = context.clustering
        if not context.split.has_label_groups or clustering.distance is None:
            return {}
        return overlap_errors(clustering.together, context.split.label_counts(clustering.clients))


def overlap_errors(together: NDArray[np.bool_], label_counts: Ids) -> Numbers:
    """How far clusters are from the clients that hold the same labels (FLIS, Fig. 3).

    Wrong and missing members of a client's cluster, the client itself aside, as a mean over
    clients: `fp` are in it and should not be, `fn` should be and are not; FLIS's clustering error
    is their sum. By `overlap`, as FLIS has it, client j belongs to client i's cluster if it holds
    at least half of i's labels; by `equal` if both hold the same labels.

    Args:
        together: (m, m) is client j in the cluster of client i?
        label_counts: (m, labels) training examples of each label that the clients hold.

    >>> labels = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
    >>> errors = overlap_errors(np.eye(3, dtype=bool), labels)  # everybody alone
    >>> [round(errors[f"{truth}_fn"], 3) for truth in ("overlap", "equal")]
    [1.333, 0.0]
    """
    has_label = (label_counts > 0).astype(np.int64)
    shared, num_labels = has_label @ has_label.T, has_label.sum(1)  # (m, m), (m,)
    overlap = 2 * shared >= num_labels[:, None]
    equal = (shared == num_labels[:, None]) & (shared == num_labels[None, :])
    wrong = {
        OVERLAP_FP: together & ~overlap,
        OVERLAP_FN: ~together & overlap,
        EQUAL_FP: together & ~equal,
        EQUAL_FN: ~together & equal,
    }
    others = ~np.eye(len(has_label), dtype=np.bool_)
    return {key: float((others & pairs).sum() / len(others)) for key, pairs in wrong.items()}

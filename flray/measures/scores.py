"""Scores of clients' models and of partitions.

Everything is a fraction, every variance has ddof 0; tables turn them into percent and percent².
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flray.columns import (
    ACCURACY_MEAN,
    ACCURACY_SE_CLIENTS,
    ACCURACY_VARIANCE,
    ACCURACY_WORST,
    ACCURACY_WORST_DECILE,
    ARI,
    CLIENTS_REACHING_TARGET,
    NMI,
    PURITY,
)
from flray.data.dataset import Ids


@dataclass(frozen=True)
class ClientScores:
    """Number of examples that each client's model classifies correctly, and its loss on them.

    A client without examples has no accuracy: it is left out on construction, of `clients` too,
    so that the arrays stay aligned and no mean contains a NaN from 0 / 0.

    >>> correct, total, loss = np.array([3, 0]), np.array([4, 0]), np.array([0.5, np.nan])
    >>> ClientScores(np.array([8, 9]), correct, total, loss).clients
    array([8])
    """

    clients: Ids  # (M,)
    correct: Ids  # (M,)
    total: Ids  # (M,) all > 0
    loss: NDArray[np.float64]  # (M,) mean over the client's examples

    def __post_init__(self) -> None:
        shapes = {f.name: getattr(self, f.name).shape for f in fields(self)}
        if len(set(shapes.values())) != 1 or self.clients.ndim != 1:
            raise ValueError(f"client scores need arrays of one length, got shapes {shapes}")
        if np.any((self.correct < 0) | (self.correct > self.total)):
            raise ValueError("correct must lie between 0 and total for every client")
        scored = self.total > 0
        for f in fields(self):
            object.__setattr__(self, f.name, getattr(self, f.name)[scored])

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """In the order of `clients`, free of NaN."""
        return self.correct / self.total  # (M,)

    def of(self, clients: Ids) -> "ClientScores":
        """The scores of these clients; clients without scores are ignored."""
        chosen = np.isin(self.clients, clients)
        return ClientScores(*(getattr(self, f.name)[chosen] for f in fields(self)))


def summarise(
    scores: ClientScores, num_examples: int, target: float | None = None
) -> dict[str, float]:
    """The columns of one evaluation: accuracy and loss over clients.

    Args:
        num_examples: distinct examples behind the scores. Clients of a group may share test
            images: counting an image once per client would make the standard error too small.
        target: accuracy to reach; without one `clients_reaching_target` is NaN.

    >>> correct, total = np.array([4, 2]), np.array([4, 4])
    >>> two = ClientScores(np.arange(2), correct, total, loss=np.array([0.0, 1.0]))
    >>> s = summarise(two, num_examples=8, target=0.9)
    >>> s["accuracy_mean"], s["accuracy_variance"], s["clients_reaching_target"]
    (0.75, 0.0625, 0.5)
    """
    accuracy = scores.accuracy
    if not len(accuracy):
        raise ValueError("no client has examples to score: nothing to summarise")
    if num_examples < 1:
        raise ValueError(f"num_examples must be >= 1, got {num_examples}")
    mean = accuracy.mean()
    num_worst = max(1, len(accuracy) // 10)
    reaching = np.nan if target is None else np.mean(accuracy >= target)
    summary = {
        ACCURACY_MEAN: mean,
        "accuracy_weighted": scores.correct.sum() / scores.total.sum(),
        "accuracy_se_binomial": np.sqrt(mean * (1 - mean) / num_examples),
        ACCURACY_SE_CLIENTS: accuracy.std() / np.sqrt(len(accuracy)),
        ACCURACY_VARIANCE: accuracy.var(),
        ACCURACY_WORST: accuracy.min(),
        ACCURACY_WORST_DECILE: np.sort(accuracy)[:num_worst].mean(),
        CLIENTS_REACHING_TARGET: reaching,
        "loss_mean": scores.loss.mean(),
    }
    return {name: float(value) for name, value in summary.items()}


def partition_scores(labels: ArrayLike, groups: ArrayLike) -> dict[str, float]:
    """How well a partition found the planted groups, both in the same order of clients.

    Purity is the share of clients that belong to the largest group of their cluster. Of the pairs
    of clients, false positives are the share of unlike ones (different groups) that are in one
    cluster, false negatives the share of like ones that are not; 0 where there are no such pairs.

    >>> scores = partition_scores([0, 0, 0, 1], [5, 5, 6, 6])
    >>> scores["purity"], scores["false_positives"], scores["false_negatives"]
    (0.75, 0.5, 0.5)
    """
    clusters, planted = np.asarray(labels), np.asarray(groups)
    if clusters.shape != planted.shape or clusters.ndim != 1 or not len(clusters):
        raise ValueError(
            "labels and groups must be one per client, "
            f"got shapes {clusters.shape} and {planted.shape}"
        )
    return dict(_partition_scores(_bytes(clusters), _bytes(planted)))


def _bytes(values: NDArray[Any]) -> bytes:
    return values.astype(np.int64).tobytes()


@lru_cache(maxsize=4)  # rounds after a clustering ask for the same again, and it takes 4 ms
def _partition_scores(labels: bytes, groups: bytes) -> dict[str, float]:
    """`partition_scores` of int64 arrays."""
    clusters, planted = np.frombuffer(labels, np.int64), np.frombuffer(groups, np.int64)
    from sklearn import metrics  # seconds to import, and seldom needed

    counts = metrics.cluster.contingency_matrix(planted, clusters)  # (groups, clusters)
    both, together, like = (_pairs(c) for c in (counts, counts.sum(0), counts.sum(1)))
    unlike = _pairs(np.array([len(clusters)])) - like
    return {
        ARI: float(metrics.adjusted_rand_score(planted, clusters)),
        NMI: float(metrics.normalized_mutual_info_score(planted, clusters)),
        PURITY: float(counts.max(axis=0).sum() / len(clusters)),
        "false_positives": (together - both) / max(unlike, 1),
        "false_negatives": (like - both) / max(like, 1),
    }


def _pairs(counts: Ids) -> int:
    """Pairs within sets of these sizes."""
    return int((counts * (counts - 1) // 2).sum())


def rounds_to_target(rounds: Sequence[int] | Ids, accuracy: ArrayLike, target: float) -> int | None:
    """The first round whose accuracy reached the target, None if none did.

    A round without an evaluation has accuracy NaN and never counts.

    >>> rounds_to_target([0, 5, 10], [0.2, 0.8, 0.9], target=0.8)
    5
    """
    numbers, values = np.asarray(rounds), np.asarray(accuracy, dtype=np.float64)
    if numbers.shape != values.shape:
        raise ValueError(
            "rounds and accuracy must have one length, "
            f"got shapes {numbers.shape} and {values.shape}"
        )
    reached = numbers[values >= target]
    return int(reached.min()) if len(reached) else None

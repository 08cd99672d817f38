"""How good are the models and the partition: numbers a table can be built from.

Everything is a fraction, every variance has ddof 0; tables turn them into percent and percent².
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from flray.columns import (
    ACCURACY_MEAN,
    ACCURACY_SE_CLIENTS,
    ACCURACY_VARIANCE,
    ACCURACY_WORST,
    ACCURACY_WORST_DECILE,
    ARI,
    CLIENTS_REACHING_TARGET,
    LABEL_CORRELATION,
    NMI,
    PURITY,
    ROBUSTNESS,
    ROBUSTNESS_CLIENTS,
    ROBUSTNESS_SE,
    UNIFORMITY,
    UNIFORMITY_LABELS,
    UNIFORMITY_RANDOM,
)
from flray.data.dataset import Ids


@dataclass(frozen=True)
class ClientScores:
    """What each client's model got right on the client's own examples.

    A client without examples has no accuracy: it is left out on construction, of `clients` too,
    so that the arrays stay aligned and no mean ever meets a NaN made by 0 / 0.

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
        """The scores of some of the clients only."""
        chosen = np.isin(self.clients, clients)
        return ClientScores(*(getattr(self, f.name)[chosen] for f in fields(self)))


def summarise(
    scores: ClientScores, num_examples: int, target: float | None = None
) -> dict[str, float]:
    """One evaluation in a few numbers.

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
    found, planted = np.asarray(labels), np.asarray(groups)
    if found.shape != planted.shape or found.ndim != 1 or not len(found):
        raise ValueError(
            "labels and groups must be one per client, "
            f"got shapes {found.shape} and {planted.shape}"
        )
    return dict(_partition_scores(_bytes(found), _bytes(planted)))


def _bytes(values: NDArray[Any]) -> bytes:
    return values.astype(np.int64).tobytes()


@lru_cache(maxsize=4)  # rounds after a clustering ask for the same again, and it takes 4 ms
def _partition_scores(labels: bytes, groups: bytes) -> dict[str, float]:
    """`partition_scores` of int64 arrays."""
    found, planted = np.frombuffer(labels, np.int64), np.frombuffer(groups, np.int64)
    from sklearn import metrics  # seconds to import, and seldom needed

    counts = metrics.cluster.contingency_matrix(planted, found)  # (groups, clusters)
    both, together, like = (_pairs(c) for c in (counts, counts.sum(0), counts.sum(1)))
    unlike = _pairs(np.array([len(found)])) - like
    return {
        ARI: float(metrics.adjusted_rand_score(planted, found)),
        NMI: float(metrics.normalized_mutual_info_score(planted, found)),
        PURITY: float(counts.max(axis=0).sum() / len(found)),
        "false_positives": (together - both) / max(unlike, 1),
        "false_negatives": (like - both) / max(like, 1),
    }


def overlap_errors(together: NDArray[np.bool_], label_counts: Ids) -> dict[str, float]:
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
    held = (label_counts > 0).astype(np.int64)
    shared, own = held @ held.T, held.sum(1)  # (m, m), (m,)
    truths = {
        "overlap": 2 * shared >= own[:, None],
        "equal": (shared == own[:, None]) & (shared == own[None, :]),
    }
    others = ~np.eye(len(held), dtype=np.bool_)
    return {
        f"{name}_{kind}": float((others & wrong).sum() / len(held))
        for name, truth in truths.items()
        for kind, wrong in (("fp", together & ~truth), ("fn", ~together & truth))
    }


def _pairs(counts: Ids) -> int:
    """Pairs within sets of these sizes."""
    return int((counts * (counts - 1) // 2).sum())


def label_scores(
    similarity: NDArray[np.float64], counts: Ids, labels: Ids, rng: np.random.Generator
) -> dict[str, float]:
    """How well a clustering follows the labels that its clients hold (REPA, arXiv 2309.14088).

    `label_correlation` is Pearson's, over pairs of clients, between the similarity of what they
    sent and the cosine of their label counts (Fig. 1); NaN where one of them does not vary.
    `uniformity` is that of the clusters; beside it those of as many clusters that are drawn at
    random, and that k-means makes of the label counts themselves (Fig. 2).

    Args:
        similarity: (m, m) of the clients' signatures, cosine in the paper.
        counts: (m, labels) examples of each label that each client holds.
        labels: (m,) the clusters.
    """
    alike = cosines(counts)
    number = len(np.unique(labels))
    drawn = rng.integers(number, size=len(labels))
    from sklearn.cluster import KMeans  # seconds to import, and seldom needed
    from sklearn.exceptions import ConvergenceWarning

    kmeans = KMeans(number, n_init=10, random_state=int(rng.integers(2**31)))
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct counts than clusters
        given = kmeans.fit_predict(counts.astype(np.float64))
    found, num_singletons = uniformity(alike, labels)
    return {
        LABEL_CORRELATION: pair_correlation(similarity, alike),
        UNIFORMITY: found,
        "singletons": num_singletons,
        UNIFORMITY_RANDOM: uniformity(alike, drawn)[0],
        UNIFORMITY_LABELS: uniformity(alike, given)[0],
    }


def cosines(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """(m, m) cosine similarity of the rows; 0 for a row of zeros.

    >>> cosines(np.array([[3, 4], [4, 3], [0, 0]]))[0].tolist()
    [1.0, 0.96, 0.0]
    """
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(length == 0, 1.0, length)
    similar: NDArray[np.float64] = units @ units.T
    return similar


def pair_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Pearson's correlation of two similarities over the pairs i < j.

    >>> pair_correlation(np.array([[1, 3, 5], [3, 1, 4], [5, 4, 1]]), -np.eye(3))
    nan
    """
    pairs = np.triu_indices(len(one), 1)
    x, y = one[pairs], other[pairs]
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def drift_similarity(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """(V, V) 1 - the mean Jensen-Shannon divergence over images, to the base 2 (REPA, Fig. 1).

    Args:
        p: (V, n, E) of each of n images in each of V views, a distribution over E.

    >>> p = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    >>> drift_similarity(p).tolist()
    [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    """
    own = _entropy(p)  # (V, n)
    between = [_entropy((p + q) / 2) - (own + h) / 2 for q, h in zip(p, own, strict=True)]
    similar: NDArray[np.float64] = 1 - np.stack(between).mean(2)
    return similar


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis, to the base 2."""
    logs = np.log2(p, out=np.zeros_like(p), where=p > 0)
    entropy: NDArray[np.float64] = -(p * logs).sum(-1)
    return entropy


def uniformity(similarity: NDArray[np.float64], labels: ArrayLike) -> tuple[float, int]:
    """REPA's eq. 7, and the number of clusters with one client, which it leaves undefined.

    The mean over the other clusters of the mean similarity of their pairs i < j; NaN where there
    are no such clusters.

    >>> similarity = np.array([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> uniformity(similarity, [0, 0, 1])
    (0.5, 1)
    """
    own = np.asarray(labels)
    members = [np.flatnonzero(own == c) for c in np.unique(own)]
    within = [similarity[np.ix_(c, c)][np.triu_indices(len(c), 1)] for c in members if len(c) > 1]
    num_singletons = len(members) - len(within)
    mean = float(np.mean([pairs.mean() for pairs in within])) if within else float("nan")
    return mean, num_singletons


def robustness_scores(successes: NDArray[np.bool_], sizes: Ids) -> dict[str, float]:
    """REPA's Algorithm 1: does a client that resembles one of a cluster land in that cluster?

    `robustness` is the mean over clusters, `robustness_se` its standard error over them (ddof 0);
    one large cluster and many of one client have a low mean, so the mean over clients, for each of
    whom its cluster counts, and the sizes are beside it.

    Args:
        successes: (C, n) of each cluster's draws.
        sizes: (C,) clients of each cluster.

    >>> scores = robustness_scores(np.array([[True, True], [True, False]]), np.array([3, 1]))
    >>> [scores[name] for name in ("robustness", "robustness_se", "robustness_clients")]
    [0.75, 0.17677669529663687, 0.875]
    """
    each = successes.mean(1)  # (C,)
    return {
        ROBUSTNESS: float(each.mean()),
        ROBUSTNESS_SE: float(each.std() / np.sqrt(len(each))),
        ROBUSTNESS_CLIENTS: float((each * sizes).sum() / sizes.sum()),
        "size_smallest": int(sizes.min()),
        "size_largest": int(sizes.max()),
    }


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

"""Scores of clients' models and of partitions.

What is shown in percent is a fraction here, and every variance has ddof 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flray.columns import (
    ACCURACY_COLUMNS,
    ARI,
    CLIENTS_REACHING_TARGET,
    NMI,
    PURITY,
    SE_SAMPLE,
    STATISTICS,
    ScoreColumns,
)
from flray.data.dataset import Ids
from flray.values import ROUNDING

Values = NDArray[np.float64]


@dataclass(frozen=True)
class ClientScores:
    """The scores of each client's model, and its loss, on examples of the client.

    A client without examples has no score: it is left out on construction, of `clients` too, so
    that the arrays stay aligned and no mean contains a NaN from 0 / 0.

    >>> correct, total, loss = np.array([3, 0]), np.array([4, 0]), np.array([0.5, np.nan])
    >>> scores = ClientScores(np.array([8, 9]), correct, total, loss)
    >>> scores.clients, scores.accuracy
    (array([8]), array([0.75]))
    """

    clients: Ids  # (M,)
    correct: NDArray[Any]  # (M,) right answers, shares of right positions of sequences; 0: numbers
    total: Ids  # (M,) examples, all > 0
    loss: Values  # (M,) mean over the client's examples
    # (M,) values by score, the first is the one that ranks; empty: the accuracy alone. NaN: a score
    # that is not defined for the client
    values: Mapping[ScoreColumns, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {name: array.shape for name, array in self._arrays()}
        if len(set(shapes.values())) != 1 or self.clients.ndim != 1:
            raise ValueError(f"client scores need arrays of one length, got shapes {shapes}")
        if np.any((self.correct < 0) | (self.correct > self.total)):
            raise ValueError("correct must lie between 0 and total for every client")
        scored = self.total > 0
        for name, array in list(self._arrays()):
            object.__setattr__(self, name, array[scored])
        values = {score: array[scored] for score, array in self.values.items()}
        object.__setattr__(self, "values", values or {ACCURACY_COLUMNS: self.correct / self.total})

    def _arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "values")

    @property
    def accuracy(self) -> Values:
        """In the order of `clients`, free of NaN."""
        return self.values[ACCURACY_COLUMNS]  # (M,)

    def of(self, clients: Ids) -> "ClientScores":
        """The scores of these clients; clients without scores are ignored."""
        chosen = np.isin(self.clients, clients)
        values = {score: array[chosen] for score, array in self.values.items()}
        arrays = {name: array[chosen] for name, array in self._arrays()}
        return replace(self, **arrays, values=values)


def summarise(
    scores: ClientScores, num_examples: int, target: float | None = None
) -> dict[str, float]:
    """The columns of one evaluation: scores and loss over clients.

    Args:
        num_examples: distinct examples behind the scores. Clients of a group may share test
            images: counting an image once per client would make the standard error too small.
        target: value of the first score to reach; without one `clients_reaching_target` is NaN.

    >>> correct, total = np.array([4, 2]), np.array([4, 4])
    >>> two = ClientScores(np.arange(2), correct, total, loss=np.array([0.0, 1.0]))
    >>> s = summarise(two, num_examples=8, target=0.9)
    >>> s["accuracy_mean"], s["accuracy_variance"], s["clients_reaching_target"]
    (0.75, 0.0625, 0.5)
    """
    if not len(scores.clients):
        raise ValueError("no client has examples to score: nothing to summarise")
    if num_examples < 1:
        raise ValueError(f"num_examples must be >= 1, got {num_examples}")
    summary: dict[str, float | np.floating[Any]] = {}
    for score, values in scores.values.items():
        statistics = _over_clients(score, values)
        if score == ACCURACY_COLUMNS:
            mean = statistics.pop("mean")
            weighted = scores.correct.sum() / scores.total.sum()
            binomial = np.sqrt(mean * (1 - mean) / num_examples)
            statistics = {"mean": mean, "weighted": weighted, "se_binomial": binomial, **statistics}
        summary |= {f"{score.name}_{name}": value for name, value in statistics.items()}
    first, values = next(iter(scores.values.items()))
    is_reached = np.nan if target is None else np.mean(reaches(values, target, first))
    summary |= {CLIENTS_REACHING_TARGET: is_reached, "loss_mean": scores.loss.mean()}
    return {name: float(value) for name, value in summary.items()}


def _over_clients(score: ScoreColumns, values: Values) -> dict[str, float]:
    """STATISTICS of a score over the clients for which it is defined; NaN if there are none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(STATISTICS, np.nan)
    worst_first = np.sort(values) if score.higher_is_better else -np.sort(-values)
    with np.errstate(invalid="ignore"):  # the spread of infinite values is NaN
        variance = values.var()
    return {
        "mean": values.mean(),
        "se_clients": np.sqrt(variance) / np.sqrt(len(values)),
        "variance": variance,
        "worst": worst_first[0],
        "worst_decile": worst_first[: max(1, len(values) // 10)].mean(),
    }


def sampling_errors(scores: ClientScores, num_asked: int, num_clients: int) -> dict[str, float]:
    """By column, the standard error of each mean as an estimate of the mean over all clients.

    sqrt((1 - n / N) s² / n) for n of N clients, drawn without replacement, where s² has ddof 1; 0
    if all were asked. Clients without a score do not count in s² / n.

    >>> four = ClientScores(np.arange(4), np.array([1, 1, 0, 0]), np.ones(4, int), np.zeros(4))
    >>> sampling_errors(four, num_asked=4, num_clients=16)  # sqrt(3/4 * 1/3 / 4)
    {'accuracy_se_sample': 0.25}
    """
    errors = {}
    for score, values in scores.values.items():
        defined = values[~np.isnan(values)]
        if num_asked == num_clients:
            error = 0.0
        elif len(defined) < 2:
            error = np.nan
        else:
            error = float(
                np.sqrt((1 - num_asked / num_clients) * defined.var(ddof=1) / len(defined))
            )
        errors[f"{score.name}_{SE_SAMPLE}"] = error
    return errors


def reaches(values: Values, target: float, score: ScoreColumns) -> NDArray[np.bool_]:
    """Where a score is at least as good as a target; False for NaN.

    A mean of clients that all have the target may be a rounding error below it.

    >>> reaches(np.array([0.7 - 1e-16, 0.69]), 0.7, ACCURACY_COLUMNS)
    array([ True, False])
    """
    slack = ROUNDING * max(1.0, abs(target))
    better = values - target if score.higher_is_better else target - values
    return better >= -slack


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
    # Pairs of unlike and like clients, each of them apart and in one cluster
    (apart, wrong), (missed, right) = metrics.pair_confusion_matrix(planted, clusters).tolist()
    return {
        ARI: float(metrics.adjusted_rand_score(planted, clusters)),
        NMI: float(metrics.normalized_mutual_info_score(planted, clusters)),
        PURITY: float(counts.max(axis=0).sum() / len(clusters)),
        "false_positives": wrong / max(apart + wrong, 1),
        "false_negatives": missed / max(missed + right, 1),
    }


def rounds_to_target(
    rounds: Sequence[int] | Ids,
    values: ArrayLike,
    target: float,
    score: ScoreColumns = ACCURACY_COLUMNS,
) -> int | None:
    """The first round whose score reached the target, None if none did.

    A round without an evaluation has the value NaN and never counts.

    >>> rounds_to_target([0, 5, 10], [0.2, 0.8, 0.9], target=0.8)
    5
    """
    numbers, course = np.asarray(rounds), np.asarray(values, dtype=np.float64)
    if numbers.shape != course.shape:
        raise ValueError(
            f"rounds and values must have one length, got shapes {numbers.shape} and {course.shape}"
        )
    reached = numbers[reaches(course, target, score)]
    return int(reached.min()) if len(reached) else None

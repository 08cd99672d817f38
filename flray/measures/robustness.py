"""Robustness of a clustering: does a client that resembles one of a cluster land in that cluster?

Radovič, Pejović: REPA, arXiv 2309.14088, Algorithm 1. Line 4: a client p like r has labels that are
distributed as (d_r + n) s, and r's own pipeline for its images. Noise n and scale s are ours, the
paper has them in an appendix that was not available. Images are drawn from r's test part, on which
nobody trains and which r sees as it sees all its images: of each label at most what is in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flray.algorithms.algorithm import Places
from flray.columns import ROBUSTNESS, ROBUSTNESS_CLIENTS, ROBUSTNESS_SE, Column
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.execution.federation import Meter
from flray.measures.measure import ClusteringContext, Measure, Numbers, RunData
from flray.randomness import generator
from flray.values import require_above_zero, require_at_least

_column = partial(
    Column,
    note="Robustness (REPA, Alg. 1): how often a client made to resemble one of a cluster lands in "
    "it, a mean over clusters.",
)


@dataclass(frozen=True)
class Robustness(Measure):
    """`evaluate.robustness`: share of similar clients that the algorithm places as their models.

    For each client that trains, `draws` similar clients are added to the timeline, which never
    train. Of each cluster as many are placed by the algorithm (`repa`, `wd`) after the clustering.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        ROBUSTNESS: _column("robustness", error=ROBUSTNESS_SE, is_main=True),
        ROBUSTNESS_CLIENTS: _column("robustness by client"),
        ROBUSTNESS_SE: Column("standard error of robustness"),
    }

    draws: int = 30  # Number n of similar clients per cluster
    # Standard deviation of the label noise, as a share of the largest label count d_r
    noise: float = 0.1
    smallest: float = 0.5  # Smallest scale s of a similar client's label counts
    largest: float = 1.5  # Largest scale s; s is drawn evenly between both
    # Fewest images of a similar client, if the test part it is drawn from has as many
    least: int = 20

    def __post_init__(self) -> None:
        require_at_least(self, draws=1, least=1, noise=0)
        require_above_zero(self, "smallest")
        if self.largest < self.smallest:
            raise ValueError(
                f"largest must be at least smallest ({self.smallest}), got {self.largest}"
            )

    def prepare(self, data: RunData) -> Timeline:
        data.timeline.at(1).require_classes("evaluate.robustness", "set it to null")
        phases = []
        for first, split in data.timeline.phases:
            clients = range(split.num_clients)
            similar = [ids for r in clients for ids in self._similar_to(split, r, data.seed)]
            phases.append((first, replace(split, similar=tuple(similar))))
        return Timeline(tuple(phases))

    def similar_id(self, num_clients: int, client: int, draw: int) -> int:
        """The id of a similar client: they follow the M clients, `draws` for each of them."""
        return num_clients + client * self.draws + draw

    def check_algorithm(self, algorithm: object) -> None:
        if not isinstance(algorithm, Places):
            raise ExperimentError(
                f"evaluate.robustness needs an algorithm that places clients it never heard of, "
                f"{type(algorithm).__name__} does not; known: repa, wd; or set it to null"
            )

    def __call__(self, context: ClusteringContext) -> Numbers:
        """Algorithm 1 for each cluster; its costs are not counted, it is no part of a run."""
        fed, clustering, algorithm = context.fed, context.clustering, context.algorithm
        self.check_algorithm(algorithm)
        assert isinstance(algorithm, Places)
        # Clusters that are found again keep their numbers, which those of the clustering do not.
        labels = algorithm.partition(context.state)[clustering.clients]
        clusters = np.unique(labels[labels >= 0])
        members = [clustering.clients[labels == c] for c in clusters]
        similar = np.stack([self._drawn(ids, context) for ids in members])  # (C, n)
        with fed.meter.phase("robustness"):
            uncounted = replace(fed, meter=Meter())
            answered, cluster = algorithm.nearest_clusters(
                context.state, np.unique(similar), uncounted
            )
        cluster_of = dict(zip(answered.tolist(), cluster.tolist(), strict=True))
        rows = zip(clusters, similar.tolist(), strict=True)
        successes = np.array([[cluster_of.get(p) == c for p in row] for c, row in rows])
        return robustness_scores(successes, np.array([len(ids) for ids in members]))

    def _drawn(self, members: Ids, context: ClusteringContext) -> Ids:
        """(n,) similar clients of members of one cluster that are drawn with replacement."""
        fed = context.fed
        rng = fed.generator("robustness", fed.t, int(members.min()))
        models = rng.choice(members, self.draws).tolist()
        return np.array([self.similar_id(fed.num_clients, r, j) for j, r in enumerate(models)])

    def _similar_to(self, split: Split, client: int, seed: int) -> list[Ids]:
        """Training examples of the similar clients of one client; none if it does not train."""
        if client not in split.clients or not len(split.test[client]):
            return [np.empty(0, np.int64)] * self.draws
        counts = split.label_counts(np.array([client]))[0]  # d_r
        test = split.test[client]
        by_label = [test[split.labels[test] == label] for label in range(len(counts))]
        generators = (generator(seed, "similar", client, j) for j in range(self.draws))
        return [self._draw(counts, by_label, rng) for rng in generators]

    def _draw(self, counts: Ids, by_label: list[Ids], rng: np.random.Generator) -> Ids:
        available = np.array([len(ids) for ids in by_label])
        noise = rng.normal(0.0, self.noise * counts.max(), len(counts))
        scale = rng.uniform(self.smallest, self.largest)
        sizes = noisy_counts(counts, noise, scale, available, self.least).tolist()
        drawn = [rng.permutation(ids)[:num] for ids, num in zip(by_label, sizes, strict=True)]
        return np.sort(np.concatenate(drawn))


def robustness_scores(successes: NDArray[np.bool_], sizes: Ids) -> Numbers:
    """The numbers of Algorithm 1.

    `robustness` is the mean over clusters, `robustness_se` its standard error over them (ddof 0).
    One large cluster and many of one client have a low mean, so the mean over clients, for each of
    whom its cluster counts, and the sizes are beside it.

    Args:
        successes: (C, n) of each cluster's draws.
        sizes: (C,) clients of each cluster.

    >>> scores = robustness_scores(np.array([[True, True], [True, False]]), np.array([3, 1]))
    >>> [scores[name] for name in ("robustness", "robustness_se", "robustness_clients")]
    [0.75, 0.17677669529663687, 0.875]
    """
    shares = successes.mean(1)  # (C,)
    return {
        ROBUSTNESS: float(shares.mean()),
        ROBUSTNESS_SE: float(shares.std() / np.sqrt(len(shares))),
        ROBUSTNESS_CLIENTS: float((shares * sizes).sum() / sizes.sum()),
        "size_smallest": int(sizes.min()),
        "size_largest": int(sizes.max()),
    }


def noisy_counts(
    counts: Ids, noise: NDArray[np.float64], scale: float, available: Ids, least: int
) -> Ids:
    """(labels,) max(0, round((d_r + n) s)), at most as many as are available.

    Where that makes fewer than `least`, all counts grow in proportion, as far as they can.

    >>> noisy_counts(np.array([50, 10]), np.array([2.0, -20.0]), 0.5, np.array([90, 90]), 20)
    array([26,  0])
    >>> noisy_counts(np.array([4, 4]), np.zeros(2), 0.5, np.array([90, 7]), 20)
    array([10,  7])
    >>> noisy_counts(np.array([4, 0]), np.zeros(2), 0.5, np.array([0, 7]), 20)
    array([0, 7])
    """
    sizes = np.maximum(counts + noise, 0.0) * scale
    sizes = np.where(available > 0, sizes, 0.0)
    if not sizes.any():
        sizes = np.minimum(counts, available).astype(np.float64)
    if not sizes.any():  # the client's labels are not available
        sizes = available.astype(np.float64)
    if np.rint(sizes).sum() < least:
        sizes *= least / sizes.sum()
    return np.minimum(np.rint(sizes).astype(np.int64), available)

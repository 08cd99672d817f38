"""Clients made up to resemble a client, for the robustness of a clustering.

Radovič, Pejović: REPA, arXiv 2309.14088, Algorithm 1, line 4: a client p like r has labels that are
distributed as (d_r + n) s, and r's own pipeline for its images. Noise n and scale s are ours, the
paper has them in an appendix that was not available. Images are drawn from r's test part, on which
nobody trains and which r sees as it sees all its images: of each label at most what is in it.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_at_least, check_positive
from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.randomness import generator


@dataclass(frozen=True)
class Robustness:
    """How similar clients are made, and how many for each cluster."""

    draws: int = 30  # Number n of similar clients per cluster
    # Standard deviation of the label noise, as a share of the largest label count d_r
    noise: float = 0.1
    smallest: float = 0.5  # Smallest scale s of a similar client's label counts
    largest: float = 1.5  # Largest scale s; s is drawn evenly between both
    # Fewest images of a similar client, if the test part it is drawn from has as many
    least: int = 20

    def __post_init__(self) -> None:
        check_at_least("draws", self.draws, 1)
        check_at_least("noise", self.noise, 0)
        check_at_least("least", self.least, 1)
        check_positive("smallest", self.smallest)
        if self.largest < self.smallest:
            raise ExperimentError(
                f"largest must be at least smallest ({self.smallest}), got {self.largest}"
            )


def with_similar(timeline: Timeline, options: Robustness, seed: int) -> Timeline:
    """The timeline with `draws` similar clients for each client that trains, in each phase."""
    phases = []
    for first, split in timeline.phases:
        similar = [_similar_to(split, r, options, seed) for r in range(split.num_clients)]
        phases.append((first, replace(split, similar=tuple(x for each in similar for x in each))))
    return Timeline(tuple(phases))


def similar_id(num_clients: int, draws: int, client: int, draw: int) -> int:
    """The id of a similar client: they follow the M clients, `draws` for each of them."""
    return num_clients + client * draws + draw


def _similar_to(split: Split, client: int, options: Robustness, seed: int) -> list[Ids]:
    if client not in split.clients or not len(split.test[client]):
        return [np.empty(0, np.int64)] * options.draws
    counts = split.label_counts(np.array([client]))[0]  # d_r
    own = split.test[client]
    by_label = [own[split.labels[own] == label] for label in range(len(counts))]
    return [
        _draw(counts, by_label, options, generator(seed, "similar", client, j))
        for j in range(options.draws)
    ]


def _draw(counts: Ids, by_label: list[Ids], options: Robustness, rng: np.random.Generator) -> Ids:
    there = np.array([len(ids) for ids in by_label])
    noise = rng.normal(0.0, options.noise * counts.max(), len(counts))
    scale = rng.uniform(options.smallest, options.largest)
    wanted = noisy_counts(counts, noise, scale, there, options.least)
    drawn = [rng.permutation(ids)[:num] for ids, num in zip(by_label, wanted.tolist(), strict=True)]
    return np.sort(np.concatenate(drawn))


def noisy_counts(
    counts: Ids, noise: NDArray[np.float64], scale: float, there: Ids, least: int
) -> Ids:
    """(labels,) max(0, round((d_r + n) s)), at most as many as are there.

    Where that makes fewer than `least`, all counts grow in proportion, as far as they can.

    >>> noisy_counts(np.array([50, 10]), np.array([2.0, -20.0]), 0.5, np.array([90, 90]), 20)
    array([26,  0])
    >>> noisy_counts(np.array([4, 4]), np.zeros(2), 0.5, np.array([90, 7]), 20)
    array([10,  7])
    """
    wanted = np.maximum(counts + noise, 0.0) * scale
    wanted = np.where(there > 0, wanted, 0.0)
    if not wanted.any():
        wanted = np.minimum(counts, there).astype(np.float64)
    if np.rint(wanted).sum() < least:
        wanted *= least / wanted.sum()
    return np.minimum(np.rint(wanted).astype(np.int64), there)

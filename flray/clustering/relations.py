"""Relations: from distances D to strengths R (m, m), how much clients learn from each other."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flray.clustering.points import Matrix
from flray.values import Unbounded, require_above_zero


@dataclass(frozen=True)
class Threshold:
    """Clients nearer than γ are related: R = 1 where D < γ, else 0.

    Deviates from FLT's paper, whose Sign(A - γ) has the opposite sense; its code has this one.
    """

    gamma: Unbounded = 1.0  # Threshold γ: clients nearer than this are related; .inf: everybody is

    def __post_init__(self) -> None:
        require_above_zero(self, "gamma")

    def __call__(self, distance: Matrix) -> Matrix:
        """R of 0 and 1.

        >>> Threshold(gamma=2.0)(np.array([[0.0, 2.0], [2.0, 0.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        return (distance < self.gamma).astype(np.float64)


@dataclass(frozen=True)
class Kernel:
    """Near clients count more: R = exp(-D² / (2 σ²)).

    Where the median distance is 0 (most clients coincide) R is its limit: 1 where D = 0, else 0.
    """

    # Width σ of the kernel. median: the median distance between clients
    sigma: float | Literal["median"] = "median"
    cutoff: float = 0.0  # Relations weaker than this become 0

    def __post_init__(self) -> None:
        if self.sigma != "median" and not self.sigma > 0:
            raise ValueError(f"sigma must be > 0 or median, got {self.sigma}")
        if not 0 <= self.cutoff <= 1:
            raise ValueError(f"cutoff must lie between 0 and 1, got {self.cutoff}")

    def __call__(self, distance: Matrix) -> Matrix:
        """R between 0 and 1.

        >>> Kernel()(np.array([[0.0, 7.0], [7.0, 0.0]])).round(3).tolist()  # exp(-1/2)
        [[1.0, 0.607], [0.607, 1.0]]
        """
        sigma = _median(distance) if self.sigma == "median" else self.sigma
        if sigma == 0:
            return np.equal(distance, 0).astype(np.float64)
        with np.errstate(over="ignore"):  # a squared ratio too large for a float: strength 0
            strength: Matrix = np.exp(-((distance / sigma) ** 2) / 2)
        return np.where(strength < self.cutoff, 0.0, strength)


@dataclass(frozen=True)
class Similarity:
    """R = 1 - D: FLIS's A itself, whose rows its code clusters by Ward; 0 where D > 1."""

    def __call__(self, distance: Matrix) -> Matrix:
        """R between 0 and 1.

        >>> Similarity()(np.array([[0.0, 0.25], [0.25, 0.0]])).tolist()
        [[1.0, 0.75], [0.75, 1.0]]
        """
        return np.maximum(1 - distance, 0.0)


@dataclass(frozen=True)
class NoRelation:
    """No relation: the partition uses D or the points.

    >>> NoRelation()(np.zeros((2, 2))) is None
    True
    """

    def __call__(self, distance: Matrix) -> None:
        """None, in the place of R."""
        return None


def _median(distance: Matrix) -> float:
    """The median distance of two clients; 0 if there is one client."""
    between = distance[np.triu_indices(len(distance), 1)]
    return float(np.median(between)) if len(between) else 0.0

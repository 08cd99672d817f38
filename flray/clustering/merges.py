"""Thresholds between the merges of a tree, at which any library cuts it alike."""

import math
from dataclasses import dataclass

import numpy as np

from flray.clustering.points import Matrix

SAME_HEIGHT = 1e-6  # relative difference below which a threshold counts as on a merge
SINGLE_MERGE_SPACING = 2.0  # ratio of thresholds where all merges have one height


@dataclass(frozen=True)
class MergePoint:
    """A threshold that is chosen once the tree of a sweep's row is known.

    >>> tree = np.array([[0, 1, 1.0, 2], [2, 3, 4.0, 3]])
    >>> MergePoint(place=1, number=3).threshold(tree)
    2.0
    """

    place: int  # number of the threshold, from 0
    number: int  # number of thresholds between the lowest and the highest merge

    def threshold(self, tree: Matrix) -> float:
        """The threshold for a tree (m - 1, 4) as scipy writes it."""
        return float(between_merges(tree, self.number)[self.place])


def between_merges(tree: Matrix, number: int) -> Matrix:
    """(number,) thresholds in equal ratios from the lowest to the highest merge, never on a merge.

    Whether a merge at exactly the threshold happens differs between libraries (scipy: yes,
    scikit-learn: no), so a threshold that meets a merge is raised to lie between it and the next:
    the merge happens under both rules. Merges of equal clients, at height 0, happen at any
    threshold and are left out.

    >>> tree = np.array([[0, 1, 0.0, 2], [2, 4, 1.0, 3], [3, 5, 4.0, 4]])
    >>> between_merges(tree, 3).round(3).tolist()  # 1, 2 and 4 before they are raised
    [1.414, 2.0, 5.657]
    """
    height = tree[:, 2]
    merges = np.unique(height[height > 0])
    if not len(merges):
        return np.zeros(number)
    thresholds = np.geomspace(merges[0], merges[-1], number)
    spacing = thresholds[1] / thresholds[0] if len(merges) > 1 else SINGLE_MERGE_SPACING
    return np.array([_off_merges(t, merges, spacing) for t in thresholds])


def _off_merges(threshold: float, merges: Matrix, spacing: float) -> float:
    """The threshold, raised by less than the spacing where it meets one of the merges."""
    met = np.isclose(merges, threshold, rtol=SAME_HEIGHT, atol=0)
    if not met.any():
        return threshold
    merge = float(merges[met].max())
    higher = merges[merges > merge * (1 + 2 * SAME_HEIGHT)]
    room = min(spacing, float(higher[0]) / merge) if len(higher) else spacing
    return merge * math.sqrt(room)

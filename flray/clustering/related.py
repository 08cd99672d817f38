"""What a partition may look at."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flray.clustering.points import Matrix, Points
from flray.data.dataset import Ids


@dataclass(frozen=True)
class Related:
    """Clients and how they relate, every array in the order of points.clients."""

    points: Points
    distance: Matrix  # D (m, m), symmetric, zero on the diagonal
    relation: Matrix | None  # R (m, m) strengths, 1 on the diagonal; None: nothing was related
    rng: np.random.Generator
    # Ground truth, (m, labels) examples of each label a client holds; raises unless the experiment
    # says `uses_ground_truth: true`, and marks the run.
    label_counts: Callable[[], Ids]

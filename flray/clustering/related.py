"""The input of a partition stage."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flray.clustering.points import Matrix, Points
from flray.data.dataset import Ids


@dataclass(frozen=True)
class Related:
    """Everything a partition may use: m clients, D and R, in the order of points.clients.

    A partition that uses the points alone has the class attribute `takes_points = True`. It can
    cluster so many clients that D does not fit in memory.

    >>> import torch
    >>> points = Points.vectors(np.array([4, 6]), torch.tensor([[0.0], [3.0]]))
    >>> related = Related(points, np.array([[0.0, 3.0], [3.0, 0.0]]), None, None, None)
    >>> related.points.num_clients, related.distance.tolist()
    (2, [[0.0, 3.0], [3.0, 0.0]])
    """

    points: Points  # after the embedding
    # D (m, m), symmetric, zero on the diagonal; None: the partition takes points and there are too
    # many clients for it
    distance: Matrix | None
    relation: Matrix | None  # R (m, m) strengths, 1 on the diagonal; None: nothing was related
    rng: np.random.Generator  # all random draws of the stage
    # Ground truth, (m, labels) examples of each label a client holds; raises unless the experiment
    # says `uses_ground_truth: true`, and marks the run.
    label_counts: Callable[[], Ids]
    groups: Callable[[], Ids] | None = None  # likewise, (m,) the group of each client
    # The distance stage, for partitions that measure some points; None: outside of a pipeline
    measure: Callable[[Points], Matrix] | None = None

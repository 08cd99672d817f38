"""Signature `subspace` and distance `principal_angles`: clients by the directions of their inputs.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin: Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles Between Client Data Subspaces.
AAAI 2023, arXiv 2209.10526.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import orth

from flray.client.subspace import NO_PART, DescribeSubspace
from flray.clustering.checks import require_finite
from flray.clustering.distances import mirrored
from flray.clustering.encoder_centres import points_of
from flray.clustering.points import Matrix, Points
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.values import require_at_least


@dataclass(frozen=True)
class Subspace:
    """U_i, the first p left singular vectors of a client's inputs X_i (d, n_i); nothing is trained.

    Points (m p, d), orthonormal for each client; fewer for a client whose examples span fewer
    dimensions. With `per_label` a client sends p vectors for each label that it holds, as the
    authors' code does.
    """

    p: int = 3  # Number of singular vectors
    per_label: bool = False  # One set of vectors for each label of a client, which reads labels

    def __post_init__(self) -> None:
        require_at_least(self, p=1)

    @property
    def is_set(self) -> bool:
        """True if a client may send several points."""
        return self.p > 1 or self.per_label

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        bases = fed.map(DescribeSubspace(self.p, self.per_label, cohort.t), cohort)
        fed.meter.count_transfer("signature", up=sum(basis.nbytes for basis in bases.values()))
        return points_of(bases), memory


@dataclass(frozen=True)
class PrincipalAngles:
    """Angles in degrees between the subspaces that clients' points span.

    `smallest`: the smallest principal angle, arccos of the largest singular value of U_iᵀ U_j, as
    the paper's Eq. 2. `trace`: Eq. 3, the sum of the angles between vectors of one rank. `entries`:
    the smallest angle between two vectors, what the authors' code computes, which depends on the
    signs of singular vectors.

    >>> import torch
    >>> e1, e2, e3 = torch.eye(3)
    >>> U, V = torch.stack([e1, e2]), torch.stack([(e1 + e2) / 2**0.5, e3])
    >>> two = Points(np.arange(2), torch.cat([U, V]), np.array([0, 0, 1, 1]))
    >>> [PrincipalAngles(form)(two)[0, 1].round(3) for form in ("smallest", "trace", "entries")]
    [np.float64(0.0), np.float64(135.0), np.float64(45.0)]
    """

    euclidean: ClassVar[bool] = False

    # Which angle between two subspaces is their distance
    form: Literal["smallest", "trace", "entries"] = "smallest"

    def __call__(self, points: Points) -> Matrix:
        require_finite(points)
        values, clients = points.array(), range(points.num_clients)
        spans = [values[points.owner == c] for c in clients]  # (p, d) each
        if self.form == "smallest":
            # Vectors of several labels are not orthogonal, and may be the same.
            spans = [orth(basis.T, NO_PART).T for basis in spans]
        # Clients with fewer vectors than others have zeros in their place.
        bases = np.zeros((len(spans), max(1, *map(len, spans)), values.shape[1]))
        present = np.zeros(bases.shape[:2], bool)
        for c in clients:
            bases[c, : len(spans[c])], present[c, : len(spans[c])] = spans[c], True
        distance = np.zeros((len(spans), len(spans)))
        for i in clients[1:]:
            of_pairs = present[:i, :, None] & present[i]
            distance[:i, i] = self._between(bases[:i], bases[i], of_pairs)
        return mirrored(np.rad2deg(distance))

    def _between(self, bases: Matrix, other: Matrix, present: NDArray[np.bool_]) -> Matrix:
        """The angles between each of the subspaces (m, p, d) and another one (p, d)."""
        cosines = bases @ other.T  # (m, p, p)
        angles: Matrix = np.arccos(np.clip(cosines, -1, 1))
        if self.form == "smallest":
            left, _, right = np.linalg.svd(cosines)
            x, y = left[:, None, :, 0] @ bases, right[:, :1] @ other  # where they are nearest
            # A small angle has no digits in its cosine.
            apart, along = (np.linalg.norm(v, axis=2)[:, 0] for v in (x - y, x + y))
            angles = 2 * np.arctan2(apart, along)
        elif self.form == "trace":
            angles = np.where(present, angles, 0.0).diagonal(axis1=1, axis2=2).sum(axis=1)
        else:
            angles = np.where(present, angles, np.pi).min(axis=(1, 2))
        return angles

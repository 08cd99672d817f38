"""Distances between clients that sent one vector each.

A distance is called with `Points` of m clients and returns D (m, m), symmetric, with 0 on the
diagonal. `takes_vectors` says that it refuses sets of points, `euclidean` whether D holds L2
distances, which Ward's linkage needs; `metric` is the name that scipy and scikit-learn have for the
distance, where they know it.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.spatial.distance import squareform
from torch import Tensor

from flray.clustering.checks import require_finite
from flray.clustering.chunks import chunk_length
from flray.clustering.gram import centred_gram, parts
from flray.clustering.points import Matrix, Points

# The error of |x|² + |y|² - 2xy is about 1e-15 of |x|² + |y|². A pair whose squared distance is
# below this share of it is computed from x - y, so that every distance is right to about 1e-11.
CANCELS = 1e-4
# Rounding moves a unit vector by about 1e-16: smaller squared distances are rounding errors.
SAME_DIRECTION = 1e-30
FEW_ELEMENTS = 64  # of vectors that may be equal, looked at first


@dataclass(frozen=True)
class L1:
    """Sum of absolute differences."""

    takes_vectors: ClassVar[bool] = True
    euclidean: ClassVar[bool] = False
    metric: ClassVar[str] = "manhattan"

    def __call__(self, points: Points) -> Matrix:
        """|x_i - x_j|_1.

        >>> L1()(Points.vectors(np.arange(2), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))).tolist()
        [[0.0, 7.0], [7.0, 0.0]]
        """
        require_finite(points)
        values = points.one_each("l1")
        num = points.num_clients
        total = torch.zeros(num * (num - 1) // 2, dtype=torch.float64, device=values.device)
        for part in parts(values):
            total += torch.pdist(part, p=1.0)
        return mirrored(squareform(total.cpu().numpy()))


@dataclass(frozen=True)
class L2:
    """Euclidean distance."""

    takes_vectors: ClassVar[bool] = True
    euclidean: ClassVar[bool] = True
    metric: ClassVar[str] = "euclidean"

    def __call__(self, points: Points) -> Matrix:
        """|x_i - x_j|_2.

        >>> L2()(Points.vectors(np.arange(2), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))).tolist()
        [[0.0, 5.0], [5.0, 0.0]]
        """
        require_finite(points)
        squared = _squared_distances(points.one_each("l2"), points.gram)
        return mirrored(squared.sqrt().cpu().numpy())


@dataclass(frozen=True)
class Cosine:
    """1 - cos of the angle; a zero vector is at 1 from every other and at 0 from another zero."""

    takes_vectors: ClassVar[bool] = True
    euclidean: ClassVar[bool] = False
    metric: ClassVar[str] = "cosine"

    def __call__(self, points: Points) -> Matrix:
        """1 - x_i x_j / (|x_i| |x_j|).

        >>> D = Cosine()(Points.vectors(np.arange(2), torch.tensor([[1.0, 0.0], [0.0, 9.0]])))
        >>> D.round(12).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        require_finite(points)
        values = points.one_each("cosine")
        norm = torch.zeros(len(values), 1, dtype=torch.float64, device=values.device)
        for part in parts(values):
            norm += (part * part).sum(1, keepdim=True)
        norm.sqrt_()
        zero = norm == 0  # (m, 1)
        # 1 - cos(x, y) = |x/|x| - y/|y||² / 2, which keeps small angles
        length = norm.masked_fill(zero, 1.0)
        distance = _squared_distances(values, centred_gram(values, length), length) / 2
        distance[distance < SAME_DIRECTION] = 0.0
        distance.clamp_(max=2.0)
        distance = torch.where(zero | zero.T, (zero ^ zero.T).double(), distance)
        return mirrored(distance.cpu().numpy())


@dataclass(frozen=True)
class Disagreement:
    """1 - A, where A is how much two clients' predictions B have in common (FLIS, Alg. 2).

    `agreement`: A = <B_i, B_j> / (|B_i| |B_j|), which for one-hot rows is the share of examples on
    which two models predict the same class, as in FLIS's code. `frobenius`: the paper's formula,
    |B_i * B_j| / (|B_i| |B_j|) with the elementwise product, which for one-hot rows is at most
    1 / sqrt(examples), so no β of the paper is ever met.
    """

    # Similarity of two clients' predictions, of which this is the complement
    similarity: Literal["agreement", "frobenius"] = "agreement"
    takes_vectors: ClassVar[bool] = True
    euclidean: ClassVar[bool] = False

    def __call__(self, points: Points) -> Matrix:
        """1 - A_ij, and 0 on the diagonal.

        >>> said = torch.tensor([[0, 1], [0, 2]])  # two models agree on one example of two
        >>> B = torch.eye(3)[said].flatten(1)
        >>> Disagreement()(Points.vectors(np.arange(2), B)).tolist()
        [[0.0, 0.5], [0.5, 0.0]]
        """
        require_finite(points)
        values = points.one_each("disagreement")
        common = torch.zeros(len(values), len(values), dtype=torch.float64, device=values.device)
        squares = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        for part in parts(values):
            squares += (part * part).sum(1)
            compared = part if self.similarity == "agreement" else part * part
            common.addmm_(compared, compared.T)
        if self.similarity == "frobenius":
            common.sqrt_()
        norms = torch.outer(squares, squares).sqrt()  # exact where the squares are whole numbers
        distance = 1 - common / norms.clamp(min=SAME_DIRECTION)
        return mirrored(distance.clamp_(min=0.0).cpu().numpy())


def mirrored(distance: Matrix) -> Matrix:
    """D from what lies above the diagonal: exactly symmetric, exactly 0 on the diagonal.

    >>> mirrored(np.array([[9.0, 2.0], [2.1, 9.0]])).tolist()
    [[0.0, 2.0], [2.0, 0.0]]
    """
    upper = np.triu(distance, 1)
    return upper + upper.T


def _squared_distances(values: Tensor, gram: Tensor, norm: Tensor | None = None) -> Tensor:
    """(m, m) |x_i/norm_i - x_j/norm_j|² above the diagonal, from products where they are exact."""
    length = gram.diagonal()
    both = length[:, None] + length[None, :]
    squared = both - 2 * gram
    first, second = torch.triu(squared <= CANCELS * both, 1).nonzero(as_tuple=True)
    # Clients that have not trained yet sent the same vector: they are one client here.
    pairs = _first_equal(values)[torch.stack([first, second])]
    distinct_pairs, positions = torch.unique(pairs, dim=1, return_inverse=True)
    squared[first, second] = _by_difference(values, norm, *distinct_pairs)[positions]
    return squared


def _first_equal(values: Tensor) -> Tensor:
    """(m,) for each vector the first one that is equal to it, which may be itself."""
    step = max(1, values.shape[1] // FEW_ELEMENTS)
    samples = values[:, ::step].detach().cpu().numpy()
    candidates: defaultdict[bytes, list[int]] = defaultdict(list)  # distinct rows, by their sample
    first_equal: list[int] = []
    for row, sample in enumerate(samples):
        rows = candidates[sample.tobytes()]
        first_equal.append(next((r for r in rows if torch.equal(values[r], values[row])), row))
        if first_equal[row] == row:
            rows.append(row)
    return torch.tensor(first_equal, device=values.device)


def _by_difference(values: Tensor, norm: Tensor | None, first: Tensor, second: Tensor) -> Tensor:
    """(pairs,) the same for some pairs, from the differences of their vectors."""
    total = torch.zeros(len(first), dtype=torch.float64, device=values.device)
    for part in parts(values, norm) if len(first) else ():
        pairs = torch.arange(len(first), device=values.device)
        for chunk in torch.split(pairs, chunk_length(8 * part.shape[1])):
            difference = part[first[chunk]] - part[second[chunk]]
            total[chunk] += difference.square_().sum(1)
    return total

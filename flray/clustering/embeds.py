"""Embeds: other coordinates for the points of all clients together.

An embed is called with `Points` (P, e) and a seed, and returns `Points` (P, e') of the same
clients. If it can be applied to points of other clients, it has a method `transform(known, new,
seed)`: the coordinates of `new` in the embedding of `known`, which `new` does not change.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flray.clustering.checks import require_finite
from flray.clustering.points import Points
from flray.values import require_at_least

NO_PART = 1e-7  # singular values below this share of the largest are rounding errors of products


@dataclass(frozen=True)
class NoEmbed:
    """No embedding: points are compared as clients sent them.

    >>> import torch
    >>> points = Points.vectors(np.arange(1), torch.tensor([[3.0, 4.0]]))
    >>> NoEmbed()(points, seed=0) is points
    True
    """

    def __call__(self, points: Points, seed: int) -> Points:
        """The same points."""
        return points


@dataclass(frozen=True)
class Unit:
    """Each point scaled to length 1; the origin stays where it is."""

    def __call__(self, points: Points, seed: int) -> Points:
        """Directions without lengths.

        >>> import torch
        >>> one = Points.vectors(np.arange(1), torch.tensor([[3.0, 4.0]]))
        >>> Unit()(one, seed=0).array().tolist()
        [[0.6, 0.8]]
        """
        require_finite(points)
        values = points.values.detach().double()
        length = values.norm(dim=1, keepdim=True)
        units = values / length.masked_fill(length == 0, 1.0)
        return Points(points.clients, units, points.owner)

    def transform(self, known: Points, new: Points, seed: int) -> Points:
        return self(new, seed)


@dataclass(frozen=True)
class Umap:
    """UMAP (McInnes 2018, arXiv:1802.03426) of all points at once, as the server of FLT does.

    Deviates from FLT's code, which calls `transform` per client: that is stochastic and depends on
    which points come along. Fewer than n_components + 2 points (UMAP's spectral start needs as
    many) are placed by PCA, which keeps their distances: they are on the scale of the input.
    """

    n_components: int = 2  # Dimensions of the embedding
    n_neighbors: int = 15  # Size of a point's neighbourhood; smaller if there are fewer points
    min_dist: float = 0.1  # Smallest distance between embedded points
    seed: int | None = 42  # Seed of UMAP; 42 is FLT's. None: the seed of the run

    def __post_init__(self) -> None:
        require_at_least(self, n_components=1, n_neighbors=2)
        if not 0 <= self.min_dist <= 1:
            raise ValueError(f"min_dist must lie between 0 and 1, got {self.min_dist}")

    def __call__(self, points: Points, seed: int) -> Points:
        """Points (P, n_components), or (P, min(n_components, P, e)) where PCA places them.

        >>> import torch
        >>> line = Points.vectors(np.arange(3), torch.tensor([[0.0], [1.0], [5.0]]))
        >>> abs(Umap()(line, seed=0).array()).round(6).tolist()  # three points: PCA
        [[2.0], [1.0], [3.0]]
        """
        require_finite(points)
        num_points = len(points.values)
        if num_points < self.n_components + 2:
            return Pca(self.n_components)(points, seed)
        reducer = _umap().UMAP(
            n_components=self.n_components,
            n_neighbors=max(2, min(self.n_neighbors, num_points - 1)),
            min_dist=self.min_dist,
            random_state=seed if self.seed is None else self.seed,
            n_jobs=1,  # what a seed makes of it anyway, with a warning
        )
        return points.moved_to(reducer.fit_transform(points.array()).astype("float64"))


def _umap() -> Any:
    """The module `umap`, which takes seconds to import.

    While it is imported, numba's compiler caches on disk; otherwise each process compiles for 15 s.
    """
    import numba

    compiled = numba.njit
    numba.njit = lambda *arguments, **options: compiled(*arguments, **{"cache": True, **options})
    try:
        return import_module("umap")
    except RuntimeError:  # there is no folder to keep it in
        numba.njit = compiled
        return import_module("umap")
    finally:
        numba.njit = compiled


@dataclass(frozen=True)
class Pca:
    """The first principal components of all points, as many as the points have."""

    n_components: int = 2  # Number of principal components

    def __post_init__(self) -> None:
        require_at_least(self, n_components=1)

    def __call__(self, points: Points, seed: int) -> Points:
        """Points (P, min(n_components, P, e)).

        >>> import torch
        >>> square = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> Pca(1)(Points.vectors(np.arange(2), square), seed=0).array().round(9).tolist()
        [[-2.5], [2.5]]
        """
        require_finite(points)
        with np.errstate(invalid="ignore"):  # sklearn's share of a variance of 0, unused here
            return points.moved_to(self._pca(points).fit_transform(points.array()))

    def transform(self, known: Points, new: Points, seed: int) -> Points:
        require_finite(new)
        with np.errstate(invalid="ignore"):
            return new.moved_to(self._pca(known).fit(known.array()).transform(new.array()))

    def _pca(self, points: Points) -> Any:  # Any: scikit-learn ships no types
        from sklearn.decomposition import PCA  # seconds to import, and seldom needed

        return PCA(min(self.n_components, *points.values.shape), svd_solver="full")


@dataclass(frozen=True)
class SvdDirections:
    """Cosines with the main directions of all points (FedGroup's decomposed cosine similarity).

    V are the first right singular vectors of the points, which are not centred; a point x becomes
    V x / ||x||, its cosine with each of them. With `unit: false` it becomes V x, its coordinates in
    a truncated singular value decomposition (CFL-GP).
    """

    number: int = 2  # Number of directions; fewer if the points have fewer
    unit: bool = True  # Scale points to length 1, so that directions alone are compared

    def __post_init__(self) -> None:
        require_at_least(self, number=1)

    def __call__(self, points: Points, seed: int) -> Points:
        """Points (P, min(number, P, e)).

        >>> import torch
        >>> two = Points.vectors(np.arange(2), torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        >>> SvdDirections(1)(two, seed=0).array().round(9).tolist()  # both along (0.6, 0.8)
        [[1.0], [1.0]]
        """
        return self.transform(points, points, seed)

    def transform(self, known: Points, new: Points, seed: int) -> Points:
        """New points by their cosines with the directions of the known ones."""
        require_finite(known)
        require_finite(new)
        directions = _right_singular(known.values.detach().double())[: self.number]  # V
        # Each sign is free: the largest entry is positive.
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        points = (Unit()(new, seed) if self.unit else new).values.detach()
        coordinates = points.to(directions) @ (directions * largest.sign()).T
        return new.moved_to(coordinates.cpu().numpy())


def _right_singular(x: Tensor) -> Tensor:
    """(min(P, e), e) the right singular vectors of points (P, e), the largest first.

    Those of few points follow from their products, so the points do not leave their device. A
    vector without a part in the points is zero.
    """
    if len(x) > x.shape[1]:
        _, sizes, directions = torch.linalg.svd(x, full_matrices=False)
        tall: Tensor = directions * (sizes > NO_PART * sizes[:1])[:, None]
        return tall
    squares, vectors = np.linalg.eigh((x @ x.T).cpu().numpy())  # X Xᵀ = U σ² Uᵀ, ascending
    sigma = np.sqrt(np.maximum(squares, 0))
    is_there = sigma > NO_PART * sigma.max(initial=0)
    scaled = vectors * np.divide(1, sigma, out=np.zeros_like(sigma), where=is_there)
    return torch.from_numpy(scaled[:, ::-1].T.copy()).to(x.device) @ x  # V = Uᵀ X / σ


@dataclass(frozen=True)
class Standardise:
    """Mean 0 and variance 1 (ddof 0) for each feature over all points; a constant one becomes 0."""

    def __call__(self, points: Points, seed: int) -> Points:
        """The features in units of their spread.

        >>> import torch
        >>> two = Points.vectors(np.arange(2), torch.tensor([[1.0, 0.1], [5.0, 0.1]]))
        >>> Standardise()(two, seed=0).array().tolist()
        [[-1.0, 0.0], [1.0, 0.0]]
        """
        return self.transform(points, points, seed)

    def transform(self, known: Points, new: Points, seed: int) -> Points:
        """New points by the means and spreads of the known ones.

        >>> import torch
        >>> known = Points.vectors(np.arange(2), torch.tensor([[1.0, 0.1], [5.0, 0.1]]))
        >>> new = Points.vectors(np.array([9]), torch.tensor([[7.0, 0.5]]))
        >>> Standardise().transform(known, new, seed=0).array().tolist()
        [[2.0, 0.0]]
        """
        require_finite(new)
        values = known.values.detach().double()
        # Not spread == 0, which would rest on how a sum is rounded.
        constant = values.amin(0) == values.amax(0)  # (e,)
        spread = values.std(0, correction=0).masked_fill(constant, 1.0)
        centred = (new.values.detach().double() - values.mean(0)).masked_fill(constant, 0.0)
        return Points(new.clients, centred / spread, new.owner)

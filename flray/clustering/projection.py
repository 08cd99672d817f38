"""Coordinates along principal axes: points of many dimensions in as few as they span."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.clustering.chunks import chunk_length

Coordinates = NDArray[np.float64]


def by_gram(gram: Tensor) -> Coordinates:
    """(P, e) coordinates with the L2 distances of P points, largest variance first.

    P points span at most P - 1 dimensions, so e = P - 1, but at least 1.

    Args:
        gram: (P, P) products of the centred points.

    >>> from flray.clustering.gram import centred_gram
    >>> line = torch.tensor([[0.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    >>> np.abs(by_gram(centred_gram(line))).round(9).tolist()
    [[2.5], [2.5]]
    """
    variances, vectors = np.linalg.eigh(gram.cpu().numpy(), UPLO="U")  # ascending
    coordinates: Coordinates = (vectors * np.sqrt(np.maximum(variances, 0)))[:, ::-1]
    return coordinates[:, : max(len(gram) - 1, 1)]


def by_covariance(values: Tensor) -> Coordinates:
    """(P, e) the same coordinates from the covariance; for more points than dimensions."""
    values = values.detach()
    num_dimensions = values.shape[1]
    mean = values.mean(0, dtype=torch.float64)
    parts = torch.split(values, chunk_length(8 * num_dimensions))
    covariance = values.new_zeros(num_dimensions, num_dimensions, dtype=torch.float64)
    for part in parts:
        centred = part.double() - mean
        covariance.addmm_(centred.T, centred)
    _, axes = np.linalg.eigh(covariance.cpu().numpy())  # ascending
    return np.concatenate([(part.double() - mean).cpu().numpy() @ axes[:, ::-1] for part in parts])

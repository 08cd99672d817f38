"""Coordinates along principal axes: points in many dimensions, written with as few as they span."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.clustering.chunks import chunk_length

Coordinates = NDArray[np.float64]


def principal_coordinates(values: Tensor) -> Coordinates:
    """(P, e) coordinates with the L2 distances of the points (P, p), largest variance first.

    P points span at most P - 1 dimensions, so e = min(P - 1, p), but at least 1.

    >>> line = torch.tensor([[0.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
    >>> np.abs(principal_coordinates(line)).round(9).tolist()
    [[2.5], [2.5]]
    """
    values = values.detach()
    num_points, num_dimensions = values.shape
    if num_points > num_dimensions:
        return _by_covariance(values)
    gram = torch.zeros(num_points, num_points, dtype=torch.float64, device=values.device)
    for part in torch.split(values, chunk_length(8 * num_points), dim=1):
        centred = part.double() - part.double().mean(0)
        gram.addmm_(centred, centred.T)
    variances, vectors = np.linalg.eigh(gram.cpu().numpy())  # ascending
    coordinates: Coordinates = (vectors * np.sqrt(np.maximum(variances, 0)))[:, ::-1]
    return coordinates[:, : max(num_points - 1, 1)]


def _by_covariance(values: Tensor) -> Coordinates:
    """The same where there are more points than dimensions, whose Gram matrix would be large."""
    num_dimensions = values.shape[1]
    mean = values.mean(0, dtype=torch.float64)
    parts = torch.split(values, chunk_length(8 * num_dimensions))
    covariance = torch.zeros(
        num_dimensions, num_dimensions, dtype=torch.float64, device=values.device
    )
    for part in parts:
        centred = part.double() - mean
        covariance.addmm_(centred.T, centred)
    _, axes = np.linalg.eigh(covariance.cpu().numpy())  # ascending
    return np.concatenate([(part.double() - mean).cpu().numpy() @ axes[:, ::-1] for part in parts])

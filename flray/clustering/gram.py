"""Gram matrices of centred vectors, for L2 distances and principal axes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from flray.clustering.chunks import chunk_length
from flray.cores import usable_cores

# On a GPU parts are so much larger: a pair of rows is a block of threads, which needs columns.
PART_ON_GPU = 8
# Rows of a product that one thread computes. Fixed, so that bits do not follow the number of cores.
TILE_ROWS = 256


def parts(values: Tensor, norm: Tensor | None = None) -> Iterator[Tensor]:
    """Chunks of the columns of `values` (P, n) in float64, each row divided by its norm (P, 1)."""
    size = chunk_length(8 * len(values)) * (PART_ON_GPU if values.device.type == "cuda" else 1)
    for part in torch.split(values.detach(), size, dim=1):
        yield part.double() if norm is None else part.double() / norm


def centred_gram(values: Tensor, norm: Tensor | None = None) -> Tensor:
    """(P, P) of (x_i - x̄)(x_j - x̄) in float64, each vector divided by its norm first.

    Only the diagonal and what lies above it are computed; the rest of the matrix is undefined.

    >>> centred_gram(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    num = len(values)
    gram = torch.zeros(num, num, dtype=torch.float64, device=values.device)
    rows = TILE_ROWS if values.device.type == "cpu" else num
    tiles = [slice(first, first + rows) for first in range(0, num, rows)]
    with ThreadPoolExecutor(min(len(tiles), usable_cores())) as pool:
        for part in parts(values, norm):
            # Distances do not change with the origin, cancellation does.
            centred = part - part.mean(0)
            add = partial(_add_tile, gram, centred)
            # A thread that is new to a GPU makes cuBLAS warn.
            list(pool.map(add, tiles) if len(tiles) > 1 else map(add, tiles))
    return gram


def _add_tile(gram: Tensor, centred: Tensor, rows: slice) -> None:
    """Add the products of some rows with themselves and with all that follow."""
    gram[rows, rows.start :].addmm_(centred[rows], centred[rows.start :].T)

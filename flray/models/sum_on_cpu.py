"""A kernel for CPUs of weighted sums of models in fixed point (`flray.models.fixed_point`)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.data.dataset import Ids
from flray.models.fixed_point import FIXED_POINT

Array = NDArray[Any]  # Any: floats, or the integers that they are summed in

PIECE = 1024  # numbers of a model at a time: those of some hundred models stay in a core's cache


@numba.njit(nogil=True)
def _add_up(
    models: Array, starts: Ids, positions: Ids, weights: Array, sums: Array, low: int, high: int
) -> None:
    """Numbers low to high of all sums: round(weight x model) of their terms, added up."""
    for v in range(len(sums)):
        total = sums[v, low:high]
        for term in range(starts[v], starts[v + 1]):
            model, weight = models[positions[term], low:high], weights[term]
            for i in range(high - low):
                total[i] += total.dtype.type(np.rint(model[i] * weight))


def sum_up(leaf: Tensor, positions: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """As `fixed_point.sums_one_by_one`, in as many threads as torch has."""
    kind, _ = FIXED_POINT[leaf.dtype]
    sums, size = torch.zeros(len(sizes), *leaf.shape[1:], dtype=kind), leaf.shape[1:].numel()
    models, totals = leaf.reshape(len(leaf), size).numpy(), sums.view(len(sums), size).numpy()
    of_terms = (np.cumsum([0, *sizes]), positions.numpy(), weights.numpy())

    def add_up(low: int) -> None:
        _add_up(models, *of_terms, totals, low, min(low + PIECE, size))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(add_up, range(0, size, PIECE)))
    return sums

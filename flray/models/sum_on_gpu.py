"""A kernel in Triton for weighted sums of models in fixed point (`flray.models.fixed_point`)."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flray.models.fixed_point import FIXED_POINT

BLOCK = 1024  # elements of a model that a program sums up


@triton.jit
def _sums(
    leaf,
    positions,
    weights,
    starts,  # of the terms of each sum, and their end
    sums,
    num_sums,
    size,
    WHOLE: tl.constexpr,  # from here on every number is an integer
    BLOCK: tl.constexpr,
):
    """A block of elements of one sum: round(weight x model) of its terms, added up as integers.

    Sums of the same block run next to each other, so that the models are read from the cache.
    """
    v, block = tl.program_id(0) % num_sums, tl.program_id(0) // num_sums
    element = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_element = element < size
    total = tl.zeros((BLOCK,), sums.dtype.element_ty)
    for term in range(tl.load(starts + v), tl.load(starts + v + 1)):
        model = leaf + tl.load(positions + term) * size
        product = tl.load(model + element, mask=is_element, other=0.0) * tl.load(weights + term)
        # To the nearest integer, to the even one of two: what is added leaves no room for the rest.
        shift = tl.where(product < 0, -WHOLE, WHOLE).to(product.dtype)
        rounded = tl.where(tl.abs(product) < WHOLE, (product + shift) - shift, product)
        total += rounded.to(total.dtype)
    tl.store(sums + v.to(tl.int64) * size + element, total, mask=is_element)


def sum_up(leaf: Tensor, positions: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """As `fixed_point.sums_one_by_one`, all sums in one kernel."""
    kind, _ = FIXED_POINT[leaf.dtype]
    leaf, num_sums = leaf.contiguous(), len(sizes)
    starts = torch.from_numpy(np.cumsum([0, *sizes])).to(leaf.device)
    sums = torch.zeros(num_sums, *leaf.shape[1:], dtype=kind, device=leaf.device)
    size = leaf.shape[1:].numel()
    whole = float(2 ** (23 if leaf.dtype == torch.float32 else 52))
    if sums.numel():
        grid = (num_sums * triton.cdiv(size, BLOCK),)
        # A product that is rounded with the sum after it would have other bits than on a CPU.
        exact = {"enable_fp_fusion": False}
        _sums[grid](leaf, positions, weights, starts, sums, num_sums, size, whole, BLOCK, **exact)
    return sums

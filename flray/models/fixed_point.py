"""Weighted sums of models in fixed point, whose bits do not depend on the order of summation.

Integers add up to the same number in any order. So the bits of a mean depend on the models in it
and on nothing else, and hosts can sum up the models they have trained before anything is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.data.dataset import Ids
from flray.models.bank import Params
from flray.models.kernels import compiles_kernels

WeightArray = NDArray[np.float64]

# By dtype of a model, the integers in which it is summed, and the bits that a sum may use.
FIXED_POINT = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 61)}
LARGEST_EXPONENT = 100  # of a scale: leaves below 2^-70 are summed with fewer bits
SLACK = 1.001  # factor of a bound: weights that differ by rounding alone must not change a scale
# Elements multiplied at a time: few, so that a CPU does it in its cache, many for a GPU.
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 1 << 17, 1 << 26
WORTH_COMPILING = 1 << 26  # products from which on a CPU has a kernel, which takes 2 s to compile


@dataclass(frozen=True)
class Terms:
    """V weighted sums over the models of a stack, in fixed point.

    Calling it with models, leaves (K, ...), returns integers, leaves (V, ...). A term of sum v is
    rounded to a multiple of 2^-exponents[leaf][v]; `result` turns sums into numbers again.

    >>> terms = Terms((np.array([0, 2]),), (np.array([0.5, 0.25]),), {"w": np.array([3])})
    >>> models = {"w": torch.tensor([[1.0], [7.0], [0.25]])}
    >>> sums = terms(models)
    >>> sums["w"]  # 8 (1/2 + 1/16), each term rounded
    tensor([[4]], dtype=torch.int32)
    >>> terms.result(sums, models)["w"]
    tensor([[0.5000]])
    """

    positions: tuple[Ids, ...]  # of the models that sum v has a term of, for each v
    weights: tuple[WeightArray, ...]  # of these terms, for each v
    exponents: dict[str, Ids]  # by leaf, (V,)

    def __call__(self, models: Params) -> Params:
        sizes = [len(positions) for positions in self.positions]
        scales = 2.0 ** np.stack(list(self.exponents.values())).astype(np.float64)  # (L, V)
        weights = torch.from_numpy(np.concatenate(self.weights) * np.repeat(scales, sizes, axis=1))
        device = next(iter(models.values())).device
        weights = weights.to(device)  # (L, terms), one copy for all leaves
        positions = torch.from_numpy(np.concatenate(self.positions)).to(device)
        num_products = sum(sizes) * sum(models[name][:1].numel() for name in self.exponents)
        sum_up = sums_one_by_one
        if device.type == "cuda" and compiles_kernels():
            from flray.models.sum_on_gpu import sum_up  # Triton is not everywhere
        elif device.type == "cpu" and num_products >= WORTH_COMPILING:
            from flray.models.sum_on_cpu import sum_up  # numba takes half a second to import
        return {
            name: sum_up(models[name], positions, scaled.to(models[name].dtype), sizes)
            for name, scaled in zip(self.exponents, weights, strict=True)
        }

    def at(self, new_position: Ids) -> "Terms":
        """The terms of models that lie elsewhere, at new_position[position]; -1: not there."""
        moved = [new_position[positions] for positions in self.positions]
        return Terms(
            tuple(positions[positions >= 0] for positions in moved),
            tuple(w[at >= 0] for w, at in zip(self.weights, moved, strict=True)),
            self.exponents,
        )

    def result(self, sums: Params, like: Params) -> Params:
        """Sums as numbers, of the dtype of the models."""
        exponents = np.stack([self.exponents[name] for name in sums]).astype(float)
        scales = torch.from_numpy(2.0**-exponents)
        scales = scales.to(next(iter(sums.values())).device)  # (L, V), one copy for all leaves
        numbers = {}
        for (name, total), scale in zip(sums.items(), scales, strict=True):
            scale = scale.to(like[name].dtype).view(-1, *[1] * (total.dim() - 1))
            numbers[name] = total.to(like[name].dtype).mul_(scale)
        return numbers


def sums_one_by_one(
    leaf: Tensor, positions: Tensor, weights: Tensor, sizes: Sequence[int]
) -> Tensor:
    """(V, ...) integers: the sums over the models of a leaf (K, ...), one after another.

    positions and weights (terms,) are those of all sums, of which the v-th has sizes[v].

    >>> leaf, positions = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1])
    >>> sums_one_by_one(leaf, positions, torch.ones(3), [2, 1]).tolist()
    [[3], [2]]
    """
    kind, _ = FIXED_POINT[leaf.dtype]
    sums = torch.zeros(len(sizes), *leaf.shape[1:], dtype=kind, device=leaf.device)
    at_a_time = ELEMENTS_ON_CPU if leaf.device.type == "cpu" else ELEMENTS_ON_GPU
    length = at_a_time // max(1, leaf.shape[1:].numel())
    terms = zip(torch.split(positions, list(sizes)), torch.split(weights, list(sizes)), strict=True)
    for total, (rows, factors) in zip(sums, terms, strict=True):
        if length <= 1:
            total += _sum_of_large(leaf, rows.tolist(), factors)
            continue
        for start in range(0, len(rows), length):
            chunk = slice(start, start + length)
            total += _rounded_products(leaf, rows[chunk], factors[chunk]).sum(0, dtype=kind)
    return sums


def _sum_of_large(leaf: Tensor, rows: Sequence[int], factors: Tensor) -> Tensor:
    """The sum over large models of a leaf, piece by piece as they lie in memory.

    What is computed of a piece stays in the cache of a core.
    """
    kind, _ = FIXED_POINT[leaf.dtype]
    if torch.empty_like(leaf[0]).stride() != leaf[0].stride():  # elements with room between them
        leaf = leaf.contiguous()
    total = torch.zeros_like(leaf[0], dtype=kind)  # lies as the models do
    sums = total.as_strided((total.numel(),), (1,))
    models = leaf.as_strided((len(leaf), len(sums)), (leaf.stride(0), 1))
    for start in range(0, len(sums), ELEMENTS_ON_CPU):
        piece = slice(start, start + ELEMENTS_ON_CPU)
        for row, factor in zip(rows, factors, strict=True):
            sums[piece] += torch.mul(models[row, piece], factor).round_().to(kind)
    return total


def _rounded_products(leaf: Tensor, rows: Tensor, factors: Tensor) -> Tensor:
    kind, _ = FIXED_POINT[leaf.dtype]
    factors = factors.view(-1, *[1] * (leaf.dim() - 1))
    return leaf.index_select(0, rows).mul_(factors).round_().to(kind)


def exponents_for(bounds: WeightArray, dtype: torch.dtype) -> Ids:
    """(V,) the bits after the point for sums of models of a dtype that stay below these bounds.

    >>> exponents_for(np.array([0.4, 100.0]), torch.float32)  # 30 bits, 7 of them before the point
    array([31, 23])
    """
    _, num_bits = FIXED_POINT[dtype]
    bits_before = np.frexp(SLACK * bounds)[1].astype(np.int64)
    return np.minimum(num_bits - bits_before, LARGEST_EXPONENT)


def largest_values(models: Params) -> dict[str, WeightArray]:
    """(K,) by leaf, the largest absolute value of each model; NaN where one is.

    >>> largest_values({"w": torch.tensor([[1.0, -2.0], [torch.nan, 0.0]])})
    {'w': array([ 2., nan])}
    """
    if not models:
        return {}
    leaves = [(leaf, tuple(range(1, leaf.dim()))) for leaf in models.values()]
    of_leaves = [
        torch.maximum(leaf.amax(axes), -leaf.amin(axes)) if axes else leaf.abs()
        for leaf, axes in leaves
    ]
    largest = torch.stack(of_leaves)  # (L, K)
    return dict(zip(models, largest.double().cpu().numpy(), strict=True))

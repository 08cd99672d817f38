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
from flray.models.bank import Params, rows_of

Weights = NDArray[np.float64]

# By dtype of a model, the integers in which it is summed, and the bits that a sum may use.
FIXED_POINT = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 61)}
LARGEST_EXPONENT = 100  # of a scale: leaves below 2^-70 are summed with fewer bits
SLACK = 1.001  # factor of a bound: weights that differ by rounding alone must not change a scale
# Elements multiplied at a time, so that a CPU does it in its cache.
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 1 << 19, 1 << 27
LEAST_ROWS = 4  # multiplied at a time
ELEMENTS_OF_SUMS = 1 << 26  # multiplied for several sums at a time, on a GPU


@dataclass(frozen=True)
class Terms:
    """V weighted sums over the models of a stack, in fixed point.

    A term is rounded to a multiple of 2^-exponents[leaf][v].

    >>> terms = Terms((np.array([0, 2]),), (np.array([0.5, 0.25]),), {"w": np.array([3])})
    >>> terms({"w": torch.tensor([[1.0], [7.0], [0.25]])})["w"]  # 8 (1/2 + 1/16), rounded
    tensor([[4]], dtype=torch.int32)
    """

    places: tuple[Ids, ...]  # of the models that sum v has a term of
    weights: tuple[Weights, ...]
    exponents: dict[str, Ids]  # by leaf, (V,)

    def __call__(self, models: Params) -> Params:
        sizes = [len(places) for places in self.places]
        scales = 2.0 ** np.stack(list(self.exponents.values())).astype(np.float64)  # (L, V)
        weights = torch.from_numpy(np.concatenate(self.weights) * np.repeat(scales, sizes, axis=1))
        like = next(iter(models.values()))
        weights = weights.to(like.device)  # (L, terms), one copy for all leaves
        at_once = like.device.type == "cuda" and len(sizes) > 1
        places = torch.from_numpy(np.concatenate(self.places)).to(like.device) if at_once else None
        return {
            name: self._sums(models[name], scaled.to(models[name].dtype))
            if places is None
            else several_sums(models[name], places, scaled.to(models[name].dtype), sizes)
            for name, scaled in zip(self.exponents, weights, strict=True)
        }

    def _sums(self, leaf: Tensor, weights: Tensor) -> Tensor:
        kind, _ = FIXED_POINT[leaf.dtype]
        sizes = [len(places) for places in self.places]
        sums = torch.zeros(len(sizes), *leaf.shape[1:], dtype=kind, device=leaf.device)
        at_once = ELEMENTS_ON_CPU if leaf.device.type == "cpu" else ELEMENTS_ON_GPU
        size = max(LEAST_ROWS, at_once // max(1, leaf.shape[1:].numel()))
        weights = weights.view(-1, *[1] * (leaf.dim() - 1))
        for total, places, factors in zip(
            sums, self.places, torch.split(weights, sizes), strict=True
        ):
            for start in range(0, len(places), size):
                chunk = slice(start, start + size)
                products = rows_of(leaf, places[chunk]).mul_(factors[chunk])
                total += products.round_().to(kind).sum(0, dtype=kind)
        return sums

    def at(self, place_of: Ids) -> "Terms":
        """The terms of models that lie elsewhere, at place_of[place]; -1: not there."""
        there = [place_of[places] >= 0 for places in self.places]
        return Terms(
            tuple(place_of[p][is_there] for p, is_there in zip(self.places, there, strict=True)),
            tuple(w[is_there] for w, is_there in zip(self.weights, there, strict=True)),
            self.exponents,
        )

    def equals(self, other: "Terms") -> bool:
        """True if both are the same sums, bit by bit."""
        mine, theirs = (
            [*terms.places, *terms.weights, *terms.exponents.values()] for terms in (self, other)
        )
        is_alike = list(self.exponents) == list(other.exponents) and len(mine) == len(theirs)
        return is_alike and all(map(np.array_equal, mine, theirs))

    def result(self, sums: Params, like: Params) -> Params:
        """Sums as numbers, of the dtype of the models."""
        scales = torch.from_numpy(
            2.0 ** -np.stack([self.exponents[name] for name in sums]).astype(float)
        )
        scales = scales.to(next(iter(sums.values())).device)  # (L, V), one copy for all leaves
        numbers = {}
        for (name, total), scale in zip(sums.items(), scales, strict=True):
            scale = scale.to(like[name].dtype).view(-1, *[1] * (total.dim() - 1))
            numbers[name] = total.to(like[name].dtype).mul_(scale)
        return numbers


def several_sums(leaf: Tensor, places: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """(V, ...) what `Terms` sums, with few calls for many short sums, as a GPU prefers it.

    places and weights (terms,) are those of all sums, of which the v-th has sizes[v].

    >>> leaf, places, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1]), torch.ones(3)
    >>> several_sums(leaf, places, weights, [2, 1]).tolist()
    [[3], [2]]
    """
    kind, _ = FIXED_POINT[leaf.dtype]
    num_elements = max(1, leaf.shape[1:].numel())
    most = max(LEAST_ROWS, ELEMENTS_OF_SUMS // num_elements)  # terms at a time
    sums = torch.zeros(len(sizes), *leaf.shape[1:], dtype=kind, device=leaf.device)
    of_term = np.repeat(np.arange(len(sizes)), sizes)
    into = torch.from_numpy(of_term).to(leaf.device)
    for start in range(0, len(of_term), most):
        chunk = slice(start, start + most)
        factors = weights[chunk].view(-1, *[1] * (leaf.dim() - 1))
        products = leaf.index_select(0, places[chunk]).mul_(factors)
        sums.index_add_(0, into[chunk], products.round_().to(kind))
    return sums


def exponents_for(bounds: Weights, dtype: torch.dtype) -> Ids:
    """(V,) the bits after the point for sums of models of a dtype that stay below these bounds.

    >>> exponents_for(np.array([0.4, 100.0]), torch.float32)  # 30 bits, 7 of them before the point
    array([31, 23])
    """
    _, num_bits = FIXED_POINT[dtype]
    bits_before = np.frexp(SLACK * bounds)[1].astype(np.int64)
    return np.minimum(num_bits - bits_before, LARGEST_EXPONENT)


def largest_values(models: Params) -> dict[str, Weights]:
    """(K,) by leaf, the largest absolute value of each model; NaN where one is.

    >>> largest_values({"w": torch.tensor([[1.0, -2.0], [torch.nan, 0.0]])})
    {'w': array([ 2., nan])}
    """
    if not models:
        return {}
    flat = [leaf.flatten(1) for leaf in models.values()]
    largest = torch.stack([torch.maximum(leaf.amax(1), -leaf.amin(1)) for leaf in flat])  # (L, K)
    return dict(zip(models, largest.double().cpu().numpy(), strict=True))

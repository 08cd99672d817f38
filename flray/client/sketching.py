"""Count sketches: a long vector as a short one, computed before it leaves a client.

Charikar, Chen, Farach-Colton: Finding Frequent Items in Data Streams. ICALP 2002.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flray.client.keeping import ModelRows
from flray.data.dataset import Ids
from flray.models.bank import Params, flat_rows
from flray.randomness import generator

ROWS_AT_ONCE = 100  # vectors sketched at a time on a CPU, so few that threads do not share an add


def count_sketch(values: Tensor, dim: int, seed: int) -> Tensor:
    """(n, dim) float64: coordinate j of each vector, times a random sign, added to bucket h(j).

    The map S is linear and depends on p, dim and seed alone. <Sx, Sy> has the expectation <x, y>
    over seeds, with a variance of at most 2 |x|² |y|² / dim. Coordinates are added in one order, so
    a row does not depend on the rows beside it. h(j) = (j + shift of j div dim) mod dim: two
    coordinates collide with a probability of at most 1 / dim, and no coordinate has to be looked
    up.

    >>> S = count_sketch(torch.eye(6), dim=4, seed=0)  # where each of six coordinates goes
    >>> S.abs().sum(1).tolist(), bool((S[:4].abs().sum(0) == 1).all())
    ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], True)

    Args:
        values: (n, p) vectors, on any device.
        dim: number of buckets.
    """
    rows = ROWS_AT_ONCE if values.device.type == "cpu" else max(len(values), 1)
    parts = [_sketched(part, dim, seed) for part in torch.split(values, rows)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _sketched(values: Tensor, dim: int, seed: int) -> Tensor:
    num = values.shape[1]
    all_signs, shifts = _signs_and_shifts(num, dim, seed)
    all_signs = all_signs.to(values)
    total = torch.zeros(len(values), dim, dtype=torch.float64, device=values.device)
    for first, shift in zip(range(0, num, dim), shifts, strict=True):
        terms = values[:, first : first + dim] * all_signs[first : first + dim]
        num_before_end = min(terms.shape[1], dim - shift)
        total[:, shift : shift + num_before_end] += terms[:, :num_before_end]
        total[:, : terms.shape[1] - num_before_end] += terms[:, num_before_end:]
    return total


@lru_cache(maxsize=2)
def _signs_and_shifts(num: int, dim: int, seed: int) -> tuple[Tensor, list[int]]:
    """(num,) signs of the coordinates, and the shift of each run of `dim` coordinates."""
    rng = generator(seed, "sketch", num, dim)
    signs = torch.from_numpy(rng.integers(2, size=num) * 2 - 1)
    return signs, rng.integers(dim, size=-(-num // dim)).tolist()


@dataclass(frozen=True)
class SketchRows:
    """Question to a host: sketches (n, dim) of models of a block, as the leaf `sketch`.

    >>> import numpy as np
    >>> models = {"b": torch.ones(2, 3), "w": torch.ones(2, 5)}
    >>> SketchRows(np.array([1]), ["b", "w"], dim=4, seed=0)(models)["sketch"].shape
    torch.Size([1, 4])
    """

    slots: Ids  # (n,) positions in the block
    names: Sequence[str]  # names of the leaves, in the order in which they are joined to a vector
    dim: int
    seed: int

    def __call__(self, models: Params) -> Params:
        rows = ModelRows(self.slots, self.names)(models)
        vectors = torch.cat([flat_rows(rows[name]) for name in self.names], dim=1)  # (n, p)
        return {"sketch": count_sketch(vectors, self.dim, self.seed)}

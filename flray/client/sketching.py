"""Count sketches: a long vector as a short one, computed before it leaves a client.

Charikar, Chen, Farach-Colton: Finding Frequent Items in Data Streams. ICALP 2002.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flray.client.keeping import ModelRows
from flray.cores import usable_cores
from flray.data.dataset import Ids
from flray.models.bank import Params, flat_rows
from flray.randomness import generator

NUMBERS_ON_GPU = 2**24  # numbers of the vectors that are sketched at a time on a GPU


def count_sketch(values: Tensor | Sequence[Tensor], dim: int, seed: int) -> Tensor:
    """(n, dim) float64: coordinate j of each vector, times a random sign, added to bucket h(j).

    The map S is linear and depends on p, dim and seed alone. <Sx, Sy> has the expectation <x, y>
    over seeds, with a variance of at most 2 |x|² |y|² / dim. h(j) = (j + shift of j div dim) mod
    dim: two coordinates collide with a probability of at most 1 / dim. Vectors are sketched one by
    one on a CPU, and always as many at a time on a GPU, where the order of a sum follows the shape:
    a row does not depend on the rows beside it.

    >>> S = count_sketch(torch.eye(6), dim=4, seed=0)  # where each of six coordinates goes
    >>> S.abs().sum(1).tolist(), bool((S[:4].abs().sum(0) == 1).all())
    ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], True)

    Args:
        values: (n, p) vectors on any device, or leaves (n, ...) whose rows joined are the vectors.
        dim: number of buckets.
    """
    leaves = [flat_rows(leaf) for leaf in ([values] if isinstance(values, Tensor) else values)]
    num, p, first = len(leaves[0]), sum(leaf.shape[1] for leaf in leaves), leaves[0]
    coordinates, signs = _layout(p, dim, seed, first.dtype, first.device)
    ones = torch.ones(len(signs) // dim, dtype=torch.float64, device=first.device)
    size = max(1, NUMBERS_ON_GPU // p)

    def sketch(*parts: Tensor) -> Tensor:
        vectors = torch.cat(parts, dim=-1)  # (p,) or at most (size, p)
        if vectors.dim() > 1:
            vectors = F.pad(vectors, (0, 0, 0, size - len(vectors)))
        terms = vectors.index_select(-1, coordinates).mul_(signs)
        return ones @ terms.view(*vectors.shape[:-1], -1, dim).double()

    if first.device.type != "cpu":
        parts = [torch.split(leaf, size) for leaf in leaves]
        return torch.cat(list(map(sketch, *parts)))[:num]

    def sketch_some(*parts: Tensor) -> list[Tensor]:
        return list(map(sketch, *parts))  # vector by vector

    cores = usable_cores()
    parts = [torch.tensor_split(leaf, cores) for leaf in leaves]
    with ThreadPoolExecutor(cores, initializer=partial(torch.set_num_threads, 1)) as pool:
        return torch.cat([ones[:0], *chain(*pool.map(sketch_some, *parts))]).view(num, dim)


@lru_cache(maxsize=2)
def _layout(
    p: int, dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Coordinates in rows of `dim`, each in the column of its bucket, and their signs; 0: none."""
    rng = generator(seed, "sketch", p, dim)
    signs = rng.integers(2, size=p) * 2 - 1
    shifts = rng.integers(dim, size=-(-p // dim))
    columns = (np.arange(dim) - shifts[:, None]) % dim  # (rows, dim) before they are shifted
    coordinates = (columns + np.arange(0, p, dim)[:, None]).reshape(-1)
    is_there = coordinates < p  # the last row may be shorter
    coordinates = np.where(is_there, coordinates, 0)
    signs = np.where(is_there, signs[coordinates], 0)
    return torch.from_numpy(coordinates).to(device), torch.from_numpy(signs).to(device, dtype)


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
        return {"sketch": count_sketch([rows[name] for name in self.names], self.dim, self.seed)}

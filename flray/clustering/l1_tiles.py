"""Sums of absolute differences of all pairs of rows on a GPU, tile by tile, with Triton.

`torch.pdist` reads both rows of each pair from the GPU's cache, which is what it waits for. A tile
of pairs reads each of its rows once and keeps its sums in registers.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

TILE, WARPS = 64, 4
UNROLLED = 8  # columns
COLUMNS = 4096  # transposed at a time

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _add_tile(  # type: ignore[no-untyped-def]  # Triton's own language
        values, total, num_rows, num_columns, TILE: tl.constexpr, UNROLLED: tl.constexpr
    ):
        if tl.program_id(0) > tl.program_id(1):
            return  # below the diagonal
        first = tl.program_id(0) * TILE + tl.arange(0, TILE)
        second = tl.program_id(1) * TILE + tl.arange(0, TILE)
        sums = tl.zeros((TILE, TILE), tl.float64)
        for start in range(0, num_columns, UNROLLED):
            for step in tl.static_range(UNROLLED):
                column = values + (start + step) * num_rows
                x = tl.load(column + first).to(tl.float64)
                y = tl.load(column + second).to(tl.float64)
                sums += tl.abs(x[:, None] - y[None, :])
        place = total + first.to(tl.int64)[:, None] * num_rows + second[None, :]
        tl.store(place, tl.load(place) + sums)


def l1_in_tiles(values: Tensor) -> Tensor:
    """(m, m) in float64, right above the diagonal; values (m, n) are on a GPU."""
    num = len(values)
    num_tiles = -(-num // TILE)
    padded = num_tiles * TILE
    total = torch.zeros(padded, padded, dtype=torch.float64, device=values.device)
    for part in _columns(values, padded):
        _add_tile[(num_tiles, num_tiles)](
            part, total, padded, len(part), TILE=TILE, UNROLLED=UNROLLED, num_warps=WARPS
        )
    return total[:num, :num]


def _columns(values: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Columns (n, num_rows) as rows, some at a time; zero where there are none."""
    for part in torch.split(values.detach(), COLUMNS, dim=1):
        num = -(-part.shape[1] // UNROLLED) * UNROLLED
        turned = part.new_zeros(num, num_rows)
        turned[: part.shape[1], : len(part)] = part.T
        yield turned

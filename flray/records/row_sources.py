"""Which rows of a state's arrays lie in which file of a checkpoint, and which are to be written.

The rows of an array are those of its first axis: a bank has one per model, a table one per client.
A checkpoint writes the rows that changed and refers to older files for the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.records.encoding import Array, Arrays

MAX_FILES = 8  # most files in which the rows of one checkpoint may lie
CHUNK_BYTES = 1 << 24  # compared or hashed at a time, so that no second copy of a state is made

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class RowSources:
    """Where the n rows of one array lie: row i is row `positions[i]` in the file of `rounds[i]`.

    >>> sources = RowSources.nowhere(3).updated(np.array([True, True, True]), t=1)
    >>> sources = sources.updated(np.array([False, True, False]), t=4)
    >>> sources.rounds.tolist(), sources.positions.tolist()
    ([1, 4, 1], [0, 0, 2])
    """

    rounds: Ids  # (n,) -1: in no file yet
    positions: Ids  # (n,)

    @staticmethod
    def nowhere(num_rows: int) -> "RowSources":
        """Rows that lie in no file yet."""
        return RowSources(np.full(num_rows, -1), np.full(num_rows, -1))

    def resized(self, num_rows: int) -> "RowSources":
        """The first `num_rows` rows; those that are new lie in no file."""
        kept = min(num_rows, len(self.rounds))
        sources = RowSources.nowhere(num_rows)
        sources.rounds[:kept] = self.rounds[:kept]
        sources.positions[:kept] = self.positions[:kept]
        return sources

    def updated(self, written: Mask, t: int) -> "RowSources":
        """After the rows of the mask were written, in order, to the file of round t."""
        positions = np.where(written, np.cumsum(written) - 1, self.positions)
        return RowSources(np.where(written, t, self.rounds), positions)

    def pieces(self) -> list[list[int]]:
        """Runs of [round, first position, number of rows], in row order: the form in a manifest.

        >>> RowSources(np.array([0, 0, 3, 0]), np.array([0, 1, 0, 3])).pieces()
        [[0, 0, 2], [3, 0, 1], [0, 3, 1]]
        """
        breaks = (np.diff(self.rounds) != 0) | (np.diff(self.positions) != 1)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])[: len(self.rounds)]
        counts = np.diff(np.concatenate([starts, [len(self.rounds)]]))
        runs = np.stack([self.rounds[starts], self.positions[starts], counts], axis=1)
        listed: list[list[int]] = runs.tolist()
        return listed

    @staticmethod
    def from_pieces(pieces: list[list[int]]) -> "RowSources":
        """The inverse of `pieces`."""
        rounds, firsts, counts = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        run_starts = np.cumsum(counts) - counts
        offsets = np.arange(counts.sum()) - np.repeat(run_starts, counts)
        return RowSources(np.repeat(rounds, counts), np.repeat(firsts, counts) + offsets)


def as_rows(array: Array) -> Array:
    """A view whose first axis are the rows saved one by one; below two dimensions one row is all.

    >>> as_rows(np.zeros((3, 2))).shape, as_rows(np.zeros(3)).shape, as_rows(np.zeros(())).shape
    ((3, 2), (1, 3), (1,))
    """
    return array if array.ndim >= 2 else array[None]


def changed_rows(old: Array | None, new: Array) -> Mask:
    """The rows of `new` that `old` does not hold bit by bit at the same position.

    >>> nan = np.array([[np.nan], [0.0], [1.0]])
    >>> changed_rows(nan, np.array([[np.nan], [-0.0], [1.0], [1.0]]))
    array([False,  True, False,  True])
    """
    rows = as_rows(new)
    if old is new:  # the same tensor, which is never changed in place
        return np.zeros(len(rows), dtype=np.bool_)
    changed = np.ones(len(rows), dtype=np.bool_)
    if old is None or old.dtype != new.dtype or as_rows(old).shape[1:] != rows.shape[1:]:
        return changed
    num_shared = min(len(as_rows(old)), len(rows))
    old_bytes, new_bytes = _bytes(as_rows(old)), _bytes(rows)  # (n, bytes of a row)
    step = max(1, CHUNK_BYTES // max(1, new_bytes.shape[1]))
    for start in range(0, num_shared, step):
        chunk = slice(start, min(start + step, num_shared))
        changed[chunk] = (old_bytes[chunk] != new_bytes[chunk]).any(axis=1)
    return changed


def rows_to_write(
    old: Arrays, new: Arrays, carried: Mapping[str, RowSources], sizes: Mapping[int, int]
) -> dict[str, Mask]:
    """Rows that changed, and rows that must leave a file which is to go, by path of the array.

    Args:
        old: the arrays of the last checkpoint by path; those of the first have none.
        carried: where the rows of `new` lie if none is written.
        sizes: bytes of tensors in each file of the last checkpoint by round.
    """
    masks = {path: changed_rows(old.get(path), array) for path, array in new.items()}
    row_bytes = {path: _bytes(as_rows(array)).shape[1] for path, array in new.items()}
    written = sum(int(mask.sum()) * row_bytes[path] for path, mask in masks.items())
    live: dict[int, int] = {}
    for path, mask in masks.items():
        rounds, counts = np.unique(carried[path].rounds[~mask], return_counts=True)
        for t, count in zip(rounds.tolist(), counts.tolist(), strict=True):
            live[t] = live.get(t, 0) + count * row_bytes[path]
    absorbed = files_to_absorb(live, sizes, written)
    return {path: mask | np.isin(carried[path].rounds, absorbed) for path, mask in masks.items()}


def files_to_absorb(live: Mapping[int, int], sizes: Mapping[int, int], written: int) -> list[int]:
    """The older files whose remaining rows are written again, so that the files can go.

    Smallest first: those beyond MAX_FILES, and those that cost no more than what is written anyway
    if files are many or mostly hold what is no longer used. Absorbing only what is small keeps
    the largest file where it is, so that a row is rewritten about log(rows / cohort) times, not in
    every MAX_FILES-th checkpoint.

    Args:
        live: bytes in use by file, `sizes` with those no longer used; both by round.
        written: bytes of rows that changed.

    >>> files_to_absorb({0: 90, 1: 5}, {0: 100, 1: 50}, written=5)
    [1]
    """
    if not written:
        return []
    is_crowded = len(live) >= MAX_FILES  # the file to be written comes on top
    absorbed: list[int] = []
    for t in sorted(live, key=lambda t: (live[t], t)):
        is_beyond = len(live) - len(absorbed) >= MAX_FILES
        is_wasteful = 2 * live[t] < sizes[t]
        if is_beyond or (live[t] <= written and (is_crowded or is_wasteful)):
            absorbed.append(t)
            written += live[t]
    return absorbed


def _bytes(rows: Array) -> NDArray[np.uint8]:
    """A view of each row's bytes, which compare where floats do not (NaN, -0.0)."""
    width = int(np.prod(rows.shape[1:]))
    return rows.reshape(len(rows), width).view(np.uint8)

"""Memory of results on a CPU that is used again: fresh memory takes a page fault per 4 KB."""

from collections.abc import Sequence
from sys import getrefcount

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 1 << 20  # bytes; the allocator keeps what is smaller
KEPT = 4  # arrays kept, whether they are in use or not
ALIGNED = 64  # bytes, as torch aligns tensors


class ReusedMemory:
    """Uninitialised tensors, over memory of earlier ones that nothing refers to any more.

    >>> memory = ReusedMemory()
    >>> first = memory.empty((1 << 10, 1 << 10), torch.float32)
    >>> address, row = first.data_ptr(), first[3]
    >>> del first
    >>> memory.empty((1 << 20,), torch.float32).data_ptr() == address  # a row is still in use
    False
    >>> del row
    >>> memory.empty((1 << 20,), torch.float32).data_ptr() == address
    True
    """

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.uint8]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor like that of `torch.empty`."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes < LARGE:
            return torch.empty(*shape, dtype=dtype)
        for array in self.arrays:
            # Referred to by the list, this loop and the call; each tensor's memory counts once.
            if len(array) == num_bytes and getrefcount(array) == 3:
                return torch.from_numpy(array).view(dtype).view(*shape)
        room = np.empty(num_bytes + ALIGNED, np.uint8)
        start = -room.ctypes.data % ALIGNED
        self.arrays = [*self.arrays[1 - KEPT :], room[start : start + num_bytes]]
        return torch.from_numpy(self.arrays[-1]).view(dtype).view(*shape)

"""Tensors that travel between processes of Ray."""

from typing import Any

import torch
from numpy.typing import NDArray
from ray.util import register_serializer

from flray.data.pixels import tensor_over


def share_tensors_without_copies() -> None:
    """Let Ray move tensors as numpy arrays, which all processes of a node map into their memory.

    Received tensors are read-only memory: nothing here works in place on what it received.
    """
    register_serializer(torch.Tensor, serializer=_to_array, deserializer=tensor_over)


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """An array of the same shape; np.ascontiguousarray would give a single number an axis.

    >>> _to_array(torch.tensor(2.0)).shape, _to_array(torch.zeros(2, 3).T).flags.c_contiguous
    ((), True)
    """
    return tensor.detach().cpu().contiguous().numpy()

"""Tensors that travel between processes of Ray."""

from typing import Any

import numpy as np
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
    return np.ascontiguousarray(tensor.detach().cpu().numpy())

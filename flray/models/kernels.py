"""Whether kernels in Triton can be compiled on this machine."""

import os
import shutil
from functools import cache

import torch

OLDEST_TRITON = (3, 6)  # that of torch 2.10, with which the kernels were measured


@cache
def compiles_kernels() -> bool:
    """True where Triton can compile for this GPU: it calls a C compiler, and needs tensor cores."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not torch.cuda.is_available():
        return False
    try:
        import triton  # a second, on machines with a GPU only
    except ImportError:
        return False
    major, minor, *_ = triton.__version__.split(".")
    has_tensor_cores = torch.cuda.get_device_capability() >= (8, 0)
    return has_tensor_cores and (int(major), int(minor)) >= OLDEST_TRITON

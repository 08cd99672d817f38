"""How many cores there are to work on, and the libraries whose threads work on them."""

import os
from functools import cache

from threadpoolctl import ThreadpoolController


def usable_cores() -> int:
    """Number of cores that this process may use, or OMP_NUM_THREADS, which Ray sets for workers.

    The affinity of the process counts, not the cores of the machine.
    """
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@cache
def thread_pools() -> ThreadpoolController:
    """Thread pools of the libraries that k-means and PCA use; to look for them takes 18 ms."""
    import sklearn.cluster
    import sklearn.decomposition  # noqa: F401

    return ThreadpoolController()

"""How many cores there are to work on."""

import os


def usable_cores() -> int:
    """Number of cores that this process may use, or OMP_NUM_THREADS, which Ray sets for workers.

    The affinity of the process counts, not the cores of the machine.
    """
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))

"""Several processes on one GPU: how many fit, and CUDA MPS, which lets them run at the same time.

Without MPS a GPU takes turns between processes, and kernels too small to fill it run one by one.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"  # where a daemon of the user's own listens
TIMEOUT_S = 20.0
END_S = 5  # seconds after which the daemon ends its servers, whose processes are ending then


def gpu_memory_gib() -> float:
    """Memory of the first GPU; 0 without one.

    Asks nvidia-smi: a process that has asked CUDA itself cannot be forked any more.
    """
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = answer.stdout.split()
    return float(lines[0]) / 1024 if answer.returncode == 0 and lines else 0.0


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Let processes that are started in the `with` block share the GPU through CUDA MPS.

    Yields True if they do. A daemon is started and ended with the block, unless one of the user is
    running already. On a machine without MPS processes take turns on the GPU.
    """
    if os.environ.get(PIPES) or os.path.exists(os.path.join(DEFAULT_PIPES, "control")):
        yield True
        return
    if shutil.which(CONTROL) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="flray-mps-", ignore_cleanup_errors=True) as folder:
        os.environ[PIPES] = os.environ[LOGS] = folder
        is_shared = _control("-d")
        try:
            yield is_shared
        finally:
            if is_shared:
                _control(command=f"quit -t {END_S}\n")
            del os.environ[PIPES], os.environ[LOGS]


def _control(*options: str, command: str | None = None) -> bool:
    """Call the control program with options or a command; True if it succeeded."""
    try:
        ended = subprocess.run(
            [CONTROL, *options],
            input=command,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0

"""A Ray cluster: the one in RAY_ADDRESS, or a local one of our own that ends with us.

Actors of a local one share a GPU through CUDA MPS, where the machine has it: without, ten actors on
a tenth of a GPU each compute in turns.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import ray
import yaml
from ray._private import ray_constants

from flray.errors import ExperimentError
from flray.execution.forking import kept_forking_python
from flray.execution.mps import shared_gpu
from flray.imports import is_inside_run

NAMESPACE = "flray"
CONNECT_TIMEOUT_S = 5.0
DATA = "FLRAY_DATA"
BOOTSTRAP = "ray_bootstrap_config.yaml"

SYSTEM = {
    # Bytes of objects that travel inside calls and answers; Ray's own limit of 100 KB sends a model
    # of MLP-200 through the object store, which costs milliseconds.
    "max_direct_call_object_size": 4 << 20,
    # Ray would start workers that nobody asked for, and ours have environments of their own.
    "prestart_worker_first_driver": False,
}


@contextmanager
def connected() -> Iterator[None]:
    """Be connected to Ray; what was started here is stopped at the end, whatever happens."""
    if ray.is_initialized():
        yield
        return
    # Ray's own log lines of workers would run through the progress lines.
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }  # Any: ray.init's own
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray puts its own in its place
    address = os.environ.get("RAY_ADDRESS")
    # Ray lets all processes search the current folder first, which may be somebody else's run.
    elsewhere = chdir(sys.prefix) if is_inside_run(Path.cwd()) else nullcontext()
    with nullcontext() if address else shared_gpu():
        if address:
            require_listener(address)
            try:
                with elsewhere:
                    ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ExperimentError(_no_cluster(address, error)) from error
        else:
            python = kept_forking_python()
            with _on_loopback(), elsewhere:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    runtime_env={"py_executable": python} if python else None,
                    _system_config=SYSTEM,
                    **options,
                )
        if callable(on_sigterm) and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        try:
            yield
        finally:
            ray.shutdown()


def require_listener(address: str) -> None:
    """Refuse an address of host and port at which nobody listens; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # `auto`, or whatever else Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ExperimentError(_no_cluster(address, error)) from error


def _no_cluster(address: str, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"no Ray cluster answers at RAY_ADDRESS={address} ({reason}); correct it, or unset it for "
        "a local cluster"
    )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray listen where this machine alone can connect, as it does on macOS and Windows.

    Whoever reaches its ports can run code here.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def whole_nodes() -> list[dict[str, float]]:
    """What each node has in all, taken or free."""
    ask: Callable[[], dict[str, dict[str, float]]] = ray._private.state.total_resources_per_node
    return list(ask().values())


def coming_nodes() -> list[dict[str, float]]:
    """What machines may still be started for us: those of the file that `ray up` leaves on a head.

    Each kind is counted as if all that may come were of it. A machine whose memory the file does
    not name is taken to have enough.
    """
    file = Path.home() / BOOTSTRAP
    if "RAY_ADDRESS" not in os.environ or not file.is_file():
        return []
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    num_present = len(whole_nodes()) - 1  # beside the head
    most = max(0, plain.get("max_workers", 0) - num_present)
    return [
        {"memory": float("inf"), **kind.get("resources", {})}
        for name, kind in plain.get("available_node_types", {}).items()
        if name != plain.get("head_node_type")
        for _ in range(min(most, kind.get("max_workers", most)))
    ]


def reachable_nodes() -> list[dict[str, float]]:
    """What each node has in all, taken or free, those that may still be started included."""
    return [*whole_nodes(), *coming_nodes()]


def free_nodes() -> list[dict[str, float]]:
    """What is free on each node."""
    ask: Callable[[], dict[str, dict[str, float]]] = ray._private.state.available_resources_per_node
    return list(ask().values())


def actor_environment(threads: int) -> dict[str, dict[str, str]]:
    """The runtime environment of our actors.

    Threads are fixed before torch is imported: set_num_threads alone comes too late. The search
    path is the driver's, so that a user's own modules are found, and so is the folder of the data.
    """
    data = {name: os.environ[name] for name in (DATA,) if name in os.environ}
    return {
        "env_vars": {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **data,
        }
    }

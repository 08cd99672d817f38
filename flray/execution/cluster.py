"""A Ray cluster: the one in RAY_ADDRESS, or a local one of our own that ends with us.

Actors of a local one share a GPU through CUDA MPS, where the machine has it: without, ten actors on
a tenth of a GPU each compute in turns.
"""

import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager, nullcontext
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray._raylet import (  # type: ignore[attr-defined]  # compiled, without types
    AuthenticationTokenLoader,
    Config,
)

from flray.errors import ExperimentError, one_line_message
from flray.execution.forking import kept_forking_python
from flray.execution.mps import shared_gpu
from flray.imports import is_inside_run

NAMESPACE = "flray"
CONNECT_TIMEOUT_S = 5.0
AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
DATA = "FLRAY_DATA"

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
    with ExitStack() as connection:
        if address:
            connection.callback(ray.shutdown)
            with _outside_runs():
                _join(address, options)
        else:
            connection.enter_context(_own_token())
            connection.enter_context(shared_gpu())
            connection.callback(ray.shutdown)
            with _outside_runs():
                _start(options)
        if callable(on_sigterm) and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        yield


def _outside_runs() -> AbstractContextManager[None]:
    """Leave a folder of runs meanwhile: Ray lets all processes search the current folder first."""
    return chdir(sys.prefix) if is_inside_run(Path.cwd()) else nullcontext()


def _join(address: str, options: dict[str, Any]) -> None:  # Any: ray.init's own
    require_listener(address)
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ExperimentError(_no_cluster(address, error)) from error


def _start(options: dict[str, Any]) -> None:  # Any: ray.init's own
    """Start a local cluster, all of whose processes end with this one, even if it is killed."""
    python = kept_forking_python()
    try:
        with _on_loopback():
            ray.init(
                address="local",
                include_dashboard=False,
                runtime_env={"py_executable": python.command} if python else None,
                _system_config=SYSTEM,
                **options,
            )
        if python is not None:  # Ray's agents would look for a killed raylet for 100 s
            python.end_with_owner(_children_of_raylet())
    except Exception as error:  # which Ray raises as such
        logs: str = get_default_ray_temp_dir()  # type: ignore[no-untyped-call]  # ray's own
        raise ExperimentError(
            f"Ray did not start on this machine ({one_line_message(error)}); if the machine is "
            f"busy, try again later; Ray's own logs are below {logs}"
        ) from error


def _children_of_raylet() -> list[int]:
    import psutil  # Ray's own copy, which is found once Ray is imported

    node: Any = ray._private.worker._global_node  # Any: a node once Ray has started
    (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
    return [child.pid for child in psutil.Process(raylet.process.pid).children()]


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


@contextmanager
def _own_token() -> Iterator[None]:
    """Let a local Ray accept only processes with its token, a new one for each cluster.

    Other users of the machine reach its ports, too. Its processes inherit the token in their
    environment, which no other user can read; Ray itself would write it to a file that every user
    may read. A RAY_AUTH_MODE of the user's own is left as it is.
    """
    if AUTH_MODE in os.environ:
        yield
        return
    before = os.environ.get(AUTH_TOKEN)
    os.environ |= {AUTH_MODE: "token", AUTH_TOKEN: secrets.token_hex(32)}
    _reread_authentication()
    try:
        yield
    finally:
        del os.environ[AUTH_MODE], os.environ[AUTH_TOKEN]
        if before is not None:
            os.environ[AUTH_TOKEN] = before
        _reread_authentication()


def _reread_authentication() -> None:
    """Let Ray forget the mode and the token that it read from the environment before."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


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

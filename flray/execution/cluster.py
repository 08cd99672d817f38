"""Connection to a Ray cluster: the one in RAY_ADDRESS, or a local one that ends with this process.

Actors of a local cluster share a GPU through CUDA MPS where the machine has it. Without MPS, ten
actors on a tenth of a GPU each would compute in turns.
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

# Arguments of ray.init. Ray's own log lines of workers would run through the progress lines.
OPTIONS: dict[str, Any] = {  # Any: ray.init's own
    "namespace": NAMESPACE,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
}
SYSTEM = {
    # Bytes of objects that travel inside calls and answers. Ray's default of 100 KB sends a model
    # of MLP-200 through the object store, which costs milliseconds.
    "max_direct_call_object_size": 4 << 20,
    # Ray would start workers that nobody asked for, and ours have environments of their own.
    "prestart_worker_first_driver": False,
}


@contextmanager
def connected() -> Iterator[None]:
    """Be connected to Ray during the `with` block.

    A local cluster that is started here is stopped at the end, whatever happens. Inside another
    `connected` block nothing is started or stopped.
    """
    if ray.is_initialized():
        yield
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)  # replaced by ray.init
    address = os.environ.get("RAY_ADDRESS")
    with ExitStack() as connection:
        if not address:
            connection.enter_context(_own_token())
            connection.enter_context(shared_gpu())
        connection.callback(ray.shutdown)
        with _outside_runs():
            if address:
                _join(address)
            else:
                _start()
        if callable(on_sigterm) and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        yield


def _outside_runs() -> AbstractContextManager[None]:
    """Leave a folder of runs meanwhile: Ray lets all processes search the current folder first."""
    return chdir(sys.prefix) if is_inside_run(Path.cwd()) else nullcontext()


def _join(address: str) -> None:
    """Connect to the cluster at RAY_ADDRESS, unless nobody listens: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # not `auto`, or whatever else Ray understands
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(**OPTIONS)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExperimentError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({reason}); correct it, or unset it "
            "for a local cluster"
        ) from error


def _start() -> None:
    """Start a local cluster, all of whose processes end with this one, even if it is killed."""
    python = kept_forking_python()
    try:
        with _on_loopback():
            ray.init(
                address="local",
                include_dashboard=False,
                runtime_env={"py_executable": python.command} if python else None,
                _system_config=SYSTEM,
                **OPTIONS,
            )
        if python is not None:  # Ray's agents would look for a killed raylet for 100 s
            python.end_with_owner(_children_of_raylet())
    except Exception as error:  # Ray raises plain Exceptions here
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


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray listen on the loopback interface only, as it does on macOS and Windows.

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

    Other users of the machine can reach its ports. Its processes inherit the token in their
    environment, which no other user can read; Ray itself would write it to a file that every user
    may read. If RAY_AUTH_MODE is set, nothing is changed.
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
    """Make Ray read mode and token from the environment again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def actor_environment(threads: int) -> dict[str, dict[str, str]]:
    """The runtime environment of our actors, with the driver's search path and folder of data.

    Threads are fixed before torch is imported: set_num_threads alone comes too late. The search
    path lets actors import modules of the user.
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

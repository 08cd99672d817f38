"""Workers that start at once: forks of a process that has imported torch and Lightning.

Importing them takes seconds of CPU, and every actor is a process of its own. On a local cluster Ray
therefore starts this file instead of Python (`start`). It asks a server (`serve`), which has
imported them once, for a fork that becomes the new process. The process that Ray started stays, as
small as it is, and stands for the fork: killing one kills both. If no server answers, or if the new
process is to have more than one thread, it becomes an ordinary Python.

Ray itself is imported after the fork, because it remembers the environment of the process that
imports it. This file imports no other module of flray: as a program it has to start within
milliseconds.
"""

import atexit
import fcntl
import gc
import json
import os
import random
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from typing import IO, Any

# Everything that is slow to import, and packages that Ray would import in every fork.
IMPORTED = ("flray.config.experiment", "flray.server.loop", "jsonschema", "requests")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SERVE, START = "serve", "start"
MOST_WAITING = 4096  # processes that ask for a fork before the server has imported everything
REQUEST_TIMEOUT_S = 10.0
LARGEST_PART = 1 << 16
READY = b"ready"


@dataclass(frozen=True)
class ForkingPython:
    """A server of forks, as the process that started it sees it."""

    command: str  # command line that starts a Python program as a fork
    pipe: IO[bytes]  # the server's standard input

    def end_with_owner(self, processes: Iterable[int]) -> None:
        """Have the server kill these processes when its owner has been killed.

        For processes that would outlive a driver that got SIGKILL, which cannot end them itself.
        """
        with suppress(OSError):  # a server that has died
            self.pipe.write(" ".join(map(str, processes)).encode() + b"\n")
            self.pipe.flush()


def kept_forking_python() -> ForkingPython | None:
    """As `forking_python`, until this process ends: its next cluster starts sooner.

    A second call returns the same server.
    """
    return _kept_by(os.getpid())


@cache
def _kept_by(owner: int) -> ForkingPython | None:
    """The server of a process; a fork of the process has one of its own."""
    server = ExitStack()
    atexit.register(lambda: server.close() if os.getpid() == owner else None)
    return server.enter_context(forking_python())


@contextmanager
def forking_python() -> Iterator[ForkingPython | None]:
    """A server that starts Python programs as forks during the `with` block.

    None where that is not possible: outside Linux, where libraries do not survive a fork, and in
    folders whose path is too long for a socket.
    """
    if sys.platform != "linux":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="flray-fork-"))  # only this user can open it
    address = folder / "socket"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(MOST_WAITING)
            server = _start_server(listener.fileno(), folder)
    except OSError:  # a path too long for a socket
        shutil.rmtree(folder, ignore_errors=True)
        yield None
        return
    command = shlex.join([sys.executable, "-S", "-E", __file__, START, str(address)])
    assert server.stdin is not None
    try:
        yield ForkingPython(command, server.stdin)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start_server(listener: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start `serve` in a process of its own, with one thread and our search path."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, __file__, SERVE, str(listener), str(folder)],
        pass_fds=[listener],
        stdin=subprocess.PIPE,  # closed when this process ends, however it does
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is not for it
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
    )


@dataclass(frozen=True)
class Program:
    """A Python program that a fork becomes: its arguments, environment and working folder."""

    argv: list[str]
    environment: dict[str, str]
    folder: str

    def become(self) -> None:
        """Continue as a Python that was started with this program; returns when it has ended."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.argv[:] = self.argv
        first = [str(Path(self.argv[0]).parent)]
        first += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = first + [entry for entry in sys.path[1:] if entry not in first]
        random.seed()
        runpy.run_path(self.argv[0], run_name="__main__")


def serve(listener: socket.socket, folder: Path) -> None:
    """Fork on every request, until standard input is closed because the owner was killed.

    The owner writes ids of processes to standard input that would outlive it; they are killed then.
    """
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # pages that no collection touches stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    owned: list[int] = []  # file descriptors, which unlike process ids are never reused
    while True:
        ready, _, _ = select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            line = os.read(sys.stdin.fileno(), LARGEST_PART)
            if not line:
                _kill(owned)
                shutil.rmtree(folder, ignore_errors=True)
                return
            for process in line.split():
                with suppress(OSError):  # it has ended
                    owned.append(os.pidfd_open(int(process)))
            continue
        connection, _ = listener.accept()
        with connection, suppress(OSError, TypeError, ValueError):  # a request that is not ours
            connection.settimeout(REQUEST_TIMEOUT_S)
            program, streams = _received(connection)
            if not os.fork():
                listener.close()
                starter = connection.dup()
                break
            for stream in streams:
                os.close(stream)
    os.setpgrp()  # Ray ends a worker with its whole process group
    starter.sendall(READY)
    _die_with(starter)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    program.become()


def _kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(OSError):  # it has ended
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _die_with(starter: socket.socket) -> None:
    """Have the kernel kill this process when the one at the other end has died."""
    fcntl.fcntl(starter, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(starter, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(starter, fcntl.F_SETFL, fcntl.fcntl(starter, fcntl.F_GETFL) | os.O_ASYNC)
    if select([starter], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGKILL)  # it died before


def _received(connection: socket.socket) -> tuple[Program, list[int]]:
    """The program that is asked for, and the three standard streams of who asks."""
    part, streams, _, _ = socket.recv_fds(connection, LARGEST_PART, 3)
    parts = [part]
    while part and not part.endswith(b"\n"):
        part = connection.recv(LARGEST_PART)
        parts.append(part)
    plain: dict[str, Any] = json.loads(b"".join(parts))  # Any: JSON
    return Program(**plain), streams


def start(address: str, argv: list[str]) -> None:
    """Have a fork run the program, or become an ordinary Python that does.

    Args:
        address: Path of the socket on which the server listens.
        argv: What Python would have been started with: a file and its arguments.
    """
    has_one_thread = os.environ.get("OMP_NUM_THREADS", "1") == "1"
    if has_one_thread and _forked(address, argv):
        return
    os.execv(sys.executable, [sys.executable, *argv])


def _forked(address: str, argv: list[str]) -> bool:
    """Ask the server for a fork and wait until it has ended; False if there is no server."""
    plain = {"argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}
    request = json.dumps(plain).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            sent = socket.send_fds(connection, [request[:LARGEST_PART]], [0, 1, 2])
            if sent < len(request):  # else the fork may have ended by now, and nothing can be sent
                connection.sendall(request[sent:])
            if connection.recv(len(READY)) != READY:
                return False
            connection.recv(1)  # returns when the fork has ended
            return True
    except OSError:
        return False


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == START:
        start(where, rest)
    else:
        serve(socket.socket(fileno=int(where)), Path(rest[0]))

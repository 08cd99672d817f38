"""Workers as forks: each is the process that was asked for, with everything imported."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from flray.execution.forking import (
    LARGEST_PART,
    READY,
    _forked,
    forking_python,
    kept_forking_python,
)

from scenarios import is_alive, wait_for

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
PROGRAM = """
import json, os, sys
told = {
    "argv": sys.argv, "folder": os.getcwd(), "variable": os.environ.get("OF_THE_FORK"),
    "path": sys.path, "main": __name__, "has_group": os.getpgrp() == os.getpid(),
    "has_torch": "torch" in sys.modules, "has_ray": "ray" in sys.modules,
    "threads": len(os.listdir("/proc/self/task")), "home": os.environ.get("HOME"),
}
print("told on standard output", flush=True)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(told, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


@pytest.fixture(scope="module")
def python() -> list[str]:
    """The server that clusters of this process use; another one would import everything again."""
    server = kept_forking_python()
    assert server is not None
    return shlex.split(server.command)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "of_a_worker" / "program.py"
    file.parent.mkdir()
    file.write_text(PROGRAM)
    return file


def told_by(
    command: list[str], program: Path, folder: Path, **environment: str
) -> tuple[dict[str, Any], str]:
    """What the program says of its process, and what it printed."""
    answer, printed = folder / "answer.json", folder / "printed"
    env = {"PATH": os.environ["PATH"], "OF_THE_FORK": "1", **environment}
    with printed.open("w") as out:
        subprocess.run([*command, str(program), str(answer)], cwd=folder, env=env, stdout=out)
    wait_for(answer.exists)
    return json.loads(answer.read_text()), printed.read_text()


def test_a_fork_is_the_process_that_was_asked_for(
    python: list[str], program: Path, tmp_path: Path
) -> None:
    told, printed = told_by(python, program, tmp_path, PYTHONPATH="/of/the/user")
    assert told["argv"] == [str(program), str(tmp_path / "answer.json")]
    assert told["folder"] == str(tmp_path)
    assert told["main"] == "__main__"
    assert told["path"][:2] == [str(program.parent), "/of/the/user"]
    assert told["variable"] == "1"
    assert told["home"] is None
    assert told["has_torch"]
    assert not told["has_ray"]
    assert told["has_group"]  # Ray kills groups: one worker must not take others with it
    assert told["threads"] == 1  # threads do not survive a fork
    assert printed == "told on standard output\n"


def test_a_large_environment_arrives_whole(
    python: list[str], program: Path, tmp_path: Path
) -> None:
    told, _ = told_by(python, program, tmp_path, LARGE="x" * 100_000)  # more than one message
    assert told["has_torch"]


def test_more_threads_are_an_ordinary_process(
    python: list[str], program: Path, tmp_path: Path
) -> None:
    told, _ = told_by(python, program, tmp_path, OMP_NUM_THREADS="2")
    assert not told["has_torch"]
    assert told["variable"] == "1"


def test_a_program_that_ends_at_once_is_not_run_again(tmp_path: Path, monkeypatch) -> None:
    """The fork has ended before who asked for it goes on after sending the request."""
    address = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(str(address))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(LARGEST_PART)
                connection.sendall(READY)

        served, send_fds = thread.submit(serve), socket.send_fds

        def send_slowly(*request: Any) -> int:
            sent = send_fds(*request)
            served.result(TIMEOUT_S)
            return sent

        monkeypatch.setattr(socket, "send_fds", send_slowly)
        assert _forked(str(address), ["program.py"])


def test_without_a_server_an_ordinary_process_starts(program: Path, tmp_path: Path) -> None:
    with forking_python() as server:
        assert server is not None
    told, _ = told_by(shlex.split(server.command), program, tmp_path)
    assert not told["has_torch"]
    assert told["variable"] == "1"


def test_nonsense_does_not_end_the_server(python: list[str], program: Path, tmp_path: Path) -> None:
    for nonsense in (b"", b"\n", b"{}\n", b'{"argv": 1}\n', b"\xff\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(python[-1])
            connection.sendall(nonsense)
    told, _ = told_by(python, program, tmp_path)
    assert told["has_torch"]


def test_who_kills_what_was_started_kills_the_fork(python: list[str], tmp_path: Path) -> None:
    """Whatever the fork is doing; and what was started ends with its fork."""
    program, answer = tmp_path / "waiting.py", tmp_path / "pid"
    program.write_text(
        "import os, sys, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGIO])\n"
        "open(sys.argv[1] + '.part', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "while True: pass\n"
    )
    for kills_fork in (False, True):
        started = subprocess.Popen([*python, str(program), str(answer)])
        wait_for(answer.exists)
        fork = int(answer.read_text())
        answer.unlink()
        sleep(0.2)
        assert is_alive(fork)
        assert started.poll() is None
        os.kill(fork if kills_fork else started.pid, signal.SIGKILL)
        started.wait(TIMEOUT_S)
        wait_for(lambda: not is_alive(fork))  # noqa: B023


def test_only_this_user_can_ask(python: list[str]) -> None:
    assert Path(python[-1]).parent.stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_the_server_ends_with_a_killed_owner() -> None:
    owner = (
        "from flray.execution.forking import forking_python\n"
        "with forking_python() as server:\n"
        "    print(server.command, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = Path(shlex.split(process.stdout.readline())[-1])
        assert address.exists()
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not address.parent.exists())

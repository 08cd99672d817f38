"""Runs that outlive their terminal: interrupted, detached, attached to again, stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flray.cli.keeper import stop
from flray.config.experiment import override
from flray.records.lock import holder, locked
from flray.records.run_directory import RunDirectory

from scenarios import TINY

pytestmark = pytest.mark.slow

RAY = ["execution={executor: ray, actors: {count: 1, num_cpus: 0.5}}", "train.epochs=20"]


@pytest.fixture
def flray(tmp_path):
    """Start the command line in a process of its own, its standard input a pipe."""
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(override(TINY, [*RAY, "rounds=2000"])))

    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            process := subprocess.Popen(
                [sys.executable, "-m", "flray", *arguments],
                cwd=tmp_path,
                env={**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return process

    yield start
    for process in started:
        process.kill()
    for folder in tmp_path.iterdir():
        if folder.is_dir() and holder(folder):
            stop(folder)
            wait_until(lambda folder=folder: holder(folder) is None, "a keeper did not stop")


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """Read what a process prints until a line has the text."""
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never printed")


def ray_processes() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "raylet" in title or title.startswith("ray::"):
            found.add(folder.name)
    return found


def test_interrupt_detach_attach_stop_resume(flray, tmp_path) -> None:
    before = ray_processes()
    out = tmp_path / "run"
    directory = RunDirectory(out)
    first = flray("run", "slow.yaml", "--out", "run")
    assert "1 client actors of 0.5 CPU each" in wait_for_line(first, "client actors")
    wait_for_line(first, "/2000")
    first.send_signal(signal.SIGINT)  # asks
    time.sleep(1)
    assert first.poll() is None
    first.send_signal(signal.SIGINT)  # detaches
    told, _ = first.communicate(timeout=30)
    assert first.returncode == 0, told
    assert "detached; the run goes on: flray attach" in told
    assert holder(out) is not None
    seen = len(directory.rows())

    busy = flray("run", "slow.yaml", "--out", "run", "--resume")
    second = flray("attach", "run")
    said, _ = busy.communicate(timeout=60)
    assert (busy.returncode, "being run by another process" in said) == (2, True), said

    for _ in range(2):  # what it finds, and what goes on
        wait_for_line(second, "/2000")
    assert len(directory.rows()) > seen
    second.send_signal(signal.SIGINT)
    second.stdin.write("s\n")
    second.stdin.flush()
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 0, said
    assert "stopping after the round in progress" in said
    assert "go on with" in said
    assert directory.summary() is None
    assert 2 <= len(directory.rows()) < 2000

    done = len(directory.rows())
    third = flray("run", "slow.yaml", "--out", "run", "--resume")
    assert f"round {done + 1:4d}/2000" in wait_for_line(third, "/2000")
    third.send_signal(signal.SIGINT)
    said, _ = third.communicate(input="s\n", timeout=120)
    assert third.returncode == 0, said + (out / "server.log").read_text()[-3000:]
    assert "stopped; the same command with --out and --resume goes on" in said
    wait_until(lambda: ray_processes() <= before, "Ray processes were left behind")


def test_what_does_not_fit_leaves_nothing_behind(flray, tmp_path) -> None:
    run = flray("run", "slow.yaml", "execution.actors.num_cpus=999", "--out", "no")
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 2
    assert "1 x 999 = 999 CPU" in said
    assert "Traceback" not in said
    assert not (tmp_path / "no").exists()


def test_a_lock_is_gone_with_its_holder(tmp_path) -> None:
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()
    assert holder(tmp_path) is None
    (tmp_path / "run.lock").write_text("1")  # of a process that was killed
    assert holder(tmp_path) is None
    with locked(tmp_path):
        pass

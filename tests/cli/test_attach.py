"""Runs that outlive their terminal: interrupted, detached, attached to again, stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from flray.config.experiment import override
from flray.records.lock import holder, locked
from flray.records.run_directory import RunDirectory

from scenarios import TINY

pytestmark = pytest.mark.slow

RAY = ["execution={executor: ray, actors: {count: 1, num_cpus: 0.5}}", "train.epochs=20"]


@pytest.fixture
def flray(tmp_path):
    """Start the command line in a process of its own, its standard input a pipe."""
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(override(TINY, [*RAY, "rounds=60"])))

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flray", *arguments],
            cwd=tmp_path,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


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
    wait_until(lambda: len(directory.rows()) >= 2, "no rounds were recorded")
    first.send_signal(signal.SIGINT)  # asks
    time.sleep(1)
    assert first.poll() is None
    first.send_signal(signal.SIGINT)  # detaches
    told, _ = first.communicate(timeout=30)
    assert first.returncode == 0, told
    assert "1 client actors of 0.5 CPU each" in told
    assert "detached; the run goes on: flray attach" in told
    assert holder(out) is not None
    seen = len(directory.rows())

    busy = flray("run", "slow.yaml", "--out", "run", "--resume")
    second = flray("attach", "run")
    said, _ = busy.communicate(timeout=60)
    assert (busy.returncode, "being run by another process" in said) == (2, True), said

    wait_until(lambda: len(directory.rows()) > seen, "the run did not go on")
    second.send_signal(signal.SIGINT)
    second.stdin.write("s\n")
    second.stdin.flush()
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert "stopping after the round in progress" in said
    assert "go on with" in said
    assert directory.summary() is None
    assert 2 <= len(directory.rows()) < 60

    third = flray("run", "slow.yaml", "--out", "run", "--resume")
    said, _ = third.communicate(timeout=200)
    assert third.returncode == 0, said
    assert "round 60/60" in said
    whole = flray("run", "slow.yaml", "execution.executor=inline", "--out", "whole")
    whole.communicate(timeout=200)
    hashes = [d.summary()["params_sha256"] for d in (directory, RunDirectory(tmp_path / "whole"))]
    assert hashes[0] == hashes[1]
    attached, _ = flray("attach", "run").communicate(timeout=60)
    assert "round 60/60" in attached
    assert "accuracy" in attached
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

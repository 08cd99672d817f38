"""A run on Ray that loses what drives it goes on by itself, to the bits of an undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.records.lock import holder
from flray.records.run_directory import RunDirectory

from scenarios import SLEEPY, TINY, processes_marked, run_experiment

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PLAIN = override(TINY, ["algorithm=slow_of_tests:Sleepy", "rounds=60"])
RAY = ["execution={executor: ray, actors: {count: 1, num_cpus: 0.5}}"]
PYTHON = """
import os
import signal
import sys

import flray
from scenarios import processes_marked
from test_going_on import FAULTS, MARK
from pathlib import Path

faults = dict(FAULTS)


def disturb(row):
    title = faults.pop(row["round"], None)
    if title:
        (pid,) = processes_marked(MARK, Path.cwd(), title)
        os.kill(pid, signal.SIGKILL)


result = flray.run("slow.yaml", "python", on_round=disturb)
assert not faults
print("ended with", result.summary["params_sha256"])
"""
FAULTS = ((3, "ray::ServerActor"), (8, "/raylet/raylet"))  # after which rounds
MARK = "GOING_ON_OF_TESTS"
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("going_on")
    (folder / "slow_of_tests.py").write_text(SLEEPY.format(seconds=0.3))
    (folder / "slow.yaml").write_text(yaml.safe_dump(override(PLAIN, RAY)))
    yield folder
    for pid in processes_marked(MARK, folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(folder) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        quick = parse_experiment(override(PLAIN, ["algorithm=fedavg"]))
        return run_experiment(quick, folder / "quiet").summary["params_sha256"]


def wait_for_round(process: subprocess.Popen, out: Path, t: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(RunDirectory(out).rows()) < t:
        assert process.poll() is None, (out / "server.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start(folder: Path, out: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "flray", "run", "slow.yaml", "--out", out],
        cwd=folder,
        env={**os.environ, MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_server_and_keeper_are_killed(folder, expected) -> None:
    """One after the other; the terminal tells of both."""
    out = folder / "both"
    process = start(folder, "both")
    wait_for_round(process, out, 3)
    (server,) = processes_marked(MARK, folder, "ray::ServerActor")
    os.kill(server, signal.SIGKILL)
    wait_for_round(process, out, 10)
    os.kill(holder(out), signal.SIGKILL)
    told, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, told + (out / "server.log").read_text()[-3000:]
    assert "the server actor died" in (out / "server.log").read_text()
    assert told.count("started again: 1 client actor ") == 1
    assert told.count("the keeper was killed: going on from the last checkpoint") == 1
    assert len(RunDirectory(out).plans()) == 3
    assert RunDirectory(out).rounds()["round"].tolist() == list(range(1, 61))
    assert RunDirectory(out).summary()["params_sha256"] == expected


def test_the_raylet_is_killed(folder, expected) -> None:
    """And with it every process of the node but the keeper."""
    out = folder / "raylet"
    process = start(folder, "raylet")
    wait_for_round(process, out, 3)
    (raylet,) = processes_marked(MARK, folder, "/raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    told, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, told + (out / "server.log").read_text()[-3000:]
    assert RunDirectory(out).summary()["params_sha256"] == expected


def test_a_run_from_python_goes_on_after_the_loss_of_its_server_and_of_the_raylet(
    folder, expected
) -> None:
    """In the same process, which is the driver."""
    path = os.pathsep.join([str(Path(__file__).parent), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", PYTHON],
        cwd=folder,
        env={**os.environ, MARK: str(folder), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert f"ended with {expected}" in done.stdout, done.stdout[-3000:]
    assert "started again, 1 of at most 3 times" in done.stdout
    assert "started again, 2 of at most 3 times" in done.stdout
    assert RunDirectory(folder / "python").rounds()["round"].tolist() == list(range(1, 61))

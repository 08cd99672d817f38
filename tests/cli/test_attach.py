"""Runs that outlive their terminal: interrupted, detached, attached to again, stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.records.lock import holder, locked
from flray.records.run_directory import RunDirectory

from scenarios import SLEEPY, TINY, processes_marked, run_experiment, wait_for

pytestmark = pytest.mark.long

SLOW = override(TINY, ["algorithm=sleepy_of_tests:Sleepy", "rounds=2000"])
RAY = ["execution={executor: ray, actors: {count: 1, num_cpus: 0.5}}"]
MARK = "FOLDER_OF_TESTS"  # an environment variable, by which their processes are known

SECRET = "planted5ec2e7"

Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Where the command lines run; what is still there of them at the end is killed."""
    folder = tmp_path_factory.mktemp("attach")
    (folder / "sleepy_of_tests.py").write_text(SLEEPY.format(seconds=0.2))
    (folder / "slow.yaml").write_text(yaml.safe_dump(override(SLOW, RAY)))
    yield folder
    for pid in processes_marked(MARK, folder):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def flray(folder) -> Iterator[Callable[..., Process]]:
    """Start the command line in a process of its own, its standard input a pipe."""
    # Where tests run in the background it is ignored, which processes would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(*arguments: str) -> Process:
        return subprocess.Popen(
            [sys.executable, "-m", "flray", *arguments],
            cwd=folder,
            env={
                **os.environ,
                "WANDB_API_KEY": SECRET,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "PYTHONUNBUFFERED": "1",
                MARK: str(folder),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    yield start
    signal.signal(signal.SIGINT, before)


def one_more_round(out: Path) -> int:
    """Run a round in this process, without Ray, and stop; how many there are then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        experiment = parse_experiment(SLOW)
        run_experiment(experiment, out, resume=out.exists(), should_stop=lambda: True)
    return len(RunDirectory(out).rows())


@pytest.fixture(scope="module")
def runs(flray, folder) -> dict[str, Process]:
    """Three at once: each spends its time on starting one process after another."""
    assert one_more_round(folder / "resumed") == 1
    return {
        "first": flray("run", "slow.yaml", "--out", "run"),
        "resumed": flray("run", "slow.yaml", "--out", "resumed", "--resume"),
        "refused": flray("run", "slow.yaml", "execution.actors.num_cpus=999", "--out", "no"),
    }


def wait_for_line(process: Process, text: str) -> str:
    """Read what a process prints until a line has the text."""
    seen = []
    for line in process.stdout:
        if text in line:
            return line
        seen.append(line)
    raise AssertionError(f"{text!r} was never printed, but {seen}")


def test_interrupt_detach_attach_stop_resume(runs, flray, folder) -> None:
    out, first = folder / "run", runs["first"]
    directory = RunDirectory(out)
    assert "1 client actor of 0.5 CPU, 0.65 GB each" in wait_for_line(first, "client actor")
    wait_for_line(first, "/2000")
    first.send_signal(signal.SIGINT)  # asks
    time.sleep(1)
    assert first.poll() is None
    first.send_signal(signal.SIGINT)  # detaches
    told, _ = first.communicate(timeout=30)
    assert first.returncode == 0, told
    assert "detached; the run goes on; watch it with: flray attach" in told
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
    done = len(directory.rows())
    assert 2 <= done < 2000
    assert one_more_round(out) == done + 1


def test_resume_goes_on_and_who_started_it_may_stop_it(runs, folder) -> None:
    resumed = runs["resumed"]
    assert "round    2/2000" in wait_for_line(resumed, "/2000")
    resumed.send_signal(signal.SIGINT)
    said, _ = resumed.communicate(input="s\n", timeout=120)
    assert resumed.returncode == 0, said + (folder / "resumed/server.log").read_text()[-3000:]
    assert "stopped; go on with: flray run --out" in said


def test_what_does_not_fit_leaves_nothing_behind(runs, folder) -> None:
    said, _ = runs["refused"].communicate(timeout=120)
    assert runs["refused"].returncode == 2
    assert "1 x 999 = 999 CPU" in said
    assert "Traceback" not in said
    assert not (folder / "no").exists()


@pytest.mark.usefixtures("runs")
def test_when_all_are_done_no_process_is_left(folder) -> None:
    wait_for(lambda: not processes_marked(MARK, folder), "the end of all processes")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "server.log" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_lock_is_gone_with_its_holder(tmp_path) -> None:
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()
    assert holder(tmp_path) is None
    (tmp_path / "run.lock").write_text("1")  # of a process that was killed
    assert holder(tmp_path) is None
    with locked(tmp_path):
        pass

"""200 rounds with a client actor killed every few seconds: the same bits, and memory stays flat."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import flray
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.execution.cluster import connected

from scenarios import TINY, processes_below, run_experiment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KILL_EVERY = 8  # rounds, which is a few seconds
SOAK = [
    "rounds=200",
    "model.hidden=200",
    "execution.block=2",
    "evaluate.every=10",
]
GROWTH = 1.15  # of the last quarter over the second


@pytest.fixture
def cluster():
    with connected():
        yield


def megabytes(pid: int) -> float:
    """What the process has in memory of its own, without what it maps of others."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


@pytest.mark.usefixtures("cluster")
def test_actors_are_killed_for_200_rounds(tmp_path, capsys) -> None:
    used: dict[str, list[float]] = {"driver": [], "server": [], "actors": []}
    killed: list[int] = []

    def disturb(row) -> None:
        actors = processes_below("ray::ClientActor")
        with suppress(OSError, ValueError):
            used["driver"].append(megabytes(os.getpid()))
            used["server"].append(max(map(megabytes, processes_below("ray::ServerActor"))))
            used["actors"].append(max(map(megabytes, actors)))
        if actors and row["round"] % KILL_EVERY == 0:
            with suppress(ProcessLookupError):
                os.kill(actors[row["round"] // KILL_EVERY % len(actors)], signal.SIGKILL)
                killed.append(row["round"])

    plain = override(TINY, SOAK)
    pool = "execution={executor: ray, block: 2, actors: {count: 2, num_cpus: 0.1}}"
    experiment = parse_experiment(override(plain, [pool]))
    disturbed = run_experiment(experiment, tmp_path / "run", on_round=disturb)
    with capsys.disabled():
        print(f"\n{len(killed)} actors killed in {disturbed.summary['seconds']:.0f} s")
        for name, values in used.items():
            quarters = [values[len(values) * n // 4 : len(values) * (n + 1) // 4] for n in range(4)]
            print(name, [f"{max(quarter):.0f} MB" for quarter in quarters])
    assert len(killed) > 5
    for name, values in used.items():
        second, fourth = values[len(values) // 4 : len(values) // 2], values[3 * len(values) // 4 :]
        assert max(fourth) < GROWTH * max(second), name
    alone = flray.run(plain, tmp_path / "alone")
    assert disturbed.summary["params_sha256"] == alone.summary["params_sha256"]

"""A sweep whose driver is killed goes on to the same numbers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from flray.config.experiment import parse_experiment

from scenarios import TINY, run_experiment

pytestmark = pytest.mark.long

NOTIFIED = """
import os
import signal
from pathlib import Path

from flray.algorithms.fedavg import FedAvg


class Notified(FedAvg):
    def round(self, state, cohort, fed):
        mark = Path(__file__).with_name("notified")
        if cohort.t == 3 and not mark.exists():
            mark.touch()
            os.kill(int(Path(__file__).with_name("pid").read_text()), signal.SIGTERM)
        return super().round(state, cohort, fed)
"""
PROGRAM = """
import sys
from pathlib import Path
from flray.sweeps.driver import run_sweep
from flray.sweeps.space import read_space
space, out, resume = sys.argv[1:]
run_sweep(read_space(Path(space)), Path(out), resume=resume == "resume")
"""
PATIENCE_S = 240


def start(space: Path, out: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, str(space), str(out), how]
    return subprocess.Popen(command, start_new_session=True)


def finished(out: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in out.glob("runs/*/summary.json")}


def begun(out: Path) -> list[Path]:
    """Runs that are past their clustering and not put together yet."""
    return [
        path for path in out.glob("parts/*/*") if len(list(path.glob("part/round_*.parquet"))) > 5
    ]


def test_killed_after_some_trials_it_goes_on_to_the_same_numbers(tmp_path) -> None:
    space, out = tmp_path / "space.yaml", tmp_path / "out"
    plain = {
        "experiment": {**TINY, "rounds": 60},
        "space": {
            "algorithm": [{"name": "flhc", "rounds_before": 2}],
            "algorithm.clustering.partition.threshold": {"between_merges": 3},
        },
        "concurrency": 1,
    }
    space.write_text(yaml.safe_dump(plain))
    process = start(space, out, "start")
    deadline = time.monotonic() + PATIENCE_S
    while (not finished(out) or not begun(out)) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = finished(out)
    assert 1 <= len(done) < 3
    assert begun(out)
    assert not (out / "rows.parquet").exists()

    assert start(space, out, "resume").wait(PATIENCE_S) == 0
    assert {path: stamp for path, stamp in finished(out).items() if path in done} == done
    table = pd.read_parquet(out / "rows.parquet")
    assert len(table) == 3
    assert set(table["status"]) <= {"done", "shared"}
    for row in table.itertuples():
        config = yaml.safe_load((out / row.folder / "config.yaml").read_text())
        alone = run_experiment(parse_experiment(config), tmp_path / "naive" / str(row.row))
        assert row.params_sha256 == alone.summary["params_sha256"]


def test_sigterm_to_a_sweep_ends_its_rounds_and_it_goes_on_to_the_same_numbers(tmp_path) -> None:
    """As a spot machine is told before it goes."""
    (tmp_path / "notified_of_tests.py").write_text(NOTIFIED)
    plain = {
        "experiment": {**TINY, "rounds": 40, "algorithm": "notified_of_tests:Notified"},
        "space": {"train.lr": [0.1, 0.05, 0.02]},
        "concurrency": 1,
    }
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(plain))
    command = [sys.executable, "-m", "flray", "sweep", "space.yaml", "--out", "out"]
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path}
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **options)
    (tmp_path / "pid").write_text(str(process.pid))
    told, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, told
    assert "SIGTERM: stopping after the round in progress" in told
    assert "go on with: flray sweep --out out --resume" in told
    assert len(finished(tmp_path / "out")) < 3
    (tmp_path / "space.yaml").unlink()  # the sweep has its own
    command.remove("space.yaml")
    subprocess.run([*command, "--resume"], **options, timeout=PATIENCE_S, check=True)
    table = pd.read_parquet(tmp_path / "out" / "rows.parquet")
    assert table["status"].tolist() == ["done"] * 3
    for row in table.itertuples():
        config = yaml.safe_load((tmp_path / "out" / row.folder / "config.yaml").read_text())
        quiet = parse_experiment({**config, "algorithm": "fedavg"})
        alone = run_experiment(quiet, tmp_path / "naive" / str(row.row))
        assert row.params_sha256 == alone.summary["params_sha256"]

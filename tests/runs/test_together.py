"""Runs side by side: the bits of each alone, and the manners of a run that is stopped."""

import os
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flray.cli.campaign import read_campaign
from flray.cli.running import run_all
from flray.config.overrides import override
from flray.errors import ClientFailure, ExperimentError
from flray.execution import mps
from flray.records.run_directory import RunDirectory
from flray.runs import together
from flray.runs.together import ForkedRun, run_together, runs_at_a_time

from scenarios import TINY, run_experiment, tiny_experiment

pytestmark = pytest.mark.slow

ALGORITHMS = ("fedavg", "local", "{name: fedprox, mu: 0.1}")


def experiment(*overrides: str):
    return tiny_experiment("rounds=2", *overrides)


def never() -> bool:
    return False


def show_nothing(_number: int, _row: object) -> None:
    """Of a round."""


def test_runs_side_by_side_have_the_bits_of_each_alone(tmp_path: Path) -> None:
    experiments = [experiment(f"algorithm={a}", f"seed={s}") for a in ALGORITHMS for s in (0, 1)][
        :-1
    ]
    jobs = [ForkedRun(each, tmp_path / f"run_{k}") for k, each in enumerate(experiments)]
    shown: list[tuple[int, int]] = []
    assert run_together(jobs, 4, lambda k, row: shown.append((k, row["round"])), never)
    hashes = [RunDirectory(job.out).summary()["params_sha256"] for job in jobs]
    alone = [run_experiment(each, tmp_path / f"alone_{k}") for k, each in enumerate(experiments)]
    assert hashes == [run.summary["params_sha256"] for run in alone]
    assert len(set(hashes)) == len(experiments)
    assert sorted(shown) == [(k, t) for k in range(len(jobs)) for t in (1, 2)]


def test_the_first_failure_stops_the_others_and_is_raised(tmp_path: Path) -> None:
    """Weights overflow in the first run; the second would take far longer than the test."""
    jobs = [
        ForkedRun(experiment("train.lr=1.0e+30"), tmp_path / "diverging"),
        ForkedRun(experiment("rounds=100000"), tmp_path / "long"),
    ]
    with pytest.raises(ClientFailure, match=r"lower train\.lr"):
        run_together(jobs, 2, show_nothing, never)
    assert RunDirectory(tmp_path / "long").summary() is None


def last_round(run: Path) -> int:
    return max((row["round"] for row in RunDirectory(run).rows()), default=0)


def test_a_stopped_command_leaves_runs_that_can_go_on(tmp_path: Path) -> None:
    jobs = [ForkedRun(experiment("rounds=100000", f"seed={s}"), tmp_path / f"{s}") for s in (0, 1)]
    shown: list[int] = []
    for _ in range(2):
        before = [last_round(job.out) for job in jobs]
        are_shown = lambda: set(shown) == {0, 1}  # noqa: E731
        assert not run_together(jobs, 2, lambda k, _row: shown.append(k), are_shown)
        assert [RunDirectory(job.out).summary() for job in jobs] == [None, None]
        assert all(last_round(job.out) > t for job, t in zip(jobs, before, strict=True))
        jobs = [replace(job, resume=True) for job in jobs]
        shown.clear()


def test_one_command_runs_side_by_side_and_ends_in_one_table(tmp_path: Path) -> None:
    for name in ("fedavg", "local"):
        plain = override(TINY, [f"algorithm={name}", "rounds=1"])
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(plain))
    files = [str(tmp_path / f"{name}.yaml") for name in ("fedavg", "local")]
    campaign = read_campaign([*files, "seeds=2"], tmp_path / "out", resume=False)
    said = StringIO()
    run_all(campaign, Console(file=said, width=200), together=3)
    text = said.getvalue()
    assert "4 runs, 3 at a time" in text
    assert "local · seed 1 · round 1/1" in text
    assert "figures" in text
    assert (tmp_path / "out" / "command.json").is_file()
    assert all(RunDirectory(run.out).summary() for run in campaign.runs)


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(together, "run_experiment", lambda *_: os._exit(3))
    with pytest.raises(ClientFailure, match="exit code 3; --resume goes on"):
        run_together([ForkedRun(experiment(), tmp_path / "a")], 2, show_nothing, never)


def test_as_many_at_a_time_as_the_gpu_and_the_cores_take(monkeypatch) -> None:
    experiments = [experiment(f"seed={s}") for s in range(18)]
    monkeypatch.setattr(together.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(together, "gpu_memory_gib", lambda: 139.0)
    monkeypatch.setattr(together.torch.version, "cuda", "12.8")
    assert runs_at_a_time(experiments, None) == 18
    monkeypatch.setattr(together.os, "sched_getaffinity", lambda _: set(range(10)))
    assert runs_at_a_time(experiments, None) == 15
    assert runs_at_a_time(experiments[:3], None) == 3
    assert runs_at_a_time(experiments, 5) == 5
    assert runs_at_a_time([experiment("execution.device=cpu")] * 2, None) == 1
    monkeypatch.setattr(together, "gpu_memory_gib", lambda: 10.0)
    assert runs_at_a_time(experiments, None) == 2
    monkeypatch.setattr(together.torch.version, "cuda", None)
    assert runs_at_a_time(experiments, None) == 1
    monkeypatch.setattr(together.torch.version, "cuda", "12.8")
    monkeypatch.setattr(together, "gpu_memory_gib", lambda: 0.0)
    assert runs_at_a_time(experiments, None) == 1
    on_ray = [experiment("execution.executor=ray")] * 2
    assert runs_at_a_time(on_ray, None) == 1
    with pytest.raises(ExperimentError, match="executor=inline"):
        runs_at_a_time(on_ray, 2)


@pytest.fixture
def control(tmp_path: Path, monkeypatch) -> Path:
    """A program in the place of MPS's that notes how it was called."""
    log, program = tmp_path / "calls", tmp_path / mps.CONTROL
    program.write_text(f'#!/bin/sh\necho "$@" "${mps.PIPES}" >> {log}\n[ "$1" ] || cat >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", str(tmp_path / "nobody"))
    return log


def test_a_daemon_of_our_own_lives_as_long_as_the_runs(control: Path) -> None:
    with mps.shared_gpu() as is_shared:
        folder = os.environ[mps.PIPES]
        assert is_shared
        assert Path(folder).is_dir()
        assert control.read_text() == f"-d {folder}\n"
    assert control.read_text() == f"-d {folder}\n{folder}\nquit -t 5\n"
    assert mps.PIPES not in os.environ
    assert not Path(folder).exists()


def test_the_daemon_of_a_user_is_left_alone(control: Path, monkeypatch) -> None:
    monkeypatch.setenv(mps.PIPES, "/somewhere")
    with mps.shared_gpu() as is_shared:
        assert is_shared
    assert not control.exists()
    assert os.environ[mps.PIPES] == "/somewhere"


def test_a_daemon_that_does_not_start_is_done_without(control: Path) -> None:
    control.with_name(mps.CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with mps.shared_gpu() as is_shared:
        assert not is_shared

"""A trial that hangs holds a sweep neither for ever nor beyond its time."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flray.config.experiment import parse_experiment
from flray.execution.patience import Patience
from flray.sweeps import tuning
from flray.sweeps.cache import Cache
from flray.sweeps.driver import Watch, run_sweep
from flray.sweeps.folder import ROWS, alive_file, read_rows
from flray.sweeps.rows import expand
from flray.sweeps.space import parse_space
from flray.sweeps.trial import TrialContext, run_row
from flray.sweeps.tuning import MOST_LOST, TrialWatch

from scenarios import TINY, processes_below, run_experiment


@pytest.fixture
def context(tmp_path) -> TrialContext:
    (tmp_path / ROWS).mkdir()
    cache = Cache(tmp_path / "cache", "sweep", "session", wish=tmp_path / "stop.wish")
    return TrialContext(tmp_path, cache, {}, False, frozenset())


def trial(number: int, status: str = "RUNNING") -> Any:
    """As Tune has them."""
    rows = [SimpleNamespace(number=number, plain={"rounds": 60})]
    state = SimpleNamespace(ray_actor=f"actor {number}")
    return SimpleNamespace(
        trial_id=str(number), status=status, config={"rows": rows}, temporary_state=state
    )


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets, and the actors that were killed."""
    now = SimpleNamespace(time=1000.0, killed=[])
    monkeypatch.setattr(tuning, "time", lambda: now.time)
    monkeypatch.setattr(tuning.ray, "kill", now.killed.append)
    return now


def test_a_trial_without_a_sign_is_ended_by_what_others_took(context, clock) -> None:
    """Rounds take 5 s, so ten times as long is too long; one that is pending may take its time."""
    shown: list[list[tuple[int, int]]] = []
    watch = TrialWatch(context, shown.append)
    watch.patience = Patience(first_s=100.0, least_s=20.0)
    trials = [trial(0), trial(1), trial(2, "PENDING")]
    for seconds in range(0, 52, 5):
        clock.time = 1000.0 + seconds
        replace(context.cache, alive=alive_file(context.folder, 0)).note_round({"round": seconds})
        os.utime(alive_file(context.folder, 0), (clock.time, clock.time))
        watch.step(trials)
        assert clock.killed == []
    assert watch.allowed_s(is_late=False) == 50.0
    clock.time = 1053.0
    watch.step(trials)
    assert clock.killed == ["actor 1"]
    watch.step(trials)
    assert clock.killed == ["actor 1"]  # it has its time once more
    last = (*range(0, 52, 5), 50, 50)
    assert shown == [[(t, 60), (0, 60)] for t in last]


def test_after_the_end_two_rounds_are_allowed(context, clock, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "LATE_S", 3.0)
    stop: list[bool] = []
    watch = TrialWatch(context, lambda _: None, lambda: bool(stop))
    assert watch.allowed_s(is_late=True) == 3.0
    watch.patience.learn("sign", 5.0)
    assert watch.allowed_s(is_late=True) == 10.0
    watch.step([trial(0)])
    assert not context.cache.is_late()
    stop.append(True)
    clock.time += 11
    watch.step([trial(0)])
    assert context.cache.is_late()
    assert clock.killed == ["actor 0"]


def test_a_sweep_stops_when_process_after_process_dies(context) -> None:
    watch = TrialWatch(context, lambda _: None)
    for _ in range(MOST_LOST - 1):
        watch.on_trial_error()
    watch.on_trial_complete()
    for _ in range(MOST_LOST):
        assert not context.cache.is_late()
        watch.on_trial_error()
    assert context.cache.is_late()


def test_who_asks_whether_it_is_over_shows_that_it_goes_on(context) -> None:
    cache = replace(context.cache, alive=alive_file(context.folder, 3))
    assert not cache.alive.exists()
    assert not cache.is_over()
    assert cache.alive.exists()
    context.cache.wish.touch()
    assert cache.is_over()


def test_every_block_of_clients_is_a_sign_of_life(tmp_path, monkeypatch) -> None:
    """Six clients, one a block, all of whom train in each of two rounds and then once more, to be
    evaluated after fine-tuning."""
    signs: list[Path] = []
    monkeypatch.setattr(Cache, "show_life", lambda cache: signs.append(cache.alive))
    execution = {"block": 1, "device": "cpu"}
    plain = {**TINY, "rounds": 2, "participation": 1.0, "execution": execution}
    plain["evaluate"] = {"fine_tune": {"epochs": 1}}
    space = parse_space({"experiment": plain, "space": {"train.lr": [0.1]}})
    (tmp_path / ROWS).mkdir()
    context = TrialContext(tmp_path, Cache(tmp_path, "a", "b"), {}, False, frozenset())
    (row,) = expand(space)
    assert run_row(row, context).status == "done"
    assert len(signs) >= 2 * (6 + 6)
    assert set(signs) == {alive_file(tmp_path, row.number)}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_a_stopped_trial_does_not_hold_a_sweep_that_is_to_end(tmp_path, monkeypatch) -> None:
    """The process of the second row is stopped in its rounds, then the sweep is told to stop."""
    monkeypatch.setattr(tuning, "LATE_S", 10.0)
    experiment = {**TINY, "rounds": 150, "evaluate": {"every": 50}}
    space = parse_space(
        {"experiment": experiment, "space": {"train.lr": [0.1, 0.2]}, "concurrency": 1}
    )
    out, stopped = tmp_path / "out", []

    def stop_the_second(_progress) -> None:
        if alive_file(out, 1).exists() and not stopped:
            for pid in processes_below("ray::ImplicitFunc"):  # in which Tune runs a trial
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

    result = run_sweep(space, out, watch=Watch(stop_the_second, should_stop=lambda: bool(stopped)))
    states = read_rows(out)
    assert len(stopped) == 1
    assert (states[0].status, states[1].status) == ("done", "unfinished")
    assert (result.report["done"], result.report["unfinished"]) == (1, 1)
    assert not Path(f"/proc/{stopped[0]}").exists()
    rest = run_sweep(space, out, resume=True)
    alone = run_experiment(parse_experiment(states[1].plain), tmp_path / "alone")
    assert rest.table["params_sha256"].iloc[1] == alone.summary["params_sha256"]

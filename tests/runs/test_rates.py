"""Learning rates over rounds: laws of whole runs."""

import math

import numpy as np
import pytest

from flray.algorithms.scaffold import Scaffold
from flray.config.experiment import parse_experiment
from flray.engines.rates import RateSchedule
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory

from linear import gradient, linear_federation, vector
from scenarios import run_experiment, sha, some_long, tiny_experiment

HALVED = "train.lr={start: 0.1, decay: 0.5, every: 2}"  # 0.1 in rounds 1 and 2, then 0.05


def test_a_decay_of_one_is_a_plain_number(known_run) -> None:
    assert sha(known_run("train.lr={start: 0.1}")) == sha(known_run())


@pytest.mark.parametrize("engine", some_long(["loop", "vectorized", "lightning"], ["vectorized"]))
def test_each_round_has_its_own_rate(tiny_run, tmp_path, engine) -> None:
    """Two rounds with 0.1, then two with 0.05, are the schedule's bits in every engine."""
    execution = f"execution.engine={engine}"
    rounds = iter(range(4))
    by_hand = {"out": tmp_path / "by_hand", "should_stop": lambda: next(rounds) == 1}
    tiny_run(execution, **by_hand)
    scheduled = tiny_run(execution, HALVED)
    changed = ["train.lr=0.05", execution]
    assert sha(scheduled) == sha(resumed_with(tmp_path / "by_hand", changed))
    assert sha(scheduled) != sha(tiny_run(execution))


def resumed_with(out, changes):
    """The run in a directory, gone on with other settings."""
    experiment = tiny_experiment(*changes)
    keys = [change.partition("=")[0] for change in changes]
    RunDirectory(out).change_settings(experiment.plain, keys)
    return run_experiment(experiment, out, resume=True)


@pytest.mark.parametrize("lr", ["{start: 0.1, decay: 0.7}", "{start: 0.1, schedule: cosine}"])
def test_a_stopped_run_goes_on_to_the_same_bits(tiny_run, tmp_path, lr) -> None:
    rounds = iter(range(4))
    out = tmp_path / "stopped"
    tiny_run(f"train.lr={lr}", out=out, should_stop=lambda: next(rounds) == 1)
    assert sha(tiny_run(f"train.lr={lr}", out=out, resume=True)) == sha(tiny_run(f"train.lr={lr}"))


def test_scaffold_divides_by_the_rate_of_its_round() -> None:
    """y_i = x - eta (g_i - c_i + c), so (x - y_i) / eta - c + c_i is g_i(x), whatever eta is."""
    clients = [[(1, 2), (2, 3)], [(3, 1), (1, 0)]]
    training = Training(lr=RateSchedule(0.1, decay=0.5), batch_size=2)
    fed, scaffold = linear_federation(clients, training).during(1), Scaffold()
    state = scaffold.init(fed).state
    for t in (1, 2):
        x, now = vector(state.bank), fed.during(t)
        state = scaffold.round(state, scaffold.cohort(state, t, now), now).state
    assert now.training.eta == 0.05
    for i, own in enumerate(clients):
        c_i = {name: leaf.item() for name, leaf in state.c_i.of_clients(np.array([i])).items()}
        expected = gradient(x, own)
        assert list(c_i.values()) == pytest.approx(expected.tolist(), rel=1e-9)


def test_a_cosine_takes_the_rounds_of_the_experiment() -> None:
    cosine = "train.lr={start: 0.2, schedule: cosine, end: 0.1}"
    experiment = tiny_experiment(cosine, "rounds=8")
    assert experiment.plain["train"]["lr"]["rounds"] == 8
    assert parse_experiment(experiment.plain).plain == experiment.plain
    rates = [experiment.settings.train.at(t).lr for t in range(1, 10)]
    expected = [0.15 + 0.05 * math.cos(math.pi * k / 8) for k in range(9)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_a_rate_is_never_zero() -> None:
    for lr in ("{start: 1.0, decay: 0.1}", "{start: 1.0, schedule: cosine}"):
        experiment = tiny_experiment(f"train.lr={lr}")
        assert experiment.settings.train.at(1_000_000_000).eta > 0


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{lr: {start: 0}}", "train.lr: start must be > 0"),
        ("{lr: {start: 0.1, decay: 1.5}}", r"train.lr: decay must be in \(0, 1\]"),
        ("{lr: {start: 0.1, every: 0}}", "train.lr: every must be >= 1"),
        ("{lr: {start: 0.1, end: 0.2}}", r"train.lr: end must be in \[0, start\]"),
        ("{lr: {start: 0.1, rounds: 5}}", "rounds belongs to schedule cosine"),
        ("{lr: {start: 0.1, schedule: cosine, decay: 0.9}}", "belong to schedule decay"),
        ("{lr: {begin: 0.1}}", "unknown key 'train.lr.begin'"),
        ("{lr: {decay: 0.9}}", "missing key 'train.lr.start'"),
        ("{lr: often}", "train.lr must be a number, got 'often'"),
        ("{lr: {start: 0.1}, optimizer: module}", "does nothing with optimizer module"),
    ],
)
def test_bad_schedules_are_refused(train, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny_experiment(f"train={train}")

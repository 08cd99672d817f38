"""Runs that end before their last round, and the best round by validation."""

import numpy as np
import pytest
from rich.console import Console

from flray.cli import concluding
from flray.columns import VALIDATION_ACCURACY_MEAN
from flray.errors import ExperimentError
from flray.measures.stopping import Stop
from flray.records.run_directory import RunDirectory

from scenarios import run_experiment, tiny_experiment

LONG = ["rounds=12", "train.lr=0.3", "participation=1"]


def numbers(result) -> dict:
    return {key: value for key, value in result.summary.items() if key != "seconds"}


def validation(result) -> np.ndarray:
    return result.rounds[VALIDATION_ACCURACY_MEAN].to_numpy()


def end_by_patience(scores: np.ndarray, patience: int) -> int:
    """The round after which `patience` rounds in a row had no new best score; from 1."""
    for t in range(1, len(scores) + 1):
        if t - 1 - int(scores[:t].argmax()) >= patience:
            return t
    return len(scores)


def test_patience_ends_where_the_whole_run_stopped_improving(tiny_run, known_run) -> None:
    whole = known_run(*LONG)
    end = end_by_patience(validation(whole), patience=2)
    assert 2 < end < 12
    stopped = tiny_run(*LONG, "stop.patience=2")
    assert (stopped.summary["rounds"], stopped.summary["ended_by"]) == (end, "patience")
    assert stopped.rounds["round"].tolist() == list(range(1, end + 1))
    short = known_run(*LONG, f"rounds={end}")
    assert stopped.summary["params_sha256"] == short.summary["params_sha256"]
    assert "ended_by" not in whole.summary


def test_a_target_ends_where_it_is_reached_first(tiny_run, known_run) -> None:
    scores = validation(known_run(*LONG))
    target = float(np.sort(scores)[len(scores) // 2])
    stopped = tiny_run(*LONG, f"stop.target={target}")
    end = int(np.argmax(scores >= target)) + 1
    assert (stopped.summary["rounds"], stopped.summary["ended_by"]) == (end, "target")


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.long), 3])
def test_an_interrupted_run_ends_in_the_same_round(tiny_run, tmp_path, rounds) -> None:
    whole = tiny_run(*LONG, "stop.patience=2")
    seen: list[dict] = []
    out = tmp_path / "interrupted"
    given = {"out": out, "on_round": seen.append, "should_stop": lambda: len(seen) >= rounds}
    assert tiny_run(*LONG, "stop.patience=2", **given).summary is None
    resumed = tiny_run(*LONG, "stop.patience=2", out=out, resume=True)
    assert numbers(resumed) == numbers(whole)


def test_a_run_that_was_cut_off_before_its_summary_trains_no_more(tiny_run, tmp_path) -> None:
    out = tmp_path / "run"
    whole = tiny_run(*LONG, "stop.patience=2", out=out)
    RunDirectory(out).reopen()
    seen: list[dict] = []
    again = tiny_run(*LONG, "stop.patience=2", out=out, resume=True, on_round=seen.append)
    assert (seen, numbers(again)) == ([], numbers(whole))


def test_the_end_of_a_command_says_why_it_came_early(tiny_run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(concluding, "write_figures", lambda *_: [])
    ended = tiny_run(*LONG, "stop.target=0.01")
    concluding.show_results({ended.path: "mine"}, Console(width=200))
    assert "(ended by stop.target after round 1)" in capsys.readouterr().out


def test_an_ended_run_is_finished_until_it_is_given_another_rule(tiny_run, tmp_path) -> None:
    out = tmp_path / "run"
    ended = tiny_run(*LONG, "stop.patience=2", out=out)
    patient = tiny_experiment(*LONG, "stop.patience=3")
    directory = RunDirectory(out)
    assert directory.is_finished(directory.config())
    assert not directory.is_finished(patient.plain)
    directory.change_settings(patient.plain, ["stop"])
    longer = run_experiment(patient, out, resume=True)
    assert longer.summary["rounds"] == ended.summary["rounds"] + 1


def test_rounds_before_a_clustering_do_not_count(tiny_run) -> None:
    """With patience 1 and rounds 1 to 6 before it, the run goes on at least to round 8."""
    clustered = "algorithm={name: flhc, rounds_before: 6}"
    stopped = tiny_run(*LONG, clustered, "stop={patience: 1, target: 0.01}")
    assert stopped.summary["rounds"] == 7
    assert stopped.summary["ended_by"] == "target"


def test_patience_counts_evaluations(tiny_run) -> None:
    rounds = tiny_run(*LONG, "stop.patience=1", "evaluate.every=3").summary["rounds"]
    assert rounds % 3 == 0


def test_the_best_round_is_the_first_with_the_highest_validation_score(known_run) -> None:
    run = known_run(*LONG)
    best = int(validation(run).argmax())
    assert run.summary["best_round"] == best + 1
    for name in ("accuracy_mean", VALIDATION_ACCURACY_MEAN):
        assert run.summary[f"{name}_at_best_round"] == run.rounds[name][best]


def test_test_data_decide_nothing(tiny_run) -> None:
    with pytest.raises(ExperimentError, match=r"set split\.validation > 0 or leave stop out"):
        tiny_run("stop.patience=2", "split.validation=0")
    assert "best_round" not in tiny_run("split.validation=0", "rounds=1").summary


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("{}", "stop: give target or patience"),
        ("{target: 90}", r"stop.target must be in \(0, 1\], got 90"),
        ("{patience: 0}", "stop: patience must be >= 1"),
    ],
)
def test_bad_rules_are_refused(stop, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny_experiment(f"stop={stop}")


def test_a_score_that_is_only_equalled_is_no_improvement() -> None:
    assert Stop(patience=1).reason([0.5, 0.5]) == "patience"
    assert Stop(patience=1).reason([]) is None

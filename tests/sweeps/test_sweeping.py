"""What `flray sweep` says."""

import os
import re
import signal
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import yaml
from rich.console import Console

from flray.cli import sweeping
from flray.config.shipped import demo_files, is_space
from flray.errors import ClientFailure, ExperimentError
from flray.sweeps.driver import Progress, SweepResult

from scenarios import TINY

REPORT = {
    **{"rows": 3, "done": 1, "shared": 1, "failed": 1, "stopped": 0, "unfinished": 0},
    **{"client_steps_trained": 1000, "client_steps_naive": 2500, "ratio": 2.5},
    "metric": "validation_accuracy_mean",
    "best": {
        **{"rows": [0, 1], "sets": {"train.lr": 0.1}, "validation_accuracy_mean": 0.9},
        **{"uses_ground_truth": False, "missing_rows": [], "left_out": 0},
    },
}


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Run the command over a sweep that only pretends: what it printed."""
    (tmp_path / "space.yaml").write_text(
        yaml.safe_dump({"experiment": TINY, "space": {"train.lr": [0.1, 0.2]}})
    )

    def say(report, run=None) -> str:
        table = pd.DataFrame({"row": [0, 1, 2], "status": "failed", "error": "no luck"})
        table.loc[: 2 - report["failed"], ["status", "error"]] = ["done", None]

        def pretend(_space, folder, *rest) -> SweepResult:
            show = rest[-1].show
            show(Progress(rows=3, rounds=[(0, 9), (0, 9)]))
            show(Progress(rows=3, rounds=[(1, 9)]))
            show(Progress(rows=3, done=2, rounds=[(2, 9)], shared=1, best=0.9))
            return SweepResult(folder, report, table)

        monkeypatch.setattr(sweeping, "run_sweep", run or pretend)
        # The sheet of the best rows reads files, which are not there
        monkeypatch.setattr(sweeping, "read_sweep", lambda _: None)
        monkeypatch.setattr(sweeping, "top_sheet", lambda _: None)
        monkeypatch.setattr(sweeping, "to_rich", lambda _: "the best rows")
        text = StringIO()
        console = Console(file=text, width=200, highlight=False)
        space = str(tmp_path / "space.yaml")
        sweeping.sweep([space, "rounds=2"], tmp_path / "out", False, None, console)
        return text.getvalue()

    return say


def test_long_rows_have_a_line_now_and_then(said, monkeypatch) -> None:
    """A line when the first rows run, and another after more than a minute.

    Nine of 30 rounds in 120 s leave 280 s, though no row has ended.
    """
    clock = [0.0]
    monkeypatch.setattr(sweeping, "perf_counter", lambda: clock[0])

    def wait(_space, folder, *rest) -> SweepResult:
        rest[-1].show(Progress(rows=3))
        for t in (0, 1, 3):
            clock[0] = 40.0 * t
            rest[-1].show(Progress(rows=3, rounds=[(t, 10), (2 * t, 10)]))
        return SweepResult(
            folder, REPORT, pd.DataFrame({"row": [0], "status": "done", "error": None})
        )

    lines = said(REPORT, wait).splitlines()
    assert lines[1:4] == [
        "0/3 rows done · 0 running",
        "0/3 rows done · 2 running",
        "0/3 rows done · 2 running after 3 to 6 of 10 rounds · 4:40 left",
    ]


def test_the_time_left_of_a_resumed_sweep_is_that_of_rows_done_since(said, monkeypatch) -> None:
    """Eight of ten rows were done before, and half of the ninth, whose rest takes 60 s."""
    clock = [0.0]
    monkeypatch.setattr(sweeping, "perf_counter", lambda: clock[0])

    def resume(_space, folder, *rest) -> SweepResult:
        for clock[0], done, last in ((1.0, 8, 5), (60.0, 9, 0)):
            rest[-1].show(Progress(rows=10, done=done, rounds=[(last, 10)]))
        table = pd.DataFrame({"row": [0], "status": "done", "error": None})
        return SweepResult(folder, REPORT, table)

    assert said(REPORT, resume).splitlines()[1:3] == [
        "8/10 rows done · 1 running after 5 of 10 rounds",
        "9/10 rows done · 1 running · 2:00 left",
    ]


def test_a_sweep_ends_in_its_best_its_failures_and_its_cost(said) -> None:
    lines = said(REPORT).splitlines()
    assert lines[1:3] == [
        "0/3 rows done · 2 running",
        "2/3 rows done (1 shared) · 1 running after 2 of 9 rounds · "
        "best validation_accuracy_mean 0.9000 · 0:00 left",
    ]
    assert lines[3:8] == [
        "3 rows: 1 done, 1 shared, 1 failed",
        "1,000 client steps trained where 2,500 would have been (2.5 times fewer)",
        "best validation_accuracy_mean 0.9000 (rows [0, 1]): train.lr=0.1",
        "the best rows",
        "1 failed (row 2): no luck",
    ]


def test_a_best_that_used_ground_truth_is_marked(said) -> None:
    lines = said(REPORT | {"best": REPORT["best"] | {"uses_ground_truth": True}}).splitlines()
    assert "best validation_accuracy_mean 0.9000 † (rows [0, 1]): train.lr=0.1" in lines
    assert "† uses ground truth: labels or groups that a real server does not know." in lines
    assert "†" not in said(REPORT)


def test_a_best_with_missing_seeds_is_marked(said) -> None:
    best = REPORT["best"] | {"rows": [0], "missing_rows": [1], "left_out": 0}
    lines = said(REPORT | {"best": best}).splitlines()
    place = lines.index("best validation_accuracy_mean 0.9000 ‡ (rows [0]): train.lr=0.1")
    assert lines[place + 1] == (
        "‡ its rows [1] failed or did not finish; no configuration is complete"
    )


def test_configurations_that_were_left_out_are_counted(said) -> None:
    lines = said(REPORT | {"best": REPORT["best"] | {"left_out": 2}}).splitlines()
    assert (
        "2 configurations are left out of this choice: some of their rows failed or did not finish"
    ) in lines


def test_a_sweep_of_failures_alone_has_failed(said) -> None:
    nothing = {"done": 0, "shared": 0, "failed": 3, "best": None, "ratio": None}
    with pytest.raises(ClientFailure, match="all 3 rows failed: no luck"):
        said(REPORT | nothing)


def test_a_sweep_out_of_time_says_how_to_go_on(said) -> None:
    text = said(REPORT | {"unfinished": 1})
    (command,) = re.findall("stopped; go on with: flray sweep --out (.*) --resume", text)
    assert Path(command).name == "out"


def test_spaces_and_experiments_are_told_apart(tmp_path) -> None:
    spaces = sorted((Path(__file__).parents[2] / "tune_spaces").glob("*.yaml"))
    assert len(spaces) > 0
    assert all(is_space(path) for path in spaces)
    assert len(demo_files()) > 0
    assert not any(is_space(path) for path in demo_files())
    with pytest.raises(ExperimentError, match="takes one space file"):
        sweeping.sweep(["a=1"], tmp_path, False, None, Console())
    with pytest.raises(ExperimentError, match=r"type flray sweep --out .* --resume"):
        sweeping.sweep(["a=1"], tmp_path, True, None, Console())


def test_sigterm_to_a_sweep_is_a_wish_to_stop(said) -> None:
    """The sweep is asked whether it should stop, and the command says how to go on."""
    before = signal.getsignal(signal.SIGTERM)
    asked: list[bool] = []
    text = said({**REPORT, "unfinished": 1})
    assert "SIGTERM" not in text
    pretended = sweeping.run_sweep

    def notified(*arguments) -> SweepResult:
        should_stop = arguments[-1].should_stop
        asked.append(should_stop())
        os.kill(os.getpid(), signal.SIGTERM)
        asked.append(should_stop())
        return pretended(*arguments)

    text = said({**REPORT, "unfinished": 1}, notified)
    assert asked == [False, True]
    assert "SIGTERM: stopping after the round in progress" in text
    assert "stopped; go on with: flray sweep" in text
    assert signal.getsignal(signal.SIGTERM) is before

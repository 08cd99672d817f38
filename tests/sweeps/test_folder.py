"""A sweep's folder: what it may hold, its table, and what is best in it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from recorded import write_sweep

from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory
from flray.reports.sweep_tables import top_sheet
from flray.reports.sweeps import read_sweep
from flray.sweeps.driver import run_sweep
from flray.sweeps.folder import check_folder, open_folder, run_path
from flray.sweeps.rows import SweepRow
from flray.sweeps.space import Options, parse_space
from flray.sweeps.table import best_of, table_of, write_table

from scenarios import TINY

SPACE = parse_space({"experiment": TINY, "space": {"seed": [0, 1]}})


def test_the_table_says_of_each_row_whether_ground_truth_was_used(tmp_path) -> None:
    """Also of one that was stopped; what was allowed, here as a baseline's key, is not shown."""
    states = []
    for number, (used, is_done) in enumerate([(True, True), (False, True), (True, False)]):
        state = SweepRow(number, {"uses_ground_truth": True}, {}, run="key", status="done")
        directory = RunDirectory(tmp_path / run_path(number))
        directory.start({"seed": 0}, {}, "digest")
        row = {"round": 1, "accuracy_mean": 0.5, "validation_accuracy_mean": 0.5}
        directory.append_rounds([row | ({"ground_truth_reads": 1} if used else {})])
        if is_done:
            directory.finish({**row, "uses_ground_truth": used})
        else:
            directory.append_rounds([{"round": 2, "seconds": 1.0}])
        states.append(state if is_done else replace(state, status="stopped"))
    states.append(SweepRow(3, {"uses_ground_truth": True}, {}))
    table = table_of(tmp_path, states)
    assert table["uses_ground_truth"].tolist()[:3] == [True, False, True]
    assert table["rounds"].tolist()[2:3] == [2]
    assert table["accuracy_mean"].tolist()[2:3] == [0.5]  # of round 1, which was evaluated
    assert pd.isna(table["uses_ground_truth"].iloc[3])
    write_table(tmp_path, table)
    assert pd.read_parquet(tmp_path / "rows.parquet")["uses_ground_truth"].iloc[0] is True


def test_rounds_that_rows_vary_are_settings_also_of_a_run_that_ended_early(tmp_path) -> None:
    """Else a seed that failed in its second round would not be a seed of its configuration."""
    for number in (0, 1):
        directory = RunDirectory(tmp_path / run_path(number))
        directory.start({"seed": 0}, {}, "digest")
        directory.append_rounds([{"round": 1, "seconds": 1.0}, {"round": 2, "seconds": 1.0}])
    plain = {"rounds": 50, "uses_ground_truth": True}
    rows = [
        SweepRow(0, {"method": "scaffold"}, plain, run="a", status="failed"),
        SweepRow(1, {"method": "fedala", "rounds": 20}, plain | {"rounds": 20}, run="b"),
        SweepRow(2, {"uses_ground_truth": True}, plain),
    ]
    table = table_of(tmp_path, rows)
    assert table["rounds"].tolist()[:2] == [50, 20]
    assert table_of(tmp_path, rows[:1])["rounds"].tolist() == [2]  # nobody varies them
    assert table["uses_ground_truth"].tolist() == [False, False, None]  # allowed, not used


def seeds_of(values: dict[float, list[float | None]]) -> tuple[list[SweepRow], dict[int, dict]]:
    """Rows by learning rate and seed with their validation accuracy; None: it failed."""
    rows, summaries = [], {}
    for lr, accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            status = "failed" if accuracy is None else "done"
            row = SweepRow(len(rows), {"train.lr": lr, "seed": seed}, {}, status=status)
            rows.append(row)
            if accuracy is not None:
                measured = dict.fromkeys(("validation_accuracy_mean", "accuracy_mean"), accuracy)
                summaries[row.number] = {"uses_ground_truth": lr > 0.15, **measured}
    return rows, summaries


def test_a_configuration_with_a_failed_seed_wins_only_where_none_is_complete() -> None:
    """0.1 is better in the one seed that it survived."""
    best = best_of(*seeds_of({0.1: [0.9, None], 0.2: [0.7, 0.8], 0.3: [0.6, 0.7]}), Options())
    assert best["sets"] == {"train.lr": 0.2}
    assert best["validation_accuracy_mean"] == pytest.approx(0.75)
    assert (best["rows"], best["missing_rows"], best["left_out"]) == ([2, 3], [], 1)
    assert best["uses_ground_truth"] is True
    best = best_of(*seeds_of({0.1: [None, 0.9], 0.2: [0.7, None], 0.3: [None, None]}), Options())
    assert best["sets"] == {"train.lr": 0.1}
    assert (best["rows"], best["missing_rows"], best["left_out"]) == ([1], [0], 0)
    assert best["uses_ground_truth"] is False
    assert best_of(*seeds_of({0.1: [None, None]}), Options()) is None


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_of_a_sweep_is_the_first_of_its_table_and_page(tmp_path, mode) -> None:
    """Ten sweeps with ties; what failed is drawn too: of some, of every configuration, of all."""
    rng, bests = np.random.default_rng(0), []
    for place in range(10):
        failed = rng.random((5, 3)) < [0.0, 0.2, 0.5, 0.8, 1.0][place % 5]
        accuracies = np.where(failed, np.nan, rng.integers(3, size=(5, 3)) / 10).round(1)
        given = {
            0.1 * k: [None if np.isnan(a) else a for a in own] for k, own in enumerate(accuracies)
        }
        rows, summaries = seeds_of(given)
        for number in summaries:  # few values, so that these tie too
            loss, clusters = rng.integers(2, size=2).tolist()
            summaries[number] |= {"validation_loss_mean": loss, "clusters": clusters}
        best = best_of(rows, summaries, Options(mode=mode))
        frame = pd.DataFrame(
            [
                {**row.overrides, "status": row.status, **summaries.get(row.number, {})}
                for row in rows
            ]
        )
        folder = write_sweep(tmp_path / str(place), frame, mode=mode)
        page = read_sweep(folder)
        if best is None:
            assert page.best.empty
            continue
        bests.append(best)
        assert page.best["train.lr"].tolist() == [best["sets"]["train.lr"]]
        assert page.best["missing_rows"].tolist() == [len(best["missing_rows"])]
        assert page.best["validation_accuracy_mean"].tolist() == pytest.approx(
            [best["validation_accuracy_mean"]]
        )
        assert page.num_left_out == best["left_out"]
        top = top_sheet(page).labels
        assert top["rank"].iloc[0].startswith("1")
        assert float(top["lr"].iloc[0]) == pytest.approx(best["sets"]["train.lr"])
    assert len(bests) == 8
    assert {bool(best["missing_rows"]) for best in bests} == {True, False}
    assert any(best["left_out"] for best in bests)


def test_a_folder_with_something_else_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ExperimentError, match=r"something that is not a sweep \(thesis.tex\)"):
        run_sweep(SPACE, tmp_path)
    with pytest.raises(ExperimentError, match="nothing to resume"):
        run_sweep(SPACE, tmp_path / "none", resume=True)


def test_a_start_that_was_killed_before_it_was_a_sweep_is_no_obstacle(tmp_path) -> None:
    open_folder(tmp_path, SPACE, {})
    check_folder(tmp_path, SPACE, {}, resume=True)
    with pytest.raises(ExperimentError, match="--resume"):
        check_folder(tmp_path, SPACE, {}, resume=False)
    (tmp_path / "space.yaml").rename(tmp_path / "space.yaml.tmp")  # what is written last
    check_folder(tmp_path, SPACE, {}, resume=False)

"""Measures of clusterings: tables and figures show the numbers that are recorded."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from recorded import write_run, write_sweep

from flray.reports.measures import errors_by_round, experiments_sheet, run_sheet
from flray.reports.runs import RunRecord
from flray.reports.sweep_curves import (
    clustering_error_figure,
    correlation_figure,
    error_figure,
    uniformity_figure,
)
from flray.reports.sweep_figures import evolution_figure
from flray.reports.sweeps import Sweep, read_sweep

NUMBER = "algorithm.clustering.partition.number"
ERRORS = {"overlap_fp": 1.0, "overlap_fn": 2.0, "equal_fp": 3.0, "equal_fn": 0.5}


def record(rows, summary) -> RunRecord:
    """A run that is not on disk."""
    run = RunRecord(Path(), {"seed": 0}, summary)
    vars(run).update(rounds=pd.DataFrame(rows))
    return run


def row(t, scale=1.0, **more):
    return {"round": t} | {f"clustering_{k}": scale * v for k, v in {**ERRORS, **more}.items()}


class TestSheets:
    def test_a_run_has_a_row_for_each_clustering_and_one_for_all(self) -> None:
        rows = [row(1), {"round": 2}, row(3, scale=3.0)]
        sheet = run_sheet(record(rows, {"overlap_fp": 2.0}), [1, 3])
        assert list(sheet.labels["after"]) == ["round 1", "round 3", "whole run"]
        values = sheet.cells["value"]
        assert values["round 3", "overlap_fn", "ours"] == 6.0
        assert values["whole run", "overlap_fp", "ours"] == 2.0
        assert "uniformity" not in {heading.key for heading in sheet.headings}
        assert len(sheet.notes) == 1

    def test_a_clustering_at_the_start_is_in_the_row_of_round_1(self) -> None:
        more = {"robustness": 0.9, "robustness_se": 0.02}
        sheet = run_sheet(record([row(1, **more)], {}), [0])
        assert list(sheet.labels["after"]) == ["at the start"]
        assert sheet.lines()["at the start", "robustness"]["ours"] == "0.90 ± 0.02"
        assert "standard error over clusters" in sheet.notes[-1]

    def test_experiments_are_means_over_seeds(self) -> None:
        seeds = [record([], {"overlap_fp": 1.0, "uniformity": u}) for u in (0.25, 0.75)]
        sheet = experiments_sheet({"repa": seeds, "fedavg": [record([], {"clusters": 1})]})
        assert list(sheet.labels.index) == ["repa"]
        cell = sheet.cells.loc[("repa", "uniformity", "ours")]
        assert cell["value"] == 0.5
        assert cell["error"] == pytest.approx(np.sqrt(0.125))
        assert "standard deviation over seeds" in sheet.notes[-1]

    def test_a_value_of_one_seed_has_the_error_of_that_seed(self) -> None:
        """The first seed has no robustness, but an error of a former clustering."""
        numbers = (
            {"uniformity": 0.5, "robustness_se": 0.3},
            {"robustness": 0.9, "robustness_se": 0.02},
        )
        sheet = experiments_sheet({"repa": [record([], n) for n in numbers]})
        assert sheet.lines()["repa", "robustness"]["ours"] == "0.90 ± 0.02"

    def test_nothing_measured_is_no_table(self) -> None:
        assert experiments_sheet({"fedavg": [record([], {"clusters": 1})]}) is None
        assert run_sheet(record([{"round": 1}], {}), [1]) is None
        assert errors_by_round(record([{"round": 1}], {})).empty


def test_errors_of_a_run_are_stacked_by_round() -> None:
    errors = errors_by_round(record([row(1), {"round": 2}, row(3)], {}))
    assert errors.index.tolist() == [1, 3]
    by_overlap, by_equal = error_figure(errors).axes
    wrong, lacking = (patch.get_data() for patch in by_overlap.patches)
    assert wrong.values.tolist() == [1.0, 1.0]
    assert lacking.values.tolist() == [3.0, 3.0]  # 1 + 2
    assert lacking.baseline.tolist() == [1.0, 1.0]
    assert by_equal.patches[1].get_data().values.tolist() == [3.5, 3.5]


def sweep(path: Path) -> Sweep:
    rows = [
        {
            "algorithm.name": name,
            NUMBER: float(k),
            "accuracy_mean": 0.5,
            "uniformity": k / 20 if name == "repa" else k / 40,
            "uniformity_random": 0.1,
            "uniformity_labels": 0.9,
            "label_correlation": 0.3 if name == "repa" else 0.6,
            "overlap_fp": 10.0 - k,
            "overlap_fn": float(k),
            "run": f"runs/{name}{k}",
        }
        for name in ("repa", "wd")
        for k in (2, 4, 8)
    ]
    return read_sweep(write_sweep(path / "s", rows))


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


class TestSweepFigures:
    def test_uniformity_stands_between_its_references(self, tmp_path) -> None:
        figure = uniformity_figure(sweep(tmp_path), NUMBER)
        drawn = list(lines(figure.axes[0]).values())
        for by_labels, found, random in ((0.9, [0.1, 0.2, 0.4], 0.1), (0.9, [0.05, 0.1, 0.2], 0.1)):
            for heights in ([by_labels] * 3, found, [random] * 3):
                assert [[k, y] for k, y in zip((2, 4, 8), heights, strict=True)] in drawn
        assert len(figure.legends[0].get_texts()) == 4  # repa, wd and the references

    def test_correlations_have_a_panel_each(self, tmp_path) -> None:
        (axes,) = correlation_figure(sweep(tmp_path), NUMBER).axes
        assert axes.get_ylabel() == "correlation with labels"
        heights = sorted({y for line in axes.lines for y in line.get_ydata()})
        assert heights == [0.3, 0.6]

    def test_the_clustering_error_is_the_sum_of_its_parts(self, tmp_path) -> None:
        total, wrong, lacking = clustering_error_figure(sweep(tmp_path), NUMBER).axes
        assert total.lines[0].get_ydata().tolist() == [10.0] * 3
        assert wrong.lines[0].get_ydata().tolist() == [8.0, 6.0, 2.0]
        assert lacking.lines[0].get_ydata().tolist() == [2.0, 4.0, 8.0]

    def test_the_course_of_training_by_a_setting(self, tmp_path) -> None:
        found = sweep(tmp_path)
        for k in (2, 4, 8):
            rows = [{"round": t, "validation_accuracy_mean": t * k / 100} for t in (1, 2)]
            write_run(found.path / f"runs/repa{k}", (), None, rows)
        (axes,) = evolution_figure(found, NUMBER).axes
        heights = sorted(line.get_ydata().tolist() for line in axes.lines if len(line.get_xdata()))
        assert heights == [[2.0, 4.0], [4.0, 8.0], [8.0, 16.0]]

    def test_without_runs_there_is_no_course(self, tmp_path) -> None:
        assert evolution_figure(sweep(tmp_path), NUMBER) is None

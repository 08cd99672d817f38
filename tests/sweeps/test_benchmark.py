"""A part of the shipped benchmark on digits, run: budgets, marks, sharing, ranks."""

import pytest

import flray
from flray.config.experiment import parse_experiment
from flray.records.run_directory import RunDirectory
from flray.reports.benchmark import benchmarks_of, ranking_sheet
from flray.reports.sweeps import read_sweep

PART = ["methods=fedavg,local,given,flhc", "splits=label_swap,dirichlet", "seeds=2"]


@pytest.mark.long
def test_a_part_of_the_benchmark_runs_and_is_ranked(tmp_path) -> None:
    result = flray.sweep("clustered_benchmark_digits", tmp_path / "part", PART)
    table = result.table
    # given: not on dirichlet; flhc: two numbers of clusters.
    assert len(table) == 2 * (1 + 1 + 2) * 2 + 2
    assert set(table["status"]) <= {"done", "shared"}
    assert result.report["ratio"] > 1  # FL+HC and the given groups share FedAvg's first rounds
    budget = table[table["method"] == "fedavg"].set_index(["experiment", "seed"])["client_steps"]
    steps = table.set_index(["experiment", "seed"])["client_steps"]
    assert (steps <= 1.15 * budget.reindex(steps.index)).all()
    assert set(table.loc[table["uses_ground_truth"].astype(bool), "method"]) == {"given"}
    sweep = read_sweep(result.path)
    deployed, tuned = benchmarks_of(sweep)
    assert (tuned.protocol, len(tuned.scores)) == ("after local training", 4)
    assert deployed.scores["label_swap"].idxmax() == "given"
    assert deployed.is_complete.to_dict() == {m: m != "given" for m in deployed.scores.index}
    assert "†" in " ".join(ranking_sheet(sweep).notes)
    # One cell again, by itself, is the same run.
    row = RunDirectory(result.path / deployed.cells.loc["flhc", "label_swap"]["folder"])
    again = flray.run(parse_experiment(row.config()).plain, tmp_path / "again")
    assert again.summary["params_sha256"] == row.summary()["params_sha256"]

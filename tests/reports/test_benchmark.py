"""A sweep over methods and splits: what is chosen, ranked and shown."""

import csv
import io

import numpy as np
import pytest
from recorded import write_sweep

from flray.errors import ExperimentError
from flray.reports.benchmark import (
    all_numbers,
    benchmarks_of,
    is_benchmark,
    joined,
    ranking_sheet,
    score_sheet,
)
from flray.reports.benchmark_figures import dots_figure, methods_figure, ranks_figure
from flray.reports.page import render_page
from flray.reports.sweeps import read_sweep
from flray.reports.writers import numbers_of, to_csv, to_latex, to_markdown

from scenarios import typed

NUMBER = "algorithm.number"
METHODS = {
    "fedavg": {"algorithm": "fedavg"},
    "ifca": {"algorithm": "ifca", NUMBER: [2, 4]},
    "given": {"algorithm": "flhc", "told": "the groups"},
    "mine": {"algorithm": "my.module:Mine", NUMBER: 3},
}
# Test accuracy as deployed and after local training, by method and split; None: does not apply.
TEST = {
    "fedavg": {"swap": (0.6, 0.8), "rotation": (0.7, 0.7), "dirichlet": (0.5, 0.9)},
    "ifca": {"swap": (0.8, 0.8), "rotation": (0.6, 0.9), "dirichlet": (0.4, 0.8)},
    "given": {"swap": (0.9, 0.7), "rotation": (0.65, 0.6)},
    "mine": {"swap": (0.6, 0.9), "rotation": (0.9, 0.8), "dirichlet": (0.6, 0.7)},
}


def row(method, split, seed, number=None, shift=0.0):
    """A finished row; seed 1 has two points more than the table, seed 0 two points less."""
    deployed, tuned = (x + shift + 0.04 * seed - 0.02 for x in TEST[method][split])
    return {
        **{"experiment": split, "method": method, "seed": seed, "status": "done", "error": None},
        **{NUMBER: number, "run": f"runs/{method}_{split}_{number}_{seed}"},
        **{"accuracy_mean": deployed, "tuned_accuracy_mean": tuned, "accuracy_worst": 0.1},
        **{"validation_accuracy_mean": deployed, "tuned_validation_accuracy_mean": tuned},
        **{"tuned_accuracy_worst": 0.2, "ari": 0.5, "client_steps": 900, "seconds": 2.0},
        **{"bytes_up": 1e6, "bytes_down": 2e6},
        "uses_ground_truth": "true" if method == "given" else "false",
    }


def rows():
    made = [
        row(method, split, seed, {"ifca": 4, "mine": 3}.get(method))
        for method, splits in TEST.items()
        for split in splits
        for seed in (0, 1)
    ]
    # By validation worse as deployed, better after local training; its test scores would be best.
    for split in TEST["ifca"]:
        for seed in (0, 1):
            other = row("ifca", split, seed, 2, shift=0.3)
            other |= {"validation_accuracy_mean": 0.1, "tuned_validation_accuracy_mean": 0.05}
            made.append(other)
    return made


@pytest.fixture
def sweep(tmp_path):
    return read_sweep(write_sweep(tmp_path / "bench", rows(), methods=METHODS))


def test_validation_chooses_and_test_scores_do_not(sweep) -> None:
    deployed, tuned = benchmarks_of(sweep)
    for benchmark, place in ((deployed, 0), (tuned, 1)):
        for method, splits in TEST.items():
            for split, scores in splits.items():
                assert benchmark.scores.loc[method, split] == pytest.approx(scores[place])
    assert np.isnan(deployed.scores.loc["given", "dirichlet"])
    cell = deployed.cells.loc["ifca", "swap"]
    assert (cell["settings"], cell["folder"]) == ("number 4", "runs/ifca_swap_4_0")
    assert cell["score_sd"] == pytest.approx(np.std([0.78, 0.82], ddof=1))


def test_sweeps_over_parts_of_the_splits_are_ranked_as_one(sweep, tmp_path) -> None:
    """Rows of a sweep over one split name none: the space does, or the folder."""
    swap = [r for r in rows() if r["experiment"] == "swap"]
    others = [r for r in rows() if r["experiment"] != "swap"]
    for each in swap:
        del each["experiment"]
    parts = {"swap": swap, "others": others}
    folders = [write_sweep(tmp_path / k, v, methods=METHODS) for k, v in parts.items()]
    both = typed("compare", *folders, "--format", "csv")
    assert both == all_numbers(sweep).to_csv(index=False)
    cell = benchmarks_of(joined(list(map(read_sweep, folders))))[0].cells.loc["ifca"]
    assert cell.loc["swap", "folder"] == str(tmp_path / "swap/runs/ifca_swap_4_0")
    named = write_sweep(tmp_path / "one", swap, methods=METHODS, experiment={"swapped": {}})
    assert list(benchmarks_of(read_sweep(named))[0].scores_of) == ["swapped"]


def test_one_method_on_one_split_is_first(tmp_path) -> None:
    alone = row("fedavg", "swap", 0)
    del alone[NUMBER], alone["experiment"]
    methods = {"fedavg": METHODS["fedavg"]}
    made = benchmarks_of(read_sweep(write_sweep(tmp_path / "swap", [alone], methods=methods)))
    assert made[0].ranks.loc["fedavg", "swap"] == 1.0


def test_sweeps_that_share_a_split_are_refused(sweep, tmp_path) -> None:
    write_sweep(tmp_path / "again", rows(), methods=METHODS)
    with pytest.raises(ExperimentError, match="split swap is in"):
        typed("compare", sweep.path, tmp_path / "again")


def test_each_protocol_chooses_by_its_own_validation(tmp_path) -> None:
    made = [r | {"tuned_validation_accuracy_mean": 1.0} if r[NUMBER] == 2 else r for r in rows()]
    deployed, tuned = benchmarks_of(
        read_sweep(write_sweep(tmp_path / "bench", made, methods=METHODS))
    )
    assert deployed.cells.loc["ifca", "swap"]["settings"] == "number 4"
    assert tuned.cells.loc["ifca", "swap"]["settings"] == "number 2"
    assert tuned.scores.loc["ifca", "swap"] == pytest.approx(1.1)


def test_mean_ranks_are_those_by_hand(sweep) -> None:
    """swap: ifca 1, fedavg and mine 2.5; rotation: mine, fedavg, ifca; dirichlet the same."""
    deployed, _ = benchmarks_of(sweep)
    means = deployed.mean_ranks
    assert means["mine"] == pytest.approx((2.5 + 1 + 1) / 3)
    assert means["fedavg"] == pytest.approx((2.5 + 2 + 2) / 3)
    assert means["ifca"] == pytest.approx((1 + 3 + 3) / 3)
    assert means["given"] == pytest.approx((1 + 3) / 2)  # among the three, in two splits
    assert deployed.is_complete.to_dict() == {m: m != "given" for m in TEST}


def test_lower_is_better_where_the_score_says_so(tmp_path) -> None:
    power = [
        {k: v for k, v in r.items() if "accuracy" not in k}
        | {"experiment": "power", "score": "mse", "score_unit": "", "score_mode": "min"}
        | {"mse_mean": r["accuracy_mean"], "validation_mse_mean": r["accuracy_mean"]}
        for r in rows()
        if r["experiment"] == "swap" and r[NUMBER] != 2
    ]
    sweep = read_sweep(write_sweep(tmp_path / "bench", rows() + power, methods=METHODS))
    deployed, _ = benchmarks_of(sweep)
    assert deployed.ranks["power"].loc[["fedavg", "ifca", "mine"]].tolist() == [1.5, 3, 1.5]
    assert not deployed.cells["missing_rows"].any()  # though it lacks the metric of the sweep
    ranked = ranking_sheet(sweep)  # no mean of two units: accuracy is that of the other splits
    alone = ranking_sheet(read_sweep(write_sweep(tmp_path / "alone", rows(), methods=METHODS)))
    accuracies = [
        numbers_of(sheet)["deployed accuracy %"].sort_index() for sheet in (ranked, alone)
    ]
    assert accuracies[0].tolist() == accuracies[1].tolist()
    assert any("the 3 of 4 splits that have this score" in note for note in ranked.notes)
    assert not any("that have this score" in note for note in alone.notes)


def test_a_missing_seed_is_marked_and_its_configuration_chosen_last(tmp_path) -> None:
    made = rows()
    failed = next(r for r in made if r["run"] == "runs/ifca_swap_4_0")
    failed |= {"status": "failed", "error": "no luck"}
    sweep = read_sweep(write_sweep(tmp_path / "bench", made, methods=METHODS))
    cell = benchmarks_of(sweep)[0].cells.loc["ifca", "swap"]
    assert cell["settings"] == "number 2"
    lost = next(r for r in made if r["run"] == "runs/fedavg_swap_None_1")
    lost |= {"status": "unfinished"}
    sweep = read_sweep(write_sweep(tmp_path / "again", made, methods=METHODS))
    assert "‡" in to_markdown(score_sheet(benchmarks_of(sweep)[0]))


def test_only_the_best_of_a_column_is_bold_and_ground_truth_does_not_compete(sweep) -> None:
    """By hand from TEST; worst clients and ARI are equal, so none of them is the best."""
    ranked = {("mine", "rank deployed"), ("mine", "score deployed")}
    ranked |= {("ifca", "rank tuned"), ("ifca", "score tuned")}
    assert ranking_sheet(sweep).bold == ranked
    deployed, tuned = (score_sheet(benchmark) for benchmark in benchmarks_of(sweep))
    assert deployed.bold == {("ifca", "swap"), ("mine", "rotation"), ("mine", "dirichlet")}
    assert tuned.bold == {("mine", "swap"), ("ifca", "rotation"), ("fedavg", "dirichlet")}
    text = to_markdown(deployed)
    assert "| ifca | **80.00** ± 2.83 | 60.00 ± 2.83 | 40.00 ± 2.83 |" in text
    assert "| given | 90.00† ± 2.83 |" in text


def test_the_table_has_ranks_costs_marks_and_what_was_told(sweep) -> None:
    sheet = ranking_sheet(sweep)
    assert sheet.labels["was told"].to_dict() == {
        "mine": "number 3",
        "fedavg": "",
        "ifca": "number by validation of 2, 4",
        "given": "the groups",
    }
    first, *_ = csv.DictReader(io.StringIO(to_csv(sheet)))
    assert first["method"] == "mine"
    assert float(first["deployed mean rank"]) == pytest.approx(1.5)
    assert float(first["MB"]) == pytest.approx(3.0)
    mine = all_numbers(sweep).loc["mine"]
    assert mine["deployed mean rank"] == pytest.approx(1.5)
    scores = benchmarks_of(sweep)[0].cells["score"].loc["mine"] * 100
    assert [mine[f"deployed {split}"] for split in scores.index] == pytest.approx(list(scores))
    text = to_markdown(sheet)
    assert "| given | the groups | (2.00)† |" in text
    assert "3 methods on 3 splits, Friedman" in text
    assert r"\begin{tabular}" in to_latex(sheet)
    marked = to_markdown(score_sheet(benchmarks_of(sweep)[0]))
    assert "90.00†" in marked.replace("*", "")


def test_figures_have_every_method(sweep) -> None:
    benchmark = benchmarks_of(sweep)[0]
    (axes,) = ranks_figure(benchmark).axes
    names = {text.get_text().split()[0] for text in axes.texts}
    assert names == {"mine", "fedavg", "ifca", "critical"}
    heat = methods_figure(benchmark).axes[0]
    assert len(heat.get_yticklabels()) == 4
    panels = [axes for axes in dots_figure(benchmark).axes if axes.axison]
    assert [axes.get_title() for axes in panels] == ["swap", "rotation", "dirichlet"]
    alone = benchmark.cells.drop(["fedavg", "ifca"], level="method")
    assert ranks_figure(type(benchmark)("x", alone, benchmark.scores_of)) is None


@pytest.mark.slow
@pytest.mark.usefixtures("empty_figures")
def test_the_page_ranks_methods_and_the_terminal_too(sweep) -> None:
    assert is_benchmark(sweep)
    (page := sweep.path / "runs/ifca_swap_4_0/report.html").parent.mkdir(parents=True)
    page.write_text("")
    text = render_page([], [sweep])
    assert "<h1>Benchmark: 4 methods on 3 splits</h1>" in text
    assert "Methods by mean rank" in text
    assert "What the settings do" not in text
    assert '<a href="runs/ifca_swap_4_0/report.html">' in text
    figure = sweep.path / "ranks.svg"
    with pytest.raises(ExperimentError, match="known: ranks, methods, dots"):
        typed("compare", sweep.path, "--figure", figure)
    typed("compare", sweep.path, "--figure", figure, "--kind", "ranks")
    assert "mean rank as deployed" in figure.read_text()
    typed("compare", sweep.path, "--figure", figure, "--kind", "ranks", "--protocol", "tuned")
    assert "mean rank after local training" in figure.read_text()
    rows = sweep.rows[[name for name in sweep.rows if not name.startswith("tuned_")]]
    rows.to_parquet(sweep.path / "rows.parquet")
    with pytest.raises(ExperimentError, match="judged deployed only"):
        typed("compare", sweep.path, "--figure", figure, "--kind", "dots", "--protocol", "tuned")

"""Runs side by side."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from recorded import write_run
from rich.console import Console

from flray.columns import ScoreColumns
from flray.reports.comparison import clustering_sheet, comparison_sheet, pairs_text
from flray.reports.lines import round_line
from flray.reports.ratios import Measured, mean_ratio
from flray.reports.runs import RunRecord, by_experiment, find_runs
from flray.reports.writers import to_rich

NUMBERS = dict.fromkeys(
    ("accuracy_mean", "accuracy_se_clients", "accuracy_worst", "accuracy_variance"), 0.5
) | dict.fromkeys(("clusters", "bytes_up", "bytes_down", "seconds"), 1)


def shown(sheet, width=200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(to_rich(sheet))
    return console.export_text()


def test_a_round_with_overlapping_clusters_says_so() -> None:
    row = {"round": 1, "seconds": 1.0, "clustering_clusters": 4}
    assert "clustered into 4 · 1.00 s" in round_line(row, 1)
    assert "4 · 1.00 s" in round_line(row | {"clustering_overlapping": float("nan")}, 1)
    assert "4 overlapping clusters" in round_line(row | {"clustering_overlapping": True}, 1)


def compared(seed: int = 0, algorithm: str = "flhc", **numbers) -> RunRecord:
    config = {"seed": seed, "algorithm": {"name": algorithm}}
    return RunRecord(Path(), config, {"seed": seed} | NUMBERS | numbers)


def on_split(split: str, algorithm: str, accuracy: float, seed: int = 0) -> RunRecord:
    run = compared(seed, algorithm, accuracy_mean=accuracy)
    return replace(run, config={**run.config, "dataset": "digits", "split": {"name": split}})


def test_differences_are_taken_on_the_same_data() -> None:
    """FL+HC has 40 points more than FedAvg on `swap`, 10 more on `turn`."""
    scores = {
        "swap/fedavg": ("swap", "fedavg", 0.5),
        "turn/fedavg": ("turn", "fedavg", 0.7),
        "swap/flhc": ("swap", "flhc", 0.9),
        "turn/flhc": ("turn", "flhc", 0.8),
        "alone/flhc": ("iid", "flhc", 0.6),
    }
    sheet = comparison_sheet({name: [on_split(*given)] for name, given in scores.items()})
    assert list(sheet.labels.index) == [
        *("swap/fedavg", "swap/flhc", "turn/fedavg", "turn/flhc", "alone/flhc")
    ]
    assert sheet.labels["data"].tolist() == ["digits · swap"] * 2 + ["digits · turn"] * 2 + [
        "digits · iid"
    ]
    assert sheet.headings[1].name == "vs same data"
    lines = sheet.lines()
    differences = {name: lines[name, "vs"]["difference"].strip() for name in scores}
    assert differences == {"swap/flhc": "+40.00", "turn/flhc": "+10.00"} | dict.fromkeys(
        ("swap/fedavg", "turn/fedavg", "alone/flhc"), ""
    )
    assert "vs compares with FedAvg on the same dataset and split" in sheet.notes[0]


def test_tests_pair_experiments_on_the_same_data() -> None:
    experiments = {
        f"{split}/{name}": [on_split(split, name, base + gain * k, k) for k in range(3)]
        for split, base in (("swap", 0.1), ("turn", 0.5))
        for name, gain in (("fedavg", 0.0), ("flhc", 0.1))
    }
    notes = " ".join(comparison_sheet(experiments).notes)
    assert "swap/flhc - swap/fedavg: 3 seeds" in notes
    assert "turn/flhc - turn/fedavg: 3 seeds" in notes
    assert "turn/flhc - swap/fedavg" not in notes


def test_data_are_compared_where_nothing_else_is() -> None:
    given = (("swap", "fedavg", 0.5), ("turn", "fedavg", 0.7))
    sheet = comparison_sheet({split: [on_split(split, *rest)] for split, *rest in given})
    assert list(sheet.labels) == ["experiment"]
    assert sheet.headings[1].name == "vs swap"


@pytest.mark.parametrize(
    ("algorithms", "expected"),
    [
        ({"cfl": "cfl", "plain": "fedavg", "mine": "flhc"}, "plain"),
        ({"mine": "flhc", "cfl": "cfl"}, "mine"),
        ({"mine": "flhc", "a": "fedavg", "b": "fedavg"}, "a"),
    ],
)
def test_differences_are_to_fedavg_else_to_the_first_one_named(algorithms, expected) -> None:
    experiments = {
        name: [compared(algorithm=algorithm, accuracy_mean=0.1 * k)]
        for k, (name, algorithm) in enumerate(algorithms.items())
    }
    sheet = comparison_sheet(experiments)
    assert list(sheet.labels.index) == list(algorithms)  # in the order of their names
    assert sheet.headings[1].name == f"vs {expected}"
    base = 10 * list(algorithms).index(expected)
    for k, name in enumerate(algorithms):
        difference = sheet.lines()[name, "vs"]["difference"]
        assert difference == (" " if name == expected else f"{10 * k - base:+.2f}")


def test_a_page_has_the_order_of_the_command_that_made_its_runs(tmp_path: Path) -> None:
    for name in ("flhc", "other", "zeta"):
        write_run(tmp_path / name / "seed_0", events=(), algorithm={"name": name})
    runs = [{"name": n, "folder": f"{n}/seed_0", "experiment": {}} for n in ("zeta", "flhc")]
    (tmp_path / "command.json").write_text(json.dumps({"overrides": [], "runs": runs}))
    found, _ = find_runs([tmp_path])
    assert list(by_experiment(found)) == ["zeta", "flhc", "other"]
    found, _ = find_runs([tmp_path / "other", tmp_path / "flhc"])
    assert list(by_experiment(found)) == ["other", "flhc"]


def run(
    seed: int, accuracy: list[float], after: int | None = None, digest: str = "same", **config
) -> RunRecord:
    """A finished run; half as many clients reach the target as are right."""
    algorithm = "fedavg" if after is None else "flhc"
    summary = {"seed": seed, "rounds": len(accuracy), "ari": 0.5, "split_sha256": digest}
    summary |= {"accuracy_mean": accuracy[-1], "clients_reaching_target": accuracy[-1] / 2}
    if after:
        summary["round_after_clustering"] = after
    record = RunRecord(Path(), {"algorithm": algorithm, "seed": seed, **config}, summary)
    rows = [(t, value, value / 2) for t, value in enumerate(accuracy, start=1)]
    columns = ["round", "accuracy_mean", "clients_reaching_target"]
    vars(record)["rounds"] = pd.DataFrame(rows, columns=columns)  # instead of reading a file
    return record


def test_the_ratio_is_to_the_same_seed_and_round() -> None:
    """After: (0.8 / 0.4 + 0.9 / 0.6) / 2 = 1.75; at the end: (0.9 / 0.6 + 0.6 / 0.6) / 2 = 1.25."""
    base = [run(0, [0.1, 0.4, 0.6]), run(1, [0.1, 0.6, 0.6])]
    mine = [run(0, [0.1, 0.8, 0.9], after=2), run(1, [0.1, 0.9, 0.6], after=2)]
    text = shown(clustering_sheet({"fedavg": base, "flhc": mine}))
    assert "(1.75x)" in text
    assert "(1.25x)" in text


def test_only_runs_that_differ_in_their_algorithm_alone_have_a_ratio() -> None:
    mine = [run(0, [0.4, 0.8], after=2)]
    for other, expected in (
        (run(0, [0.2, 0.4]), "(2.00x)"),
        (run(1, [0.2, 0.4]), "(–)"),
        (run(0, [0.2, 0.4], digest="another"), "(–)"),
        (run(0, [0.2, 0.4], participation=0.5), "(–)"),
        (run(0, [0.2, 0.4], evaluate={"every": 2}), "(2.00x)"),
    ):
        text = shown(clustering_sheet({"fedavg": [other], "flhc": mine}))
        assert expected in text
        assert "80.00" in text


def test_a_seed_that_never_clustered_is_left_out() -> None:
    base = [run(0, [0.2, 0.4]), run(1, [0.2, 0.4])]
    mine = [run(0, [0.2, 0.8], after=2), run(1, [0.2, 0.4])]
    assert "(2.00x)" in shown(clustering_sheet({"fedavg": base, "flhc": mine}))


def test_ratios_are_to_fedavg_wherever_it_stands() -> None:
    base, mine = [run(0, [0.2, 0.4])], [run(0, [0.2, 0.8], after=2)]
    sheet = clustering_sheet({"flhc": mine, "plain": base})
    assert "with the ratio to plain" in sheet.title
    assert "(2.00x)" in shown(sheet)


def test_without_a_clustering_there_is_no_table() -> None:
    assert clustering_sheet({"a": [run(0, [0.5])], "b": [run(0, [0.5])]}) is None
    assert clustering_sheet({"a": [run(0, [0.5], after=1)]}) is None


def test_experiments_with_another_score_have_another_target() -> None:
    """Half of the clients reach a macro F1; how many reach the accuracy is not known."""
    base, mine, other = run(0, [0.2, 0.4]), run(0, [0.2, 0.8], after=2), run(0, [0.5], after=1)
    vars(other)["scores"] = (ScoreColumns("macro_f1", "%", higher_is_better=True),)
    both = clustering_sheet({"fedavg": [base], "flhc": [mine], "other": [other]})
    assert list(both.labels.index) == ["flhc"]
    assert clustering_sheet({"fedavg": [base], "other": [other]}) is None


def test_only_references_of_experiments_shown_are_named() -> None:
    base, mine = run(0, [0.2, 0.4], dataset="a"), run(0, [0.2, 0.8], after=2, dataset="a")
    alone = run(0, [0.5, 0.5], dataset="b")
    sheet = clustering_sheet({"fedavg": [base], "flhc": [mine], "alone": [alone]})
    assert sheet.title.endswith("with the ratio to fedavg")


def test_a_split_without_validation_is_no_error() -> None:
    assert "50.00" in shown(comparison_sheet({"a": [compared()]}))


def test_other_protocols_have_columns_where_a_run_has_them() -> None:
    tuned = compared(global_accuracy_mean=0.25, tuned_accuracy_mean=0.75)
    keys = ["global_accuracy_mean", "tuned_accuracy_mean"]
    assert not set(keys) & {h.key for h in comparison_sheet({"a": [compared()]}).headings}
    sheet = comparison_sheet({"a": [compared()], "b": [tuned]})
    assert [h.key for h in sheet.headings][2:4] == keys
    lines = sheet.lines()
    assert [lines["b", key]["ours"] for key in keys] == ["25.00", "75.00"]
    assert [lines["a", key]["ours"] for key in keys] == ["–", "–"]


def test_an_experiment_with_fewer_seeds_than_others_is_no_mean_over_as_many() -> None:
    """A seed of b failed: its accuracy has no spread over seeds, and clients have another one."""
    two = [compared(0, accuracy_mean=0.8), compared(1, accuracy_mean=0.5)]
    sheet = comparison_sheet({"a": two, "b": two[:1]})
    lines = sheet.lines()
    assert lines["a", "accuracy_mean"]["ours"] == "65.00 ± 21.21 n=2"
    assert lines["b", "accuracy_mean"]["ours"] == "80.00 n=1"
    assert sheet.title == "mean over n seeds"
    whole = comparison_sheet({"a": two, "b": two})
    assert whole.lines()["b", "accuracy_mean"]["ours"] == "65.00 ± 21.21"
    assert whole.title == "mean over 2 seeds"


def test_means_and_paired_differences_are_over_seeds() -> None:
    """Differences of 10 and 20 points: mean 15, standard error 5 sqrt(2) / sqrt(2)."""
    first = [compared(0, accuracy_mean=0.8), compared(1, accuracy_mean=0.5)]
    second = [compared(0, accuracy_mean=0.9), compared(1, accuracy_mean=0.7, clusters=2)]
    lines = comparison_sheet({"a": first, "b": second}).lines()
    assert lines["b", "vs"]["difference"] == "+15.00 ± 5.00"
    assert lines["b", "accuracy_mean"]["ours"] == "80.00 ± 14.14"
    assert lines["b", "clusters"]["ours"] == "1.5"
    apart = comparison_sheet({"a": first[:1], "b": second[1:]})
    assert apart.lines()["b", "vs"]["difference"] == "no common seed"


def test_failed_clients_are_named_below_the_table() -> None:
    """Two seeds: 3 + 1 times a client was left out."""
    few = [compared(0, clients_dropped=3), compared(1, clients_dropped=1)]
    none = [compared(seed, clients_dropped=0) for seed in (0, 1)]
    (note,) = (n for n in comparison_sheet({"a": none, "b": few}).notes if "left out" in n)
    assert note == "b: clients failed and were left out 4 times (on_client_failure: drop)."


def test_ratios_of_tuned_accuracy_need_the_same_fine_tuning() -> None:
    def tuned(accuracy: float, epochs: int, after: int | None = None) -> RunRecord:
        found = run(0, [accuracy], after, evaluate={"on": "local", "fine_tune": {"epochs": epochs}})
        vars(found)["summary"]["tuned_accuracy_mean"] = accuracy
        return found

    mine, base = [Measured(tuned(0.8, 1, after=1), None, 0.8)], [tuned(0.4, 5)]
    assert mean_ratio(mine, "accuracy_mean", base)[0] == 2.0
    assert mean_ratio(mine, "tuned_accuracy_mean", base)[1] == ()
    assert mean_ratio(mine, "tuned_accuracy_mean", [tuned(0.4, 1)])[0] == 2.0


def test_experiments_that_used_ground_truth_are_marked() -> None:
    used, unused = ([compared(uses_ground_truth=value)] for value in (True, False))
    sheet = comparison_sheet({"a": unused, "b": used})
    assert "†" in sheet.lines()["b", "accuracy_mean"]["ours"]
    assert "†" not in sheet.lines()["a", "accuracy_mean"]["ours"]
    assert "† uses ground truth" in shown(sheet)
    assert "†" not in shown(comparison_sheet({"a": unused}))
    clustered = run(0, [0.5, 0.5], after=1)
    vars(clustered)["summary"]["uses_ground_truth"] = True
    assert "†" in shown(clustering_sheet({"a": [run(0, [0.5, 0.5])], "b": [clustered]}))


def test_differences_are_tested_seed_by_seed_where_there_are_three() -> None:
    """Differences of 1, 2 and 3 points: t = 2 / (1 / sqrt(3)) = 3.46 with 2 degrees of freedom, so
    p = 0.074; the eight signs are equally likely, so Wilcoxon's p = 2 / 8."""
    base = [compared(seed, accuracy_mean=0.5 + 0.1 * seed) for seed in range(3)]
    mine = [compared(seed, accuracy_mean=0.51 + 0.11 * seed) for seed in range(3)]
    notes = " ".join(comparison_sheet({"fedavg": base, "flhc": mine}).notes)
    assert "flhc - fedavg: 3 seeds, 95 % interval -0.48 to +4.48" in notes
    assert "t test p = 0.074, Wilcoxon p = 0.25" in notes
    assert "t assumes normal differences" in notes
    equal = [compared(seed, accuracy_mean=0.6 + 0.1 * seed) for seed in range(3)]  # 10 points each
    assert "t test" not in " ".join(comparison_sheet({"fedavg": base, "flhc": equal}).notes)
    two = " ".join(comparison_sheet({"fedavg": base[:2], "flhc": mine[:2]}).notes)
    assert "Wilcoxon" not in two


def test_a_table_with_seeds_and_long_names_fits_into_100_columns() -> None:
    long = "mnist_label_swap_with_a_name_that_goes_on"
    runs = [
        compared(seed, accuracy_mean=0.5 + 0.1 * seed, bytes_up=1e9, seconds=3600.5)
        for seed in range(3)
    ]
    runs = [
        replace(run, summary={**run.summary, "validation_accuracy_mean": 0.5 + 0.1 * run.seed})
        for run in runs
    ]
    text = shown(comparison_sheet({"fedavg": runs, long: runs}))
    table = text.split("± is")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 100
    assert all(part in text for part in ("mnist_label_swap", "_with_a_name_tha", "t_goes_on"))


def test_tied_differences_have_an_exact_rank_test_too() -> None:
    """All four have one sign, which 2 of the 16 equally likely signs have: p = 0.125."""
    assert "Wilcoxon p = 0.12 (at least 0.12)" in pairs_text([1.0, 1.0, 1.0, 3.0])

"""Tables of the terminal."""

from pathlib import Path

from rich.console import Console

from flray.report.console import clustering_table, comparison_table
from flray.report.ratios import Measured, mean_ratio
from flray.report.runs import RunRecord


def shown(table) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


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
    vars(record)["rounds"] = {  # in the place of reading rounds.parquet
        t: {"accuracy_mean": value, "clients_reaching_target": value / 2}
        for t, value in enumerate(accuracy, start=1)
    }
    return record


def test_the_ratio_is_to_the_same_seed_and_round() -> None:
    """After: (0.8 / 0.4 + 0.9 / 0.6) / 2 = 1.75; at the end: (0.9 / 0.6 + 0.6 / 0.6) / 2 = 1.25."""
    base = [run(0, [0.1, 0.4, 0.6]), run(1, [0.1, 0.6, 0.6])]
    mine = [run(0, [0.1, 0.8, 0.9], after=2), run(1, [0.1, 0.9, 0.6], after=2)]
    text = shown(clustering_table({"fedavg": base, "flhc": mine}))
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
        text = shown(clustering_table({"fedavg": [other], "flhc": mine}))
        assert expected in text
        assert "80.00" in text


def test_a_seed_that_never_clustered_is_left_out() -> None:
    base = [run(0, [0.2, 0.4]), run(1, [0.2, 0.4])]
    mine = [run(0, [0.2, 0.8], after=2), run(1, [0.2, 0.4])]
    assert "(2.00x)" in shown(clustering_table({"fedavg": base, "flhc": mine}))


def test_a_baseline_of_nothing_gives_a_dash() -> None:
    text = shown(clustering_table({"a": [run(0, [0.0, 0.0])], "b": [run(0, [0.5, 0.5], after=1)]}))
    assert "(–)" in text


def test_without_a_clustering_there_is_no_table() -> None:
    assert clustering_table({"a": [run(0, [0.5])], "b": [run(0, [0.5])]}) is None
    assert clustering_table({"a": [run(0, [0.5], after=1)]}) is None


def test_a_split_without_validation_is_no_error() -> None:
    numbers = ("accuracy_mean", "accuracy_se_clients", "accuracy_worst", "accuracy_variance")
    counts = ("clusters", "bytes_up", "bytes_down", "seconds")
    summary = {"seed": 0} | dict.fromkeys(numbers, 0.5) | dict.fromkeys(counts, 1)
    assert "50.00" in shown(comparison_table({"a": [summary]}))


def test_other_protocols_have_columns_where_a_run_has_them() -> None:
    numbers = ("accuracy_mean", "accuracy_se_clients", "accuracy_worst", "accuracy_variance")
    counts = ("clusters", "bytes_up", "bytes_down", "seconds")
    plain = {"seed": 0} | dict.fromkeys(numbers, 0.5) | dict.fromkeys(counts, 1)
    tuned = plain | {"global_accuracy_mean": 0.25, "tuned_accuracy_mean": 0.75}
    assert not {"global", "tuned"} & set(shown(comparison_table({"a": [plain]})).split())
    text = shown(comparison_table({"a": [plain], "b": [tuned]}))
    head, _, without, within = (line.split() for line in text.splitlines() if line.strip())
    first = head.index("global")
    assert head[first : first + 3] == ["global", "tuned", "validation"]
    assert within[-9:-7] == ["25.00", "75.00"]
    assert without[-9:-7] == ["nan", "nan"]


def test_ratios_of_tuned_accuracy_need_the_same_fine_tuning() -> None:
    def tuned(accuracy: float, epochs: int, after: int | None = None) -> RunRecord:
        found = run(0, [accuracy], after, evaluate={"on": "local", "fine_tune": {"epochs": epochs}})
        vars(found)["summary"]["tuned_accuracy_mean"] = accuracy
        return found

    mine, base = [Measured(tuned(0.8, 1, after=1), None, 0.8)], [tuned(0.4, 5)]
    assert mean_ratio(mine, "accuracy_mean", base).value == 2.0
    assert mean_ratio(mine, "tuned_accuracy_mean", base).value is None
    assert mean_ratio(mine, "tuned_accuracy_mean", [tuned(0.4, 1)]).value == 2.0


def test_experiments_that_used_ground_truth_are_marked() -> None:
    numbers = ("accuracy_mean", "accuracy_se_clients", "accuracy_worst", "accuracy_variance")
    counts = ("clusters", "bytes_up", "bytes_down", "seconds")
    summary = {"seed": 0} | dict.fromkeys(numbers, 0.5) | dict.fromkeys(counts, 1)
    used, unused = ([summary | {"uses_ground_truth": value}] for value in (True, False))
    text = shown(comparison_table({"a": unused, "b": used}))
    assert "b †" in text
    assert "a †" not in text
    assert "† uses ground truth" in text
    assert "†" not in shown(comparison_table({"a": unused}))
    clustered = run(0, [0.5, 0.5], after=1)
    vars(clustered)["summary"]["uses_ground_truth"] = True
    assert "b †" in shown(clustering_table({"a": [run(0, [0.5, 0.5])], "b": [clustered]}))

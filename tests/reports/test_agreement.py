"""Cells within tolerance and pairs in the paper's order, counted; the page of results has them."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flray.config.experiment import parse_experiment, read_yaml
from flray.reports.published import find_table, load_tables
from flray.reports.published.filling import fill
from flray.reports.published.sheet import render, within_tolerance
from flray.reports.runs import RunRecord
from flray.reports.sheets import Fields

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def script(name: str) -> ModuleType:
    """A script of docs/results."""
    spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    return script("count")


@pytest.fixture
def shares(counting: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "count", counting)  # shares.py imports it by this name
    return script("shares")


def test_a_difference_of_exactly_the_tolerance_is_within(counting: ModuleType) -> None:
    """FLT, Table I, MNIST: FedAvg 82.73, Local 97.41; variances have no tolerance."""
    table = find_table("flt.1")
    ours = {(0, "MNIST.acc"): {"value": 85.73}, (1, "MNIST.acc"): {"value": 94.40}}
    ours |= {(0, "MNIST.var"): {"value": 44.65}}
    is_within = within_tolerance(table, counting.frame(table, ours))
    assert is_within.to_dict() == {(0, "MNIST.acc"): True, (1, "MNIST.acc"): False}
    # Four points are allowed on CIFAR-10.
    paper = table.rows[0].cells["CIFAR10.acc"].value
    assert paper is not None
    for difference, is_in in ((-4, True), (-4.01, False)):
        cells = counting.frame(table, {(0, "CIFAR10.acc"): {"value": paper + difference}})
        assert within_tolerance(table, cells).tolist() == [is_in]


def test_a_difference_is_judged_as_it_is_printed(counting: ModuleType) -> None:
    """FL+HC, Table I, prints one decimal: 91.1 + 3.04 is 3.0 points off, 91.1 + 3.06 is 3.1."""
    table = find_table("flhc.1")
    for value, is_in in ((94.14, True), (94.16, False)):
        cells = counting.frame(table, {(0, "acc_post_cluster"): {"value": value}})
        assert within_tolerance(table, cells).tolist() == [is_in]


def test_what_is_counted_of_a_table(counting: ModuleType) -> None:
    """FLT, Table I, MNIST: FedAvg 82.73 < PCA+kM+HC 83.82 < Local 97.41: three pairs.

    The equal numbers of FedAvg and PCA+kM+HC keep no order; the first is explained.
    """
    ours = {(0, "MNIST.acc"): 90.0, (1, "MNIST.acc"): 95.0, (2, "MNIST.acc"): 90.0}
    cells = {place: {"value": value} for place, value in ours.items()}
    cause = {"table": "flt.1", "row": "Fed*"}
    counts = counting.counts(find_table("flt.1"), cells, [cause])
    assert counts.pop("printed") == 6 * 4
    expected = {"cells": 3, "judged": 3, "within": 1, "known": 1, "pairs": 3, "kept": 2}
    assert counts == expected


def test_a_share_is_compared_with_the_chance_of_one_error_in_100(shares: ModuleType) -> None:
    """FL+HC, Table II, first row: the paper has 49 % of clients at 98.2 %, ours 40 % at 99 %.

    0.99^100 + 100 * 0.01 * 0.99^99 = 0.7358, and 0.4607 with 0.982.
    """
    table = find_table("flhc.2")
    ours = {(0, "acc_post_cluster"): {"value": 99.0}}
    ours |= {(0, "pct_clients_target_post_cluster"): {"value": 40.0}}
    assert shares.residuals(table, ours) == pytest.approx(
        np.array([[40 - 73.58, 49 - 46.07]]), abs=0.01
    )


def test_shares_of_label_swapped_clients_follow_from_accuracies(
    counting: ModuleType, shares: ModuleType
) -> None:
    tables = counting.found_tables()
    for key, cells in (("flhc.2", 32), ("flhc.5", 18)):
        left = shares.residuals(*tables[key])
        assert left.shape == (cells, 2)
        assert abs(left).max() < 7
    assert abs(shares.residuals(*tables["flhc.1"])).max() > 60  # their clients differ


def test_ratios_are_pairs_with_fedavg(counting: ModuleType) -> None:
    """FL+HC, Table I, first row: 1.9 and 1.0 times FedAvg; 1.0 is no order."""

    def orders(column: str, value: float, ratio: float | None) -> tuple[int, int]:
        fields: Fields = {"value": value, "ratio": ratio, "has_ratio": True}
        counts = counting.counts(find_table("flhc.1"), {(0, column): fields})
        return counts["kept"], counts["pairs"]

    after = "acc_post_cluster"
    assert [orders(after, 91.1, ratio) for ratio in (1.2, 1.04)] == [(1, 1), (0, 1)]
    assert [orders(after, value, None) for value in (91.1, 0.0)] == [(1, 1), (0, 1)]  # FedAvg 0
    assert orders("acc_round50", 98.5, 1.2) == (0, 0)


def test_columns_of_cifar_have_four_points_and_those_in_percent_three() -> None:
    columns = [(t.key, c) for t in load_tables().values() for c in t.columns]
    four = {key for key, column in columns if column.tolerance == 4}
    assert four == {"flis.1", "flis.2", "flis.4", "flt.1", "flt.2", "flt.5"}
    for _, column in columns:
        assert (column.tolerance is None) == (column.unit != "percent")
        assert column.tolerance != 3 or "CIFAR" not in column.entry


def test_a_written_table_is_read_back(counting: ModuleType) -> None:
    """FL+HC, Table I, three seeds: 16 rows of four numbers; the first is 94.6, 2.3 times FedAvg."""
    table, ours = counting.read_table((RESULTS / "flhc_table1" / "table.md").read_text())
    assert (table.key, len(ours)) == ("flhc.1", 64)
    first = ours[0, "acc_post_cluster"]
    assert (first["value"], first["ratio"], first["seeds"]) == (94.6, 2.3, (0, 1, 2))
    assert ours[0, "pct_clients_target_post_cluster"]["ratio"] is None
    assert counting.read_table("**methods by mean rank**\n\n| method |\n| --- |\n") is None


def test_the_mean_over_three_seeds_is_read_back_with_its_spread(counting: ModuleType) -> None:
    """FLT, Table I, MNIST: FedAvg 80, 81 and 85 % is 82 ± 2.65 %, Local of one seed 98 %."""
    plain = read_yaml(EXPERIMENTS / "flt" / "mnist_scenario1_fedavg.yaml")
    accuracies = [("fedavg", 0, 0.80), ("fedavg", 1, 0.81), ("fedavg", 2, 0.85), ("local", 0, 0.98)]
    runs = [
        RunRecord(
            Path(f"{method}_{seed}"),
            parse_experiment({**plain, "algorithm": method, "seed": seed}).plain,
            {"accuracy_mean": accuracy, "clients": 100},
        )
        for method, seed, accuracy in accuracies
    ]
    text = str(render(find_table("flt.1"), fill(find_table("flt.1"), runs), "md"))
    assert "82.00 ± 2.65 n=3" in text.replace("**", "")
    table, ours = counting.read_table(text)
    fedavg, local = ours[0, "MNIST.acc"], ours[1, "MNIST.acc"]
    assert (fedavg["value"], fedavg["error"], fedavg["seeds"]) == (82.0, 2.65, (0, 1, 2))
    assert (local["value"], local["error"], local["seeds"]) == (98.0, None, (0,))
    line = counting.line_of({"name": "FLT", "tables": ["flt.1"]}, {"flt.1": (table, ours)})
    assert line[-2:] == ["3, 1 in 1 of 2", "2.65"]


def test_the_pages_of_results_have_the_counts(counting: ModuleType) -> None:
    """Else: python docs/results/count.py."""
    counts = counting.count()
    assert len(counts) > 5
    for page, text in counts.items():
        assert text in (RESULTS / page).read_text(encoding="utf-8"), page


def test_the_front_page_is_short_and_links_every_page() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in RESULTS.glob("*.md")} - {"README.md"}
    assert len(text.splitlines()) < 120
    assert pages <= set(re.findall(r"\]\(([\w.]+)\)", text))

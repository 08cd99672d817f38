"""Cells within tolerance and pairs in the paper's order, counted; the page of results has them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from flray.reports.published import find_table, load_tables
from flray.reports.published.agreement import Agreement, agreement
from flray.reports.sheets import Fields, numbers

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    """The script docs/results/count.py."""
    spec = importlib.util.spec_from_file_location("count", RESULTS / "count.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agreed(key: str, ours: dict[tuple[int, str], Fields]) -> Agreement:
    """Of a published table with these numbers of ours by row number and column key."""
    table = find_table(key)
    cells = {(*place, "ours"): fields for place, fields in ours.items()}
    for r, row in enumerate(table.rows):
        for column in table.columns:
            cell = row.cells[column.key]
            printed = {"value": cell.value, "ratio": cell.ratio, "has_ratio": True}
            cells[r, column.key, "paper"] = printed
    return agreement(table, numbers(cells))


def test_a_difference_of_exactly_the_tolerance_is_within() -> None:
    """FLT, Table I, MNIST: FedAvg 82.73, Local 97.41; variances have no tolerance."""
    at_edge = {(0, "MNIST.acc"): {"value": 85.73}, (1, "MNIST.acc"): {"value": 94.40}}
    variance = {(0, "MNIST.var"): {"value": 44.65}}
    assert agreed("flt.1", at_edge | variance) == Agreement(3, 2, 1, pairs=1, kept=1)
    # Four points are allowed on CIFAR-10.
    paper = find_table("flt.1").rows[0].cells["CIFAR10.acc"].value
    assert paper is not None
    assert agreed("flt.1", {(0, "CIFAR10.acc"): {"value": paper - 4}}).within == 1
    assert agreed("flt.1", {(0, "CIFAR10.acc"): {"value": paper - 4.01}}).within == 0


def test_equal_numbers_of_ours_keep_no_order() -> None:
    """FLT, Table I, MNIST: FedAvg 82.73 < PCA+kM+HC 83.82 < Local 97.41: three pairs."""
    ours = {(0, "MNIST.acc"): 90.0, (1, "MNIST.acc"): 95.0, (2, "MNIST.acc"): 90.0}
    counts = agreed("flt.1", {place: {"value": value} for place, value in ours.items()})
    assert (counts.pairs, counts.kept) == (3, 2)


def test_ratios_are_pairs_with_fedavg() -> None:
    """FL+HC, Table I, first rows: 1.9 and 1.0 times FedAvg; 1.0 is no order."""
    column = "acc_post_cluster", "acc_round50"
    above = {(0, column[0]): {"value": 91.1, "ratio": 1.2, "has_ratio": True}}
    equal = {(0, column[0]): {"value": 91.1, "ratio": 1.04, "has_ratio": True}}
    of_zero = {(0, column[0]): {"value": 91.1, "ratio": None, "has_ratio": True}}
    both_zero = {(0, column[0]): {"value": 0.0, "ratio": None, "has_ratio": True}}
    no_order = {(0, column[1]): {"value": 98.5, "ratio": 1.2, "has_ratio": True}}
    kept = [agreed("flhc.1", ours) for ours in (above, equal, of_zero, both_zero, no_order)]
    assert [(a.kept, a.pairs) for a in kept] == [(1, 1), (0, 1), (1, 1), (0, 1), (0, 0)]


def test_nothing_to_judge_is_no_sentence() -> None:
    assert agreed("flt.1", {}).text == ""
    assert "1 of 1 cells" in agreed("flt.1", {(0, "MNIST.acc"): {"value": 82.0}}).text


def test_columns_of_cifar_have_four_points_and_those_in_percent_three() -> None:
    columns = [(t.key, c) for t in load_tables().values() for c in t.columns]
    four = {key for key, column in columns if column.tolerance == 4}
    assert four == {"flis.1", "flis.2", "flis.4", "flt.1", "flt.2", "flt.5"}
    for _, column in columns:
        assert (column.tolerance is None) == (column.unit != "percent")
        assert column.tolerance != 3 or "CIFAR" not in column.entry


def test_a_written_table_is_read_back(counting: ModuleType) -> None:
    """FL+HC, Table I: 16 rows of four numbers; the first is 93.7, 1.8 times FedAvg."""
    table, ours = counting.read_table((RESULTS / "flhc_table1" / "table.md").read_text())
    assert (table.key, len(ours)) == ("flhc.1", 64)
    first = ours[0, "acc_post_cluster"]
    assert (first["value"], first["ratio"], first["seeds"]) == (93.7, 1.8, (0,))
    assert ours[4, "pct_clients_target_post_cluster"]["ratio"] is None
    assert counting.read_table("**methods by mean rank**\n\n| method |\n| --- |\n") is None


def test_the_page_of_results_has_the_counts(counting: ModuleType) -> None:
    """Else: python docs/results/count.py."""
    assert counting.count() in (RESULTS / "README.md").read_text(encoding="utf-8")

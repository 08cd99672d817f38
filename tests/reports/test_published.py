"""The papers' tables: numbers typed from the papers, names, and a check of files seen to fail."""

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from flray.errors import ExperimentError
from flray.reports.published import find_table, load_tables
from flray.reports.published.layout import Published, TableColumn, TableRow
from flray.reports.published.tables import FOLDER, Cost, Table, parse_table

TABLES = load_tables()
# What can be printed at all: the variance of numbers in 0..100 is at most 50².
RANGES = {
    "percent": (0, 100),
    "percent²": (0, 2500),
    "fraction": (0, 1),
    "rounds": (1, 10_000),
    "Mb": (0, 1e6),
}
LARGEST_RATIO = 100


def check_tables(tables: Mapping[str, Table]) -> list[str]:
    """The faults of tables, a line each: cells missing or twice, numbers that cannot be."""
    return [fault for table in tables.values() for fault in faults_of(table)]


def faults_of(table: Table) -> list[str]:
    keys, titles = [c.key for c in table.columns], [row.title for row in table.rows]
    faults = []
    for kind, names in (("column", keys), ("row", titles)):
        twice = [name for name, count in Counter(names).items() if count > 1]
        faults += [f"{table.key}: {kind} {name!r} is there twice" for name in twice]
        faults += [f"{table.key}: no {kind}s"] * (not names)
    if table.cost.steps is None and not table.cost.note:
        faults.append(f"{table.key}: neither a cost in costs.yaml nor a reason why there is none")
    for row in table.rows:
        extras = [key for key in row.cells if key not in keys]
        faults += [f"{row.title!r} has {extra!r}, which is no column" for extra in extras]
        for column in table.columns:
            where = f"{table.key}: row {row.title!r}, column {column.key!r}"
            if column.key not in row.cells:
                faults.append(f"{where} is missing; an empty cell is written as null")
            else:
                faults += [f"{where}: {fault}" for fault in implausible(column, row)]
    return faults


def implausible(column: TableColumn, row: TableRow) -> list[str]:
    if column.unit == "formula":
        return []
    low, high = RANGES[column.unit]
    ranges = {"value": (low, high), "spread": (0, high - low), "ratio": (0, LARGEST_RATIO)}
    numbers = {name: getattr(row.cells[column.key], name) for name in ranges}
    return [
        f"{name} must be a number in {least:g}..{most:g} ({column.unit}), got {numbers[name]!r}"
        for name, (least, most) in ranges.items()
        if numbers[name] is not None
        and not (isinstance(numbers[name], int | float) and least <= numbers[name] <= most)
    ]


def cell(key: str, labels: tuple[str, ...], column: str, block: str = "") -> Published:
    rows = [row for row in TABLES[key].rows if row.labels == labels and row.block == block]
    assert len(rows) == 1
    return rows[0].cells[column]


def test_every_table_is_there_and_sound() -> None:
    papers = [key.split(".")[0] for key in TABLES]
    count = {paper: papers.count(paper) for paper in papers}
    assert count == {"flhc": 6, "flis": 4, "flt": 6, "flt_workshop": 3, "pfllib": 1, "repa": 1}
    assert check_tables(TABLES) == []


@pytest.mark.parametrize(
    ("key", "labels", "column", "expected"),
    [
        ("flhc.1", ("0.1", "1"), "acc_post_cluster", Published(91.1, ratio=1.9)),
        ("flhc.2", ("1.0", "10"), "pct_clients_target_round50", Published(74.0)),
        ("flhc.3", ("1.0", "3"), "acc_round50", Published()),  # did not complete
        ("flhc.3", ("1.0", "1"), "pct_clients_target_post_cluster", Published(39.2, ratio=0.0)),
        ("flhc.4", ("L1", "comp."), "pct_clients_target_round50", Published(92.0, ratio=2.1)),
        ("flhc.5", ("cos.", "sing."), "acc_round50", Published()),
        ("flhc.6", ("L1", "com."), "acc_post_cluster", Published(69.9, ratio=1.1)),
        ("flt.1", ("FLT (Enc1)",), "CIFAR10.acc", Published(87.11, 0.33)),
        ("flt.1", ("FedSEM",), "CIFAR10.var", Published(695.01)),
        ("flt.2", ("FLT (Enc1)",), "CIFAR10.acc", Published(79.971, 0.4)),
        ("flt.3", ("FLT(C=5)",), "MLP.acc", Published(72.05, 0.77)),
        ("flt.4", ("FLT",), "CNN.var", Published(98.65)),
        ("flt.5", ("(500, 0.5, 5, 100)",), "FLT_enc2", Published(81.22, 0.39)),
        ("flt_workshop.1", ("IFCA",), "MLP.acc", Published(61.24, 0.84)),
        ("flt_workshop.2", ("FedSEM",), "var", Published(406.6)),
        ("flis.3", ("LG",), "CIFAR-10.rounds", Published(33)),
        ("flis.3", ("FLIS (HC)",), "CIFAR-100.mb", Published(1991.6)),
        ("flis.3", ("CFL",), "SVHN.rounds", Published()),  # never reached
        ("pfllib.1", ("FedRep",), "dirichlet", Published(97.56, 0.04)),
        ("pfllib.1", ("FedAvg fine-tuned",), "labels", Published()),  # not printed
        ("repa.1", ("WD", "f=2"), "concept_drift", Published(0.15, 0.05)),
    ],
)
def test_numbers_are_the_papers(
    key: str, labels: tuple[str, ...], column: str, expected: Published
) -> None:
    assert cell(key, labels, column) == expected


def test_rows_of_two_blocks_are_kept_apart() -> None:
    twenty, thirty = "Non-IID label skew (20%)", "Non-IID label skew (30%)"
    assert cell("flis.1", ("FLIS (DC)",), "CIFAR-10", twenty) == Published(89.47, 0.92)
    assert cell("flis.1", ("FLIS (DC)",), "CIFAR-10", thirty) == Published(82.25, 1.12)
    assert cell("flis.2", ("SCAFFOLD",), "FMNIST", "Non-IID Dir(0.1)") == Published(10.0, 0.0)
    assert cell("flis.4", ("IFCA",), "SVHN", twenty) == Published(94.83, 0.14)


def test_formulas_are_text() -> None:
    ifca = Published(text="rho*M*W_local*T*(C+1)")
    assert cell("flt.6", ("IFCA",), "formula") == ifca
    assert cell("flt_workshop.3", ("IFCA",), "formula") == ifca
    assert TABLES["flt.6"].is_formulas


@pytest.mark.parametrize(
    ("key", "size"),
    [("flhc.1", (16, 4)), ("flhc.4", (10, 4)), ("flis.1", (22, 4)), ("flis.3", (9, 9))],
)
def test_tables_have_the_papers_size(key: str, size: tuple[int, int]) -> None:
    """FLIS's Table III has a column of ours beside them: megabits with our parameters."""
    assert (len(TABLES[key].rows), len(TABLES[key].columns)) == size


def test_headings_are_the_papers() -> None:
    assert TABLES["flhc.4"].row_headings == ("dist", "link")
    assert [(c.group, c.name) for c in TABLES["flhc.4"].columns][:2] == [
        ("test acc", "post cluster"),
        ("test acc", "50"),
    ]
    assert TABLES["flt.5"].row_headings == ("(M, ρ, E, T)",)


def test_the_space_of_a_table_is_in_the_repository() -> None:
    spaces = [table.space for table in TABLES.values() if table.space]
    assert len(spaces) == 19
    assert all((FOLDER.parents[1] / "tune_spaces" / space).is_file() for space in spaces)


def test_every_cost_is_resolved_or_explained() -> None:
    raws = [yaml.safe_load(path.read_text()) for path in FOLDER.glob("*_table*.yaml")]
    entries = yaml.safe_load((FOLDER / "costs.yaml").read_text())["tables"]
    assert len(raws) == len(TABLES)
    assert {raw["cost"]["entry"] for raw in raws} == set(entries)
    assert TABLES["flt.1"].cost.steps == 720_000 + 3_000_000
    assert TABLES["flhc.4"].cost == Cost(1_494_000, "one threshold")
    assert TABLES["flis.3"].cost.steps is None


@pytest.mark.parametrize("name", ["flch.4", "flhc.7", "flhc", "", "repa.figures"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ExperimentError, match=r"unknown table .*known: flhc\.1, .*repa\.1"):
        find_table(name)


def test_an_unknown_name_comes_with_a_suggestion() -> None:
    with pytest.raises(ExperimentError, match=r"did you mean 'flhc\.4'"):
        find_table("flch.iv")


def broken(change: str, value: Any) -> Table:
    raw = yaml.safe_load((FOLDER / "flt_table1.yaml").read_text(encoding="utf-8"))
    raw = copy.deepcopy(raw)
    entry = raw["rows"][0]["values"]
    if change == "drop column":
        del entry["CIFAR10"]
    elif change == "drop number":
        del entry["CIFAR10"]["var"]
    elif change == "another column":
        entry["CIFAR100"] = {"mean": value}
    elif change == "row twice":
        raw["rows"].append(raw["rows"][0])
    else:
        entry["MNIST"][change] = value
    return parse_table("flt.1", raw, Cost(1, ""))


@pytest.mark.parametrize(
    ("change", "value", "fault"),
    [
        ("drop column", None, "'CIFAR10.acc' is missing"),
        ("drop number", None, "'CIFAR10.var' is missing"),
        ("another column", 1.0, "'CIFAR100', which is no column"),
        ("row twice", None, "row 'FedAvg' is there twice"),
        ("mean", 182.73, "value must be a number in 0..100"),
        ("mean", "82,73", "value must be a number"),
        ("mean", float("nan"), "value must be a number"),
        ("stderr", -0.38, "spread must be a number"),
        ("var", 2501, "value must be a number in 0..2500"),
    ],
)
def test_the_check_sees_a_broken_table(change: str, value: Any, fault: str) -> None:
    faults = check_tables({"flt.1": broken(change, value)})
    assert len(faults) == 1 + (change == "drop column")  # which is two columns
    assert fault in faults[0]


def test_the_check_accepts_null_and_asks_for_a_cost() -> None:
    table = broken("mean", None)
    assert check_tables({"flt.1": table}) == []
    raw = yaml.safe_load((FOLDER / "flt_table1.yaml").read_text(encoding="utf-8"))
    free = parse_table("flt.1", raw, Cost(None, ""))
    assert "neither a cost" in check_tables({"flt.1": free})[0]

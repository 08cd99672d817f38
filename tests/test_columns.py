"""Names of columns: one place, and what a run writes is called so."""

import ast
import json
from pathlib import Path

import flray
from flray import columns

PACKAGE = Path(flray.__file__).parent
# A key of experiments and a field of the cells of tables too.
AMBIGUOUS = {"uses_ground_truth"}
NAMES = {v for k, v in vars(columns).items() if k.isupper() and isinstance(v, str)}


def literals(text: str) -> set[str]:
    found = ast.walk(ast.parse(text))
    return {
        node.value
        for node in found
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_columns_are_written_by_their_constants() -> None:
    """Names of several words; one word may mean something else."""
    names = {name for name in NAMES if "_" in name.strip("_")} - AMBIGUOUS
    assert len(names) > 40
    assert names & literals('frame["accuracy_mean"]') == {"accuracy_mean"}
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 80
    of_columns = Path(columns.__file__)
    used = {p.name: names & literals(p.read_text()) for p in files if p != of_columns}
    assert {name: found for name, found in used.items() if found} == {}
    templates = (PACKAGE / "reports" / "templates").glob("*.html")
    assert [
        (p.name, name) for p in templates for name in names if f'"{name}"' in p.read_text()
    ] == []


def test_a_run_writes_the_columns_that_are_named(tiny_run) -> None:
    swap = "split={name: label_swap, clients: 6, groups: 2}"
    result = tiny_run(swap, "algorithm={name: flhc, rounds_before: 1}", "rounds=2")
    of_clients = [
        "ROUND",
        "CLIENT",
        "PART",
        "CORRECT",
        "TOTAL",
        "ACCURACY",
        "LOSS",
        "MODEL",
        "GROUP",
    ]
    assert list(result.clients) == [getattr(columns, name) for name in of_clients]
    of_rounds = [
        "ROUND",
        "COHORT_SIZE",
        "TRAIN_LOSS",
        "CLUSTERS",
        "ACCURACY_MEAN",
        "SECONDS",
    ]
    of_rounds += ["CLIENT_STEPS", "CLUSTERING_CLUSTERS", "VALIDATION_ACCURACY_MEAN"]
    assert {getattr(columns, name) for name in of_rounds} <= set(result.rounds)
    of_run = ["ROUNDS", "ROUNDS_TO_TARGET", "USES_GROUND_TRUTH", "SPLIT_SHA256", "PARAMS_SHA256"]
    summary = json.loads((result.path / "summary.json").read_text())
    assert {getattr(columns, name) for name in of_run} <= set(summary)
    assert columns.ACCURACY_MEAN + columns.AFTER in summary
    assert not columns.of_one_round(columns.CLUSTERS)

"""Names of columns: one place, and what a run writes is called so."""

import json

from flray.records import columns


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
        "PARAMS_CHANGE",
        "ACCURACY_MEAN",
        "SECONDS",
    ]
    of_rounds += ["CLIENT_STEPS", "CLUSTERING_CLUSTERS", "VALIDATION_ACCURACY_MEAN"]
    assert {getattr(columns, name) for name in of_rounds} <= set(result.rounds)
    of_run = ["ROUNDS", "ROUNDS_TO_TARGET", "USES_GROUND_TRUTH", "SPLIT_SHA256", "PARAMS_SHA256"]
    summary = json.loads((result.path / "summary.json").read_text())
    assert {getattr(columns, name) for name in of_run} <= set(summary)
    assert columns.ACCURACY_MEAN + columns.AFTER in summary
    assert not any(columns.of_one_round(key) for key in (columns.CLUSTERS, columns.PARAMS_CHANGE))

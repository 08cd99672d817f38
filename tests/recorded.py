"""Runs and sweeps as they are recorded, written without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from flray.measures.scores import ClientScores
from flray.records.clusterings import write_clustering
from flray.records.run_directory import RunDirectory

Row = dict[str, Any]  # Any: YAML, JSON

LABELS = np.array([0, 0, 1, 1, 1])
GROUPS = np.array([7, 7, 3, 3, 7])
CORRECT = np.array([10, 9, 8, 7, 6])  # of 10: accuracies 1.0, 0.9, 0.8, 0.7, 0.6
ON_A_LINE = np.array([0.0, 1, 8, 9, 10])
D = np.abs(np.subtract.outer(ON_A_LINE, ON_A_LINE))
CLUSTERING = {
    "clients": np.arange(5),
    "labels": LABELS,
    "D": D,
    "linkage": linkage(squareform(D), "average"),
    "groups": GROUPS,
}
CONFIG: Row = {
    "dataset": {"name": "digits", "size": 28},
    "split": {"name": "label_swap", "clients": 5},
    "algorithm": {"name": "flhc", "clustering": {"partition": {"threshold": 3.0}}},
    "rounds": 3,
    "seed": 0,
    "evaluate": {"target": 0.75},
}
SUMMARY: Row = {
    "algorithm": "flhc",
    "rounds": 3,
    "accuracy_mean": 0.8,
    "accuracy_se_clients": 0.0632,
    "accuracy_worst": 0.6,
    "accuracy_variance": 0.02,
    "validation_accuracy_mean": 0.7125,
    "clients_reaching_target": 0.6,
    "clusters": 2,
    "ari": 0.25,
    "client_steps": 1234,
    "bytes_up": 3_000_000,
    "bytes_down": 6_000_000,
    "seconds": 61.0,
    "params_sha256": "0123456789abcdef" * 4,
}
ROUNDS = [
    {
        "round": t,
        "accuracy_mean": 0.2 + t / 5,
        "clusters": 1 + (t > 2),
        "seconds": 2.0,
        "bytes_up_model": 1_000_000,
        "bytes_down_model": 2_000_000,
        "seconds_train": 1.5,
    }
    for t in (1, 2, 3)
]
THRESHOLD = "algorithm.clustering.partition.threshold"
LINKAGE = "algorithm.clustering.partition.linkage"
DISTANCE = "algorithm.clustering.distance"


TOTALS = {
    "bytes_up": "bytes_up_model",
    "bytes_down": "bytes_down_model",
    "client_steps": "client_steps",
    "seconds": "seconds",
    "uses_ground_truth": "ground_truth_reads",
}
NOT_OF_A_ROUND = ("algorithm", "clients", "params_sha256", "round", "seed", "split")


def fitting(rounds: Sequence[Row], summary: Mapping[str, Any]) -> list[Row]:
    """Rounds whose last row, and whose sums, are those of a summary."""
    rows = [dict(row) for row in rounds if row["round"] < summary["rounds"]]
    last = {"round": summary["rounds"]}
    for key, value in summary.items():
        if key in TOTALS:
            column = TOTALS[key]
            last[column] = value - sum(row.get(column, 0) for row in rows)
        elif not key.startswith(NOT_OF_A_ROUND) or key == "clients_reaching_target":
            last[key] = value
    kept = [dict(row) for row in rounds if row["round"] == summary["rounds"]]
    return [*rows, {**(kept[0] if kept else {}), **last}]


def write_run(
    path: Path,
    events: Sequence[int] = (2,),
    summary: Mapping[str, Any] | None = SUMMARY,
    rounds: Sequence[Row] = ROUNDS,
    **changes: Any,
) -> Path:
    """A run with five clients, evaluated in every round; a clustering after each of `events`.

    Args:
        summary: None for a run that is not finished.
        changes: of the configuration.
    """
    config = CONFIG | changes
    directory = RunDirectory(path)
    environment = {"versions": {"torch": "2.9.9"}, "commit": "c0ffee"}
    directory.start(config, environment, "digest")
    for row in rounds if summary is None else fitting(rounds, summary):
        directory.append_rounds([row])
        scores = ClientScores(np.arange(5), CORRECT, np.full(5, 10), np.zeros(5))
        directory.append_clients(row["round"], "test", scores, LABELS, GROUPS)
    for t in events:
        write_clustering(path / "clusterings", t, CLUSTERING)
    if summary is not None:
        method = config["algorithm"]
        name = method if isinstance(method, str) else method["name"]
        directory.finish({**summary, "seed": config["seed"], "algorithm": name})
    return path


def sweep_rows(seeds: Sequence[int] = (0, 1)) -> list[Row]:
    """Linkages, distances and thresholds; ward, l2, 1.0 is best by validation, l1 by test."""
    rows: list[Row] = []
    for linked in ("ward", "single"):
        for distance in ("l1", "l2"):
            for threshold in (0.1, 1.0, 10.0):
                for seed in seeds:
                    accuracy = 0.5 + 0.2 * (linked == "ward") - 0.1 * abs(np.log10(threshold))
                    rows.append(
                        {
                            DISTANCE: distance,
                            LINKAGE: linked,
                            THRESHOLD: threshold,
                            "seed": seed,
                            "status": "shared" if seed else "done",
                            "run": f"runs/{len(rows)}",
                            "error": None,
                            "accuracy_mean": accuracy + 0.02 * seed + 0.01 * (distance == "l1"),
                            "validation_accuracy_mean": accuracy + 0.01 * (distance == "l2"),
                            "clusters": round(4 / threshold),
                        }
                    )
    return rows


def write_sweep(path: Path, rows: Sequence[Row] | None = None, **space: Any) -> Path:
    path.mkdir(parents=True)
    frame = pd.DataFrame(sweep_rows() if rows is None else rows)
    frame.to_parquet(path / "rows.parquet")
    counts = {"rows": len(frame), "client_steps_trained": 250, "client_steps_naive": 1000}
    (path / "sweep.json").write_text(json.dumps(counts))
    given = [key for key in frame if "." in key]
    plain = {"space": {key: frame[key].dropna().unique().tolist() for key in given}} | space
    (path / "space.yaml").write_text(yaml.safe_dump(plain))
    return path

"""A run while it goes on: a line for each round. Without pandas, whose import delays a start."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flray.records.clusterings import clustering_files, read_clustering
from flray.report.configuration import look_up

THRESHOLD = "algorithm.clustering.partition.threshold"


def with_merges(row: Mapping[str, Any], run: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a round with the range of merges of its clustering, which the run's folder keeps.

    Not a column of its own: rows of a sweep with equal clusters share a run, whatever their trees.
    """
    files = clustering_files(run) if row.get("clustering_clusters") is not None else {}
    file = files.get(row["round"]) or files.get(0)
    tree = None if file is None else read_clustering(file).linkage
    if tree is None or not len(tree):
        return dict(row)
    heights = {"clustering_lowest_merge": tree[0, 2], "clustering_highest_merge": tree[-1, 2]}
    return {**row, **heights, "clustering_threshold": look_up(config, THRESHOLD)}


def round_line(row: Mapping[str, Any], num_rounds: int) -> str:
    """One round on one line.

    >>> round_line({"round": 3, "accuracy_mean": 0.5, "accuracy_worst": 0.25, "clusters": 2,
    ...             "train_loss": 1.5, "seconds": 0.25}, 20)
    'round  3/20 · accuracy  50.00 % · worst client  25.00 % · clusters 2 · loss 1.5000 · 0.25 s'
    """
    width = len(str(num_rounds))
    parts = [f"round {row['round']:{width}d}/{num_rounds}"]
    if row.get("accuracy_mean") is not None:
        parts.append(f"accuracy {100 * row['accuracy_mean']:6.2f} %")
        parts.append(f"worst client {100 * row['accuracy_worst']:6.2f} %")
        parts.append(f"clusters {row['clusters']}")
    if "train_loss" in row:
        parts.append(f"loss {row['train_loss']:.4f}")
    if row.get("clustering_clusters") is not None:
        found = f"clustered into {row['clustering_clusters']:g}"
        found += " overlapping clusters" if row.get("clustering_overlapping") == 1 else ""
        if row.get("clustering_ari") is not None:
            found += f" (ARI {row['clustering_ari']:.2f})"
        parts += [found, *_merges(row)]
    if row.get("clients_dropped"):
        parts.append(f"dropped {row['clients_dropped']}")
    parts.append(f"{row['seconds']:.2f} s")
    return " · ".join(parts)


def event_line(events: Sequence[Mapping[str, Any]], t: int) -> str:  # Any: YAML
    """What happens at the start of round t, empty where nothing does.

    >>> event_line([{"round": 3, "kind": "leave", "clients": [4, 5]}], 3)
    'round 3 begins with: leave (clients 4, 5)'
    """
    now = [event for event in events if event["round"] == t]
    told = [f"{e['kind']} (clients {', '.join(map(str, e['clients']))})" for e in now]
    return f"round {t} begins with: {'; '.join(told)}" if told else ""


def _merges(row: Mapping[str, Any]) -> list[str]:  # Any: one value a column
    """The range of a tree's merges, and what a threshold outside it does.

    >>> _merges({"clustering_lowest_merge": 0.5, "clustering_highest_merge": 1.9,
    ...          "clustering_threshold": 3.0})
    ['merges 0.5 to 1.9: the threshold 3 is above every merge, so there is one cluster']
    """
    low, high = row.get("clustering_lowest_merge"), row.get("clustering_highest_merge")
    if low is None or high is None:
        return []
    told, threshold = f"merges {low:.3g} to {high:.3g}", row.get("clustering_threshold")
    if threshold is not None and threshold >= high:
        told += f": the threshold {threshold:g} is above every merge, so there is one cluster"
    elif threshold is not None and threshold < low:
        told += f": the threshold {threshold:g} is below every merge, so every client is alone"
    return [told]

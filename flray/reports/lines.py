"""Lines on the terminal for each round of a run in progress.

Imports no pandas, which would delay a start.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flray import columns as recorded
from flray.columns import ScoreColumns
from flray.config.overrides import THRESHOLD
from flray.records.clusterings import clustering_files, read_clustering
from flray.records.run_directory import RunDirectory
from flray.reports.columns import column_of
from flray.reports.configuration import value_at
from flray.values import highest_equal

Row = Mapping[str, Any]  # a row of rounds.parquet; Any: numbers and texts


def line_of_run(row: Row, run: Path, config: Mapping[str, Any]) -> str:  # Any: YAML
    """The `round_line` of a run, with its score and the range of merges of the clustering.

    The range is not a recorded column, because rows of a sweep with equal clusters share a run even
    if their trees differ. It is left out if the partition has no tree.

    Args:
        row: A row of rounds.parquet.
        run: The run directory, whose clusterings/ has the file of the round already.
        config: The resolved configuration, for the number of rounds and the threshold.
    """
    files = clustering_files(run) if row.get(recorded.CLUSTERING_CLUSTERS) is not None else {}
    file = files.get(row[recorded.ROUND]) or files.get(0)
    tree = None if file is None else read_clustering(file).linkage
    merges = ""
    if tree is not None and len(tree):
        merges = _merges(tree[0, 2], tree[-1, 2], value_at(config, THRESHOLD))
    return round_line(row, config["rounds"], RunDirectory(run).scores()[0], merges)


def round_line(
    row: Row, num_rounds: int, score: ScoreColumns = recorded.ACCURACY_COLUMNS, merges: str = ""
) -> str:
    """One round on one line: its evaluation if it had one, its loss, its clustering, its seconds.

    Args:
        row: A row of rounds.parquet.
        num_rounds: The rounds of the run.
        score: The score of the run.
        merges: What there is to say about the tree of its clustering.

    >>> round_line({"round": 3, "accuracy_mean": 0.5, "accuracy_worst": 0.25, "clusters": 2,
    ...             "train_loss": 1.5, "seconds": 0.25}, 20)
    'round  3/20 · accuracy  50.00 % · worst client  25.00 % · clusters 2 · loss 1.5000 · 0.25 s'
    """
    parts = [f"round {row[recorded.ROUND]:{len(str(num_rounds))}d}/{num_rounds}"]
    if row.get(score.mean) is not None:
        columns = {score.name: score.mean, "worst client": score.column("worst")}
        for title, column in columns.items():
            shown = column_of(column)
            number = f"{shown.scale * row[column]:6.{shown.decimals}f}"
            if column == score.mean and row.get(score.column(recorded.SE_SAMPLE)):
                error = shown.scale * row[score.column(recorded.SE_SAMPLE)]
                number += f" ± {error:.{shown.decimals}f}"
            parts.append(f"{title} {number} {shown.unit}".rstrip())
        if row.get(score.column(recorded.SE_SAMPLE)):
            parts[-2] += f" (sample of {row[recorded.CLIENTS_EVALUATED]:,.0f} clients)"
        parts.append(f"clusters {row[recorded.CLUSTERS]}")
    if recorded.TRAIN_LOSS in row:
        parts.append(f"loss {row[recorded.TRAIN_LOSS]:.4f}")
    if row.get(recorded.CLUSTERING_CLUSTERS) is not None:
        clusters = f"clustered into {row[recorded.CLUSTERING_CLUSTERS]:g}"
        if row.get(recorded.CLUSTERING_OVERLAPPING) == 1:
            clusters += " overlapping clusters"
        if row.get(recorded.CLUSTERING + recorded.ARI) is not None:
            clusters += f" (ARI {row[recorded.CLUSTERING + recorded.ARI]:.2f})"
        parts.append(clusters)
    if merges:
        parts.append(merges)
    if row.get(recorded.CLIENTS_DROPPED):
        parts.append(f"dropped {row[recorded.CLIENTS_DROPPED]}")
    parts.append(f"{row[recorded.SECONDS]:.2f} s")
    return " · ".join(parts)


def event_line(events: Sequence[Mapping[str, Any]], t: int) -> str:  # Any: YAML
    """The events at the start of round t on one line, "" if there are none.

    Args:
        events: The list `events` of a resolved configuration, each with round, kind and clients.

    >>> event_line([{"round": 3, "kind": "leave", "clients": [4, 5]}], 3)
    'round 3 begins with: leave (clients 4, 5)'
    """
    now = [event for event in events if event["round"] == t]
    texts = [f"{e['kind']} (clients {', '.join(map(str, e['clients']))})" for e in now]
    return f"round {t} begins with: {'; '.join(texts)}" if texts else ""


def _merges(low: float, high: float, threshold: float | None) -> str:
    """The range of a tree's merges, and what a threshold outside it does.

    >>> _merges(0.5, 1.9, 3.0)
    'merges 0.5 to 1.9: the threshold 3 is above every merge, so there is one cluster'
    """
    text = f"merges {low:.3g} to {high:.3g}"
    if threshold is not None and highest_equal(threshold) >= high:
        text += f": the threshold {threshold:g} is above every merge, so there is one cluster"
    elif threshold is not None and highest_equal(threshold) < low:
        text += f": the threshold {threshold:g} is below every merge, so every client is alone"
    return text

"""Runs in the terminal: a line for each round, a table at the end; percent, not fractions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from flray.report.ratios import Measured, Ratio, mean_ratio
from flray.report.runs import GROUND_TRUTH, GROUND_TRUTH_NOTE, RunRecord

Summary = Mapping[str, Any]  # Any: JSON

# Accuracies of other protocols, in columns of their own where a run has them.
PROTOCOLS = {
    "global": "global_accuracy_mean",
    "tuned": "tuned_accuracy_mean",
    "tuned global": "tuned_global_accuracy_mean",
}


def round_line(row: Summary, num_rounds: int) -> str:
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
        if row.get("clustering_ari") is not None:
            found += f" (ARI {row['clustering_ari']:.2f})"
        parts.append(found)
    if row.get("clients_dropped"):
        parts.append(f"dropped {row['clients_dropped']}")
    parts.append(f"{row['seconds']:.2f} s")
    return " · ".join(parts)


def comparison_table(runs: Mapping[str, Sequence[Summary]]) -> Table:
    """One row for each experiment, a mean over its seeds; differences are paired by seed."""
    seeds = max(len(summaries) for summaries in runs.values())
    first = next(iter(runs))
    title = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else None
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment")
    there = {key for summaries in runs.values() for s in summaries for key in s}
    protocols = {name: key for name, key in PROTOCOLS.items() if key in there}
    columns = ["accuracy %", *protocols, "validation", "worst", "variance %²", "clusters"]
    columns += ["MB up", "MB down", "seconds"]
    if len(runs) > 1:
        columns.insert(1, f"vs {first}")
    for column in columns:
        table.add_column(column, justify="right")
    for name, summaries in runs.items():
        cells = _cells(summaries, list(protocols.values()))
        if len(runs) > 1:
            cells.insert(1, _difference(summaries, runs[first]) if name != first else "")
        used = any(summary.get("uses_ground_truth") for summary in summaries)
        table.add_row(_marked(name, used), *cells)
        if used:
            table.caption, table.caption_justify = GROUND_TRUTH_NOTE, "left"
    return table


def _marked(name: str, used_ground_truth: bool) -> str:
    return f"{name} {GROUND_TRUTH}" if used_ground_truth else name


def clustering_table(runs: Mapping[str, Sequence[RunRecord]]) -> Table | None:
    """FL+HC's own columns: the round after the clustering and the last, with the ratio to the first
    experiment at the same seed and round; None where nothing was clustered or compared with."""
    first, *others = runs
    clustered = {
        name: found
        for name in others
        if (found := [run for run in runs[name] if "round_after_clustering" in run.summary])
    }
    if not clustered:
        return None
    table = Table(
        title=f"after the clustering and at the end, with the ratio to {first}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    columns = ["accuracy %", "at the end", "clients at target %", "at the end", "ARI"]
    for column in ("experiment", "round", *columns):
        table.add_column(column, justify="left" if column == "experiment" else "right")
    for name, found in clustered.items():
        used = any(run.uses_ground_truth for run in found)
        table.add_row(_marked(name, used), *_clustering_cells(found, runs[first]))
    return table


def _clustering_cells(runs: Sequence[RunRecord], baselines: Sequence[RunRecord]) -> list[str]:
    after = [int(run.summary["round_after_clustering"]) for run in runs]
    cells = [f"{np.mean(after):g}"]
    for column in ("accuracy_mean", "clients_reaching_target"):
        for at in (after, [int(run.summary["rounds"]) for run in runs]):
            mine = [_measured(run, t, column) for run, t in zip(runs, at, strict=True)]
            value = _spread([100 * each.value for each in mine])
            cells.append(f"{value} {_ratio_text(mean_ratio(mine, column, baselines))}")
    found = [run.summary["ari"] for run in runs if run.summary.get("ari") is not None]
    return [*cells, _spread(found) if found else "–"]


def _measured(run: RunRecord, t: int, column: str) -> Measured:
    """The value of a column in round t; NaN where it was not evaluated or is not finite."""
    value = run.at(t).get(column)
    return Measured(run, t, np.nan if value is None else value)


def _ratio_text(ratio: Ratio) -> str:
    return "(–)" if ratio.value is None else f"({ratio.value:.2f}x)"


def _cells(summaries: Sequence[Summary], protocols: Sequence[str]) -> list[str]:
    accuracy = _spread([100 * s["accuracy_mean"] for s in summaries])
    if len(summaries) == 1:
        accuracy = f"{accuracy} ± {100 * summaries[0]['accuracy_se_clients']:.2f}"
    return [
        accuracy,
        *(_spread(_percents(summaries, key)) for key in (*protocols, "validation_accuracy_mean")),
        _spread([100 * s["accuracy_worst"] for s in summaries]),
        _spread([1e4 * s["accuracy_variance"] for s in summaries]),
        f"{np.mean([s['clusters'] for s in summaries]):g}",
        f"{np.mean([s['bytes_up'] for s in summaries]) / 1e6:,.1f}",
        f"{np.mean([s['bytes_down'] for s in summaries]) / 1e6:,.1f}",
        f"{np.mean([s['seconds'] for s in summaries]):.1f}",
    ]


def _percents(summaries: Sequence[Summary], key: str) -> list[float]:
    """A fraction of each summary in percent, NaN where it has none."""
    return [np.nan if s.get(key) is None else 100 * s[key] for s in summaries]


def _spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def _difference(summaries: Sequence[Summary], against: Sequence[Summary]) -> str:
    """Mean of the differences seed by seed, and its standard error.

    >>> _difference([{"seed": 0, "accuracy_mean": .9}, {"seed": 1, "accuracy_mean": .7}],
    ...             [{"seed": 0, "accuracy_mean": .8}, {"seed": 1, "accuracy_mean": .5}])
    '+15.00 ± 5.00'
    """
    base = {s["seed"]: s["accuracy_mean"] for s in against}
    paired = [100 * (s["accuracy_mean"] - base[s["seed"]]) for s in summaries if s["seed"] in base]
    if not paired:
        return "no common seed"
    text = f"{np.mean(paired):+.2f}"
    if len(paired) > 1:
        text += f" ± {np.std(paired, ddof=1) / np.sqrt(len(paired)):.2f}"
    return text

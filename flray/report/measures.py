"""Measures of clusterings as a table: those of one run, or of several runs side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flray.report.runs import Experiments, Plain, RunRecord
from flray.report.sheets import Heading, Sheet, numbers

HALF, SAME, ALIKE, UNIFORM = (
    "half the labels:",
    "same labels:",
    "correlation with",
    "uniformity",
)
# Keys of a summary; a clustering's columns have the prefix `clustering_`.
HEADINGS = (
    Heading("overlap_fp", "false pos.", HALF),
    Heading("overlap_fn", "false neg.", HALF),
    Heading("equal_fp", "false pos.", SAME),
    Heading("equal_fn", "false neg.", SAME),
    Heading("label_correlation", "labels", ALIKE),
    Heading("drift_correlation", "drift", ALIKE),
    Heading("data_correlation", "both", ALIKE),
    Heading("uniformity", "", UNIFORM),
    Heading("uniformity_random", "(random)", UNIFORM),
    Heading("uniformity_labels", "(of labels)", UNIFORM),
    Heading("robustness", "robustness"),
    Heading("robustness_clients", "robustness by client"),
)
ERRORS = ("overlap_fp", "overlap_fn", "equal_fp", "equal_fn")
_NOTES = (
    (
        ERRORS,
        "False positives and negatives (FLIS, Fig. 3): wrong and missing companions of a client, a "
        "mean over clients and clusterings, where those with half of its labels, or with the same "
        "labels, belong to it.",
    ),
    (
        ("label_correlation", "drift_correlation"),
        "Correlation (REPA, Fig. 1): of the cosine of two clients' embeddings with how alike their "
        "labels are, their ways to see images, or both.",
    ),
    (
        ("uniformity",),
        "Uniformity (REPA, eq. 7, Fig. 2): how alike the labels of clients in one cluster are; for "
        "as many random clusters, and for k-means of the labels themselves.",
    ),
    (
        ("robustness",),
        "Robustness (REPA, Alg. 1): how often a client made to resemble one of a cluster lands in "
        "it, a mean ± standard error over clusters.",
    ),
)


def run_sheet(run: RunRecord, drawn: Sequence[int]) -> Sheet | None:
    """The measures of some clusterings of a run, by round, and over all of them if there are more.

    Args:
        drawn: rounds of clusterings.
    """
    rows = {f"round {t}" if t else "at the start": [_at(run, t)] for t in drawn}
    if len(drawn) > 1:
        rows["whole run"] = [run.numbers]
    return _sheet("measures of the clusterings", "after", rows)


def experiments_sheet(experiments: Experiments) -> Sheet | None:
    """The measures of each experiment, as its summaries have them, a mean over its seeds."""
    rows = {name: [run.numbers for run in runs] for name, runs in experiments.items()}
    clustered = {name: held for name, held in rows.items() if any("overlap_fp" in n for n in held)}
    return _sheet("measures of the clusterings", "experiment", clustered)


def errors_by_round(run: RunRecord) -> pd.DataFrame:
    """The clustering errors of each clustering by round; empty where none are recorded."""
    named = {f"clustering_{name}": name for name in ERRORS}
    if not set(named) <= set(run.rounds):
        return pd.DataFrame(columns=list(ERRORS))
    errors = run.rounds.set_index("round")[list(named)].rename(columns=named)
    return errors.dropna().astype(float)


def _at(run: RunRecord, t: int) -> Plain:
    """What is recorded of the clustering after round t; that at the start is in round 1's row."""
    row = run.rounds[run.rounds["round"] == max(t, 1)]
    if row.empty:
        return {}
    prefix = "clustering_"
    values = {str(k): v for k, v in row.iloc[0].items()}
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def _sheet(title: str, first: str, rows: Mapping[str, Sequence[Plain]]) -> Sheet | None:
    """A row for each name; None where nothing was measured."""
    cells: dict[tuple[Any, str, str], dict[str, Any]] = {}  # Any: fields
    for name, held in rows.items():
        for heading in HEADINGS:
            values = [float(n[heading.key]) for n in held if n.get(heading.key) is not None]
            values = [value for value in values if np.isfinite(value)]
            cell: dict[str, Any] = {"value": float(np.mean(values)) if values else np.nan}
            if len(values) > 1:
                cell["error"] = float(np.std(values, ddof=1))
            elif heading.key == "robustness" and values:
                cell["error"] = held[0].get("robustness_se")
            cells[name, heading.key, "ours"] = cell
    if not cells:
        return None
    frame = numbers(cells)
    known = set(frame["value"].dropna().index.get_level_values("column"))
    shown = tuple(heading for heading in HEADINGS if heading.key in known)
    if not shown:
        return None
    labels = pd.DataFrame({first: list(rows)}, index=list(rows))
    notes = tuple(words for keys, words in _NOTES if known & set(keys))
    kept = frame[frame.index.get_level_values("column").isin(known)]
    return Sheet(title, labels, shown, kept, notes=notes)

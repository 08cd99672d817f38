"""Measures of clusterings as a table: those of one run, or of several runs side by side."""

from collections.abc import Mapping, Sequence

import pandas as pd

from flray.report.columns import CORRELATIONS, known
from flray.report.runs import Experiments, Plain, RunRecord
from flray.report.sheets import Cells, Sheet, headings_of, numbers, seed_mean

ERRORS = ("overlap_fp", "overlap_fn", "equal_fp", "equal_fn")
UNIFORMITY = ("uniformity", "uniformity_random", "uniformity_labels")
ROBUSTNESS = ("robustness", "robustness_clients")
# Keys of a summary, and what they are; a clustering's columns have the prefix `clustering_`.
_NOTES = {
    ERRORS: "False positives and negatives (FLIS, Fig. 3): wrong and missing companions of a "
    "client, a mean over clients and clusterings, where those with half of its labels, or with the "
    "same labels, belong to it.",
    CORRELATIONS: "Correlation (REPA, Fig. 1): of the cosine of two clients' embeddings with how "
    "alike their labels are, their ways to see images, or both.",
    UNIFORMITY: "Uniformity (REPA, eq. 7, Fig. 2): how alike the labels of clients in one cluster "
    "are; for as many random clusters, and for k-means of the labels themselves.",
    ROBUSTNESS: "Robustness (REPA, Alg. 1): how often a client made to resemble one of a cluster "
    "lands in it, a mean over clusters.",
}


def run_sheet(run: RunRecord, drawn: Sequence[int]) -> Sheet | None:
    """The measures of some clusterings of a run, by round, and over all of them if there are more.

    Args:
        drawn: rounds of clusterings.
    """
    rows = {f"round {t}" if t else "at the start": [_at(run, t)] for t in drawn}
    if len(drawn) > 1:
        rows["whole run"] = [run.numbers]
    return _sheet("after", rows)


def experiments_sheet(experiments: Experiments) -> Sheet | None:
    """The measures of each experiment, as its summaries have them, a mean over its seeds."""
    rows = {name: [run.numbers for run in runs] for name, runs in experiments.items()}
    clustered = {name: held for name, held in rows.items() if any("overlap_fp" in n for n in held)}
    return _sheet("experiment", clustered)


def errors_by_round(run: RunRecord) -> pd.DataFrame:
    """The clustering errors of each clustering by round; empty where none are recorded."""
    named = {f"clustering_{name}": name for name in ERRORS}
    errors = run.rounds.set_index("round").reindex(columns=list(named)).rename(columns=named)
    return errors.astype(float).dropna()


def _at(run: RunRecord, t: int) -> Plain:
    """What is recorded of the clustering after round t; that at the start is in round 1's row."""
    row = run.rounds[run.rounds["round"] == max(t, 1)].filter(regex="^clustering_")
    named = row.rename(columns=lambda name: name.removeprefix("clustering_"))
    return {} if named.empty else {str(k): v for k, v in named.iloc[0].items()}


def _sheet(first: str, rows: Mapping[str, Sequence[Plain]]) -> Sheet | None:
    """A row for each name; None where nothing was measured."""
    cells: Cells = {}
    for name, held in rows.items():
        for key in (key for keys in _NOTES for key in keys):
            values = [value for n in held if (value := known(n.get(key))) is not None]
            if values:
                cells[name, key, "ours"] = seed_mean(values)
                if key == "robustness" and len(values) == 1:
                    cells[name, key, "ours"]["error"] = held[0].get("robustness_se")
    if not cells:
        return None
    measured = {key for _, key, _ in cells}
    shown = [key for keys in _NOTES for key in keys if key in measured]
    notes = tuple(words for keys, words in _NOTES.items() if measured & set(keys))
    frame, labels = numbers(cells), pd.DataFrame({first: list(rows)}, index=list(rows))
    if frame["error"].notna().any():
        has_seeds = any(len(held) > 1 for held in rows.values())
        over = "standard deviation over seeds" if has_seeds else "standard error over clusters"
        notes += (f"± is the {over}.",)
    headings = tuple(headings_of(shown, frame))
    return Sheet("measures of the clusterings", labels, headings, frame, notes=notes)

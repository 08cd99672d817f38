"""Measures of clusterings as a table: those of one run, or of several runs side by side."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from flray.columns import CLUSTERING, ERRORS, ROUND
from flray.measures import MEASURE_COLUMNS
from flray.reports.columns import known
from flray.reports.runs import Experiments, Plain, RunRecord
from flray.reports.sheets import Fields, Sheet, seed_mean, sheet_of

# Keys of a summary; in a row of rounds.parquet they begin with `clustering_`.
_SHOWN = {key: column for key, column in MEASURE_COLUMNS.items() if column.note}


def run_sheet(run: RunRecord, drawn: Sequence[int]) -> Sheet | None:
    """The measures of clusterings by their rounds, and of the whole run if they are several."""
    rows = {f"round {t}" if t else "at the start": [_at(run, t)] for t in drawn}
    if len(drawn) > 1:
        rows["whole run"] = [run.numbers]
    return _sheet("after", rows)


def experiments_sheet(experiments: Experiments) -> Sheet | None:
    """The measures of each experiment, as its summaries have them, a mean over its seeds."""
    rows = {name: [run.numbers for run in runs] for name, runs in experiments.items()}
    clustered = {name: held for name, held in rows.items() if any(map(_is_measured, held))}
    return _sheet("experiment", clustered)


def _is_measured(numbers: Plain) -> bool:
    return any(key in numbers for key in _SHOWN)


def errors_by_round(run: RunRecord) -> pd.DataFrame:
    """The clustering errors of each clustering by round; empty where none are recorded."""
    named = {CLUSTERING + name: name for name in ERRORS}
    errors = run.rounds.set_index(ROUND).reindex(columns=list(named)).rename(columns=named)
    return errors.astype(float).dropna()


def _at(run: RunRecord, t: int) -> Plain:
    """What is recorded of the clustering after round t; that at the start is in round 1's row."""
    row = run.row(max(t, 1)).items()
    return {key.removeprefix(CLUSTERING): v for key, v in row if key.startswith(CLUSTERING)}


def _sheet(first: str, rows: Mapping[str, Sequence[Plain]]) -> Sheet | None:
    """A row for each name; None where nothing was measured."""
    cells: dict[tuple[str, str, str], Fields] = {}
    for name, held in rows.items():
        for key, column in _SHOWN.items():
            values = [value for n in held if not math.isnan(value := known(n.get(key)))]
            if values:
                cells[name, key, "ours"] = seed_mean(values)
                if column.error and len(values) == 1:
                    cells[name, key, "ours"]["error"] = held[0].get(column.error)
    measured = {key for _, key, _ in cells}
    shown = [key for key in _SHOWN if key in measured]
    notes = list(dict.fromkeys(_SHOWN[key].note for key in shown))
    if any(cell["error"] is not None for cell in cells.values()):
        has_seeds = any(len(held) > 1 for held in rows.values())
        over = "standard deviation over seeds" if has_seeds else "standard error over clusters"
        notes.append(f"± is the {over}.")
    labels = pd.DataFrame({first: list(rows)}, index=list(rows))
    return sheet_of("measures of the clusterings", labels, shown, cells, notes) if cells else None

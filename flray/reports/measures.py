"""Tables of the measures of clusterings: those of one run by round, or of several experiments."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from flray.columns import CLUSTERING, ERRORS, ROUND
from flray.measures import MEASURE_COLUMNS
from flray.reports.columns import finite
from flray.reports.runs import Experiments, Plain, RunRecord
from flray.reports.sheets import Fields, Sheet, seed_mean, sheet_of

# Keys of a summary; in rounds.parquet they begin with `clustering_`
_SHOWN = {key: column for key, column in MEASURE_COLUMNS.items() if column.note}


def run_sheet(run: RunRecord, clusterings: Sequence[int]) -> Sheet | None:
    """The measures of the clusterings of these rounds, and of the whole run if they are several.

    Measures are errors, correlations, uniformity and robustness, as far as they were recorded; None
    if none was.
    """
    rows = {f"round {t}" if t else "at the start": [_at(run, t)] for t in clusterings}
    if len(clusterings) > 1:
        rows["whole run"] = [run.numbers]
    return _sheet("after", rows)


def experiments_sheet(experiments: Experiments) -> Sheet | None:
    """The measures of each experiment that has any, means over its seeds.

    They are those of the whole run, as its summary has them. None if no experiment has any.

    Args:
        experiments: The finished runs of each experiment by name.
    """
    rows = {name: [run.numbers for run in runs] for name, runs in experiments.items()}
    keys = _SHOWN.keys()
    measured = {name: seeds for name, seeds in rows.items() if any(keys & n.keys() for n in seeds)}
    return _sheet("experiment", measured)


def errors_by_round(run: RunRecord) -> pd.DataFrame:
    """The clustering errors of each clustering by round; empty if none are recorded.

    Columns are overlap_fp, overlap_fn, equal_fp and equal_fn, in companions per client. Rounds
    without a clustering are left out.
    """
    names = {CLUSTERING + name: name for name in ERRORS}
    errors = run.rounds.set_index(ROUND).reindex(columns=list(names)).rename(columns=names)
    return errors.astype(float).dropna()


def _at(run: RunRecord, t: int) -> Plain:
    """The measures of the clustering after round t; those of the start are in round 1's row."""
    row = run.row(max(t, 1)).items()
    return {key.removeprefix(CLUSTERING): v for key, v in row if key.startswith(CLUSTERING)}


def _sheet(first: str, rows: Mapping[str, Sequence[Plain]]) -> Sheet | None:
    """A row for each name, with means over its seeds; None if nothing was measured."""
    cells: dict[tuple[str, str, str], Fields] = {}
    for name, seeds in rows.items():
        for key, column in _SHOWN.items():
            measured = [n for n in seeds if not math.isnan(finite(n.get(key)))]
            if measured:
                cells[name, key, "ours"] = seed_mean([finite(n.get(key)) for n in measured])
                if column.error and len(measured) == 1:
                    cells[name, key, "ours"]["error"] = measured[0].get(column.error)
    shown = {key for _, key, _ in cells}
    columns = [key for key in _SHOWN if key in shown]
    notes = list(dict.fromkeys(_SHOWN[key].note for key in columns))
    if any(cell["error"] is not None for cell in cells.values()):
        has_seeds = any(len(seeds) > 1 for seeds in rows.values())
        over = "standard deviation over seeds" if has_seeds else "standard error over clusters"
        notes.append(f"± is the {over}.")
    labels = pd.DataFrame({first: list(rows)}, index=list(rows))
    return sheet_of("measures of the clusterings", labels, columns, cells, notes) if cells else None

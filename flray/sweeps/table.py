"""The results of a sweep: its table, its best configuration and what it cost.

All is computed from the rows' states and run directories, never from what a trial returned, so that
a resumed sweep has the same table.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flray.columns import (
    ACCURACY,
    CLIENT_STEPS,
    ERROR,
    FOLDER,
    HOLDOUT_LABELS_READ,
    MERGE_PLACE,
    ROW,
    RUN,
    SCORE,
    STATUS,
    USES_GROUND_TRUTH,
)
from flray.files import replace_file
from flray.records.run_directory import RunDirectory
from flray.server.summary import numbers_so_far
from flray.sweeps.branching import PREFIX
from flray.sweeps.cache import Cache
from flray.sweeps.folder import run_path
from flray.sweeps.groups import KIND as GROUP
from flray.sweeps.keys import canonical
from flray.sweeps.ranking import TIE_BREAKERS, candidates, ranks
from flray.sweeps.rows import SweepRow
from flray.sweeps.space import Options
from flray.sweeps.stages import OBSERVATION

TABLE = "rows.parquet"


def table_of(folder: Path, rows: Sequence[SweepRow]) -> pd.DataFrame:
    """One line for each row: its settings, its status and every number of its run.

    First come the columns row, status, run, folder and error, then a column for each key that the
    space varies, then those of summary.json. A row that stopped early has its numbers so far. Cells
    of lists and mappings are JSON.
    """
    # The column of ground truth tells whether it was used, not whether a row was allowed to use it.
    overridden = dict.fromkeys(key for row in rows for key in row.overrides)
    keys = [key for key in overridden if key != USES_GROUND_TRUTH]
    records = []
    for row in rows:
        path = None if row.run is None else run_path(row.number)
        state = {ROW: row.number, STATUS: row.status, RUN: row.run, FOLDER: path, ERROR: row.error}
        unknown = {USES_GROUND_TRUTH: None, HOLDOUT_LABELS_READ: None}
        numbers = {} if path is None else _numbers(RunDirectory(folder / path))
        settings = {k: _cell(v) for k, v in row.overrides.items() if k in keys}
        # Where others vary `rounds`, they are those to run, not those of a run that ended early.
        planned = {k: row.plain[k] for k in ("rounds",) if k in keys and k in row.plain}
        point = {MERGE_PLACE: row.merge_point.place} if row.merge_point else {}
        records.append(unknown | numbers | state | planned | settings | point)
    first = [ROW, STATUS, RUN, FOLDER, ERROR]
    columns = dict.fromkeys([*first, *keys, *(key for record in records for key in record)])
    frame = pd.DataFrame(records, columns=list(columns))
    return frame.assign(**{key: _one_kind(frame[key]) for key in keys})


def write_table(folder: Path, frame: pd.DataFrame) -> None:
    """Write rows.parquet; a reader sees the old table or the new one."""
    replace_file(folder / TABLE, lambda path: frame.to_parquet(path))


def _numbers(run: RunDirectory) -> dict[str, Any]:
    """The summary; of a run that stopped before its end, its numbers so far."""
    return run.summary() or (numbers_so_far(run) if len(run.rounds()) else {})


def _cell(value: Any) -> Any:
    """A value of YAML as a cell of a table: lists and mappings become JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _one_kind(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Parquet holds one type per column: numbers beside names become text."""
    kinds = {type(value) for value in column.dropna()}
    if len(kinds) < 2 or kinds <= {int, float}:
        return column
    return column.map(lambda value: value if value is None or value != value else str(value))


def best_of(
    rows: Sequence[SweepRow], summaries: Mapping[int, Mapping[str, Any]], options: Options
) -> dict[str, Any] | None:
    """The configuration with the best mean of the metric over its seeds; None: none has one.

    Complete configurations go first; equal means are decided by the rule of `ranking.py`. The
    result is the entry `best` of sweep.json: `rows` that have a value and `missing_rows` of the
    configuration, `left_out`, how many incomplete configurations were not considered, `sets`, its
    settings, and means of the metric and of the first score on test parts.

    Args:
        summaries: The summaries of the rows that are done, by number.
        options: Metric and mode of the space.
    """
    numbers, metric = [row.number for row in rows], options.metric
    columns = list(dict.fromkeys((metric, *TIE_BREAKERS)))
    cells = [[summaries.get(n, {}).get(column) for column in columns] for n in numbers]
    values = pd.DataFrame(cells, numbers, columns, float)
    texts = pd.Series([canonical(row.settings_without_seed()) for row in rows], numbers)
    alike = values.groupby(texts, sort=False)
    missing = alike.size() - alike[metric].count()
    means = alike.mean().assign(missing=missing).dropna(subset=[metric])
    if means.empty:
        return None
    best = ranks(means, metric, means["missing"], options.mode == "max").idxmin()
    metrics = values.loc[texts == best, metric]
    measured = [summaries[number] for number in metrics.dropna().index]
    test = f"{measured[0].get(SCORE, ACCURACY)}_mean"
    first = next(row for row in rows if row.number == metrics.index[0])
    return {
        "rows": metrics.dropna().index.tolist(),
        "missing_rows": metrics[metrics.isna()].index.tolist(),
        "left_out": int((~candidates(means["missing"])).sum()),  # configurations
        "sets": first.settings_without_seed(),
        metric: float(metrics.mean()),
        test: float(np.mean([summary[test] for summary in measured])),
        USES_GROUND_TRUTH: any(summary[USES_GROUND_TRUTH] for summary in measured),
    }


def costs_of(
    folder: Path, rows: Sequence[SweepRow], frame: pd.DataFrame, cache: Cache
) -> dict[str, Any]:  # Any: JSON
    """Numbers of computed entries; client steps trained, and if every row had run alone.

    `components` counts the groups of clients of all rows, `components_trained` those that were
    trained, `ratio` is how many times fewer client steps the sweep trained than its rows alone.

    Args:
        cache: The cache, which knows what its entries cost this sweep.
    """
    costs = {kind: cache.costs(kind) for kind in (PREFIX, OBSERVATION, "distance", "tree", GROUP)}
    trained = sum(sum(steps.values()) for steps in costs.values())
    trained += sum(_steps_of(folder, row) for row in rows)
    naive = int(frame[CLIENT_STEPS].fillna(0).sum()) if CLIENT_STEPS in frame else 0
    return {
        "prefixes": len({key.partition("-")[0] for key in costs[PREFIX]}),
        "observations": len(costs[OBSERVATION]),
        "distances": len(costs["distance"]),
        "trees": len(costs["tree"]),
        "runs": len({row.run for row in rows if row.run is not None}),
        "components": sum(len(row.groups) for row in rows),
        "components_trained": len(costs[GROUP]),
        "client_steps_trained": trained,
        "client_steps_naive": naive,
        "ratio": naive / trained if trained and naive else None,
    }


def _steps_of(folder: Path, row: SweepRow) -> int:
    """Client steps of the row's own run, finished or not, without those of cached entries."""
    if row.groups or row.status == "shared":
        return 0
    rounds = RunDirectory(folder / run_path(row.number)).rows()
    steps: int = sum(record.get(CLIENT_STEPS, 0) for record in rounds)
    return max(steps - row.steps_found, 0)

"""A sweep's folder: its space, its rows one by one and as a table, and its report."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import yaml

from flray.clustering.merges import MergePoint
from flray.columns import (
    ACCURACY_MEAN,
    ERROR,
    FOLDER,
    HOLDOUT_LABELS_READ,
    MERGE_PLACE,
    ROW,
    RUN,
    STATUS,
    USES_GROUND_TRUTH,
)
from flray.config.deciding import first_difference
from flray.errors import ExperimentError
from flray.files import read_json, reading, replace_file, replace_text
from flray.records import lock
from flray.records.inside import refuse_links_out
from flray.records.run_directory import RunDirectory
from flray.server.summary import numbers_so_far
from flray.sweeps.keys import canonical
from flray.sweeps.ranking import TIE_BREAKERS, candidates, ranks
from flray.sweeps.rows import SweepRow
from flray.sweeps.space import Options, Space

SPACE, REPORT, TABLE, ROWS = "space.yaml", "sweep.json", "rows.parquet", "trials"
FOLDERS = ("runs", ROWS)
FREE = ("concurrency", "cache")  # keys of a space that may change on --resume


def run_path(number: int) -> str:
    """Where the run of a row lies, relative to the sweep's folder."""
    return f"runs/{number:04d}"


def check_folder(path: Path, space: Space, code: Mapping[str, str], resume: bool) -> None:
    """Refuse a folder that holds anything other than this sweep."""
    refuse_links_out(path)
    if (path / SPACE).is_file():
        _check_same(path, space, code)
        if not resume:
            raise ExperimentError(
                f"{path} already holds this sweep: pass --resume to go on with it, choose another "
                "--out or remove it"
            )
        return
    begun = (lock.NAME, *FOLDERS, REPORT, f"{REPORT}.tmp", f"{SPACE}.tmp")  # a start cut short
    foreign = sorted(p.name for p in path.glob("*") if p.name not in begun)
    if foreign:
        raise ExperimentError(
            f"{path} holds something that is not a sweep ({foreign[0]}): choose another --out"
        )
    if resume:
        raise ExperimentError(f"nothing to resume: {path} holds no sweep; leave out --resume")


def open_folder(path: Path, space: Space, code: Mapping[str, str]) -> None:
    """Make the folder of a sweep where there is none."""
    if (path / SPACE).is_file():
        return
    for name in FOLDERS:
        (path / name).mkdir(exist_ok=True)
    write_report(path, {"id": uuid4().hex, "code": dict(code), "seconds": 0.0})
    text = yaml.safe_dump(space.plain, sort_keys=False, allow_unicode=True)
    replace_text(path / SPACE, text)  # last: it is what makes this a sweep


def _check_same(path: Path, space: Space, code: Mapping[str, str]) -> None:
    with reading(path / SPACE):
        held = dict(yaml.safe_load((path / SPACE).read_text(encoding="utf-8")))
    here = yaml.safe_load(yaml.safe_dump(space.plain))
    kept = [{key: value for key, value in each.items() if key not in FREE} for each in (held, here)]
    difference = first_difference(*kept)
    if difference is not None:
        raise ExperimentError(
            f"{path} holds another sweep ({difference}): choose another --out or remove it"
        )
    difference = first_difference(read_report(path).get("code", {}), code)
    if difference is not None:
        raise ExperimentError(
            f"{path} was computed by other code ({difference}), whose numbers do not belong in "
            "one table with this one's: choose another --out, or go back to that version"
        )


def read_report(path: Path) -> dict[str, Any]:
    return read_json(path / REPORT)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    replace_text(path / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def write_row(folder: Path, row: SweepRow) -> None:
    """Write the state of a row."""
    replace_text(folder / ROWS / f"{row.number:04d}.json", json.dumps(asdict(row), indent=1))


def alive_file(folder: Path, number: int) -> Path:
    """Touched by the trial of a row as long as it goes on."""
    return folder / ROWS / f"{number:04d}.alive"


def read_rows(
    folder: Path, number: int | None = None, but: Iterable[int] = ()
) -> dict[int, SweepRow]:
    """All rows that had a trial, or the one of this number, as they were last recorded.

    Args:
        but: numbers of rows to leave out.
    """
    name = "*.json" if number is None else f"{number:04d}.json"
    left_out = {f"{each:04d}.json" for each in but}
    found = {}
    for file in sorted((folder / ROWS).glob(name)):
        if file.name in left_out:
            continue
        with reading(file):
            held = read_json(file)
            point = held["merge_point"] and MergePoint(**held["merge_point"])
            row = SweepRow(**{**held, "merge_point": point})
            if file.stem != f"{row.number:04d}":
                raise ValueError(f"it is of row {row.number}")
        found[row.number] = row
    return found


def table_of(folder: Path, rows: Sequence[SweepRow]) -> pd.DataFrame:
    """One line for each row: its settings, its status and every number of its run."""
    records = []
    for row in rows:
        path = None if row.run is None else run_path(row.number)
        own = {ROW: row.number, STATUS: row.status, RUN: row.run, FOLDER: path, ERROR: row.error}
        unknown = {USES_GROUND_TRUTH: None, HOLDOUT_LABELS_READ: None}
        numbers = {} if path is None else _numbers(RunDirectory(folder / path))
        # This column tells whether ground truth was used, not whether a row was allowed to use it.
        sets = {k: _cell(v) for k, v in row.overrides.items() if k != USES_GROUND_TRUTH}
        place = {MERGE_PLACE: row.merge_point.place} if row.merge_point else {}
        records.append(unknown | numbers | own | sets | place)
    first = [ROW, STATUS, RUN, FOLDER, ERROR]
    keys = [key for row in rows for key in row.overrides]
    columns = dict.fromkeys([*first, *keys, *(key for record in records for key in record)])
    frame = pd.DataFrame(records, columns=list(columns))
    return frame.assign(**{key: _one_kind(frame[key]) for key in dict.fromkeys(keys)})


def _numbers(run: RunDirectory) -> dict[str, Any]:
    """The summary; of a run that stopped before, its numbers so far."""
    rounds = run.rounds()
    return run.summary() or (numbers_so_far(rounds) if len(rounds) else {})


def write_table(folder: Path, frame: pd.DataFrame) -> None:
    replace_file(folder / TABLE, lambda path: frame.to_parquet(path))


def best_of(
    rows: Sequence[SweepRow], summaries: Mapping[int, Mapping[str, Any]], options: Options
) -> dict[str, Any] | None:
    """The configuration with the best mean of the metric over its seeds; None: none has one.

    Args:
        summaries: of the rows that are done, by number.
    """
    numbers, metric = [row.number for row in rows], options.metric
    columns = list(dict.fromkeys((metric, *TIE_BREAKERS)))
    held = [[summaries.get(n, {}).get(column) for column in columns] for n in numbers]
    values = pd.DataFrame(held, numbers, columns, float)
    texts = pd.Series([canonical(row.but_for_the_seed()) for row in rows], numbers)
    alike = values.groupby(texts, sort=False)
    missing = alike.size() - alike[metric].count()
    found = alike.mean().assign(missing=missing).dropna(subset=[metric])
    if found.empty:
        return None
    best = ranks(found, metric, found["missing"], options.mode == "max").idxmin()
    own = values.loc[texts == best, metric]
    measured = [summaries[number] for number in own.dropna().index]
    return {
        "rows": own.dropna().index.tolist(),
        "missing_rows": own[own.isna()].index.tolist(),
        "left_out": int((~candidates(found["missing"])).sum()),  # configurations
        "sets": next(row for row in rows if row.number == own.index[0]).but_for_the_seed(),
        metric: float(own.mean()),
        ACCURACY_MEAN: float(np.mean([each[ACCURACY_MEAN] for each in measured])),
        USES_GROUND_TRUTH: any(each[USES_GROUND_TRUTH] for each in measured),
    }


def _cell(value: Any) -> Any:
    """A value of YAML as a cell of a table: lists and mappings become JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _one_kind(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Parquet holds one type per column: numbers beside names become text."""
    kinds = {type(value) for value in column.dropna()}
    if len(kinds) < 2 or kinds <= {int, float}:
        return column
    return column.map(lambda value: value if value is None or value != value else str(value))

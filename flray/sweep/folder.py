"""A sweep's folder: its space, its rows as a table, and what it cost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import yaml

from flray.errors import ExperimentError
from flray.records import lock
from flray.records.atomic import replace_file, replace_text
from flray.records.columns import (
    ACCURACY_MEAN,
    CLIENT_STEPS,
    ERROR,
    FOLDER,
    HOLDOUT_LABELS_READ,
    MERGE_PLACE,
    ROUND,
    ROUNDS,
    ROW,
    RUN,
    STATUS,
    USES_GROUND_TRUTH,
    of_one_round,
)
from flray.records.damage import read_json, reading
from flray.records.run_directory import RunDirectory, first_difference
from flray.server.summary import used_ground_truth
from flray.sweep.keys import canonical
from flray.sweep.rows import SweepRow
from flray.sweep.space import THRESHOLD, Options, Space

SPACE, REPORT, TABLE, STATES = "space.yaml", "sweep.json", "rows.parquet", "trials"
FREE = ("concurrency", "client_actors", "cache")  # keys of a space that may change on --resume


def run_path(number: int) -> str:
    """Where the run of a row lies, relative to the sweep's folder."""
    return f"runs/{number:04d}"


@dataclass(frozen=True)
class RowState:
    """What has become of a row."""

    number: int
    overrides: Mapping[str, Any]  # Any: YAML
    plain: Mapping[str, Any]
    run: str | None = None  # the key of its run, which rows may share
    status: str = "unfinished"  # then done, shared (with the run of another row), failed or stopped
    error: str | None = None
    merge_place: int | None = None  # of its threshold between the merges, where it has one
    is_whole: bool = False  # its algorithm has metrics that prefix and components lack
    components: list[str] = field(default_factory=list)  # keys of those its clients are in
    begin: int | None = None  # its run trained the rounds after this one; None: components did
    steps_placed: int = 0  # client steps that placed clients after the clustering
    steps_found: int = 0  # client steps of those rounds that were not trained for them

    @property
    def is_done(self) -> bool:
        return self.status in ("done", "shared")

    def but_for_the_seed(self) -> dict[str, Any]:
        """What rows that differ in their seed alone have in common.

        Each seed has a tree of its own, so it is the place between the merges that is common.
        """
        sets = {key: value for key, value in self.overrides.items() if key != "seed"}
        if self.merge_place is None:
            return sets
        return {k: v for k, v in sets.items() if k != THRESHOLD} | {MERGE_PLACE: self.merge_place}


def new_state(row: SweepRow) -> RowState:
    place = row.merge_point.place if row.merge_point else None
    return RowState(row.number, row.overrides, row.plain, merge_place=place)


def check_folder(path: Path, space: Space, code: Mapping[str, str], resume: bool) -> None:
    """Refuse a folder that holds anything but this sweep or nothing."""
    if (path / SPACE).is_file():
        _check_same(path, space, code)
        if not resume:
            raise ExperimentError(
                f"{path} already holds this sweep: pass --resume to go on with it, choose another "
                "--out or remove it"
            )
        return
    foreign = sorted(p.name for p in path.glob("*") if p.name != lock.NAME)
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
    for name in ("runs", STATES):
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


def write_state(folder: Path, state: RowState) -> None:
    replace_text(folder / STATES / f"{state.number:04d}.json", json.dumps(asdict(state), indent=1))


def alive_file(folder: Path, number: int) -> Path:
    """Touched by the trial of a row as long as it goes on."""
    return folder / STATES / f"{number:04d}.alive"


def read_states(folder: Path, number: int | None = None) -> dict[int, RowState]:
    """What has become of all rows, or of one, by number; a row without a trial is missing."""
    name = "*.json" if number is None else f"{number:04d}.json"
    found = {}
    for file in sorted((folder / STATES).glob(name)):
        with reading(file):
            state = RowState(**read_json(file))
        found[state.number] = state
    return found


def table_of(folder: Path, states: Sequence[RowState]) -> pd.DataFrame:
    """One row for each configuration: what it sets, what became of it, every number of its run."""
    records = []
    for state in states:
        path = None if state.run is None else run_path(state.number)
        own = {ROW: state.number, STATUS: state.status, RUN: state.run, FOLDER: path}
        numbers = {} if path is None else _numbers(RunDirectory(folder / path))
        # Whether ground truth was used is a result, even where rows differ in being allowed to.
        settings = (each for each in state.overrides.items() if each[0] != USES_GROUND_TRUTH)
        chosen = {key: _cell(value) for key, value in settings}
        if state.merge_place is not None:
            chosen[MERGE_PLACE] = state.merge_place
        unknown = {USES_GROUND_TRUTH: None, HOLDOUT_LABELS_READ: None}
        records.append(unknown | numbers | own | {ERROR: state.error} | chosen)
    first = [ROW, STATUS, RUN, FOLDER, ERROR]
    keys = [key for state in states for key in state.overrides]
    columns = dict.fromkeys([*first, *keys, *(key for record in records for key in record)])
    frame = pd.DataFrame(records, columns=list(columns))
    return frame.assign(**{key: _one_kind(frame[key]) for key in dict.fromkeys(keys)})


def _numbers(run: RunDirectory) -> dict[str, Any]:
    """The summary; of a run that stopped before, the last round, in the same words."""
    summary = run.summary()
    if summary is not None:
        return summary
    rounds = run.rows()
    if not rounds:
        return {}
    steps = sum(row.get(CLIENT_STEPS, 0) for row in rounds)
    last = {key: value for key, value in rounds[-1].items() if not of_one_round(key)}
    used = {USES_GROUND_TRUTH: used_ground_truth(run)}
    return last | {ROUNDS: rounds[-1][ROUND], CLIENT_STEPS: steps} | used


def write_table(folder: Path, frame: pd.DataFrame) -> None:
    replace_file(folder / TABLE, lambda path: frame.to_parquet(path))


def configurations(states: Sequence[RowState]) -> list[list[RowState]]:
    """The rows that differ in their seed alone, together."""
    alike: dict[str, list[RowState]] = {}
    for state in states:
        alike.setdefault(canonical(state.but_for_the_seed()), []).append(state)
    return list(alike.values())


def best_of(
    states: Sequence[RowState], frame: pd.DataFrame, options: Options
) -> dict[str, Any] | None:
    """The configuration with the best mean of the metric over its seeds; None: none has one.

    One with rows that failed or did not finish is a candidate only where no other is complete.
    """
    ended = [state.number for state in states if state.is_done]
    known = frame[frame[ROW].isin(ended)].reindex(columns=[ROW, options.metric]).dropna()
    values = dict(zip(known[ROW], known[options.metric], strict=True))
    measured = [each for each in configurations(states) if any(s.number in values for s in each)]
    if not measured:
        return None
    complete = [each for each in measured if all(state.number in values for state in each)]
    candidates = complete or measured
    rows = [[state.number for state in each if state.number in values] for each in candidates]
    means = [float(np.mean([values[number] for number in numbers])) for numbers in rows]
    place = means.index((max if options.mode == "max" else min)(means))
    own = frame[frame[ROW].isin(rows[place])]
    everybody = [state.number for state in candidates[place]]
    return {
        "rows": rows[place],
        "missing_rows": [number for number in everybody if number not in rows[place]],
        "left_out": len(measured) - len(candidates),  # configurations
        "sets": candidates[place][0].but_for_the_seed(),
        options.metric: means[place],
        ACCURACY_MEAN: float(own[ACCURACY_MEAN].mean()),
        USES_GROUND_TRUTH: bool(own[USES_GROUND_TRUTH].isin([True]).any()),
    }


def _cell(value: Any) -> Any:
    """A value of YAML as one of a table: what is nested is written out."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _one_kind(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Parquet holds one type a column: numbers beside names become text."""
    kinds = {type(value) for value in column.dropna()}
    if len(kinds) < 2 or kinds <= {int, float}:
        return column
    return column.map(lambda value: value if value is None or value != value else str(value))

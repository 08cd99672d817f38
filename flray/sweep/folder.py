"""A sweep's folder: its space, its rows as a table, and what it cost."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import yaml

from flray.errors import ExperimentError
from flray.records import lock
from flray.records.atomic import replace_file, replace_text
from flray.records.damage import read_json, reading
from flray.records.run_directory import RunDirectory, first_difference
from flray.server.summary import of_one_round, used_ground_truth
from flray.sweep.rows import canonical
from flray.sweep.space import THRESHOLD, Options, Space

SPACE, REPORT, TABLE, STATES = "space.yaml", "sweep.json", "rows.parquet", "trials"
FREE = (
    "concurrency",
    "client_actors",
    "cache",
)  # keys of a space that a sweep may go on with otherwise


def run_path(key: str) -> str:
    """Where a run lies, relative to the sweep's folder."""
    return f"runs/{key}"


def row_path(number: int) -> str:
    """Where a row lies that shares the run of another, relative to the sweep's folder."""
    return f"rows/{number:04d}"


@dataclass(frozen=True)
class RowState:
    """What has become of a row."""

    number: int
    overrides: Mapping[str, Any]  # Any: YAML
    plain: Mapping[str, Any]
    run: str | None = None  # the key of its run, where it has got one
    is_own: bool = True  # or it shares the run of another row
    status: str = "unfinished"
    error: str | None = None
    merge_place: int | None = None  # of its threshold between the merges, where it has one
    components: list[str] = field(default_factory=list)  # keys of those its clients are in
    begin: int | None = None  # its run trained the rounds after this one; None: all is in the cache
    steps_added: int = (
        0  # client steps of the row that are in no such round, less those not its own
    )

    @property
    def folder(self) -> str | None:
        """Its run directory, or the folder that stands for one; relative to the sweep's."""
        if self.run is None:
            return None
        return run_path(self.run) if self.is_own else row_path(self.number)

    def but_for_the_seed(self) -> dict[str, Any]:
        """What rows that differ in their seed alone have in common.

        Each seed has a tree of its own, so it is the place between the merges that is common.
        """
        sets = {key: value for key, value in self.overrides.items() if key != "seed"}
        if self.merge_place is None:
            return sets
        return {k: v for k, v in sets.items() if k != THRESHOLD} | {"merge_place": self.merge_place}


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
    for name in ("runs", "rows", STATES):
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


def read_states(folder: Path) -> dict[int, RowState]:
    """What has become of rows, by number; those that have no trial yet are missing."""
    files = sorted((folder / STATES).glob("*.json"))
    states = map(_read_state, files)
    return {state.number: state for state in states}


def _read_state(file: Path) -> RowState:
    with reading(file):
        return RowState(**read_json(file))


def fill_shared_row(folder: Path, state: RowState) -> None:
    """Give a row that shares a run its numbers; its configuration and clustering are its own."""
    assert state.run is not None
    source, target = RunDirectory(folder / run_path(state.run)), folder / row_path(state.number)
    summary = source.summary()
    assert summary is not None, state.run
    for name in ("rounds.parquet", "clients.parquet"):
        replace_file(target / name, partial(shutil.copyfile, source.path / name))
    shared = {**summary, "shared_with": run_path(state.run)}
    replace_text(target / "summary.json", json.dumps(shared, indent=2, ensure_ascii=False) + "\n")


def table_of(folder: Path, states: Sequence[RowState]) -> pd.DataFrame:
    """One row for each configuration: what it sets, what became of it, every number of its run."""
    records = []
    for state in states:
        own = {"row": state.number, "status": state.status, "run": None, "folder": None}
        if state.run is not None:
            own |= {"run": run_path(state.run), "folder": state.folder}
        numbers = {} if state.run is None else _numbers(RunDirectory(folder / run_path(state.run)))
        # Whether ground truth was used is a result, even where rows differ in being allowed to.
        settings = (each for each in state.overrides.items() if each[0] != "uses_ground_truth")
        chosen = {key: _cell(value) for key, value in settings}
        if state.merge_place is not None:
            chosen["merge_place"] = state.merge_place
        unknown = {"uses_ground_truth": None, "holdout_labels_read": None}
        records.append(unknown | numbers | own | {"error": state.error} | chosen)
    first = ["row", "status", "run", "folder", "error"]
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
    steps = sum(row.get("client_steps", 0) for row in rounds)
    last = {key: value for key, value in rounds[-1].items() if not of_one_round(key)}
    used = {"uses_ground_truth": used_ground_truth(run)}
    return last | {"rounds": rounds[-1]["round"], "client_steps": steps} | used


def write_table(folder: Path, frame: pd.DataFrame) -> None:
    replace_file(folder / TABLE, lambda path: frame.to_parquet(path))


def best_of(
    states: Sequence[RowState], frame: pd.DataFrame, options: Options
) -> dict[str, Any] | None:
    """The configuration with the best mean of the metric over its seeds; None: none has one.

    One with rows that failed or did not finish is a candidate only where no other is complete.
    """
    values = dict(zip(frame["row"], frame.get(options.metric, []), strict=False))
    alike: dict[str, list[RowState]] = {}
    for state in states:
        alike.setdefault(canonical(state.but_for_the_seed()), []).append(state)
    ended = {key: [s for s in group if _has_number(s, values)] for key, group in alike.items()}
    measured = [key for key in alike if ended[key]]
    if not measured:
        return None
    complete = [key for key in measured if len(ended[key]) == len(alike[key])]
    means = {
        key: float(np.mean([values[state.number] for state in ended[key]]))
        for key in complete or measured
    }
    best = (max if options.mode == "max" else min)(means, key=lambda key: means[key])
    rows = [state.number for state in ended[best]]
    found = {
        "rows": rows,
        "missing_rows": [state.number for state in alike[best] if state.number not in rows],
        "left_out": len(measured) - len(means),  # configurations
        "sets": alike[best][0].but_for_the_seed(),
        options.metric: means[best],
    }
    own = frame[frame["row"].isin(rows)]
    used = bool(own["uses_ground_truth"].isin([True]).any())
    return {**found, "accuracy_mean": float(own["accuracy_mean"].mean()), "uses_ground_truth": used}


def _has_number(state: RowState, values: Mapping[int, Any]) -> bool:  # Any: numbers, or missing
    return state.status in ("done", "shared") and bool(pd.notna(values.get(state.number)))


def _cell(value: Any) -> Any:
    """A value of YAML as one of a table: what is nested is written out."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _one_kind(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Parquet holds one type a column: numbers beside names become text."""
    kinds = {type(value) for value in column.dropna()}
    if len(kinds) < 2 or kinds <= {int, float}:
        return column
    return column.map(lambda value: value if value is None or value != value else str(value))

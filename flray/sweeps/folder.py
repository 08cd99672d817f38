"""A sweep's folder, and its files that are not run directories.

| path | content |
|---|---|
| `space.yaml` | the resolved space; written last, it makes the folder a sweep |
| `sweep.json` | report: id, versions, numbers of rows by status, costs, best configuration |
| `rows.parquet` | table with a line for each row |
| `trials/0012.json` | state of row 12; its trial touches `0012.alive`, which has its last round |
| `runs/0012/` | run directory of row 12 |
| `parts/0012/` | run directories in which row 12 trains groups of its clients, while it runs |
| `cache/` | what rows share, emptied when all are done; elsewhere with `cache` in the space |
"""

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from flray.clustering.merges import MergePoint
from flray.config.deciding import first_difference
from flray.errors import ExperimentError
from flray.files import read_json, reading, replace_text
from flray.records import lock
from flray.records.inside import refuse_links_out
from flray.sweeps.rows import SweepRow
from flray.sweeps.space import Space

SPACE, REPORT, ROWS = "space.yaml", "sweep.json", "trials"
FOLDERS = ("runs", ROWS)
FREE = ("concurrency", "cache")  # keys of a space that may change on --resume


def run_path(number: int) -> str:
    """Where the run of a row lies, relative to the sweep's folder.

    >>> run_path(12)
    'runs/0012'
    """
    return f"runs/{number:04d}"


def check_folder(path: Path, space: Space, code: Mapping[str, str], resume: bool) -> None:
    """Refuse a folder that holds anything other than this sweep.

    An ExperimentError says which key differs, or which code computed what is there.

    Args:
        code: versions of code and libraries, see `code_version`.
        resume: True if the folder must hold the sweep already, False if it must not.
    """
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
    """Make the folder of a sweep where there is none; an existing sweep is left as it is.

    A start that is killed here leaves a folder that the next start completes.
    """
    if (path / SPACE).is_file():
        return
    for name in FOLDERS:
        (path / name).mkdir(exist_ok=True)
    write_report(path, {"id": uuid4().hex, "code": dict(code), "seconds": 0.0})
    text = yaml.safe_dump(space.plain, sort_keys=False, allow_unicode=True)
    replace_text(path / SPACE, text)  # last: it is what makes this a sweep


def _check_same(path: Path, space: Space, code: Mapping[str, str]) -> None:
    """Refuse a sweep of another space, or of other code, than the one in the folder."""
    with reading(path / SPACE):
        recorded = dict(yaml.safe_load((path / SPACE).read_text(encoding="utf-8")))
    asked = yaml.safe_load(yaml.safe_dump(space.plain))
    fixed = [{k: v for k, v in keys.items() if k not in FREE} for keys in (recorded, asked)]
    difference = first_difference(*fixed)
    if difference is not None:
        raise ExperimentError(
            f"{path} holds another sweep ({difference}): to go on with it type flray sweep --out "
            f"{shlex.quote(str(path))} --resume; for this one choose another --out"
        )
    difference = first_difference(read_report(path).get("code", {}), code)
    if difference is not None:
        raise ExperimentError(
            f"{path} was computed by other code ({difference}), whose numbers do not belong in "
            "one table with this one's: choose another --out, or go back to that version"
        )


def read_report(path: Path) -> dict[str, Any]:
    """The content of sweep.json.

    Raises:
        ExperimentError: The file is missing or damaged.
    """
    return read_json(path / REPORT)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write sweep.json; a reader sees the old report or the new one."""
    replace_text(path / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def write_row(folder: Path, row: SweepRow) -> None:
    """Write the state of a row; a reader, such as the driver, sees the old state or the new one."""
    point = row.merge_point and asdict(row.merge_point)
    text = json.dumps({**vars(row), "merge_point": point}, indent=1)
    replace_text(folder / ROWS / f"{row.number:04d}.json", text)


def alive_file(folder: Path, number: int) -> Path:
    """A file that the trial of a row touches as long as it makes progress.

    The driver reads its time of change, to find trials that hang.
    """
    return folder / ROWS / f"{number:04d}.alive"


def read_row(folder: Path, number: int) -> SweepRow | None:
    """The row of this number as it was last recorded; None: it had no trial yet.

    Raises:
        ExperimentError: The file is damaged, or belongs to another row.
    """
    file = folder / ROWS / f"{number:04d}.json"
    if not file.is_file():
        return None
    with reading(file):
        fields = read_json(file)
        point = fields["merge_point"] and MergePoint(**fields["merge_point"])
        row = SweepRow(**{**fields, "merge_point": point})
        if row.number != number:
            raise ValueError(f"it is of row {row.number}")
    return row


def read_rows(folder: Path, left_out: Collection[int] = ()) -> dict[int, SweepRow]:
    """All rows that had a trial, as they were last recorded, by ascending number.

    Args:
        left_out: Numbers of rows that need not be read, because they will not change.
    """
    numbers = sorted(int(file.stem) for file in (folder / ROWS).glob("*.json"))
    rows = {number: read_row(folder, number) for number in numbers if number not in left_out}
    return {number: row for number, row in rows.items() if row is not None}

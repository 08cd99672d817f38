"""Parquet tables of numbers, written in full or not at all, checked when read; files of rounds."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flray.columns import PART, ROUND
from flray.files import reading, replace_file

MANY_ROWS = 10_000  # of a table that several threads read; fewer take as long as starting them

_ROUND = re.compile(r"round_(\d+).*")


def write(path: Path, table: pa.Table) -> None:
    """Put a table, with checksums of its pages, in the place of `path`.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "rounds.parquet"
    >>> write(path, of_rows([{"round": 1}, {"round": 2, "train_loss": 0.5}]))
    >>> read(path)["train_loss"].to_pylist()
    [None, 0.5]
    """
    replace_file(path, lambda file: pq.write_table(table, file, write_page_checksum=True))


def read(
    path: Path, columns: list[str] | None = None, required: Sequence[str] = (ROUND,)
) -> pa.Table:
    """The table of a file, or some of its columns.

    Args:
        columns: those that are read; None: all.
        required: those that must be there if all are read.

    Raises:
        ExperimentError: if the file is missing or damaged: a checksum does not fit, a column is
            not there, or one other than PART holds something else than numbers.
    """
    # `pq.read_table` opens by name more than once, and a run replaces files meanwhile.
    with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read(columns, use_threads=file.metadata.num_rows >= MANY_ROWS)
        for name, kind in zip(table.column_names, table.schema.types, strict=True):
            if name != PART and not _is_number(kind):
                raise ValueError(f"the column {name!r} holds values of type {kind}, not numbers")
        missing = [name for name in columns or required if name not in table.column_names]
        if missing:
            raise ValueError(f"there is no column {missing[0]!r}")
        if table[ROUND].null_count or not pa.types.is_integer(table[ROUND].type):
            raise ValueError(f"the column {ROUND!r} must hold whole numbers")
        return table


def of_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:  # Any: numbers
    """The table of rows by column; a column that a row lacks is null there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def join(tables: Sequence[pa.Table]) -> pa.Table:
    """One below the other; a column that one of them lacks is null there."""
    return pa.concat_tables(tables, promote_options="permissive")


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    return any(test(kind) for test in tests)


def round_of(path: Path) -> int:
    """The round in the name of a file.

    >>> round_of(Path("round_000012_test.parquet"))
    12
    """
    name = _ROUND.fullmatch(path.name)
    assert name is not None, path
    return int(name[1])


def files_of_rounds(folder: Path, suffix: str) -> list[Path]:
    """The files `round_*.suffix` of a folder in order of rounds; none if there is no folder.

    Files of one round are in the order of their names.
    """
    return sorted(folder.glob(f"round_*.{suffix}"), key=lambda path: (round_of(path), path.name))


def remove_later_files(folder: Path, suffix: str, after_round: int) -> None:
    """Remove the files in a folder that belong to rounds after this one."""
    for path in files_of_rounds(folder, suffix):
        if round_of(path) > after_round:
            path.unlink()


def num_files(folder: Path, suffix: str, t: int) -> int:
    """The number of files in a folder that belong to rounds up to t."""
    return sum(round_of(path) <= t for path in files_of_rounds(folder, suffix))

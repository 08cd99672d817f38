"""Datasets in files of the user's own: arrays, tables, series and texts with owners."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import fsspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flray.data.checks import check_at_least
from flray.data.dataset import Dataset
from flray.data.datasets.folder import data_folder, reading
from flray.data.owned import Rows
from flray.errors import ExperimentError

Names = str | tuple[str, ...]
Task = Literal["auto", "classes", "numbers"]
MOST_CATEGORIES = 100  # of a column that becomes one-hot


def file_at(given: str) -> str:
    """A URL as it is; a path as it is, or below the data folder (FLRAY_DATA)."""
    if "://" in given:
        return given
    candidates = [Path(given).expanduser(), data_folder() / given]
    for path in candidates:
        if path.is_file():
            return str(path)
    raise ExperimentError(
        f"there is no file {given}; looked for {' and '.join(str(path) for path in candidates)}"
    )


@contextmanager
def opened(given: str) -> Iterator[IO[bytes]]:
    """The file, or what is at the URL; damage becomes an error that names it."""
    place = file_at(given)
    with reading(Path(given).stem, Path(place)), fsspec.open(place, "rb") as stream:
        yield stream


@dataclass(frozen=True)
class Arrays:
    """Arrays of an .npz file: inputs, targets, and a column that names the owner of each example."""

    file: str  # Path or URL of an .npz file; paths may be relative to the data folder
    inputs: str = "x"  # Array of inputs, (N, ...)
    targets: str = "y"  # Array of targets, (N,) or (N, ...)
    client: Names = "client"  # Array with the owner of each example; several are joined
    group: str | None = None  # Array with the kind of each owner. None: not known
    time: str | None = None  # Array with the time of each example. None: not known

    def load(self) -> Dataset:
        with opened(self.file) as stream, np.load(stream) as stored:
            arrays = {key: stored[key] for key in stored.files}
        names = _names(self.client)
        for key in (self.inputs, self.targets, *names, *filter(None, (self.group, self.time))):
            if key not in arrays:
                raise ExperimentError(
                    f"{self.file} has no array {key!r}; it has {', '.join(sorted(arrays))}"
                )
        inputs = arrays[self.inputs]
        columns = {k: a for k, a in arrays.items() if a.shape == (len(inputs),)}
        return Rows(
            inputs=inputs,
            targets=arrays[self.targets],
            client=_joined([_named(arrays, name) for name in names]),
            group=None if self.group is None else _named(arrays, self.group),
            time=None if self.time is None else arrays[self.time],
            columns=columns,
        ).dataset(Path(self.file).stem)


def _named(arrays: dict[str, NDArray[Any]], key: str) -> NDArray[Any]:
    """A column; numbers become names where the file has an array of names, KEY_names."""
    names = arrays.get(f"{key}_names")
    return arrays[key] if names is None else names[arrays[key].astype(np.int64)]


def _names(given: Names) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    """One column, or the texts of several with slashes between them."""
    if len(columns) == 1:
        return columns[0]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return np.array(["/".join(str(value) for value in row) for row in rows])


@dataclass(frozen=True)
class Table:
    """Rows of a CSV or Parquet file, one example each; the other numeric columns are features.

    Columns of text become one-hot. Features are standardised by the training rows.
    """

    file: str  # Path or URL of a .csv or .parquet file
    client: Names  # Column with the owner of each row; several are joined
    target: str  # Column to predict
    group: str | None = None  # Column with the kind of each owner. None: not known
    time: str | None = None  # Column with the time of each row, numbers or dates. None: not known
    features: tuple[str, ...] | None = None  # Columns used as inputs. None: all others
    # What the target is. auto: text and whole numbers are classes, other numbers are predicted
    task: Task = "auto"

    def load(self) -> Dataset:
        return from_frame(read_frame(self.file), self, Path(self.file).stem)


def read_frame(file: str) -> pd.DataFrame:
    """The table in a CSV or Parquet file."""
    with opened(file) as stream:
        return pd.read_parquet(stream) if file.endswith(".parquet") else pd.read_csv(stream)


def from_frame(frame: pd.DataFrame, columns: Table, name: str) -> Dataset:
    """The dataset of a data frame."""
    owners = _names(columns.client)
    special = [*owners, columns.target, *filter(None, (columns.group, columns.time))]
    _require_columns(frame, [*special, *(columns.features or ())], name)
    names = [c for c in frame.columns if c not in special]
    chosen = names if columns.features is None else list(columns.features)
    targets, target_names = _table_targets(frame[columns.target], columns.task)
    for column in owners:
        _refuse_empty(frame[column])
    inputs, _ = _features(frame[chosen])
    return Rows(
        inputs=inputs,
        targets=targets,
        client=_joined([frame[column].to_numpy() for column in owners]),
        group=None if columns.group is None else frame[columns.group].to_numpy(),
        time=None if columns.time is None else _times(frame[columns.time]),
        columns={str(c): frame[c].to_numpy() for c in frame.columns if c != columns.target},
    ).dataset(name)


def _require_columns(frame: pd.DataFrame, names: list[str], where: str) -> None:
    for name in names:
        if name not in frame.columns:
            raise ExperimentError(
                f"{where} has no column {name!r}; it has {', '.join(map(str, frame.columns))}"
            )


def _refuse_empty(column: "pd.Series[Any]") -> None:
    empty = column.isna().to_numpy()
    if empty.any():
        raise ExperimentError(
            f"column {column.name} has no value in row {int(empty.argmax())} ({int(empty.sum())} "
            "such rows); fill or remove them"
        )


def _table_targets(column: "pd.Series[Any]", task: Task) -> tuple[NDArray[Any], list[str]]:
    """Classes as numbers with their names, or floats."""
    _refuse_empty(column)
    is_number = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    if task == "numbers" and not is_number:
        raise ExperimentError(
            f"column {column.name} is {column.dtype}, and task: numbers needs numbers"
        )
    if task == "numbers" or (task == "auto" and pd.api.types.is_float_dtype(column)):
        return column.to_numpy(np.float32), []
    names, classes = np.unique(column.to_numpy(), return_inverse=True)
    return classes.astype(np.int64), [str(name) for name in names]


def _features(frame: pd.DataFrame) -> tuple[NDArray[np.float32], list[str]]:
    """(N, F) numbers, text as one-hot, and the names of the F features."""
    columns, names = [], []
    for label, column in frame.items():
        _refuse_empty(column)
        if pd.api.types.is_numeric_dtype(column):
            columns.append(column.to_numpy(np.float32)[:, None])
            names.append(str(label))
            continue
        _refuse_text_among_numbers(column)
        values, code = np.unique(column.astype(str).to_numpy(), return_inverse=True)
        if len(values) > MOST_CATEGORIES:
            raise ExperimentError(
                f"column {label} has {len(values)} different texts; at most {MOST_CATEGORIES} "
                "become one-hot features: name the columns to use in dataset.features"
            )
        columns.append(np.eye(len(values), dtype=np.float32)[code])
        names += [f"{label}={value}" for value in values]
    if not columns:
        raise ExperimentError("the table has no column left to be a feature")
    return np.concatenate(columns, axis=1), names


def _refuse_text_among_numbers(column: "pd.Series[Any]") -> None:
    """Refuse a column that is mostly numbers; a stray text made all of it text."""
    is_text = pd.to_numeric(column, errors="coerce").isna().to_numpy()
    if 0 < is_text.sum() < len(column) / 2:
        row = int(is_text.argmax())
        raise ExperimentError(
            f"feature {column.name} has the text {column.iloc[row]!r} in row {row} among numbers "
            f"({int(is_text.sum())} such rows); correct them or leave the column out "
            "(dataset.features)"
        )


def _times(column: "pd.Series[Any]") -> NDArray[np.float64]:
    """Numbers as they are; dates as seconds."""
    _refuse_empty(column)
    if pd.api.types.is_numeric_dtype(column):
        return column.to_numpy(np.float64)
    dates = pd.to_datetime(column, errors="coerce", format="mixed", utc=True)
    wrong = dates.isna().to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise ExperimentError(
            f"column {column.name} must be times, got {column.iloc[row]!r} in row {row}; expected "
            "numbers or dates such as 2016-01-31T12:00"
        )
    return dates.astype("datetime64[ns, UTC]").astype("int64").to_numpy() / 1e9


@dataclass(frozen=True)
class Series:
    """Windows of series: from the last `window` values of a client the next `horizon`.

    A table with one row for each client and instant, or an .npz file whose array `value` has one
    row for each client.
    """

    file: str  # Path or URL of a .csv, .parquet or .npz file
    value: str = "value"  # Column or array with the values
    client: str = "client"  # Column or array with the owner of each value, or of each series
    time: str | None = None  # Column with evenly spaced times; not needed in an .npz file
    group: str | None = None  # Column or array with the kind of each owner. None: not known
    window: int = 168  # Values that the model sees
    horizon: int = 24  # Values that it predicts
    every: int | None = None  # Steps between windows. None: the horizon, so that no target repeats

    def __post_init__(self) -> None:
        for name in ("window", "horizon"):
            check_at_least(name, getattr(self, name), 1)
        if self.every is not None:
            check_at_least("every", self.every, 1)

    def load(self) -> Dataset:
        read = self._from_arrays if self.file.endswith(".npz") else self._from_table
        names, series, groups, begins = read()
        inputs, targets, owners, spans = [], [], [], []
        length = self.window + self.horizon
        for k, values in enumerate(series):
            if len(values) < length:
                raise ExperimentError(
                    f"client {names[k]} has {len(values)} values; a window of {self.window} and a "
                    f"horizon of {self.horizon} need {length}"
                )
            views = np.lib.stride_tricks.sliding_window_view(values, length)
            first = np.arange(0, len(views), self.every or self.horizon)
            inputs.append(views[first, : self.window, None])
            targets.append(views[first, self.window :])
            owners.append(np.full(len(first), k))
            spans.append(begins[k] + np.stack([first, first + length - 1], axis=1))
        owner = np.concatenate(owners)
        return Rows(
            inputs=np.concatenate(inputs),
            targets=np.concatenate(targets),
            client=np.asarray(names)[owner],
            group=None if groups is None else np.asarray(groups)[owner],
            time=np.concatenate(spans),
        ).dataset(Path(self.file).stem)

    def _from_arrays(self) -> "AllSeries":
        with opened(self.file) as stream, np.load(stream) as stored:
            arrays = {key: stored[key] for key in stored.files}
        for key in filter(None, (self.value, self.client, self.group)):
            if key not in arrays:
                raise ExperimentError(
                    f"{self.file} has no array {key!r}; it has {', '.join(sorted(arrays))}"
                )
        values = arrays[self.value].astype(np.float32)
        groups = None if self.group is None else _named(arrays, self.group)
        return _named(arrays, self.client), list(values), groups, np.zeros(len(values))

    def _from_table(self) -> "AllSeries":
        frame = read_frame(self.file)
        if self.time is None:
            raise ExperimentError(
                "dataset series needs `time`, the column with the times of a table"
            )
        wanted = [self.value, self.client, self.time, *filter(None, (self.group,))]
        _require_columns(frame, wanted, self.file)
        for column in (self.value, self.client):
            _refuse_empty(frame[column])
        times = _times(frame[self.time])
        names, owner = np.unique(frame[self.client].to_numpy(), return_inverse=True)
        series, begins, groups = [], [], []
        step = None
        for k in range(len(names)):
            rows = np.flatnonzero(owner == k)
            gaps = np.diff(times[rows])
            step = step or (float(gaps[0]) if len(gaps) else 1.0)
            wrong = np.flatnonzero(~np.isclose(gaps, step))
            if len(wrong):
                raise ExperimentError(
                    f"the times of client {names[k]} must be sorted and {step:g} apart, row "
                    f"{int(rows[wrong[0] + 1])} is {gaps[wrong[0]]:g} after the row before"
                )
            series.append(frame[self.value].to_numpy(np.float32)[rows])
            begins.append(round(times[rows[0]] / step))
            if self.group is not None:
                groups.append(frame[self.group].to_numpy()[rows[0]])
        return names, series, groups or None, np.array(begins, np.float64)


# Names of clients, their series, their groups, and the number of the first instant of each.
AllSeries = tuple[Any, list[NDArray[np.float32]], Any, NDArray[np.float64]]


@dataclass(frozen=True)
class Text:
    """Plays: characters of a role, from which the next character is predicted.

    A line that ends in a colon names the role that speaks until the next empty line. The speeches
    of a role are joined and cut into sequences that do not overlap.
    """

    file: str  # Path or URL of a text file
    length: int = 80  # Characters of a sequence

    def __post_init__(self) -> None:
        check_at_least("length", self.length, 1)

    def load(self) -> Dataset:
        with opened(self.file) as stream:
            text = stream.read().decode()
        roles: dict[str, list[str]] = {}
        for speech in text.split("\n\n"):
            role, colon, words = speech.strip("\n").partition(":\n")
            if colon and "\n" not in role:
                roles.setdefault(role, []).append(words + "\n")
        if not roles:
            raise ExperimentError(
                f"{self.file} names no role: a line that ends in a colon begins a speech"
            )
        characters = sorted(set("".join(words for said in roles.values() for words in said)))
        code = {character: number for number, character in enumerate(characters)}
        sequences, owners = [], []
        for role, speeches in roles.items():
            numbers = np.array([code[c] for c in "".join(speeches)], np.int64)
            num = (len(numbers) - 1) // self.length
            for first in range(0, num * self.length, self.length):
                sequences.append(numbers[first : first + self.length + 1])
                owners.append(role)
        cut = np.stack(sequences)  # (N, length + 1)
        rows = Rows(cut[:, :-1], cut[:, 1:], np.array(owners), time=np.arange(len(cut)))
        return rows.dataset(Path(self.file).stem)

"""Datasets in files of the user's own: arrays, series and texts with owners, and how to read them.

Files are .npz, .csv or .parquet at a path, below the data folder (FLRAY_DATA), or at a URL; they
may be compressed (.gz).
"""

import csv
import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from flray.data.checks import refuse_rows
from flray.data.dataset import Dataset
from flray.data.datasets.folder import data_folder, reading
from flray.data.dealing import known_source
from flray.data.owned import TIME, Rows, window_rows
from flray.errors import ExperimentError
from flray.values import require_at_least

if TYPE_CHECKING:
    import pandas as pd

Names = str | tuple[str, ...]


@contextmanager
def opened(file: str) -> Iterator[IO[bytes]]:
    """The file, or what is at the URL; damage becomes an error that names it."""
    location = _location(file)
    compressed = fsspec.open(location, "rb", compression="infer")
    with reading(Path(file).stem, location), compressed as stream:
        yield stream


def _location(file: str) -> str:
    """A URL as it is, or where a file lies: here or in the folder of the data."""
    if "://" in file:
        return file
    paths = [Path(file).expanduser(), data_folder() / file]
    for path in paths:
        if path.is_file():
            return str(path)
    raise ExperimentError(f"there is no file {file}; looked for {' and '.join(map(str, paths))}")


def file_digest(file: str) -> str | None:
    """SHA-256 of the content of a file or of what is at a URL; None: it is not there."""
    try:
        location = _location(file)
        if "://" in location:
            return _digest(location)
        return _digest_of_version(location, Path(location).stat().st_mtime_ns)
    except ExperimentError:
        return None


@cache
def _digest_of_version(location: str, written_at: int) -> str:  # noqa: ARG001, tells versions apart
    """Each version of a file is read once: rows of a sweep ask again and again."""
    return _digest(location)


def _digest(location: str) -> str:
    sha = hashlib.sha256()
    with opened(location) as stream:
        while part := stream.read(1 << 20):
            sha.update(part)
    return sha.hexdigest()


def read_text(file: str) -> bytes:
    """The bytes of a text without a byte order mark and empty lines at the start.

    Raises:
        ExperimentError: The text is not UTF-8; the message names the first such line, from 1.
    """
    with opened(file) as stream:
        text = stream.read()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise ExperimentError(
            f"{file} is no text in UTF-8, first in line {line}; save it as UTF-8, a table also as "
            ".parquet"
        ) from error
    return text.removeprefix(BOM_UTF8).lstrip(b"\r\n")


@dataclass(frozen=True)
class Columns:
    """Arrays of a file by name; `columns[name]` names what there is if `name` is missing."""

    where: str
    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of_frame(cls, where: str, frame: "pd.DataFrame") -> "Columns":
        """The columns of a table, which must have different names."""
        repeated = frame.columns[frame.columns.duplicated()]
        if len(repeated):
            raise ExperimentError(f"{where} has two columns {repeated[0]!r}; rename or remove one")
        return cls(where, {str(name): column.to_numpy() for name, column in frame.items()})

    @classmethod
    def read(cls, file: str) -> "Columns":
        """The arrays of an .npz file, or the columns of a table."""
        if not file.endswith(".npz"):
            return cls.of_frame(file, read_table(file))
        with opened(file) as stream, np.load(stream) as stored:
            return cls(file, {key: stored[key] for key in stored.files})

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.arrays:
            known = ", ".join(sorted(self.arrays))
            raise ExperimentError(f"{self.where} has no column {name!r}; it has {known}")
        return self.arrays[name]

    def named(self, name: str | None) -> NDArray[Any] | None:
        """A column, or None without a name; with an array NAME_names, its names of numbers."""
        if name is None:
            return None
        names = self.arrays.get(f"{name}_names")
        return self[name] if names is None else names[self[name].astype(np.int64)]

    def joined(self, names: Names) -> NDArray[Any]:
        """One column, or the texts of several with slashes between them."""
        columns = [self.named(name) for name in ((names,) if isinstance(names, str) else names)]
        texts = [np.asarray(column) for column in columns]
        for other in texts[1:]:
            texts[0] = np.char.add(np.char.add(texts[0].astype(str), "/"), other.astype(str))
        return texts[0]

    def numbers(self, name: str) -> NDArray[np.float32]:
        """A column as floats; NaN, which `Rows` refuses, where it has text."""
        import pandas as pd

        column = self[name]
        is_number = column.dtype.kind in "biuf"
        numbers = column if is_number else pd.to_numeric(pd.Series(column), errors="coerce")
        return np.asarray(numbers, np.float32)


def read_table(file: str) -> "pd.DataFrame":
    """The table in a .parquet or .csv file, whose separator is a comma, semicolon or tab.

    Columns without a name, such as the index that pandas writes first, are left out.
    """
    import pandas as pd  # seconds to import, and seldom needed

    if file.endswith(".parquet"):
        with opened(file) as stream:
            return pd.read_parquet(stream)
    text = read_text(file)
    header = text.partition(b"\n")[0].decode()
    separator = max(",;\t", key=header.count)
    with reading(Path(file).stem, file):
        frame = pd.read_csv(BytesIO(text), sep=separator, low_memory=False)  # one type per column
        if not isinstance(frame.index, pd.RangeIndex):
            raise ValueError("rows have more values than the header has names")
    frame.columns = [name.strip() for name in next(csv.reader([header], delimiter=separator))]
    return frame.loc[:, frame.columns != ""]


@dataclass(frozen=True)
class Arrays:
    """Arrays of an .npz file: inputs, targets, and one that names the owner of each example."""

    file: str  # Path or URL of an .npz file; paths may be relative to the data folder
    inputs: str = "x"  # Array of inputs, (N, ...)
    targets: str = "y"  # Array of targets, (N,) or (N, ...)
    client: Names = "client"  # Array with the owner of each example; several are joined
    group: str | None = None  # Array with the kind of each owner. None: not known
    time: str | None = None  # Array with the time of each example. None: not known
    # Scale each channel, the first axis of an example, to mean 0 and std 1 on training examples
    standardise: bool = False

    def load(self) -> Dataset:
        columns = Columns.read(self.file)
        inputs = columns[self.inputs]
        return Rows(
            inputs=inputs,
            targets=columns[self.targets],
            client=columns.joined(self.client),
            group=columns.named(self.group),
            time=columns.named(self.time),
            columns={k: a for k, a in columns.arrays.items() if a.shape == inputs.shape[:1]},
            scaled=np.full(inputs.shape[1:2], self.standardise),
        ).dataset(Path(self.file).stem)


@dataclass(frozen=True)
class Series:
    """Windows of series: from the last `window` values of a client the next `horizon`.

    A table with one row for each client and instant, or an .npz file whose array `value` has one
    row for each client.
    """

    file: str  # Path or URL of a .csv, .parquet or .npz file
    value: str = "value"  # Column or array with the values
    client: Names = "client"  # Column or array with the owner of each value, or of each series
    time: str | None = None  # Column with evenly spaced times; None in an .npz file
    group: str | None = None  # Column or array with the kind of each owner. None: not known
    window: int = 168  # Values that the model sees
    horizon: int = 24  # Values that it predicts
    every: int | None = None  # Steps between windows. None: the horizon, so that no target repeats

    def __post_init__(self) -> None:
        require_at_least(self, window=1, horizon=1, every=1)

    def load(self) -> Dataset:
        instants = self._instants(Columns.read(self.file))
        length = self.window + self.horizon
        num_values = np.bincount(known_source(instants, "dataset series"))
        if num_values.min() < length:
            raise ExperimentError(
                f"client {instants.client_names[num_values.argmin()]} has {num_values.min()} "
                f"values; a window of {self.window} and a horizon of {self.horizon} need {length}"
            )
        windows = window_rows(instants, length, self.every or self.horizon)
        values = windows.images
        inputs, targets = values[:, : self.window, None], values[:, self.window :]
        return replace(windows, images=inputs, labels=targets)

    def _instants(self, columns: Columns) -> Dataset:
        """One row for each client and instant."""
        value, client = columns.numbers(self.value), columns.joined(self.client)
        group, time = columns.named(self.group), columns.named(self.time)
        if value.ndim == 2:
            num, length = value.shape
            client = np.repeat(client, length)
            group = None if group is None else np.repeat(group, length)
            value, time = value.ravel(), np.tile(np.arange(length), num)
        if time is None:
            raise ExperimentError("dataset series needs `time`, the column of the table with times")
        row = np.arange(len(value))
        rows = Rows(value, value, client, group, time, {"row": row})
        instants = rows.dataset(Path(self.file).stem)
        gaps = np.diff(instants.columns[TIME][:, 0])
        is_next = np.diff(known_source(instants, "dataset series")) == 0  # of the same client
        is_wrong = np.zeros(len(row), bool)
        step = gaps[is_next][0] if is_next.any() else 0.0
        is_wrong[instants.columns["row"][1:]] = is_next & ~np.isclose(gaps, step)
        advice = f"all steps of {self.time} must be as the first one, {step:g}"
        refuse_rows(is_wrong, f"the time of client {client[is_wrong.argmax()]} jumps", advice)
        return instants


@dataclass(frozen=True)
class Text:
    """Plays: characters of a role, from which the next character is predicted.

    A line that ends in a colon names the role that speaks until the next empty line. The speeches
    of a role are joined and cut into sequences that do not overlap.
    """

    file: str  # Path or URL of a text file
    length: int = 80  # Characters of a sequence
    # Known kind of each role, such as its play; roles without one are `other`. None: none is known
    group: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        require_at_least(self, length=1)

    def load(self) -> Dataset:
        text = read_text(self.file).decode().replace("\r\n", "\n")
        roles, spoken = [], []
        for speech in text.split("\n\n"):
            role, colon, words = speech.strip("\n").partition(":\n")
            if colon and "\n" not in role:
                roles.append(role)
                spoken.append(words + "\n")
        if not roles:
            raise ExperimentError(
                f"{self.file} names no role: a line that ends in a colon begins a speech"
            )
        _, codes = np.unique(list("".join(spoken)), return_inverse=True)
        owner = np.repeat(roles, [len(words) for words in spoken])
        group = [(self.group or {}).get(role, "other") for role in roles]
        kind = np.repeat(group, [len(words) for words in spoken]) if self.group else None
        rows = Rows(codes, codes, owner, kind, np.arange(len(codes)))
        characters = rows.dataset(Path(self.file).stem)
        windows = window_rows(characters, self.length + 1, self.length)
        return replace(windows, images=windows.images[:, :-1], labels=windows.images[:, 1:])

"""Datasets whose examples have owners: whose each example is, when it was made, of which kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_finite, refuse_rows, refuse_values
from flray.data.dataset import Dataset, Ids, Normalization
from flray.data.dealing import known_source
from flray.data.tensors import as_array
from flray.errors import ExperimentError

Column = NDArray[Any]  # (N,) numbers or text; Any: the user's

TIME = "time"  # the column that orders the examples of a client
TARGETS = "targets"


def coded(what: str, column: Column) -> tuple[Ids, tuple[str, ...]]:
    """(N,) the number of each value among the sorted values, and their names.

    >>> coded("city", np.array(["b", "a", "b"]))
    (array([1, 0, 1]), ('a', 'b'))
    """
    import pandas as pd  # seconds to import, and seldom needed

    codes, values = pd.factorize(column, sort=True)
    refuse_rows(codes < 0, f"{what} has no value", "fill or remove them")
    return codes.astype(np.int64), tuple(str(value) for value in values)


def times_of(column: Column) -> NDArray[np.float64]:
    """(N,) numbers as they are, dates as seconds.

    >>> times_of(np.array(["1970-01-01", "1970-01-02T12:00"])) / 3600
    array([ 0., 36.])
    """
    import pandas as pd

    times = np.asarray(column)
    if times.dtype.kind not in "iuf":
        dates = pd.to_datetime(pd.Series(times), errors="coerce", format="mixed", utc=True)
        instants = dates.dt.tz_localize(None).to_numpy("datetime64[ns]")
        times = np.where(np.isnat(instants), np.nan, instants.astype(np.int64) / 1e9)
    advice = "expected numbers or dates such as 2016-01-31T12:00"
    refuse_rows(~np.isfinite(times), "time is neither a number nor a date", advice)
    return times.astype(np.float64)


@dataclass(frozen=True)
class Rows:
    """Examples as a user has them, in any order of clients.

    Inputs that are floats reach the model as they are, bytes divided by 255; other whole numbers
    are tokens, or floats for models that compute with numbers. Targets that are whole numbers are
    classes from 0, floats are numbers to predict.

    >>> rows = Rows(np.zeros((3, 2)), np.array([1.5, 0.5, 2.5]), client=np.array(["b", "a", "b"]))
    >>> data = rows.dataset("visits")
    >>> data.client_names, data.source, data.labels  # rows are ordered by client
    (('a', 'b'), array([0, 1, 1]), array([0.5, 1.5, 2.5], dtype=float32))
    """

    inputs: NDArray[Any]  # (N, ...) bytes, floats, or whole numbers such as tokens
    targets: NDArray[Any]  # (N,) or (N, ...) classes from 0, or floats
    client: Column  # (N,) the name or number of the owner
    group: Column | None = None  # (N,) the kind of the owner, one for each client
    time: Column | None = None  # (N,) numbers or dates, ascending for each client
    columns: Mapping[str, Column] = field(default_factory=dict)  # (N,) others, by name
    scaled: NDArray[np.bool_] | None = None  # (channels,) as in `Dataset`

    def dataset(self, name: str) -> Dataset:
        """The rows in the order of the clients' names; how clients take turns changes nothing.

        Raises:
            ExperimentError: Lengths differ, a value is missing, times are not sorted, or a client
                has two groups; the message names the first row, counted from 0.
        """
        if not len(self.client):
            raise ExperimentError(f"{name} has no rows; expected one for each example")
        inputs = _numbers("inputs", self.inputs, self.scaled)
        targets = _numbers(TARGETS, self.targets)
        columns: dict[str, Column | None] = {TARGETS: targets, "client": self.client}
        columns |= {**self.columns, "group": self.group, TIME: self.time}
        for column, values in columns.items():
            if values is not None and len(values) != len(inputs):
                raise ExperimentError(
                    f"{name}: {column} has {len(values)} rows and inputs {len(inputs)}; "
                    "every column must have one value for each example"
                )
        for column in ("client", "group", TIME):
            values = columns[column]
            if values is not None and np.ndim(values) != 1:
                raise ExperimentError(
                    f"{name}: {column} must have one value for each example, got the shape "
                    f"{np.shape(values)}"
                )
        source, names = coded("client", self.client)
        order = np.argsort(source, kind="stable")
        others = {key: values for key, values in self.columns.items() if key != TIME}
        kept = {key: np.asarray(values)[order] for key, values in others.items()}
        if self.time is not None:
            kept[TIME] = _ordered_times(times_of(self.time), source, names)[order]
        groups, group_names = self._groups(source, names)
        return Dataset(
            name=name,
            images=inputs[order],
            labels=targets[order].astype(np.int64 if targets.dtype.kind == "u" else targets.dtype),
            num_train=len(inputs),
            num_classes=0 if targets.dtype.kind == "f" else int(targets.max()) + 1,
            normalization=Normalization((0.0,), (1.0,)),
            source=source[order],
            client_names=names,
            groups=groups,
            group_names=group_names,
            columns=kept,
            scaled=self.scaled,
        )

    def _groups(self, source: Ids, names: tuple[str, ...]) -> tuple[Ids | None, tuple[str, ...]]:
        """(C,) the group of each client, and the names of the groups."""
        if self.group is None:
            return None, ()
        group, group_names = coded("group", self.group)
        first = np.unique(source, return_index=True)[1]  # (C,) first row of each client
        is_other = group != group[first][source]
        client = source[is_other.argmax()]
        what = f"client {names[client]}, {group_names[group[first[client]]]} in row {first[client]}"
        refuse_rows(is_other, f"{what}, has another group", "a client has one group")
        return group[first], group_names


def _numbers(
    what: str, given: NDArray[Any], scaled: NDArray[np.bool_] | None = None
) -> NDArray[Any]:
    """Bytes as they are, float32 of floats, int64 of other whole numbers.

    What will be scaled keeps its digits, as float64: of instants, float32 has steps of minutes.
    """
    array = np.asarray(given)
    if array.dtype.kind not in "buif" or array.ndim == 0:
        raise ExperimentError(
            f"{what} must be numbers, one row for each example, got {array.dtype} of the shape "
            f"{array.shape}"
        )
    if what == TARGETS and array.dtype.kind != "f":
        rule = "targets that are whole numbers are classes from 0"
        refuse_values(array, array < 0, rule, "correct them, or give amounts as floats")
    else:
        check_finite(what, array)
    if array.dtype == np.uint8:
        return array
    if scaled is not None and scaled.any() and array.dtype not in (np.float16, np.float32):
        return array.astype(np.float64)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def _ordered_times(
    time: NDArray[np.float64], source: Ids, names: tuple[str, ...]
) -> NDArray[np.float64]:
    """(N, 2) the first and the last instant of each example; refuses a client out of order."""
    order = np.argsort(source, kind="stable")
    is_early = np.zeros(len(time), bool)
    is_early[order[1:]] = (np.diff(source[order]) == 0) & ~(np.diff(time[order]) >= 0)
    client = names[source[is_early.argmax()]]
    refuse_rows(is_early, f"the time of client {client} goes back", "sort the rows by time")
    return np.stack([time, time], axis=1)


def window_rows(instants: Dataset, length: int, every: int) -> Dataset:
    """Windows of consecutive rows of a client, `every` rows apart, as inputs of a dataset.

    Args:
        instants: one row for each instant, in the order of clients and times.

    >>> data = Rows(np.arange(5.0), np.zeros(5), np.array(list("aaabb"))).dataset("tiny")
    >>> window_rows(data, length=2, every=1).images.tolist()  # none has rows of two clients
    [[0.0, 1.0], [1.0, 2.0], [3.0, 4.0]]
    """
    source = known_source(instants, "a window")
    first = np.arange(max(len(source) - length + 1, 0))
    position = first - np.searchsorted(source, source[first])  # among the rows of the client
    first = first[(source[first] == source[first + length - 1]) & (position % every == 0)]
    rows = first[:, None] + np.arange(length)
    times = instants.columns.get(TIME)
    return replace(
        instants,
        images=instants.images[rows],
        labels=instants.labels[first],
        num_train=len(first),
        source=source[first],
        columns={} if times is None else {TIME: times[rows[:, [0, -1]], 0]},
    )


def join_clients(clients: Sequence[Any], name: str = "clients") -> Dataset:
    """A dataset of one pair (inputs, targets), or torch Dataset, for each client 0, 1, ...

    >>> data = join_clients([(np.zeros((2, 3)), [0, 1]), (np.ones((1, 3)), [1])])
    >>> data.source, data.num_classes
    (array([0, 0, 1]), 2)
    """
    if isinstance(clients, Mapping):
        raise ExperimentError(
            "expected a list with a pair (x, y) for each client, got a mapping; give list(clients"
            ".values()), whose clients are numbered from 0"
        )
    pairs = [examples_of(client) for client in clients]
    if not pairs:
        raise ExperimentError(
            "expected at least one client, got none; give a pair (x, y) for each client"
        )
    for client, (x, y) in enumerate(pairs):
        if len(x) != len(y) or not len(x) or x.shape[1:] != pairs[0][0].shape[1:]:
            raise ExperimentError(
                f"client {client} has inputs {x.shape} and targets {y.shape}; expected as many "
                f"targets as inputs, at least one, and inputs (n, *{pairs[0][0].shape[1:]})"
            )
    owner = np.repeat(np.arange(len(pairs)), [len(x) for x, _ in pairs])
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return Rows(inputs, targets, owner).dataset(name)


def examples_of(client: Any) -> tuple[NDArray[Any], NDArray[Any]]:  # Any: from a user
    """Inputs and targets of a pair (x, y), or of a torch Dataset, whose examples are read once."""
    if not isinstance(client, tuple | list):  # a torch Dataset
        columns = zip(*(client[k] for k in range(len(client))), strict=True)
        client = [np.stack([as_array(value) for value in column]) for column in columns]
    if len(client) != 2:
        raise ExperimentError(
            f"expected a pair (x, y) or a torch Dataset of pairs, got {len(client)} values of "
            f"{type(client[0]).__name__ if client else 'no kind'}; give x and y as arrays"
        )
    x, y = client
    return as_array(x), as_array(y)

"""Datasets whose examples have owners: whose each example is, when it was made, of which kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Dataset, Ids, Normalization
from flray.errors import ExperimentError

Column = NDArray[Any]  # (N,) numbers or text; Any: the user's

TIME = "time"  # the column that orders the examples of a client


@dataclass(frozen=True)
class Rows:
    """Examples as a user has them, in any order of clients.

    >>> rows = Rows(np.zeros((3, 2)), np.array([1.5, 0.5, 2.5]), client=np.array(["b", "a", "b"]))
    >>> data = rows.dataset("visits")
    >>> data.client_names, data.source, data.labels  # rows are ordered by client
    (('a', 'b'), array([0, 1, 1]), array([0.5, 1.5, 2.5], dtype=float32))
    """

    inputs: NDArray[Any]  # (N, ...) bytes, floats, or whole numbers such as tokens
    targets: NDArray[Any]  # (N,) classes from 0, or floats or sequences of any shape (N, ...)
    client: Column  # (N,) the name or number of the owner
    group: Column | None = None  # (N,) the kind of the owner, one for each client
    time: Column | None = None  # (N,) ascending for each client; (N, 2) first and last instant
    columns: Mapping[str, Column] = field(default_factory=dict)  # (N,) others, by name

    def dataset(self, name: str) -> Dataset:
        """The rows in the order of the clients' names; how clients take turns changes nothing.

        Raises:
            ExperimentError: Lengths differ, a value is missing, or a client has two groups; the
                message names the first row, counted from 0.
        """
        inputs, targets = _inputs(self.inputs), _targets(self.targets)
        columns = {"inputs": inputs, "targets": targets, "client": self.client, **self.columns}
        columns |= {} if self.group is None else {"group": self.group}
        columns |= {} if self.time is None else {TIME: self.time}
        for column, values in columns.items():
            if len(values) != len(inputs):
                raise ExperimentError(
                    f"{name}: {column} has {len(values)} rows and inputs {len(inputs)}; "
                    "every column must have one value for each example"
                )
        names, source = np.unique(self.client, return_inverse=True)
        order = np.argsort(source, kind="stable")
        kept = {key: np.asarray(values)[order] for key, values in self.columns.items()}
        if self.time is not None:
            kept[TIME] = _ordered_times(self.time, source, names, order)
        group_names, groups = self._groups(source, names)
        is_classes = targets.dtype == np.int64
        return Dataset(
            name=name,
            images=inputs[order],
            labels=targets[order],
            num_train=len(inputs),
            num_classes=int(targets.max()) + 1 if is_classes else 0,
            normalization=Normalization((0.0,), (1.0,)),
            source=source[order],
            client_names=tuple(str(client) for client in names),
            groups=groups,
            group_names=group_names,
            columns=kept,
        )

    def _groups(self, source: Ids, names: Column) -> tuple[tuple[str, ...], Ids | None]:
        """Names of the groups, and (C,) the group of each client."""
        if self.group is None:
            return (), None
        group_names, group = np.unique(self.group, return_inverse=True)
        _, first = np.unique(source, return_index=True)
        groups: Ids = group[first]
        wrong = np.flatnonzero(group != groups[source])
        if len(wrong):
            row, client = int(wrong[0]), source[wrong[0]]
            raise ExperimentError(
                f"client {names[client]} is of group {group_names[groups[client]]} in row "
                f"{first[client]} and of group {group_names[group[row]]} in row {row}; a client "
                "has one group"
            )
        return tuple(str(g) for g in group_names), groups


def _inputs(given: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(given)
    if array.dtype.kind not in "buif" or not len(array):
        raise ExperimentError(
            f"inputs must be numbers, one row for each example, got {array.dtype} of the shape "
            f"{array.shape}"
        )
    if array.dtype == np.uint8:
        return array
    kept = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    _refuse_missing("inputs", kept)
    return kept


def _targets(given: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(given)
    if array.dtype.kind not in "buif":
        raise ExperimentError(f"targets must be numbers, got {array.dtype}")
    if array.dtype.kind == "f":
        values = array.astype(np.float32)
        _refuse_missing("targets", values)
        return values
    if array.size and array.min() < 0:
        row = int(np.argwhere(array < 0)[0][0])
        raise ExperimentError(
            f"targets that are whole numbers are classes from 0, got {array[row]} in row {row}; "
            "give numbers to be predicted as floats"
        )
    return array.astype(np.int64)


def _refuse_missing(what: str, values: NDArray[Any]) -> None:
    """Refuse floats that are NaN or infinite, and name the first row that has one."""
    if values.dtype.kind != "f":
        return
    is_missing = ~np.isfinite(values.reshape(len(values), -1))  # (N, values)
    if is_missing.any():
        row, at = (int(index[0]) for index in np.nonzero(is_missing))
        raise ExperimentError(
            f"{what} must be finite numbers, got {values[row].reshape(-1)[at]} in row {row} "
            f"({int(is_missing.any(1).sum())} such rows); fill or remove them"
        )


def _ordered_times(time: Column, source: Ids, names: Column, order: Ids) -> NDArray[np.float64]:
    """(N, 2) the first and the last instant of each example, in the order of the clients."""
    spans = np.asarray(time).astype(np.float64).reshape(len(order), -1)[order][:, [0, -1]]
    is_same_client = source[order][1:] == source[order][:-1]
    wrong = np.flatnonzero(is_same_client & (np.diff(spans[:, 0]) < 0))
    if len(wrong):
        row = int(order[wrong[0] + 1])
        raise ExperimentError(
            f"the rows of client {names[source[row]]} are not ordered by time: row {row} is before "
            f"row {int(order[wrong[0]])}; sort the file by time"
        )
    return spans


def join_clients(clients: Sequence[tuple[Any, Any]], name: str = "clients") -> Dataset:
    """A dataset of one pair (inputs, targets) for each client; they are named 0, 1, ...

    >>> data = join_clients([(np.zeros((2, 3)), np.array([0, 1])), (np.ones((1, 3)), np.array([1]))])
    >>> data.source, data.num_classes
    (array([0, 0, 1]), 2)
    """
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in clients]
    for client, (x, y) in enumerate(pairs):
        if len(x) != len(y) or not len(x) or x.shape[1:] != pairs[0][0].shape[1:]:
            raise ExperimentError(
                f"client {client} has inputs {x.shape} and targets {y.shape}; expected as many "
                f"targets as inputs, at least one, and inputs (n, *{pairs[0][0].shape[1:]})"
            )
    owner = np.repeat(np.arange(len(pairs)), [len(x) for x, _ in pairs])
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return Rows(inputs, targets, owner).dataset(name)

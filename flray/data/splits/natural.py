"""Clients as the data have them: each owner of examples is one client."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import known_source
from flray.data.owned import TIME
from flray.data.parts import num_cut
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least, require_share

SHARE = "share"


@dataclass(frozen=True)
class Natural:
    """One client for each owner, in the order of their names; their kinds are the groups.

    Test and validation parts are cut from the client's own examples. By `time` they are its last
    ones, and examples that overlap them in time are left out. By a column, such as a recording or a
    day, all examples of a client with one value are in one part. So overlapping windows never leak
    by `time` or by a column. By `share` they do: training windows may overlap test windows.

    The server's public examples are the first of a random order that share nothing with a test or
    validation part: no value of the column, and no instant of a window whose times are known. Those
    that do stay with their owners.

    >>> from flray.data.owned import Rows
    >>> rows = Rows(np.zeros((20, 3)), np.zeros(20), client=np.repeat(["a", "b"], 10))
    >>> split = Natural(test_fraction=0.3).split(rows.dataset("tiny"), seed=0)
    >>> [len(part[0]) for part in (split.train, split.validation, split.test)]
    [6, 1, 3]
    """

    # How a client's test and validation examples are chosen. share: at random; time: its last
    # ones; or the name of a column, whose values are not divided
    test_by: str = SHARE
    test_fraction: float = 0.2  # Share of a client's data that is its test part
    validation: float = 0.1  # Share of a client's data that is its validation part
    # Fewest examples of a client; clients with fewer are left out. None: all must have enough
    min_samples: int | None = None
    clients: int | None = None  # Number of clients, drawn at random. None: all of them
    # Number of public examples of the server, drawn at random, held by no client. They overlap no
    # test or validation window, and may overlap windows that clients train on
    server: int = 0
    holdout: int = 0  # Number of clients, drawn at random, that hold data but never train

    def __post_init__(self) -> None:
        require_share(self, "test_fraction", "validation")
        if self.test_fraction + self.validation >= 1:
            raise ValueError(
                "validation + test_fraction must be below 1, or nothing is left to train on; got "
                f"{self.validation} + {self.test_fraction}"
            )
        require_at_least(self, min_samples=1, clients=1, server=0, holdout=0)

    def split(self, dataset: Dataset, seed: int) -> Split:
        public, clients, parts = self._dealt(dataset, seed)
        table = np.unique(np.concatenate([public, *(ids for part in parts for ids in part)]))
        train, validation, test = (
            tuple(np.searchsorted(table, ids) for ids in part) for part in zip(*parts, strict=True)
        )
        holdout = generator(seed, "split.holdout").permutation(len(clients))[: self.holdout]
        return Split(
            image_ids=table,
            labels=dataset.labels[table],
            train=train,
            validation=validation,
            test=test,
            groups=None if dataset.groups is None else dataset.groups[clients],
            knows_groups=True,
            client_names=tuple(dataset.name_of(owner) for owner in clients),
            server=np.searchsorted(table, public),
            holdout=np.sort(holdout),
        )

    def _dealt(self, dataset: Dataset, seed: int) -> tuple[Ids, Ids, list[tuple[Ids, Ids, Ids]]]:
        """Rows of the server, the owners that are clients, and the rows of each of their parts."""
        source = known_source(dataset, "split natural")
        values = self._values(dataset)
        order = generator(seed, "split.natural").permutation(len(source))
        drawn = generator(seed, "split.server").permutation(len(source))
        while True:  # ends: each pass takes rows away from those that may be drawn
            public = np.sort(drawn[: self.server])
            rows = np.setdiff1d(np.arange(len(source)), public)
            clients = self._clients(dataset, source[rows], seed)
            owned = [rows[source[rows] == client] for client in clients]
            parts = [self._parts(dataset, ids, values, order) for ids in owned]
            if not self.server:
                return public, clients, parts
            is_shared = np.zeros(len(source), bool)
            for client, (_, validation, test) in zip(clients, parts, strict=True):
                ids = np.flatnonzero(source == client)  # public ones too
                judged = np.isin(ids, np.concatenate([validation, test]))
                is_shared[ids] = self._sharing(dataset, values, ids, judged)
            if not is_shared[public].any():
                return public, clients, parts
            drawn = drawn[~is_shared[drawn]]
            if len(drawn) < self.server:
                other = (
                    "set split.test_by: time" if self.test_by == SHARE else "lower test_fraction"
                )
                raise ExperimentError(
                    f"{dataset.name} has {len(drawn)} examples that share no sample with a test or "
                    f"validation example, and split.server is {self.server}; lower it, or {other}"
                )

    def _values(self, dataset: Dataset) -> NDArray[Any]:
        """(N,) values that are not divided among parts; by time (N, 2) first and last instants."""
        if self.test_by == SHARE:
            return np.arange(len(dataset.labels))
        if self.test_by not in dataset.columns:
            raise ExperimentError(
                f"split.test_by is {self.test_by!r}, and {dataset.name} has no such column; known: "
                f"{', '.join([SHARE, *dataset.columns])}"
            )
        return dataset.columns[self.test_by]

    def _sharing(
        self, dataset: Dataset, values: NDArray[Any], ids: Ids, judged: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which rows of an owner have a value or an instant of those that are judged."""
        sharing = judged
        if self.test_by != TIME:
            value = np.unique(values[ids], return_inverse=True)[1]
            sharing = np.isin(value, value[judged])
        spans = dataset.columns.get(TIME)
        return sharing if spans is None else sharing | _overlapping(spans[ids], judged)

    def _clients(self, dataset: Dataset, source: Ids, seed: int) -> Ids:
        """Owners with enough examples, as many as were asked for."""
        owners, num_examples = np.unique(source, return_counts=True)
        eligible = owners[num_examples >= (self.min_samples or 1)]
        chosen = generator(seed, "split.clients").permutation(eligible)[: self.clients]
        wanted = max(self.clients or 1, self.holdout + 1)
        if len(chosen) < wanted:
            public = f" beside the {self.server} of the server" if self.server else ""
            raise ExperimentError(
                f"{dataset.name} has {len(eligible)} clients with at least {self.min_samples or 1} "
                f"examples{public}, and {wanted} of {self.clients or len(eligible)} are needed; "
                f"lower split.{'server, ' if self.server else ''}min_samples, clients or holdout"
            )
        return np.sort(chosen)

    def _parts(
        self, dataset: Dataset, ids: Ids, values: NDArray[Any], order: Ids
    ) -> tuple[Ids, Ids, Ids]:
        """Rows of a client for training, validation and test."""
        cut = _cut_time if self.test_by == TIME else _cut_values
        rest, test = cut(ids, self.test_fraction, values, order)
        share = self.validation / (1 - self.test_fraction)
        train, validation = cut(rest, share, values, order)
        if not len(train) or (self.test_fraction and not len(test)):
            owner = known_source(dataset, "split natural")[ids[0]]
            raise ExperimentError(
                f"client {dataset.name_of(owner)} has too few examples, {len(ids)}, for a training "
                f"and a test part by {self.test_by}; leave small clients out with split.min_samples"
            )
        return train, validation, test


def _overlapping(spans: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which windows of one owner have an instant of a chosen one; single instants have none.

    >>> spans = np.array([[0, 2], [2, 4], [4, 6], [6, 8]])  # windows of three instants
    >>> _overlapping(spans, np.array([True, False, False, False]))
    array([ True,  True, False, False])
    """
    is_window = spans[:, 0] < spans[:, 1]
    windows = spans[chosen & is_window]
    if not len(windows):
        return np.zeros(len(spans), bool)
    first, last = windows[np.argsort(windows[:, 0])].T
    num_begun = np.searchsorted(first, spans[:, 1], side="right")  # before each window ends
    latest = np.maximum.accumulate(last)[np.maximum(num_begun - 1, 0)]
    return is_window & (num_begun > 0) & (latest >= spans[:, 0])


def _cut_time(ids: Ids, share: float, spans: NDArray[Any], order: Ids) -> tuple[Ids, Ids]:  # noqa: ARG001
    """The last examples, and those that ended before the first of these began.

    >>> spans = np.array([[0, 2], [1, 3], [2, 4], [3, 5]])  # windows of three instants
    >>> [ids.tolist() for ids in _cut_time(np.arange(4), 0.25, spans, np.arange(4))]
    [[0], [3]]
    """
    num = num_cut(len(ids), share, len(ids))
    if not num:
        return ids, ids[:0]
    last = ids[len(ids) - num :]
    return ids[spans[ids, 1] < spans[last, 0].min()], last


def _cut_values(ids: Ids, share: float, values: NDArray[Any], order: Ids) -> tuple[Ids, Ids]:
    """Examples with some of their values, which come first in a random order, and the others.

    >>> values = np.array([5, 5, 7, 7])
    >>> [ids.tolist() for ids in _cut_values(np.arange(4), 0.5, values, np.array([3, 2, 1, 0]))]
    [[0, 1], [2, 3]]
    """
    _, first, member = np.unique(values[ids], return_index=True, return_inverse=True)
    num = num_cut(len(first), share, len(first))
    is_chosen = np.isin(member, np.argsort(order[ids[first]])[:num])
    return ids[~is_chosen], ids[is_chosen]

"""Clients as the data have them: each owner of examples is one client."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_at_least, check_share
from flray.data.dataset import Dataset, Ids
from flray.data.dealing import known_source
from flray.data.owned import TIME
from flray.data.parts import num_cut
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.randomness import generator

SHARE = "share"


@dataclass(frozen=True)
class Natural:
    """One client for each owner, in the order of their names; their kinds are the groups.

    Test and validation parts are cut from the client's own examples. By `time` they are its last
    ones, and examples that overlap them in time are left out. By a column, such as a recording or a
    day, all examples of a client with one value are in one part. So overlapping windows never leak.

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
    # Number of public examples of the server, drawn at random, held by no client; windows of a
    # series may overlap those of clients in time
    server: int = 0
    holdout: int = 0  # Number of clients, drawn at random, that hold data but never train

    def __post_init__(self) -> None:
        check_share("test_fraction", self.test_fraction)
        check_share("validation", self.validation)
        if self.test_fraction + self.validation >= 1:
            raise ExperimentError(
                "validation + test_fraction must be below 1, or nothing is left to train on; got "
                f"{self.validation} + {self.test_fraction}"
            )
        check_at_least(self, 1, "min_samples", "clients")
        check_at_least(self, 0, "server", "holdout")

    def split(self, dataset: Dataset, seed: int) -> Split:
        source = known_source(dataset, "split natural")
        public = np.sort(generator(seed, "split.server").permutation(len(source))[: self.server])
        rows = np.setdiff1d(np.arange(len(source)), public)
        clients = self._clients(dataset, source[rows], seed)
        order = generator(seed, "split.natural").permutation(len(source))
        parts = [self._parts(dataset, rows[source[rows] == client], order) for client in clients]
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

    def _parts(self, dataset: Dataset, ids: Ids, order: Ids) -> tuple[Ids, Ids, Ids]:
        """Rows of a client for training, validation and test."""
        if self.test_by != SHARE and self.test_by not in dataset.columns:
            raise ExperimentError(
                f"split.test_by is {self.test_by!r}, and {dataset.name} has no such column; known: "
                f"{', '.join([SHARE, *dataset.columns])}"
            )
        values = np.arange(len(order)) if self.test_by == SHARE else dataset.columns[self.test_by]
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

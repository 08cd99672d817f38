"""Clients as the data have them: each owner of examples is one client."""

from dataclasses import dataclass

import numpy as np

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
    day, all examples with one value are in one part. So overlapping windows never leak.
    """

    # How a client's test and validation examples are chosen. share: at random; time: its last
    # ones; or the name of a column, whose values are not divided
    test_by: str = SHARE
    test_fraction: float = 0.2  # Share of a client's data that is its test part
    validation: float = 0.1  # Share of a client's data that is its validation part
    min_samples: int = 3  # Fewest examples of a client; clients with fewer are left out
    clients: int | None = None  # Number of clients, drawn at random. None: all of them
    server: int = 0  # Number of public examples of the server, drawn at random, held by no client
    holdout: int = 0  # Number of clients, drawn at random, that hold data but never train

    def __post_init__(self) -> None:
        check_share("test_fraction", self.test_fraction)
        check_share("validation", self.validation)
        if self.test_fraction + self.validation >= 1:
            raise ExperimentError(
                "validation + test_fraction must be below 1, or nothing is left to train on; got "
                f"{self.validation} + {self.test_fraction}"
            )
        check_at_least("min_samples", self.min_samples, 1)
        check_at_least("server", self.server, 0)
        check_at_least("holdout", self.holdout, 0)
        if self.clients is not None:
            check_at_least("clients", self.clients, 1)

    def split(self, dataset: Dataset, seed: int) -> Split:
        source = known_source(dataset, "split natural")
        public = generator(seed, "split.server").permutation(len(source))[: self.server]
        rows = np.setdiff1d(np.arange(len(source)), public)
        clients = self._clients(dataset, source[rows], seed)
        parts = self._parts(dataset, [rows[source[rows] == client] for client in clients], seed)
        table = np.unique(np.concatenate([public, *(ids for part in parts for ids in part)]))
        train, validation, test = (
            tuple(np.searchsorted(table, ids) for ids in part) for part in parts
        )
        holdout = generator(seed, "split.holdout").permutation(len(clients))[: self.holdout]
        return Split(
            image_ids=table,
            labels=dataset.labels[table],
            train=train,
            validation=validation,
            test=test,
            groups=None if dataset.groups is None else dataset.groups[clients],
            server=np.searchsorted(table, np.sort(public)),
            holdout=np.sort(holdout),
        )

    def _clients(self, dataset: Dataset, source: Ids, seed: int) -> Ids:
        """Owners with enough examples, as many as were asked for."""
        owners, num_examples = np.unique(source, return_counts=True)
        eligible = owners[num_examples >= self.min_samples]
        wanted = max(self.clients or 1, self.holdout + 1)
        if len(eligible) < wanted:
            least = int(num_examples.argmin())
            raise ExperimentError(
                f"{dataset.name} has {len(eligible)} clients with at least {self.min_samples} "
                f"examples (split.min_samples), {wanted} are needed; the smallest, "
                f"{dataset.client_names[owners[least]] if dataset.client_names else owners[least]}, "
                f"has {num_examples[least]}; lower split.min_samples, clients or holdout"
            )
        drawn = generator(seed, "split.clients").permutation(eligible)[: self.clients]
        return np.sort(drawn)

    def _parts(
        self, dataset: Dataset, owned: list[Ids], seed: int
    ) -> tuple[list[Ids], list[Ids], list[Ids]]:
        """Rows of each client for training, validation and test."""
        cut = {SHARE: _by_share, TIME: _by_time}.get(self.test_by, _by_column)
        if cut is not _by_share and self.test_by not in dataset.columns:
            known = ", ".join([SHARE, *dataset.columns])
            raise ExperimentError(
                f"split.test_by is {self.test_by!r}, and {dataset.name} has no such column; "
                f"known: {known}"
            )
        values = dataset.columns.get(self.test_by, np.empty(0))
        order = generator(seed, "split.natural").permutation(len(dataset.labels))
        train, validation, test = [], [], []
        for client, ids in enumerate(owned):
            rest, last = cut(ids, self.test_fraction, values, order)
            share = self.validation * len(ids) / max(len(rest), 1)
            rest, middle = cut(rest, min(share, 1.0), values, order)
            if not len(rest):
                raise ExperimentError(
                    f"client {client} of {len(owned)} has {len(ids)} examples and none to train on "
                    f"after the cut by {self.test_by}; raise split.min_samples, or lower "
                    "split.test_fraction and split.validation"
                )
            train.append(rest)
            validation.append(middle)
            test.append(last)
        return train, validation, test


def _by_share(ids: Ids, share: float, values: Ids, order: Ids) -> tuple[Ids, Ids]:
    """The examples in two parts; the second has those that come first in a random order."""
    num = num_cut(len(ids), share, len(ids))
    chosen = ids[np.argsort(order[ids])[:num]]
    return np.setdiff1d(ids, chosen), np.sort(chosen)


def _by_time(ids: Ids, share: float, spans: Ids, order: Ids) -> tuple[Ids, Ids]:
    """The last examples, and those that ended before the first of these began.

    >>> spans = np.array([[0, 2], [1, 3], [2, 4], [3, 5]])  # windows of three instants
    >>> [ids.tolist() for ids in _by_time(np.arange(4), 0.25, spans, np.arange(4))]
    [[0], [3]]
    """
    num = num_cut(len(ids), share, len(ids))
    if not num:
        return ids, ids[:0]
    last = ids[len(ids) - num :]
    before = ids[spans[ids, 1] < spans[last, 0].min()]
    return before, last


def _by_column(ids: Ids, share: float, values: Ids, order: Ids) -> tuple[Ids, Ids]:
    """Whole values of a column; which ones depends on a random order of all examples."""
    _, first, member = np.unique(values[ids], return_index=True, return_inverse=True)
    num = num_cut(len(first), share, len(first))
    chosen = np.argsort(order[ids[first]])[:num]
    is_chosen = np.isin(member, chosen)
    return ids[~is_chosen], ids[is_chosen]

"""Aggregation, one operator for every method: W' = A X + B W.

X are the models trained this round, W the bank before it. A row of [A B] sums to 1 and belongs to
one new model; a row that hears nobody keeps its model. Sums are taken in fixed point
(`flray.models.fixed_point`); a model that is only copied keeps its bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.models.bank import ModelBank, Params, rows_of
from flray.models.fixed_point import Terms, WeightArray, exponents_for, largest_values
from flray.models.server_optimizers import OPTIMIZERS, NoOptimizer
from flray.values import require_above_zero

Unheard = Literal["ignore", "stale"]


@dataclass(frozen=True)
class Aggregation:
    """How the models of heard and unheard clients enter a mean.

    By default a model becomes sum_k n_k w_k / sum_k n_k over the clients heard, as in FedAvg.

    >>> row = mixing_row(np.array([1.0, 3.0]), None, 0, Aggregation(server_lr=0.5))
    >>> row.a, row.b  # half of the mean of two clients, half of the model before
    (array([0.125, 0.375]), array([0.5]))
    """

    # Clients not heard in a round. ignore: left out of the mean; stale: count with their last
    # model, as in FLT
    unheard: Unheard = "ignore"
    # Weight of a client in a mean. samples: n_k (McMahan 2017); uniform: 1
    weights: Literal["samples", "uniform"] = "samples"
    server_lr: float = 1.0  # Server learning rate η: w' = w + η (mean - w)
    # What the server makes of mean - w. none: the step itself, as in FedAvg
    optimizer: Annotated[Any, "optimizer", OPTIMIZERS] = field(default_factory=NoOptimizer)

    def __post_init__(self) -> None:
        require_above_zero(self, "server_lr")

    @property
    def has_optimizer(self) -> bool:
        """True if models have moments, which an optimiser of the server moves them by."""
        return not isinstance(self.optimizer, NoOptimizer)

    @property
    def mean_weight(self) -> float:
        """Weight of the mean in A X + B W; an optimiser multiplies its own step by the rate."""
        return 1.0 if self.has_optimizer else self.server_lr


@dataclass(frozen=True)
class Relation:
    """Who hears whom in a mean: i hears j with rows[row_of_client[i], column_of_client[j]].

    Strengths are >= 0 and relative: `Federation.mix` multiplies them by n_j and divides by their
    sum. A client whose row is zero hears nobody and keeps its model. Equal rows are stored once,
    equal columns may be, so that V clusters take V x V numbers.

    >>> clusters = Relation.of_clusters(np.array([0, 1, 0]))
    >>> clusters.strengths(np.arange(3))[clusters.row_of_client[2]]  # hears client 0 and itself
    array([1., 0., 1.])
    """

    rows: WeightArray  # (V, C) distinct rows of strengths; one that no client has is zero
    row_of_client: Ids  # (M,) position in `rows` of what each client hears
    column_of_client: Ids  # (M,) the column that has how strongly each client is heard

    def strengths(self, clients: Ids) -> WeightArray:
        """(V, K) how strongly these clients are heard by each row."""
        return self.rows[:, self.column_of_client[clients]]

    def matrix(self) -> WeightArray:
        """(M, M) in row i what client i hears."""
        return self.rows[np.ix_(self.row_of_client, self.column_of_client)]

    @classmethod
    def joint(cls, num_clients: int) -> "Relation":
        """Everybody hears everybody: FedAvg.

        >>> Relation.joint(3).rows, Relation.joint(3).row_of_client
        (array([[1.]]), array([0, 0, 0]))
        """
        everybody = np.zeros(num_clients, np.int64)
        return cls(np.ones((1, 1)), everybody, everybody)

    @classmethod
    def of_clusters(cls, labels: Ids) -> "Relation":
        """Everybody hears its cluster; a client labelled -1 hears nobody and keeps its model.

        >>> Relation.of_clusters(np.array([0, -1, 0])).strengths(np.arange(3))
        array([[0., 0., 0.],
               [1., 0., 1.]])
        """
        first, row_of_client = first_and_inverse(labels + 1)
        rows = np.eye(len(first))
        rows[labels[first] == -1] = 0.0
        return cls(rows, row_of_client, row_of_client)

    @classmethod
    def of_matrix(cls, strengths: WeightArray) -> "Relation":
        """Row i of an (M, M) matrix is what client i hears; equal rows and columns are stored once.

        >>> Relation.of_matrix(np.array([[1.0, 0.5, 0.5]] * 3)).rows
        array([[0.5, 1. ]])
        """
        rows, row_of_client = np.unique(strengths, axis=0, return_inverse=True)
        rows, column_of_client = np.unique(rows, axis=1, return_inverse=True)
        return cls(rows, row_of_client.reshape(-1), column_of_client.reshape(-1))


@dataclass(frozen=True)
class MixingRow:
    """The entries of one row of [A B] that are not zero: the weights that make one new model.

    w' = sum_k a_k x_heard[k] + sum_u b_u w_kept[u]; the weights sum to 1.
    """

    heard: Ids  # positions in the cohort
    a: WeightArray  # weights of the trained models at `heard`
    kept: Ids  # rows of the bank before
    b: WeightArray  # weights of the models at `kept`
    previous: int = 0  # row that the model had in the bank before

    @property
    def copies_heard(self) -> bool:
        """True if the row is one trained model, whose bits are kept."""
        return not len(self.kept) and len(self.heard) == 1 and float(self.a[0]) == 1

    @property
    def copies_kept(self) -> bool:
        """True if the row is one model of the bank before, whose bits are kept."""
        return not len(self.heard) and len(self.kept) == 1 and float(self.b[0]) == 1


def mixing_row(
    heard: WeightArray, unheard: WeightArray | None, previous: int, aggregation: Aggregation
) -> MixingRow:
    """The row of [A B] of a model.

    >>> row = mixing_row(np.array([1.0, 0.0, 2.0]), None, 0, Aggregation())
    >>> row.heard, row.a * 3, row.b
    (array([0, 2]), array([1., 2.]), array([], dtype=float64))

    Args:
        heard: (K,) how strongly it hears each client that trained, times n_j.
        unheard: (U,) the same for the other clients, summed by their row of the bank. None: they
            do not count.
        previous: row that the model has in the bank before the round.
    """
    positions = np.flatnonzero(heard)
    a, b = heard[positions], np.zeros(previous + 1) if unheard is None else unheard
    total = a.sum() + b.sum()
    if len(positions) == 0 or total == 0:
        return MixingRow(positions[:0], a[:0], np.array([previous]), np.ones(1), previous)
    # w' = w + server_lr (mean - w): the mean has the weight server_lr, the old model the rest
    server_lr = aggregation.mean_weight
    a, b = server_lr * a / total, server_lr * b / total
    b[previous] += 1 - server_lr
    kept = np.flatnonzero(b)
    return MixingRow(positions, a, kept, b[kept], previous)


class Models(Protocol):
    """Trained models of K clients, which may be in the memory of the hosts that trained them."""

    @property
    def largest(self) -> dict[str, WeightArray]:
        """(K,) by leaf, the largest absolute value of each model."""
        ...

    def rows(self, positions: Ids, names: Sequence[str]) -> Params:
        """These leaves (n, ...) of the models at these positions."""
        ...

    def sums(self, terms: Terms) -> Params:
        """Weighted sums of these models, integers (V, ...) in fixed point."""
        ...


@dataclass(frozen=True)
class HeldModels:
    """Models in the memory of this process.

    >>> models = HeldModels({"w": torch.tensor([[1.0], [-5.0]])})
    >>> models.largest, models.rows(np.array([1]), ["w"])
    ({'w': array([1., 5.])}, {'w': tensor([[-5.]])})
    """

    params: Params  # leaves (K, ...)

    @cached_property
    def largest(self) -> dict[str, WeightArray]:
        """As `Models.largest`."""
        return largest_values(self.params)

    def rows(self, positions: Ids, names: Sequence[str]) -> Params:
        """As `Models.rows`."""
        return {name: rows_of(self.params[name], positions) for name in names}

    def sums(self, terms: Terms) -> Params:
        """As `Models.sums`."""
        return terms(self.params)


@dataclass(frozen=True)
class ClientModels:
    """A model of each of the clients, in their order."""

    clients: Ids  # (K,)
    models: Models


@dataclass(frozen=True)
class Weighted:
    """How strongly V rows hear clients, times n_j: what the rows of [A B] are made of.

    >>> bank = ModelBank({}, np.zeros(4, np.int64))
    >>> n = np.array([5.0, 10.0, 20.0, 30.0])
    >>> weighted = Weighted.of(lambda clients: n[None, clients], np.array([1, 3]), bank, "stale")
    >>> weighted.heard, weighted.unheard  # clients 1 and 3 trained, the others have model 0
    (array([[10., 30.]]), array([[25.]]))
    """

    heard: WeightArray  # (V, K) of the clients that trained
    unheard: WeightArray | None  # (V, U) of the others, by their row of the bank; None: not counted

    @classmethod
    def of(
        cls,
        strengths: Callable[[Ids], WeightArray],
        cohort: Ids,
        bank: ModelBank,
        unheard: Unheard,
    ) -> "Weighted":
        """Ask for the strengths (V, K) of the clients that count, whatever their number is."""
        heard = strengths(cohort)
        if unheard == "ignore":
            return cls(heard, None)
        others = np.setdiff1d(np.arange(len(bank.owner)), cohort)
        num_rows = max(int(bank.owner.max()) + 1, len(heard))  # some may have no user
        sums = [np.bincount(bank.owner[others], s, num_rows) for s in strengths(others)]
        return cls(heard, np.array(sums))

    def row(self, v: int, previous: int, aggregation: Aggregation) -> MixingRow:
        """The row of [A B] that row v makes of the model at `previous`."""
        unheard = None if self.unheard is None else self.unheard[v]
        return mixing_row(self.heard[v], unheard, previous, aggregation)


def rows_of_clients(
    relation: Relation, weighted: Weighted, bank: ModelBank, aggregation: Aggregation
) -> tuple[list[MixingRow], Ids]:
    """The rows of [A B] of the distinct new models, and (M,) the row of each client.

    Clients with equal rows of the relation share a model, unless the new model contains the
    client's old one: where nobody was heard, where the server step is not 1, or where the server
    has an optimiser.
    """
    hears: NDArray[np.bool_] = np.any(weighted.heard > 0, axis=1)  # (V,)
    always_keeps = aggregation.has_optimizer or aggregation.server_lr != 1
    if hears.all() and not always_keeps:  # nobody's old model matters
        rows = [weighted.row(v, 0, aggregation) for v in range(len(hears))]
        return rows, relation.row_of_client
    keeps_own = ~hears[relation.row_of_client] | always_keeps  # (M,)
    # One number for each pair (row of the relation, row that is kept or none).
    pairs = relation.row_of_client * (bank.owner.max() + 2) + np.where(keeps_own, bank.owner + 1, 0)
    first, owner = first_and_inverse(pairs)
    rows = [
        weighted.row(int(relation.row_of_client[i]), int(bank.owner[i]), aggregation) for i in first
    ]
    return rows, owner


def first_and_inverse(numbers: Ids) -> tuple[Ids, Ids]:
    """Where each distinct number >= 0 comes first, in their order, and (M,) the rank of each.

    As `np.unique`, which sorts all M numbers; those of few clusters are counted instead.

    >>> first_and_inverse(np.array([7, 3, 7, 3]))
    (array([1, 0]), array([1, 0, 1, 0]))
    """
    num, largest = len(numbers), int(numbers.max(initial=0))
    if largest > 4 * num:
        _, first, rank = np.unique(numbers, return_index=True, return_inverse=True)
        return first, rank.reshape(-1)
    position = np.full(largest + 1, num)
    position[numbers[::-1]] = np.arange(num)[::-1]  # the first one is written last
    is_used = position < num
    return position[is_used], (np.cumsum(is_used) - 1)[numbers]


def mix(rows: Sequence[MixingRow], trained: Models, bank: Params) -> Params:
    """W' = A X + B W, a new stack with one model for each row and the leaves of the bank.

    >>> bank, trained = {"w": torch.zeros(1, 1)}, HeldModels({"w": torch.tensor([[1.0], [3.0]])})
    >>> none = np.array([], np.int64)
    >>> mean = MixingRow(np.array([0, 1]), np.array([0.5, 0.5]), none, np.empty(0))
    >>> mix([mean], trained, bank)["w"]
    tensor([[2.]])
    """
    names = list(bank)
    if names and not any(row.copies_heard or row.copies_kept for row in rows):
        return _means(rows, trained, bank)
    mixed = {name: leaf.new_empty(len(rows), *leaf.shape[1:]) for name, leaf in bank.items()}
    heard = np.array([v for v, row in enumerate(rows) if row.copies_heard], np.int64)
    if len(heard):
        positions = np.concatenate([rows[v].heard for v in heard])
        _put(mixed, heard, trained.rows(positions, names))
    kept = np.array([v for v, row in enumerate(rows) if row.copies_kept], np.int64)
    if len(kept):
        before = np.concatenate([rows[v].kept for v in kept])
        _put(mixed, kept, {name: rows_of(bank[name], before) for name in names})
    summed = np.setdiff1d(np.arange(len(rows)), np.concatenate([heard, kept]))
    if len(summed) and names:
        _put(mixed, summed, _means([rows[v] for v in summed], trained, bank))
    return mixed


def _put(mixed: Params, rows: Ids, values: Params) -> None:
    for name, leaf in mixed.items():
        leaf.index_copy_(0, torch.from_numpy(rows).to(leaf.device), values[name].to(leaf.device))


def _means(rows: Sequence[MixingRow], trained: Models, bank: Params) -> Params:
    """The models of these rows, as sums in fixed point."""
    heard, kept = tuple(row.heard for row in rows), tuple(row.kept for row in rows)
    exponents = _exponents(rows, trained.largest, bank)
    terms = Terms(heard, tuple(row.a for row in rows), exponents)
    sums = trained.sums(terms)
    if any(map(len, kept)):
        before = Terms(kept, tuple(row.b for row in rows), exponents)(bank)
        sums = {name: total + before[name] for name, total in sums.items()}
    return terms.result(sums, bank)


def _exponents(
    rows: Sequence[MixingRow], largest: dict[str, WeightArray], bank: Params
) -> dict[str, Ids]:
    """By leaf (V,): how many bits after the point the sum of each row has room for."""
    used = np.unique(np.concatenate([row.kept for row in rows]))
    before = {name: np.empty(0) for name in bank}
    if len(used):  # otherwise there is nothing to wait for
        before = largest_values({name: rows_of(leaf, used) for name, leaf in bank.items()})
    kept = [np.searchsorted(used, row.kept) for row in rows]
    exponents = {}
    for name, leaf in bank.items():
        bounds = [
            abs(row.a).sum() * largest[name][row.heard].max(initial=0.0)
            + abs(row.b).sum() * before[name][positions].max(initial=0.0)
            for row, positions in zip(rows, kept, strict=True)
        ]
        exponents[name] = exponents_for(np.array(bounds), leaf.dtype)
    return exponents

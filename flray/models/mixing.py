"""Aggregation, one operator for every method: W' = A X + B W.

X are the models trained this round, W the bank before it. A row of [A B] sums to 1 and belongs to
one new model; a row that hears nobody keeps its model. Sums are taken in fixed point
(`flray.models.fixed_point`); a model that is only copied keeps its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.models.bank import ModelBank, Params, rows_of
from flray.models.fixed_point import Terms, WeightArray, exponents_for, largest_values
from flray.models.server_optimizers import OPTIMIZERS, NoOptimizer


@dataclass(frozen=True)
class Aggregation:
    """How the models of heard and unheard clients enter a mean.

    By default a model becomes sum_k n_k w_k / sum_k n_k over the clients heard, as in FedAvg.

    >>> bank = ModelBank({}, np.zeros(2, np.int64))
    >>> half = Aggregation(server_lr=0.5)
    >>> row = mixing_row(np.array([1.0, 3.0]), 0, np.array([0, 1]), bank, half)
    >>> row.a, row.b  # half of the mean of two clients, half of the model before
    (array([0.125, 0.375]), array([0.5]))
    """

    # Clients not heard in a round. ignore: left out of the mean; stale: count with their last
    # model, as in FLT
    unheard: Literal["ignore", "stale"] = "ignore"
    # Weight of a client in a mean. samples: n_k (McMahan 2017); uniform: 1
    weights: Literal["samples", "uniform"] = "samples"
    server_lr: float = 1.0  # Server learning rate η: w' = w + η (mean - w)
    # What the server makes of mean - w. none: the step itself, as in FedAvg
    optimizer: Annotated[Any, "optimizer", OPTIMIZERS] = field(default_factory=NoOptimizer)

    def __post_init__(self) -> None:
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be > 0, got {self.server_lr}")

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
    """Who hears whom in a mean: i hears j with strength rows[row_of_client[i], j].

    Strengths are >= 0 and relative: `Federation.mix` multiplies them by n_j and divides by their
    sum. A client whose row is zero hears nobody and keeps its model. Equal rows are stored once,
    so that M clients in V clusters take V M numbers.

    >>> clusters = Relation.of_clusters(np.array([0, 1, 0]))
    >>> clusters.rows[clusters.row_of_client[2]]  # client 2 hears client 0 and itself
    array([1., 0., 1.])
    """

    rows: WeightArray  # (V, M) the distinct rows of strengths
    row_of_client: Ids  # (M,) position in `rows` of what each client hears

    @classmethod
    def joint(cls, num_clients: int) -> "Relation":
        """Everybody hears everybody: FedAvg.

        >>> Relation.joint(3).rows, Relation.joint(3).row_of_client
        (array([[1., 1., 1.]]), array([0, 0, 0]))
        """
        return cls(np.ones((1, num_clients)), np.zeros(num_clients, np.int64))

    @classmethod
    def of_clusters(cls, labels: Ids) -> "Relation":
        """Everybody hears its cluster; a client labelled -1 hears nobody and keeps its model.

        >>> Relation.of_clusters(np.array([0, -1, 0])).rows
        array([[0., 0., 0.],
               [1., 0., 1.]])
        """
        names, row_of_client = np.unique(labels, return_inverse=True)
        rows = (labels == names[:, None]).astype(np.float64)
        rows[names < 0] = 0.0
        return cls(rows, row_of_client)

    @classmethod
    def of_matrix(cls, strengths: WeightArray) -> "Relation":
        """Row i of an (M, M) matrix is what client i hears; equal rows are stored once.

        >>> Relation.of_matrix(np.array([[1.0, 0.5], [1.0, 0.5]])).rows
        array([[1. , 0.5]])
        """
        rows, row_of_client = np.unique(strengths, axis=0, return_inverse=True)
        return cls(rows, row_of_client.reshape(-1))


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
    relation: WeightArray, previous: int, cohort: Ids, bank: ModelBank, aggregation: Aggregation
) -> MixingRow:
    """The row of [A B] of a model that hears client j with strength relation[j].

    >>> bank = ModelBank({}, np.zeros(4, np.int64))
    >>> row = mixing_row(np.array([1., 1, 2, 0]), 0, np.array([1, 2]), bank, Aggregation())
    >>> row.a * 3, row.b
    (array([1., 2.]), array([], dtype=float64))

    Args:
        relation: (M,) one row of a `Relation`: strengths, already multiplied by n_j.
        previous: row that the model has in the bank before the round.
        cohort: clients heard this round, in the order of their trained models.
    """
    heard = np.flatnonzero(relation[cohort])
    a = relation[cohort][heard]
    b = np.zeros(max(int(bank.owner.max()), previous) + 1)  # (U,)
    if aggregation.unheard == "stale":
        unheard = np.setdiff1d(np.flatnonzero(relation), cohort)
        np.add.at(b, bank.owner[unheard], relation[unheard])
    total = a.sum() + b.sum()
    if len(heard) == 0 or total == 0:
        return MixingRow(heard[:0], a[:0], np.array([previous]), np.ones(1), previous)
    # w' = w + server_lr (mean - w): the mean has the weight server_lr, the old model the rest
    server_lr = aggregation.mean_weight
    a, b = server_lr * a / total, server_lr * b / total
    b[previous] += 1 - server_lr
    kept = np.flatnonzero(b)
    return MixingRow(heard, a, kept, b[kept], previous)


def mixing_rows(
    hears: WeightArray, cohort: Ids, bank: ModelBank, aggregation: Aggregation
) -> list[MixingRow]:
    """A row of [A B] for each row of the bank: model u hears client j with strength hears[u, j]."""
    return [
        mixing_row(strengths, u, cohort, bank, aggregation) for u, strengths in enumerate(hears)
    ]


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
    largest: dict[str, WeightArray] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", largest_values(self.params))

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


def rows_of_clients(
    relation: Relation, cohort: Ids, bank: ModelBank, aggregation: Aggregation
) -> tuple[list[MixingRow], Ids]:
    """The rows of [A B] of the distinct new models, and (M,) the row of each client.

    The strengths in `relation` include n_j. Clients with equal rows of the relation share a model,
    unless the new model contains the client's old one: where nobody was heard, where the server
    step is not 1, or where the server has an optimiser.
    """
    hears: NDArray[np.bool_] = np.any(relation.rows[:, cohort] > 0, axis=1)  # (V,)
    hears_somebody = hears[relation.row_of_client]  # (M,)
    keeps_own = ~hears_somebody | aggregation.has_optimizer | (aggregation.server_lr != 1)
    # One number for each pair (row of the relation, row that is kept or none).
    pairs = relation.row_of_client * (bank.owner.max() + 2) + np.where(keeps_own, bank.owner + 1, 0)
    _, first, owner = np.unique(pairs, return_index=True, return_inverse=True)
    rows = [
        mixing_row(
            relation.rows[relation.row_of_client[i]], int(bank.owner[i]), cohort, bank, aggregation
        )
        for i in first
    ]
    return rows, owner.reshape(-1)


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

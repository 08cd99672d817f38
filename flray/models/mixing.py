"""Aggregation, one operator for every method: W' = A X + B W.

X are the models trained this round, W the bank before it. A row of [A B] sums to 1 and belongs to
one new model; a row that hears nobody keeps its model. Sums are taken in fixed point: integers add
up to the same number in any order, so the bits of a model depend on who was heard and on nothing
else, and hosts can sum up the models they have trained. A model that is only copied keeps its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.data.dataset import Ids
from flray.models.bank import ModelBank, Params

Weights = NDArray[np.float64]

# The integers in which models of a dtype are summed, and the bits that a sum may use.
FIXED_POINT = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 61)}
LARGEST_EXPONENT = 100  # of a scale: leaves below 2^-70 are summed with fewer bits
SLACK = 1.001  # of a bound: weights that differ by rounding alone must not change a scale
# Elements multiplied at a time, so that a CPU does it in its cache.
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 1 << 19, 1 << 27
LEAST_ROWS = 4  # multiplied at a time
ELEMENTS_OF_SUMS = 1 << 26  # multiplied for several sums at a time, on a GPU


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
    server_lr: float = 1.0  # Server learning rate: w' = w + server_lr (mean - w)

    def __post_init__(self) -> None:
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be > 0, got {self.server_lr}")


@dataclass(frozen=True)
class Relation:
    """Who hears whom in a mean: client i hears client j with strength rows[of[i], j].

    Strengths are >= 0 and relative: `Federation.mix` multiplies them by n_j and divides by their
    sum. A client whose row is zero hears nobody and keeps its model. Equal rows are stored once.

    >>> clusters = Relation.of_clusters(np.array([0, 1, 0]))
    >>> clusters.rows[clusters.of[2]]  # client 2 hears client 0 and itself
    array([1., 0., 1.])
    """

    rows: Weights  # (V, M) the distinct rows
    of: Ids  # (M,) the number of each client's row

    @classmethod
    def joint(cls, num_clients: int) -> "Relation":
        """Everybody hears everybody: FedAvg.

        >>> Relation.joint(3).rows, Relation.joint(3).of
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
        names, of = np.unique(labels, return_inverse=True)
        rows = (labels == names[:, None]).astype(np.float64)
        rows[names < 0] = 0.0
        return cls(rows, of)

    @classmethod
    def of_matrix(cls, strengths: Weights) -> "Relation":
        """Row i of an (M, M) matrix is what client i hears; equal rows are stored once.

        >>> Relation.of_matrix(np.array([[1.0, 0.5], [1.0, 0.5]])).rows
        array([[1. , 0.5]])
        """
        rows, of = np.unique(strengths, axis=0, return_inverse=True)
        return cls(rows, of.reshape(-1))


@dataclass(frozen=True)
class MixingRow:
    """One non-zero row of [A B]: w' = sum_k a_k x_heard[k] + sum_u b_u w_kept[u]; it sums to 1."""

    heard: Ids  # positions in the cohort
    a: Weights  # a weight for each of `heard`
    kept: Ids  # rows of the bank before
    b: Weights  # a weight for each of `kept`

    @property
    def copies_heard(self) -> bool:
        """True if the row is one trained model, whose bits are kept."""
        return not len(self.kept) and len(self.heard) == 1 and float(self.a[0]) == 1

    @property
    def copies_kept(self) -> bool:
        """True if the row is one model of the bank before, whose bits are kept."""
        return not len(self.heard) and len(self.kept) == 1 and float(self.b[0]) == 1


def mixing_row(
    relation: Weights, previous: int, cohort: Ids, bank: ModelBank, aggregation: Aggregation
) -> MixingRow:
    """The row of [A B] of a model that hears client j with strength relation[j] (n_j included).

    previous is the model's row in the bank before.

    >>> bank = ModelBank({}, np.zeros(4, np.int64))
    >>> row = mixing_row(np.array([1., 1, 2, 0]), 0, np.array([1, 2]), bank, Aggregation())
    >>> row.a * 3, row.b
    (array([1., 2.]), array([], dtype=float64))
    """
    heard = np.flatnonzero(relation[cohort])
    a = relation[cohort][heard]
    b = np.zeros(max(int(bank.owner.max()), previous) + 1)  # (U,)
    if aggregation.unheard == "stale":
        unheard = np.setdiff1d(np.flatnonzero(relation), cohort)
        np.add.at(b, bank.owner[unheard], relation[unheard])
    total = a.sum() + b.sum()
    if len(heard) == 0 or total == 0:
        return MixingRow(heard[:0], a[:0], np.array([previous]), np.ones(1))
    step = aggregation.server_lr
    a, b = step * a / total, step * b / total
    b[previous] += 1 - step
    kept = np.flatnonzero(b)
    return MixingRow(heard, a, kept, b[kept])


def mixing_rows(
    hears: Weights, cohort: Ids, bank: ModelBank, aggregation: Aggregation
) -> list[MixingRow]:
    """A row of [A B] for each model of the bank, which hears client j with strength hears[u, j]."""
    return [
        mixing_row(strengths, u, cohort, bank, aggregation) for u, strengths in enumerate(hears)
    ]


class Models(Protocol):
    """Trained models of K clients, wherever they are."""

    @property
    def largest(self) -> dict[str, Weights]:
        """(K,) by leaf, the largest absolute value."""
        ...

    def rows(self, places: Ids, names: Sequence[str]) -> Params:
        """The leaves (n, ...) of the models at these places."""
        ...

    def sums(self, terms: "Terms") -> Params:
        """Weighted sums of these models."""
        ...


@dataclass(frozen=True)
class Terms:
    """V weighted sums over the models of a stack, in fixed point.

    A term is rounded to a multiple of 2^-exponents[leaf][v].

    >>> terms = Terms((np.array([0, 2]),), (np.array([0.5, 0.25]),), {"w": np.array([3])})
    >>> terms({"w": torch.tensor([[1.0], [7.0], [0.25]])})["w"]  # 8 (1/2 + 1/16), rounded
    tensor([[4]], dtype=torch.int32)
    """

    places: tuple[Ids, ...]  # of the models that sum v has a term of
    weights: tuple[Weights, ...]
    exponents: dict[str, Ids]  # by leaf, (V,)

    def __call__(self, models: Params) -> Params:
        sizes = [len(places) for places in self.places]
        scales = 2.0 ** np.stack(list(self.exponents.values())).astype(np.float64)  # (L, V)
        weights = torch.from_numpy(np.concatenate(self.weights) * np.repeat(scales, sizes, axis=1))
        like = next(iter(models.values()))
        weights = weights.to(like.device)  # (L, terms), one copy for all leaves
        at_once = like.device.type == "cuda" and len(sizes) > 1
        places = torch.from_numpy(np.concatenate(self.places)).to(like.device) if at_once else None
        return {
            name: self._sums(models[name], scaled.to(models[name].dtype))
            if places is None
            else several_sums(models[name], places, scaled.to(models[name].dtype), sizes)
            for name, scaled in zip(self.exponents, weights, strict=True)
        }

    def _sums(self, leaf: Tensor, weights: Tensor) -> Tensor:
        kind, _ = FIXED_POINT[leaf.dtype]
        sizes = [len(places) for places in self.places]
        sums = torch.zeros(len(sizes), *leaf.shape[1:], dtype=kind, device=leaf.device)
        at_once = ELEMENTS_ON_CPU if leaf.device.type == "cpu" else ELEMENTS_ON_GPU
        size = max(LEAST_ROWS, at_once // max(1, leaf.shape[1:].numel()))
        for total, places, factors in zip(
            sums, self.places, torch.split(weights, sizes), strict=True
        ):
            for start in range(0, len(places), size):
                chunk = slice(start, start + size)
                products = _products(leaf, places[chunk], factors[chunk])
                total += products.round_().to(kind).sum(0, dtype=kind)
        return sums

    def at(self, place_of: Ids) -> "Terms":
        """The terms of models that lie elsewhere, at place_of[place]; -1: not there."""
        there = [place_of[places] >= 0 for places in self.places]
        return Terms(
            tuple(place_of[p][is_there] for p, is_there in zip(self.places, there, strict=True)),
            tuple(w[is_there] for w, is_there in zip(self.weights, there, strict=True)),
            self.exponents,
        )

    def result(self, sums: Params, like: Params) -> Params:
        """Sums as numbers, of the dtype of the models."""
        scales = torch.from_numpy(
            2.0 ** -np.stack([self.exponents[name] for name in sums]).astype(float)
        )
        scales = scales.to(next(iter(sums.values())).device)  # (L, V), one copy for all leaves
        numbers = {}
        for (name, total), scale in zip(sums.items(), scales, strict=True):
            scale = scale.to(like[name].dtype).view(-1, *[1] * (total.dim() - 1))
            numbers[name] = total.to(like[name].dtype).mul_(scale)
        return numbers


def several_sums(leaf: Tensor, places: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """(V, ...) what `Terms` sums, with few calls for many short sums, as a GPU prefers it.

    places and weights (terms,) are those of all sums, of which the v-th has sizes[v].

    >>> leaf, places, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1]), torch.ones(3)
    >>> several_sums(leaf, places, weights, [2, 1]).tolist()
    [[3], [2]]
    """
    kind, _ = FIXED_POINT[leaf.dtype]
    num_elements = max(1, leaf.shape[1:].numel())
    most = max(LEAST_ROWS, ELEMENTS_OF_SUMS // num_elements)  # terms at a time
    sums = torch.zeros(len(sizes), *leaf.shape[1:], dtype=kind, device=leaf.device)
    of_term = np.repeat(np.arange(len(sizes)), sizes)
    into = torch.from_numpy(of_term).to(leaf.device)
    for start in range(0, len(of_term), most):
        chunk = slice(start, start + most)
        factors = weights[chunk].view(-1, *[1] * (leaf.dim() - 1))
        products = leaf.index_select(0, places[chunk]).mul_(factors)
        sums.index_add_(0, into[chunk], products.round_().to(kind))
    return sums


@dataclass(frozen=True)
class HeldModels:
    """Models in the memory of this process."""

    params: Params  # leaves (K, ...)
    largest: dict[str, Weights] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", largest_values(self.params))

    def rows(self, places: Ids, names: Sequence[str]) -> Params:
        """The leaves (n, ...) of these names of the models at these positions."""
        return {name: rows_of(self.params[name], places) for name in names}

    def sums(self, terms: Terms) -> Params:
        """The weighted sums, integers in fixed point."""
        return terms(self.params)


@dataclass(frozen=True)
class ClientModels:
    """A model of each of the clients, in their order."""

    clients: Ids  # (K,)
    models: Models


def largest_values(models: Params) -> dict[str, Weights]:
    """(K,) by leaf, the largest absolute value of each model; NaN where one is.

    >>> largest_values({"w": torch.tensor([[1.0, -2.0], [torch.nan, 0.0]])})
    {'w': array([ 2., nan])}
    """
    if not models:
        return {}
    flat = [leaf.flatten(1) for leaf in models.values()]
    largest = torch.stack([torch.maximum(leaf.amax(1), -leaf.amin(1)) for leaf in flat])  # (L, K)
    return dict(zip(models, largest.double().cpu().numpy(), strict=True))


def _products(leaf: Tensor, places: Ids, weights: Tensor) -> Tensor:
    """The rows at these places times their weights, a new tensor."""
    weights = weights.view(-1, *[1] * (leaf.dim() - 1))
    first, past = int(places[0]), int(places[0]) + len(places)
    if np.array_equal(places, np.arange(first, past)):
        return leaf[first:past] * weights
    return rows_of(leaf, places).mul_(weights)


def rows_of(leaf: Tensor, places: Ids) -> Tensor:
    """(n, ...) a copy of the rows at these positions."""
    return leaf.index_select(0, torch.from_numpy(places).to(leaf.device))


def mix_bank(
    relation: Relation, cohort: Ids, trained: Models, bank: ModelBank, aggregation: Aggregation
) -> ModelBank:
    """Each client's model after the round; clients whose models must be equal share a row."""
    rows, owner = rows_of_clients(relation, cohort, bank, aggregation)
    return ModelBank(mix(rows, trained, bank.params), owner)


def rows_of_clients(
    relation: Relation, cohort: Ids, bank: ModelBank, aggregation: Aggregation
) -> tuple[list[MixingRow], Ids]:
    """The rows of [A B] of all clients' models, and (M,) which of them is each client's.

    The strengths in `relation` include n_j. Clients that hear alike get one model, unless it is
    made of the different ones they had: where nobody was heard, or with a server step below 1.
    """
    hears: NDArray[np.bool_] = np.any(relation.rows[:, cohort] > 0, axis=1)  # (V,)
    hears_somebody = hears[relation.of]  # (M,)
    keeps_own = ~hears_somebody | (aggregation.server_lr != 1)
    kinds = np.stack([relation.of, np.where(keeps_own, bank.owner, -1)])
    _, first, owner = np.unique(kinds, axis=1, return_index=True, return_inverse=True)
    rows = [
        mixing_row(relation.rows[relation.of[i]], int(bank.owner[i]), cohort, bank, aggregation)
        for i in first
    ]
    return rows, owner.reshape(-1)


def mix(rows: Sequence[MixingRow], trained: Models, bank: Params) -> Params:
    """W' = A X + B W, a new stack with one model for each row and the leaves of the bank."""
    names = list(bank)
    if names and not any(row.copies_heard or row.copies_kept for row in rows):
        return _means(rows, trained, bank)
    mixed = {name: leaf.new_empty(len(rows), *leaf.shape[1:]) for name, leaf in bank.items()}
    heard = np.array([v for v, row in enumerate(rows) if row.copies_heard], np.int64)
    if len(heard):
        places = np.concatenate([rows[v].heard for v in heard])
        _put(mixed, heard, trained.rows(places, names))
    kept = np.array([v for v, row in enumerate(rows) if row.copies_kept], np.int64)
    if len(kept):
        places = np.concatenate([rows[v].kept for v in kept])
        _put(mixed, kept, {name: rows_of(bank[name], places) for name in names})
    summed = np.setdiff1d(np.arange(len(rows)), np.concatenate([heard, kept]))
    if len(summed) and names:
        _put(mixed, summed, _means([rows[v] for v in summed], trained, bank))
    return mixed


def _put(mixed: Params, rows: Ids, values: Params) -> None:
    for name, leaf in mixed.items():
        leaf.index_copy_(0, torch.from_numpy(rows).to(leaf.device), values[name].to(leaf.device))


def _means(rows: Sequence[MixingRow], trained: Models, bank: Params) -> Params:
    heard, kept = tuple(row.heard for row in rows), tuple(row.kept for row in rows)
    exponents = _exponents(rows, trained.largest, bank)
    terms = Terms(heard, tuple(row.a for row in rows), exponents)
    sums = trained.sums(terms)
    if any(map(len, kept)):
        before = Terms(kept, tuple(row.b for row in rows), exponents)(bank)
        sums = {name: total + before[name] for name, total in sums.items()}
    return terms.result(sums, bank)


def _exponents(
    rows: Sequence[MixingRow], largest: dict[str, Weights], bank: Params
) -> dict[str, Ids]:
    """By leaf (V,): how many bits after the point the sum of each row has room for."""
    used = np.unique(np.concatenate([row.kept for row in rows]))
    before = {name: np.empty(0) for name in bank}
    if len(used):  # otherwise there is nothing to wait for
        before = largest_values({name: rows_of(leaf, used) for name, leaf in bank.items()})
    a, b = (np.array([abs(weights).sum() for weights in side]) for side in _weights_of(rows))
    heard = _padded([row.heard for row in rows])
    kept = _padded([np.searchsorted(used, row.kept) for row in rows])
    exponents = {}
    for name, leaf in bank.items():
        bounds = a * _largest_of(largest[name], heard) + b * _largest_of(before[name], kept)
        _, num_bits = FIXED_POINT[leaf.dtype]
        bits_before = np.frexp(SLACK * bounds)[1].astype(np.int64)
        exponents[name] = np.minimum(num_bits - bits_before, LARGEST_EXPONENT)
    return exponents


def _weights_of(rows: Sequence[MixingRow]) -> tuple[list[Weights], list[Weights]]:
    return [row.a for row in rows], [row.b for row in rows]


def _padded(places: Sequence[Ids]) -> Ids:
    """(V, most) the places of each row, filled up with -1.

    >>> _padded([np.array([4]), np.array([2, 3])]).tolist()
    [[4, -1], [2, 3]]
    """
    sizes = np.array([len(ids) for ids in places])
    padded = np.full((len(places), int(sizes.max(initial=0))), -1)
    padded[np.arange(padded.shape[1]) < sizes[:, None]] = np.concatenate(places)
    return padded


def _largest_of(values: Weights, places: Ids) -> Weights:
    """(V,) the largest of the values at the places of each row; at least 0, which is that of -1."""
    largest: Weights = np.append(values, 0.0)[places].max(1, initial=0.0)
    return largest

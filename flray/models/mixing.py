"""Aggregation, one operator for every method: W' = A X + B W.

X are the models trained this round, W the bank before it. A row of [A B] sums to 1 and belongs to
one new model; a row that hears nobody keeps its model. The sum is a fold over non-zero weights in
client order, so its bits depend on who was heard and on nothing else.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.data.dataset import Ids
from flray.models.bank import ModelBank, Params

Weights = NDArray[np.float64]


@dataclass(frozen=True)
class Aggregation:
    """How heard and unheard clients enter a mean."""

    unheard: Literal["ignore", "stale"] = "ignore"  # stale: as they were, which is what FLT does
    weights: Literal["samples", "uniform"] = "samples"  # n_k (McMahan 2017), or 1
    server_lr: float = 1.0  # w' = w + server_lr (mean - w)

    def __post_init__(self) -> None:
        if not self.server_lr > 0:
            raise ValueError(f"server_lr must be > 0, got {self.server_lr}")


@dataclass(frozen=True)
class Relation:
    """Who hears whom: client i hears client j with strength rows[of[i], j]."""

    rows: Weights  # (V, M) distinct rows
    of: Ids  # (M,) the row of each client

    @classmethod
    def joint(cls, num_clients: int) -> "Relation":
        """Everybody hears everybody: FedAvg."""
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
        """Row i of an (M, M) matrix is what client i hears; equal rows are one."""
        rows, of = np.unique(strengths, axis=0, return_inverse=True)
        return cls(rows, of.reshape(-1))


@dataclass(frozen=True)
class MixingRow:
    """One non-zero row of [A B]."""

    heard: Ids  # places in the cohort
    a: Weights
    kept: Ids  # rows of the bank before
    b: Weights


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


def mix_bank(
    relation: Relation, cohort: Ids, trained: Params, bank: ModelBank, aggregation: Aggregation
) -> ModelBank:
    """Each client's model after the round; clients whose models must be equal share a row.

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
    return ModelBank(mix(rows, trained, bank.params), owner.reshape(-1))


def mix(rows: list[MixingRow], trained: Params, bank: Params) -> Params:
    """W' = A X + B W, a new stack with one model for each row."""
    return {k: torch.stack([_fold(r, trained[k], bank[k]) for r in rows]) for k in bank}


def _fold(row: MixingRow, trained: Tensor, bank: Tensor) -> Tensor:
    terms = [(trained, int(j), float(a)) for j, a in zip(row.heard, row.a, strict=True)]
    terms += [(bank, int(u), float(b)) for u, b in zip(row.kept, row.b, strict=True)]
    # The first term starts the sum: 0 + (-0.0) would change a bit of a model that is only copied.
    source, index, weight = terms[0]
    total = source[index] * weight
    for source, index, weight in terms[1:]:
        # Two roundings, as any device does them: a fused multiply-add would differ between devices.
        total = total + source[index] * weight
    return total

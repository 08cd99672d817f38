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

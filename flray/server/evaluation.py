"""Evaluation: every client's model on the client's own examples, grouped by distinct model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flray.client.tasks import ExampleScores, ScoreJob
from flray.data.dataset import Ids
from flray.data.split import Split
from flray.execution.federation import Federation
from flray.models.bank import ModelBank
from flray.scores import ClientScores, partition_scores, summarise

Row = dict[str, Any]  # Any: one value a column, numbers mostly


@dataclass(frozen=True)
class Evaluation:
    every: int = 1  # rounds between evaluations; the last round is always evaluated
    also: tuple[int, ...] = ()  # rounds evaluated in any case
    target: float | None = None  # accuracy that a client, and the mean, should reach

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be >= 1, got {self.every}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(
                f"target must be in (0, 1], got {self.target}: a fraction, not percent"
            )


def evaluation_row(
    scores: Mapping[str, ClientScores], partition: Ids, split: Split, target: float | None
) -> Row:
    """What a round's row says of the scores, which are given by part (test, validation).

    Args:
        partition: (M,) the cluster of each client; one without (-1) counts in no cluster.
    """
    clients = split.clients
    holdout = np.setdiff1d(split.holdout, split.absent)
    placed = clients[partition[clients] >= 0]
    row: Row = {"clusters": len(np.unique(partition[placed]))}
    parts = {"test": split.test, "validation": split.validation}
    for prefix, name, who in (
        ("", "test", clients),
        ("holdout_", "test", holdout),
        ("validation_", "validation", clients),
    ):
        found = scores[name].of(who)
        if len(found.clients):
            ids = np.concatenate([parts[name][i] for i in found.clients])
            num_images = len(np.unique(split.image_ids[ids]))
            summary = summarise(found, num_images, target)
            row |= {prefix + key: value for key, value in summary.items()}
    if split.groups is not None and len(placed):
        row |= partition_scores(partition[placed], split.groups[placed])
    return row


def score_clients(
    fed: Federation, bank: ModelBank, clients: Ids, part: tuple[Ids, ...]
) -> ClientScores:
    """Scores of the clients on their part (validation or test); part is indexed by client id.

    An example that several clients with the same model share is predicted once.
    """
    rows = np.unique(bank.owner[clients])
    members = {int(u): clients[bank.owner[clients] == u] for u in rows}
    examples = {u: np.unique(np.concatenate([part[i] for i in who])) for u, who in members.items()}
    answers = fed.score(bank, [ScoreJob(u, ids) for u, ids in examples.items()])
    correct, total = np.zeros(len(clients), np.int64), np.zeros(len(clients), np.int64)
    loss = np.full(len(clients), np.nan)
    place = {int(i): k for k, i in enumerate(clients)}
    for (u, ids), answer in zip(examples.items(), answers, strict=True):
        for i in members[u]:
            k = place[int(i)]
            correct[k], total[k], loss[k] = _client_score(ids, answer, part[i])
    return ClientScores(clients, correct, total, loss)


def _client_score(ids: Ids, answer: ExampleScores, own: Ids) -> tuple[int, int, float]:
    where = np.searchsorted(ids, own)
    loss = float(answer.loss[where].mean()) if len(own) else np.nan
    return int(answer.correct[where].sum()), len(own), loss

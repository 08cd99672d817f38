"""Evaluation: every client's model on the client's own examples, and by other protocols.

With `on: global` models are judged on the whole test set too, with `fine_tune` also after training
on the client's own data. Neither changes what is trained, nor any other column.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flray.client.scoring import ExampleScores, ScoreJob
from flray.columns import CLUSTERS, EVALUATED
from flray.data.dataset import Ids
from flray.data.split import Split
from flray.execution.evaluating import score, tune_and_score
from flray.execution.federation import Cohort, Federation
from flray.measures.scores import ClientScores, partition_scores, summarise
from flray.measures.settings import Evaluation
from flray.models.bank import ModelBank

RoundRow = dict[str, Any]  # Any: one value a column, numbers mostly

# Of ids for each of them, up to which they are marked in an array over their range.
LARGEST_RANGE = 64


def evaluation_row(
    scores: Mapping[str, ClientScores], partition: Ids, split: Split, target: float | None
) -> RoundRow:
    """What a round's row says of the scores, which are given by part as in clients.parquet.

    Args:
        partition: (M,) the cluster of each client; one without (-1) counts in no cluster.
    """
    clients = split.clients
    holdout = np.setdiff1d(split.holdout, split.absent)
    placed = clients[partition[clients] >= 0]
    row: RoundRow = {CLUSTERS: len(np.unique(partition[placed]))}
    for prefix, part, is_holdout in EVALUATED:
        if part not in scores:
            continue
        found = scores[part].of(holdout if is_holdout else clients)
        if len(found.clients):
            num_images = _num_images(split, part.removeprefix("tuned_"), found.clients)
            summary = summarise(found, num_images, target)
            row |= {prefix + key: value for key, value in summary.items()}
    if split.groups is not None and len(placed):
        row |= partition_scores(partition[placed], split.groups[placed])
    return row


def _num_images(split: Split, part: str, clients: Ids) -> int:
    """Distinct images behind the scores of some clients on a part."""
    if part == "global":
        return len(split.global_test)  # one example an image
    parts = {"test": split.test, "validation": split.validation}[part]
    return len(distinct(split.image_ids[np.concatenate([parts[i] for i in clients])]))


def distinct(ids: Ids) -> Ids:
    """Each id once, ascending. Marks them where they are many for their range, instead of sorting.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    if not len(ids) or ids.max() > LARGEST_RANGE * len(ids):
        return np.unique(ids)
    there = np.zeros(int(ids.max()) + 1, np.bool_)
    there[ids] = True
    return np.flatnonzero(there)


def place_finder(ids: Ids) -> Callable[[Ids], Ids]:
    """Finds the places of some of the ids, which are distinct and ascending.

    >>> place_finder(np.array([1, 3, 90]))(np.array([90, 1])).tolist()
    [2, 0]
    """
    if not len(ids) or ids[-1] > LARGEST_RANGE * len(ids):
        return lambda some: np.searchsorted(ids, some)
    places = np.empty(int(ids[-1]) + 1, np.int64)
    places[ids] = np.arange(len(ids))
    return places.__getitem__


def evaluate(
    fed: Federation, bank: ModelBank, cohort: Cohort, split: Split, evaluation: Evaluation
) -> dict[str, ClientScores]:
    """Scores of the clients of the cohort by part, as clients.parquet names them."""
    clients = cohort.clients
    scores = {
        "test": score_clients(fed, bank, clients, split.test),
        "validation": score_clients(fed, bank, clients, split.validation),
    }
    if "global" in evaluation.parts:
        scores["global"] = score_globally(fed, bank, clients, split.global_test)
    tuning = evaluation.tuning(fed.training)
    if tuning is not None:
        tuned = tune_and_score(fed, bank, cohort, tuning, evaluation.parts)
        for part in evaluation.parts:
            found = [each[part] for each in tuned.values()]
            scores[f"tuned_{part}"] = ClientScores(
                np.array(list(tuned), np.int64),
                np.array([each.correct for each in found], np.int64),
                np.array([each.total for each in found], np.int64),
                np.array([each.loss for each in found], np.float64),
            )
    return scores


def score_globally(fed: Federation, bank: ModelBank, clients: Ids, examples: Ids) -> ClientScores:
    """Scores of the clients on the same examples; each distinct model predicts them once."""
    rows, model = np.unique(bank.owner[clients], return_inverse=True)
    answers = score(fed, bank, [ScoreJob(int(u), examples) for u in rows])
    correct = np.array([answer.correct.sum() for answer in answers], np.int64)[model]
    loss = np.array([answer.loss.mean() for answer in answers])[model]
    return ClientScores(clients, correct, np.full(len(clients), len(examples)), loss)


def score_clients(
    fed: Federation, bank: ModelBank, clients: Ids, part: tuple[Ids, ...]
) -> ClientScores:
    """Scores of the clients on their part (validation or test); part is indexed by client id.

    An example that several clients with the same model share is predicted once. Holdout clients are
    scored apart: the size of a batch changes last bits, and they must change nothing for others.
    """
    is_holdout = np.isin(clients, fed.holdout).tolist()
    groups: dict[tuple[int, bool], list[int]] = {}
    for i, row, apart in zip(
        clients.tolist(), bank.owner[clients].tolist(), is_holdout, strict=True
    ):
        groups.setdefault((row, apart), []).append(i)
    members = dict(sorted(groups.items()))
    examples = {u: distinct(np.concatenate([part[i] for i in who])) for u, who in members.items()}
    answers = score(fed, bank, [ScoreJob(u, ids) for (u, _), ids in examples.items()])
    correct, total = np.zeros(len(clients), np.int64), np.zeros(len(clients), np.int64)
    loss = np.full(len(clients), np.nan)
    place = {int(i): k for k, i in enumerate(clients)}
    for (u, ids), answer in zip(examples.items(), answers, strict=True):
        find = place_finder(ids)
        for i in members[u]:
            k = place[int(i)]
            correct[k], total[k], loss[k] = _client_score(answer, find(part[i]))
    return ClientScores(clients, correct, total, loss)


def _client_score(answer: ExampleScores, own: Ids) -> tuple[int, int, float]:
    loss = float(answer.loss[own].mean()) if len(own) else np.nan
    return int(answer.correct[own].sum()), len(own), loss

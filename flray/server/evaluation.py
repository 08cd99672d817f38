"""Evaluation: every client's model on the client's own examples, and by other protocols.

With `on: global` models are judged on the whole test set too, with `fine_tune` also after training
on the client's own data. Neither changes what is trained, nor any other column.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flray.client.scores import Score, columns_of
from flray.client.scoring import PartScore, ScoreJob, part_score
from flray.columns import CLIENTS_EVALUATED, CLUSTERS, EVALUATED
from flray.data.dataset import Ids
from flray.data.split import Split
from flray.execution.evaluating import score, tune_and_score
from flray.execution.federation import Cohort, Federation
from flray.measures.scores import ClientScores, partition_scores, sampling_errors, summarise
from flray.measures.settings import Evaluation
from flray.models.bank import ModelBank

RoundRow = dict[str, Any]  # Any: one value a column, numbers mostly

# Range of ids, in multiples of their number, up to which an array over the range beats sorting.
LARGEST_RANGE = 64


def evaluation_row(
    scores: Mapping[str, ClientScores],
    partition: Ids,
    split: Split,
    target: float | None,
    sample_size: float | None = None,
) -> RoundRow:
    """Columns of a round's row: summaries of the scores by part, clusters, agreement with groups.

    Clients that train and holdout clients are summarised apart, the latter in columns that begin
    with `holdout_`. Clients without a cluster do not count in the agreement with groups.

    Args:
        scores: The scores by part, as clients.parquet names the parts.
        partition: (M,) the cluster of each client; -1 for a client without one.
        target: value of the first score that clients are to reach, if the experiment names one.
        sample_size: clients of each kind that were asked, as `Evaluation.sample_size` returns it.
    """
    clients = split.clients
    holdout = np.setdiff1d(split.holdout, split.absent)
    placed = clients[partition[clients] >= 0]
    row: RoundRow = {CLUSTERS: len(np.unique(partition[placed]))}
    if sample_size is not None:
        row[CLIENTS_EVALUATED] = int(min(sample_size, len(clients)))
    for prefix, part, is_holdout in EVALUATED:
        if part not in scores:
            continue
        everybody = holdout if is_holdout else clients
        chosen = scores[part].of(everybody)
        if len(chosen.clients):
            num_images = _num_images(split, part.removeprefix("tuned_"), chosen.clients)
            summary = summarise(chosen, num_images, target)
            if sample_size is not None:
                num_asked = int(min(sample_size, len(everybody)))
                summary |= sampling_errors(chosen, num_asked, len(everybody))
            row |= {prefix + key: value for key, value in summary.items()}
    if split.groups is not None and len(placed):
        row |= partition_scores(partition[placed], split.groups[placed])
    return row


def _num_images(split: Split, part: str, clients: Ids) -> int:
    """The number of distinct images that clients are scored on."""
    if part == "global":
        return len(split.global_test)  # one example per image
    parts = {"test": split.test, "validation": split.validation}[part]
    image_ids, _ = distinct(split.image_ids[np.concatenate([parts[i] for i in clients])])
    return len(image_ids)


def distinct(ids: Ids) -> tuple[Ids, Ids]:
    """Each id once, ascending, and the position of each of `ids` among them.

    Without sorting if there are many ids for their range.

    >>> distinct(np.array([3, 1, 3]))
    (array([1, 3]), array([1, 0, 1]))
    """
    if not len(ids) or ids.max() > LARGEST_RANGE * len(ids):
        once = np.unique(ids)
        return once, np.searchsorted(once, ids)
    is_there = np.zeros(int(ids.max()) + 1, np.bool_)
    is_there[ids] = True
    return np.flatnonzero(is_there), (np.cumsum(is_there) - 1)[ids]


def evaluate(
    fed: Federation, bank: ModelBank, cohort: Cohort, split: Split, evaluation: Evaluation
) -> dict[str, ClientScores]:
    """Score the models of a cohort on the parts that an evaluation asks for.

    Nothing that is trained later depends on it. With fine-tuning, each client's model is first
    trained on the client's own data, and the tuned model is thrown away.

    Args:
        fed: The federation in the round of the cohort.
        bank: The model of each client; the clients of the cohort must have one.
        cohort: The clients to score, and the round.
        evaluation: Settings of the evaluation.

    Returns:
        Scores of the clients by part, as clients.parquet names the parts: `test`, `validation` and,
            if they are asked for, `global`, `tuned_test` and so on.
    """
    clients, judged_by = cohort.clients, evaluation.computed
    scores = {
        "test": score_clients(fed, bank, clients, split.test, judged_by),
        "validation": score_clients(fed, bank, clients, split.validation, judged_by),
    }
    if "global" in evaluation.parts:
        scores["global"] = score_globally(fed, bank, clients, split.global_test, judged_by)
    tuning = evaluation.tuning(fed.training)
    if tuning is not None:
        tuned = tune_and_score(fed, bank, cohort, tuning, evaluation.parts)
        clients = np.array(list(tuned), np.int64)
        for part in evaluation.parts:
            by_client = [by_part[part] for by_part in tuned.values()]
            scores[f"tuned_{part}"] = _client_scores(clients, by_client, judged_by)
    return scores


def _client_scores(
    clients: Ids, by_client: Sequence[PartScore], scores: Sequence[Score]
) -> ClientScores:
    """The scores of clients as arrays, in the order of `clients`."""
    correct = np.array([s.correct for s in by_client] or np.empty(0, np.int64))
    total = np.array([s.total for s in by_client], np.int64)
    loss = np.array([s.loss for s in by_client], np.float64)
    values = {
        columns_of(score): np.array([s.values[k] for s in by_client], np.float64)
        for k, score in enumerate(scores)
    }
    return ClientScores(clients, correct, total, loss, values)


def score_globally(
    fed: Federation, bank: ModelBank, clients: Ids, examples: Ids, scores: Sequence[Score] = ()
) -> ClientScores:
    """Scores of the clients on the same examples, which each model or mixture predicts once.

    Args:
        bank: `bank.owner[i]` is the row of client i.
        examples: ids of the examples that all of them are scored on.
        scores: those that the hosts compute; none: accuracy alone.
    """
    used = list(zip(bank.owner[clients].tolist(), bank.shares_of(clients), strict=True))
    distinct_uses = {use: k for k, use in enumerate(sorted(set(used)))}
    answers = score(fed, bank, [ScoreJob(u, examples, shares) for u, shares in distinct_uses])
    by_use = [part_score(scores, answer) for answer in answers]
    return _client_scores(clients, [by_use[distinct_uses[use]] for use in used], scores)


def score_clients(
    fed: Federation,
    bank: ModelBank,
    clients: Ids,
    part: tuple[Ids, ...],
    scores: Sequence[Score] = (),
) -> ClientScores:
    """Scores of the clients on their own examples, in the order of `clients`.

    An example that several clients with the same model share is predicted once. Holdout clients are
    scored apart: the size of a batch changes last bits, and they must change nothing for others. A
    client without examples has a total of 0 and a loss of NaN.

    Args:
        part: ids of validation or test examples, by client id.
        scores: those that the hosts compute; none: accuracy alone.
    """
    is_holdout = np.isin(clients, fed.holdout).tolist()
    groups: dict[tuple[int, tuple[float, ...], bool], list[int]] = {}
    uses = zip(bank.owner[clients].tolist(), bank.shares_of(clients), is_holdout, strict=True)
    for i, use in zip(clients.tolist(), uses, strict=True):
        groups.setdefault(use, []).append(i)
    members = dict(sorted(groups.items()))
    joined = {use: distinct(np.concatenate([part[i] for i in who])) for use, who in members.items()}
    jobs = [ScoreJob(row, ids, shares) for (row, shares, _), (ids, _) in joined.items()]
    answers = score(fed, bank, jobs)
    by_client: dict[int, PartScore] = {}
    for (use, (_, positions)), answer in zip(joined.items(), answers, strict=True):
        first = 0
        for i in members[use]:
            last = first + len(part[i])
            by_client[i] = part_score(scores, answer, positions[first:last])
            first = last
    return _client_scores(clients, [by_client[i] for i in clients.tolist()], scores)

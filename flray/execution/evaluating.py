"""Scores that the server asks for: models on examples, and models after fine-tuning."""

from collections.abc import Sequence

import numpy as np

from flray.client.scoring import ExampleScores, PartScore, ScoreJob
from flray.client.tasks import Score, TuneAndScore
from flray.columns import CLIENT_STEPS_EVALUATION
from flray.data.split import Part
from flray.engines.training import Training
from flray.errors import ClientFailure
from flray.execution.asking import attempt
from flray.execution.executor import Failed
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank

# Examples that one host scores at a time: few enough for many hosts, unless there are very many.
SCORE_TOGETHER, MOST_TOGETHER = 5000, 50_000
SCORE_GROUPS = 16


def score(fed: Federation, bank: ModelBank, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
    """The scores of each job, in their order; jobs that follow each other are sent together.

    How jobs are grouped depends on their examples alone, never on the number of hosts, because
    sizes of batches change last bits.

    Args:
        fed: The federation, whose executor computes.
        bank: U models.
        jobs: A row of the bank and the examples to score it on.

    Raises:
        ClientFailure: A host failed, and failed again when it was retried.
    """
    scores: list[ExampleScores] = []
    for output in attempt(fed.executor, Score(), bank.params, _grouped(jobs)):
        if isinstance(output, Failed):
            raise ClientFailure(f"evaluation failed: {output.reason}") from output.error
        scores.extend(output)
    return scores


def tune_and_score(
    fed: Federation, bank: ModelBank, cohort: Cohort, tuning: Training, parts: tuple[Part, ...]
) -> dict[int, dict[Part, PartScore]]:
    """Scores of each client's model after training on the client's own data, by client.

    The tuned models do not leave their hosts. What it costs is not counted as training, but in
    `client_steps_evaluation`. With `on_client_failure: drop`, clients that fail are missing in the
    answer and counted in `clients_dropped_evaluation`.

    Args:
        bank: The model of each client before tuning.
        cohort: The clients, and the round whose data they train on.
        parts: Parts that tuned models are scored on.
    """
    task, rows = TuneAndScore(tuning, cohort.t, parts), bank.owner[cohort.clients]
    scores = fed.map(task, cohort, bank.params, rows=rows, dropped="clients_dropped_evaluation")
    steps = fed.num_steps(np.array(list(scores), np.int64), tuning)
    fed.meter.counts[CLIENT_STEPS_EVALUATION] += int(steps.sum())
    return scores


def _grouped(jobs: Sequence[ScoreJob]) -> list[list[ScoreJob]]:
    """Consecutive jobs with a limit on their examples, or one that has more."""
    all_examples = sum(len(job.examples) for job in jobs)
    most = min(max(SCORE_TOGETHER, all_examples // SCORE_GROUPS), MOST_TOGETHER)
    groups: list[list[ScoreJob]] = []
    total = 0
    for job in jobs:
        total += len(job.examples)
        if not groups or total > most:
            groups.append([])
            total = len(job.examples)
        groups[-1].append(job)
    return groups

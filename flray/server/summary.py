"""The summary of a run: its last round, its totals, and the round after a clustering.

A summary follows from the files of a run directory alone, so that it can be checked against them
and computed for a run that was put together from parts.
"""

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from flray.columns import (
    ACCURACY_COLUMNS,
    AFTER,
    ARI,
    AT_BEST,
    BEST_ROUND,
    BYTES_DOWN,
    BYTES_UP,
    CLIENT,
    CLIENT_STEPS,
    CLIENTS_DROPPED,
    CLIENTS_EVALUATED,
    CLIENTS_REACHING_TARGET,
    CLUSTERING,
    CLUSTERING_OVERLAPPING,
    CLUSTERS,
    CLUSTERS_OVERLAP,
    EVALUATED,
    GROUND_TRUTH_READS,
    HOLDOUT_LABELS_READ,
    NMI,
    PARAMS_SHA256,
    PART,
    ROUND,
    ROUND_AFTER_CLUSTERING,
    ROUNDS,
    ROUNDS_TO_TARGET,
    SE_SAMPLE,
    SECONDS,
    SEED,
    SPLIT_SHA256,
    TRAIN_LOSS,
    USES_GROUND_TRUTH,
    ScoreColumns,
    of_one_round,
)
from flray.data.events import Timeline
from flray.errors import ExperimentError
from flray.measures import MEASURE_COLUMNS
from flray.measures.scores import ClientScores, partition_scores, rounds_to_target, summarise
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow

if TYPE_CHECKING:
    import pandas as pd  # imported for types only: pandas delays a start

BITS = 8  # bits per byte
TOTALS = {
    BYTES_UP: f"^{BYTES_UP}",
    BYTES_DOWN: f"^{BYTES_DOWN}",
    CLIENT_STEPS: f"^{CLIENT_STEPS}$",
    CLIENTS_DROPPED: f"^{CLIENTS_DROPPED}$",
}
READS = {USES_GROUND_TRUTH: GROUND_TRUTH_READS, HOLDOUT_LABELS_READ: HOLDOUT_LABELS_READ}
OTHERS = (
    CLIENTS_EVALUATED,
    CLUSTERS,
    ROUNDS_TO_TARGET,
    SECONDS,
    TRAIN_LOSS,
)


def after_clustering(score: ScoreColumns) -> tuple[str, ...]:
    """What FL+HC reports of the round after its clustering."""
    return score.mean, CLIENTS_REACHING_TARGET, score.validation


def summarise_run(
    directory: RunDirectory, timeline: Timeline, target: float | None, params_sha256: str
) -> RoundRow:
    """The numbers of summary.json, from the records of a run whose rounds are all done.

    Columns of the last round keep their names; totals such as `bytes_up` are sums over rounds;
    numbers of the round after a clustering end with `_after_clustering`.

    Args:
        target: `evaluate.target`, for the rounds and bytes that it took to reach it.
        params_sha256: digest of the final models.
    """
    rounds, score = directory.rounds(), directory.scores()[0]
    t, means = rounds[ROUND].to_numpy(), rounds[score.mean].to_numpy()
    return {
        ROUNDS: int(t[-1]),
        "clients": len(timeline.at(int(t[-1])).clients),
        ARI: None,  # null if no groups were planted
        NMI: None,
        ROUNDS_TO_TARGET: None if target is None else rounds_to_target(t, means, target, score),
        **_of_rounds(directory, rounds),
        **_of_other_protocols(directory, rounds, target, timeline),
        SPLIT_SHA256: timeline.digest(),
        PARAMS_SHA256: params_sha256,
    }


def _of_rounds(directory: RunDirectory, rounds: "pd.DataFrame") -> RoundRow:
    """The numbers that follow from rounds.parquet and the rounds of clusterings alone."""
    last = _row_at(rounds, -1)
    return {
        ROUNDS: last[ROUND],
        **{key: value for key, value in last.items() if not of_one_round(key)},
        **({CLUSTERS: int(last[CLUSTERS])} if CLUSTERS in last else {}),
        **_of_clustering(rounds),
        **_after_clustering(rounds, directory),
        **_at_best(rounds, directory.scores()[0]),
        **_totals(rounds),
    }


def _row_at(rounds: "pd.DataFrame", position: int) -> RoundRow:
    """One row of rounds.parquet, by position; much faster than `to_dict` for tens of columns."""
    return {str(name): rounds[name].tolist()[position] for name in rounds}


def checked_summary(directory: RunDirectory) -> RoundRow | None:
    """The summary of a finished run, compared with the run's other files; None if not finished.

    Numbers that rounds.parquet does not hold are not compared, nor are numbers that the summary of
    an older version lacks.

    Raises:
        ExperimentError: The message names the first number that differs.
    """
    summary, config = directory.summary(), directory.config()
    if summary is None:
        return None
    expected: RoundRow = {SEED: config.get(SEED), ROUNDS: 0}
    for kind in ("algorithm", "dataset", "split", "model"):
        component = config.get(kind)
        if isinstance(component, dict) and "name" in component:
            expected[kind] = component["name"]
    if len(rounds := directory.rounds()):
        expected |= _of_rounds(directory, rounds)
    for key, value in expected.items():
        if (key in summary or key == ROUNDS) and not _is_same(summary.get(key), value):
            raise ExperimentError(
                f"{directory.path / 'summary.json'} does not fit the other files of its run: "
                f"{key} is {summary.get(key)!r} in it and {value!r} by them. Restore what was "
                "changed from a copy, or remove the run and start it again"
            )
    return summary


def _is_same(written: object, value: object) -> bool:
    """True if a value of summary.json is what was to be written; NaN is written as null."""
    numbers = [x for x in (written, value) if isinstance(x, float | int) and math.isfinite(x)]
    if len(numbers) == 2:
        return math.isclose(*numbers, rel_tol=1e-9)
    return written == value or (written is None and isinstance(value, float) and not numbers)


def numbers_so_far(directory: RunDirectory) -> RoundRow:
    """The numbers of a run that has not finished, by their keys in a summary: its last evaluation
    and its totals."""
    rounds = directory.rounds()
    evaluated = rounds.filter(items=[directory.scores()[0].mean]).dropna()
    last = rounds.loc[evaluated.index[-1:]].dropna(axis=1).to_dict("records")
    return {
        **{str(key): v for row in last for key, v in row.items() if not of_one_round(str(key))},
        ROUNDS: int(rounds[ROUND].max()) if len(rounds) else 0,
        **_totals(rounds),
    }


def _totals(rounds: "pd.DataFrame") -> RoundRow:
    """What the rounds took, and whether they read what a real server does not know."""

    def total(pattern: str) -> float:
        return float(sum(rounds[name].sum() for name in rounds if re.match(pattern, str(name))))

    counts = {name: int(total(pattern)) for name, pattern in TOTALS.items()}
    reads = {name: bool(total(f"{key}$")) for name, key in READS.items()}
    return {**counts, SECONDS: total(f"{SECONDS}$"), **reads}


def summary_names(scores: Iterable[ScoreColumns] = (ACCURACY_COLUMNS,)) -> list[str]:
    """Every number that a summary may have, whatever else the experiment; custom metrics aside."""
    one, scores = np.ones(1, np.int64), tuple(scores)
    values = {score: np.zeros(1) for score in scores}
    evaluated = summarise(ClientScores(np.zeros(1, np.int64), one, one, np.zeros(1), values), 1)
    names = {prefix + name for prefix, _, _ in EVALUATED for name in evaluated}
    names |= set(partition_scores([0], [0])) | set(TOTALS) | set(OTHERS)
    names |= {score.column(SE_SAMPLE, prefix) for score in scores for prefix, *_ in EVALUATED}
    names |= MEASURE_COLUMNS.keys()
    names |= {name + AT_BEST for s in scores for name in (s.mean, s.validation)} | {BEST_ROUND}
    return sorted(names | {name + AFTER for s in scores for name in after_clustering(s)})


def _of_other_protocols(
    directory: RunDirectory, rounds: "pd.DataFrame", target: float | None, timeline: Timeline
) -> RoundRow:
    """When the global model, and the models that clients trained last, reached the target."""
    t, score = rounds[ROUND].to_numpy(), directory.scores()[0]
    courses = {}
    if (column := score.column("mean", "global_")) in rounds:
        courses["global_"] = rounds[column].to_numpy()
    row: RoundRow = {}
    if directory.has_scores_of("last_trained"):
        last = last_trained_score(directory.clients(), score.name).reindex(t, method="ffill")
        courses["last_trained_"] = last.to_numpy()
        row[score.column("mean", "last_trained_")] = float(last.iloc[-1])
    if target is None:
        return row
    num_clients = len(timeline.at(int(t[-1])).clients)
    for prefix, course in courses.items():
        when = rounds_to_target(t, course, target, score)
        row[prefix + ROUNDS_TO_TARGET] = when
        for kind in ("", "model_"):
            sent = None if when is None else _megabits(rounds, when, num_clients, kind)
            row[f"{prefix}{kind}megabits_to_target"] = sent
    return row


def last_trained_score(clients: "pd.DataFrame", name: str) -> "pd.Series[float]":
    """By round, the mean score over clients of the model that each client trained last.

    FLIS judges its clients by it. A client that has not trained yet has the initial model.

    >>> rows = [(0, 0, 0.5), (0, 1, 0.1), (1, 0, 0.9), (2, 1, 0.7)]
    >>> import pandas as pd
    >>> frame = pd.DataFrame(rows, columns=["round", "client", "accuracy"])
    >>> last_trained_score(frame.assign(part="last_trained"), "accuracy").tolist()
    [0.3, 0.5, 0.8]
    """
    rows = clients[clients[PART] == "last_trained"]
    values = rows.pivot(index=ROUND, columns=CLIENT, values=name)
    return values.sort_index().ffill().mean(axis=1)


def _megabits(rounds: "pd.DataFrame", until: int, num_clients: int, kind: str) -> float:
    """Mean traffic per client until a round, up and down; with kind "model_" of models only."""
    sent = f"^bytes_(up|down)_{kind.rstrip('_')}"
    columns = rounds[rounds[ROUND] <= until].filter(regex=sent)
    return float(columns.sum().sum() * BITS / num_clients / 1e6)


def _of_clustering(rounds: "pd.DataFrame") -> RoundRow:
    """Numbers of the last clustering, or means over all of them (`Column.is_mean`)."""
    columns = (name for name in MEASURE_COLUMNS if CLUSTERING + name in rounds)
    recorded = {name: rounds[CLUSTERING + name].dropna() for name in columns}
    row: RoundRow = {
        name: float(values.mean() if MEASURE_COLUMNS[name].is_mean else values.iloc[-1])
        for name, values in recorded.items()
        if len(values)
    }
    is_overlapping = CLUSTERING_OVERLAPPING in rounds
    return row | ({CLUSTERS_OVERLAP: True} if is_overlapping else {})


def _at_best(rounds: "pd.DataFrame", score: ScoreColumns) -> RoundRow:
    """The first round with the best validation score; {} without a validation part."""
    validation = rounds.get(score.validation)
    if validation is None or validation.isna().all():
        return {}
    best = validation.max() if score.higher_is_better else validation.min()
    row = _row_at(rounds, int((validation == best).argmax()))
    columns = (score.mean, score.validation)
    return {BEST_ROUND: row[ROUND]} | {name + AT_BEST: row[name] for name in columns}


def _after_clustering(rounds: "pd.DataFrame", directory: RunDirectory) -> RoundRow:
    """FL+HC reports the round after the (first) clustering beside the last one."""
    clustered, names = directory.clustering_rounds(), after_clustering(directory.scores()[0])
    after = np.flatnonzero(rounds[ROUND] == (clustered[0] + 1 if clustered else -1))
    if not len(after):
        return {}
    row = _row_at(rounds, int(after[0]))
    return {ROUND_AFTER_CLUSTERING: row[ROUND]} | {
        name + AFTER: row[name] for name in names if name in row
    }

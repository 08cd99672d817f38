"""The summary of a run: its last round, its totals, and the round after a clustering."""

import math
from typing import TYPE_CHECKING

import numpy as np

from flray.columns import (
    ACCURACY,
    ACCURACY_MEAN,
    AFTER,
    ARI,
    AT_BEST,
    BEST_ROUND,
    BYTES_DOWN,
    BYTES_UP,
    CLIENT,
    CLIENT_STEPS,
    CLIENTS_DROPPED,
    CLIENTS_REACHING_TARGET,
    CLUSTERING,
    CLUSTERING_OVERLAPPING,
    CLUSTERS,
    CLUSTERS_OVERLAP,
    EVALUATED,
    GLOBAL_ACCURACY_MEAN,
    GROUND_TRUTH_READS,
    HOLDOUT_LABELS_READ,
    LAST_TRAINED_ACCURACY_MEAN,
    NMI,
    PARAMS_CHANGE,
    PARAMS_SHA256,
    PART,
    ROUND,
    ROUND_AFTER_CLUSTERING,
    ROUNDS,
    ROUNDS_TO_TARGET,
    SECONDS,
    SEED,
    SPLIT_SHA256,
    TRAIN_LOSS,
    USES_GROUND_TRUTH,
    VALIDATION_ACCURACY_MEAN,
    of_one_round,
)
from flray.data.events import Timeline
from flray.errors import ExperimentError
from flray.measures import MEASURE_COLUMNS
from flray.measures.scores import ClientScores, partition_scores, rounds_to_target, summarise
from flray.measures.stopping import SCORE
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start

BITS = 8  # bits per byte
TOTALS = {
    BYTES_UP: f"^{BYTES_UP}",
    BYTES_DOWN: f"^{BYTES_DOWN}",
    CLIENT_STEPS: f"^{CLIENT_STEPS}$",
    CLIENTS_DROPPED: f"^{CLIENTS_DROPPED}$",
}
READS = {USES_GROUND_TRUTH: GROUND_TRUTH_READS, HOLDOUT_LABELS_READ: HOLDOUT_LABELS_READ}
OTHERS = (
    CLUSTERS,
    PARAMS_CHANGE,
    ROUNDS_TO_TARGET,
    SECONDS,
    TRAIN_LOSS,
)
# What FL+HC reports of the round after its clustering.
AFTER_CLUSTERING = (
    ACCURACY_MEAN,
    CLIENTS_REACHING_TARGET,
    VALIDATION_ACCURACY_MEAN,
)
# What a summary has of the best round by validation.
AT_BEST_ROUND = (ACCURACY_MEAN, VALIDATION_ACCURACY_MEAN)


def summarise_run(
    directory: RunDirectory, timeline: Timeline, target: float | None, params_sha256: str
) -> RoundRow:
    """The numbers of summary.json, from the records of a run whose rounds are all done.

    Args:
        target: accuracy of `evaluate.target`, for the rounds and bytes that it took to reach it.
        params_sha256: digest of the final models.
    """
    rounds = directory.rounds()
    t, accuracies = rounds[ROUND].to_numpy(), rounds[ACCURACY_MEAN].to_numpy()
    return {
        ROUNDS: int(t[-1]),
        "clients": len(timeline.at(int(t[-1])).clients),
        ARI: None,  # if no groups were planted
        NMI: None,
        ROUNDS_TO_TARGET: None if target is None else rounds_to_target(t, accuracies, target),
        **_of_rounds(rounds, directory.clustering_rounds()),
        **_of_other_protocols(directory, rounds, target),
        SPLIT_SHA256: timeline.digest(),
        PARAMS_SHA256: params_sha256,
    }


def _of_rounds(rounds: "pd.DataFrame", clustered: list[int]) -> RoundRow:
    """The numbers that follow from rounds.parquet and the rounds of clusterings alone."""
    last: RoundRow = rounds.to_dict("records")[-1]  # type: ignore[assignment]  # columns are str
    return {
        ROUNDS: last[ROUND],
        **{key: value for key, value in last.items() if not of_one_round(key)},
        **({CLUSTERS: int(last[CLUSTERS])} if CLUSTERS in last else {}),
        **_of_clustering(rounds),
        **_after_clustering(rounds, clustered),
        **_at_best(rounds),
        **_totals(rounds),
    }


def checked_summary(directory: RunDirectory) -> RoundRow | None:
    """The summary of a finished run, compared with the run's other files; None if not finished.

    Numbers that rounds.parquet does not hold are not compared, nor are numbers that the summary of
    an older version lacks. Raises an ExperimentError that names the first number that differs.
    """
    summary, config = directory.summary(), directory.config()
    if summary is None:
        return None
    rounds = directory.rounds()
    expected: RoundRow = {SEED: config.get(SEED), ROUNDS: 0}
    for kind in ("algorithm", "dataset", "split", "model"):
        component = config.get(kind)
        if isinstance(component, dict) and "name" in component:
            expected[kind] = component["name"]
    if len(rounds):
        expected |= _of_rounds(rounds, directory.clustering_rounds())
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


def numbers_so_far(rounds: "pd.DataFrame") -> RoundRow:
    """The numbers of a run that has not finished, by their keys in a summary: its last evaluation
    and its totals."""
    evaluated = rounds.filter(items=[ACCURACY_MEAN]).dropna()
    last = rounds.loc[evaluated.index[-1:]].dropna(axis=1).to_dict("records")
    return {
        **{str(key): v for row in last for key, v in row.items() if not of_one_round(str(key))},
        ROUNDS: int(rounds[ROUND].max()) if len(rounds) else 0,
        **_totals(rounds),
    }


def _totals(rounds: "pd.DataFrame") -> RoundRow:
    """What the rounds took, and whether they read what a real server does not know."""
    counts = {name: int(rounds.filter(regex=key).sum().sum()) for name, key in TOTALS.items()}
    reads = {name: bool(rounds.filter(items=[key]).sum().sum()) for name, key in READS.items()}
    return {**counts, SECONDS: float(rounds.filter(items=[SECONDS]).sum().sum()), **reads}


def summary_names() -> list[str]:
    """Every number that a summary may have, whatever the experiment; custom metrics aside."""
    one = np.ones(1, np.int64)
    evaluated = summarise(ClientScores(np.zeros(1, np.int64), one, one, np.zeros(1)), 1)
    names = {prefix + name for prefix, _, _ in EVALUATED for name in evaluated}
    names |= set(partition_scores([0], [0])) | set(TOTALS) | set(OTHERS)
    names |= MEASURE_COLUMNS.keys()
    names |= {name + AT_BEST for name in AT_BEST_ROUND} | {BEST_ROUND}
    return sorted(names | {name + AFTER for name in AFTER_CLUSTERING})


def _of_other_protocols(
    directory: RunDirectory, rounds: "pd.DataFrame", target: float | None
) -> RoundRow:
    """When the global model, and the models that clients trained last, reached the target."""
    t = rounds[ROUND].to_numpy()
    courses = {}
    if GLOBAL_ACCURACY_MEAN in rounds:
        courses["global_"] = rounds[GLOBAL_ACCURACY_MEAN].to_numpy()
    row: RoundRow = {}
    last = last_trained_accuracy(directory.clients()).reindex(t, method="ffill")
    if len(last.dropna()):
        courses["last_trained_"] = last.to_numpy()
        row[LAST_TRAINED_ACCURACY_MEAN] = float(last.iloc[-1])
    if target is None:
        return row
    for prefix, course in courses.items():
        when = rounds_to_target(t, course, target)
        row[prefix + ROUNDS_TO_TARGET] = when
        for kind in ("", "model_"):
            sent = None if when is None else _megabits(rounds, when, directory, kind)
            row[f"{prefix}{kind}megabits_to_target"] = sent
    return row


def last_trained_accuracy(clients: "pd.DataFrame") -> "pd.Series[float]":
    """By round, the mean accuracy over clients of the model that each client trained last.

    FLIS judges its clients by it. A client that has not trained yet has the initial model.

    >>> rows = [(0, 0, 0.5), (0, 1, 0.1), (1, 0, 0.9), (2, 1, 0.7)]
    >>> import pandas as pd
    >>> frame = pd.DataFrame(rows, columns=["round", "client", "accuracy"])
    >>> last_trained_accuracy(frame.assign(part="last_trained")).tolist()
    [0.3, 0.5, 0.8]
    """
    rows = clients[clients[PART] == "last_trained"]
    accuracies = rows.pivot(index=ROUND, columns=CLIENT, values=ACCURACY)
    mean: pd.Series[float] = accuracies.sort_index().ffill().mean(axis=1)
    return mean


def _megabits(rounds: "pd.DataFrame", until: int, directory: RunDirectory, kind: str) -> float:
    """Mean traffic per client until a round, up and down; with kind "model_" of models only."""
    sent = f"^bytes_(up|down)_{kind.rstrip('_')}"
    columns = rounds[rounds[ROUND] <= until].filter(regex=sent)
    num_clients = directory.clients()[CLIENT].nunique()
    return float(columns.sum().sum() * BITS / num_clients / 1e6)


def _of_clustering(rounds: "pd.DataFrame") -> RoundRow:
    """Numbers of the last clustering, or means over all of them (`Column.is_mean`)."""
    columns = (name for name in MEASURE_COLUMNS if CLUSTERING + name in rounds)
    found = {name: rounds[CLUSTERING + name].dropna() for name in columns}
    row: RoundRow = {
        name: float(values.mean() if MEASURE_COLUMNS[name].is_mean else values.iloc[-1])
        for name, values in found.items()
        if len(values)
    }
    is_overlapping = CLUSTERING_OVERLAPPING in rounds
    return row | ({CLUSTERS_OVERLAP: True} if is_overlapping else {})


def _at_best(rounds: "pd.DataFrame") -> RoundRow:
    """The first round with the highest validation accuracy; {} without a validation part."""
    if SCORE not in rounds:
        return {}
    best = rounds[rounds[SCORE] == rounds[SCORE].max()]
    row: RoundRow = best.to_dict("records")[0]
    return {BEST_ROUND: row[ROUND]} | {name + AT_BEST: row[name] for name in AT_BEST_ROUND}


def _after_clustering(rounds: "pd.DataFrame", clustered: list[int]) -> RoundRow:
    """FL+HC reports the round after the (first) clustering beside the last one."""
    after = rounds[rounds[ROUND] == clustered[0] + 1] if clustered else rounds[:0]
    if after.empty:
        return {}
    row: RoundRow = after.to_dict("records")[0]  # type: ignore[assignment]  # columns are str
    return {ROUND_AFTER_CLUSTERING: row[ROUND]} | {
        name + AFTER: row[name] for name in AFTER_CLUSTERING if name in row
    }

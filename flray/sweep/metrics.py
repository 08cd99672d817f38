"""The metrics that a sweep may choose by: the numbers of summary.json."""

from collections.abc import Sequence

import numpy as np

from flray.config.experiment import Experiment
from flray.errors import ExperimentError
from flray.scores import ClientScores, partition_scores, summarise
from flray.server.evaluation import COLUMNS
from flray.server.summary import AFTER_CLUSTERING, OF_ALL_CLUSTERINGS, OF_CLUSTERING, TOTALS
from flray.sweep.space import OptunaSearch, Space

OTHERS = ("clusters", "params_change_sq", "rounds_to_target", "seconds", "train_loss")


def known_metrics() -> list[str]:
    """Every number that a summary may have, whatever the experiment; custom metrics aside."""
    one = np.ones(1, np.int64)
    evaluated = summarise(ClientScores(np.zeros(1, np.int64), one, one, np.zeros(1)), 1)
    names = {prefix + name for prefix, _, _ in COLUMNS for name in evaluated}
    names |= set(partition_scores([0], [0])) | set(TOTALS) | set(OTHERS)
    names |= {*OF_CLUSTERING, *OF_ALL_CLUSTERINGS}
    return sorted(names | {f"{name}_after_clustering" for name in AFTER_CLUSTERING})


def check_metric(space: Space, experiments: Sequence[Experiment]) -> None:
    """Refuse a metric that no row will have, before anything is trained.

    An algorithm of the user's own, named with a colon, may return metrics of its own.
    """
    metric, known = space.options.metric, known_metrics()
    if metric not in known and not any(":" in e.algorithm.name for e in experiments):
        raise ExperimentError(f"unknown metric {metric!r}; known: {', '.join(known)}")
    has_validation = any(e.plain["split"].get("validation", True) for e in experiments)
    is_needed = space.is_scheduled or isinstance(space.options.search, OptunaSearch)
    if is_needed and "validation_" in metric and not has_validation:
        raise ExperimentError(
            f"the search goes by {metric}, but no client has validation examples: set "
            "split.validation=0.1, or name another metric"
        )

"""Checks of what an algorithm returns, with errors that name its method.

The methods may be a user's own. What is wrong is found here, and not by whoever reads it later.
"""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.columns import TRAIN_LOSS, ScoreColumns, of_one_round
from flray.errors import ExperimentError
from flray.execution.cohort import Cohort
from flray.models.bank import ModelBank
from flray.server.summary import summary_names


def require_outcome(outcome: object, method: str, scores: Iterable[ScoreColumns] = ()) -> None:
    """Refuse what `init` or `round` returned if it is no Outcome that the run can record.

    Metrics must be numbers, with names of their own: only `train_loss` is a recorded column.

    Args:
        outcome: what the method returned.
        method: how messages name it.
        scores: those that the run records.

    >>> require_outcome(Outcome("w1", {"train_loss": 0.5}), "Mine.round")
    >>> require_outcome("w1", "Mine.round")
    Traceback (most recent call last):
    flray.errors.ExperimentError: Mine.round must return Outcome(state, metrics, clusterings), ...
    """
    if not isinstance(outcome, Outcome):
        raise ExperimentError(
            f"{method} must return Outcome(state, metrics, clusterings), got {_kind(outcome)}"
        )
    for name, value in outcome.metrics.items():
        if not isinstance(value, Real):
            raise ExperimentError(
                f"{method} must return numbers as metrics, got {_kind(value)} for {name!r}; "
                "a tensor or array of one number is one after float(...)"
            )
    names = sorted(outcome.metrics.keys() - {TRAIN_LOSS})
    taken = summary_names(scores) if names else ()
    for name in names:
        if name in taken or of_one_round(name):
            raise ExperimentError(
                f"{method} must return metrics with names of their own, got {name!r}, which is or "
                f"begins like a column that the run records; choose another, such as 'my_{name}'"
            )


def require_cohort(cohort: object, method: str) -> None:
    """Refuse what `cohort` returned if it is no Cohort."""
    if not isinstance(cohort, Cohort):
        raise ExperimentError(f"{method} must return Cohort(t, clients), got {_kind(cohort)}")


def require_bank(bank: object, method: str) -> None:
    """Refuse what `deploy` returned if it is no ModelBank."""
    if not isinstance(bank, ModelBank):
        raise ExperimentError(f"{method} must return a ModelBank, got {_kind(bank)}")


def require_partition(
    labels: Any,  # Any: what the method returned
    num_clients: int,
    method: str,
) -> None:
    """Refuse what `partition` returned if it is not a whole number for each client.

    >>> require_partition([0, 1], 2, "Mine.partition")
    Traceback (most recent call last):
    flray.errors.ExperimentError: Mine.partition must return a NumPy array (2,) of whole ...
    """
    is_whole = isinstance(labels, np.ndarray) and np.issubdtype(labels.dtype, np.integer)
    if not is_whole or labels.shape != (num_clients,):
        raise ExperimentError(
            f"{method} must return a NumPy array ({num_clients},) of whole numbers, the cluster of "
            f"each client, got {_kind(labels)}"
        )


def _kind(value: object) -> str:
    """What a value is: its type, and the shape and type of what is in it."""
    name = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"{name} of shape {value.shape} and type {value.dtype}"
    return name

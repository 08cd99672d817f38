"""Checks of what an algorithm returns, with errors that name its method.

The methods may be a user's own. What is wrong is found here, and not by whoever reads it later.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

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


@contextmanager
def unchanged(state: object, method: str) -> Iterator[None]:
    """Refuse a method that changes a tensor of its state in place: a resumed run starts from it.

    Takes time by the number of tensors, not by their sizes. Arrays of NumPy count no changes.

    >>> import torch
    >>> with unchanged({"w": (w := torch.zeros(2))}, "Mine.round"):
    ...     _ = w.add_(1)
    Traceback (most recent call last):
    flray.errors.ExperimentError: Mine.round must not change the state that it is given, and has ...
    """
    before = [(path, leaf, leaf._version) for path, leaf in _tensors(state, "state")]
    yield
    for path, leaf, version in before:
        if leaf._version != version:
            raise ExperimentError(
                f"{method} must not change the state that it is given, and has changed {path} in "
                "place; compute a new tensor, as w + u instead of w.add_(u), or change a clone"
            )


def _tensors(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state that count their changes, with their paths in it."""
    children: Iterable[tuple[object, object]] = ()
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield path, value
    elif isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    elif is_dataclass(value):
        children = ((field.name, getattr(value, field.name)) for field in fields(value))
    for name, child in children:
        yield from _tensors(child, f"{path}.{name}")


def _kind(value: object) -> str:
    """What a value is: its type, and the shape and type of what is in it."""
    name = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"{name} of shape {value.shape} and type {value.dtype}"
    return name

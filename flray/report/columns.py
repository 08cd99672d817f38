"""The numbers that runs record: what they are called, in what unit and how precisely shown."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

from flray.records.columns import (
    ACCURACY_MEAN,
    AFTER,
    CLIENT_STEPS,
    CLUSTERS,
    ROUNDS,
    SECONDS,
    VALIDATION_ACCURACY_MEAN,
)

MISSING = "–"
TEST, VALIDATION, HOLDOUT = ACCURACY_MEAN, VALIDATION_ACCURACY_MEAN, "holdout_accuracy_mean"
CORRELATIONS = ("label_correlation", "drift_correlation", "data_correlation")


@dataclass(frozen=True)
class Column:
    title: str
    short: str = ""  # for tables in the terminal; "": the title
    scale: float = 1.0  # from what is recorded to what is shown
    unit: str = ""
    decimals: int = 2  # 0: a count, whose mean has one
    group: str = ""  # heading above several columns

    @property
    def label(self) -> str:
        """For an axis."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def _percent(title: str, short: str = "") -> Column:
    return Column(title, short, 100.0, "%")


_HALF, _SAME, _ALIKE = "half the labels:", "same labels:", "correlation with"
COLUMNS = {
    TEST: _percent("test accuracy", "accuracy %"),
    "global_accuracy_mean": _percent("global test accuracy", "global"),
    "tuned_accuracy_mean": _percent("fine-tuned test accuracy", "tuned"),
    "tuned_global_accuracy_mean": _percent("fine-tuned global test accuracy", "tuned global"),
    VALIDATION: _percent("validation accuracy", "validation"),
    HOLDOUT: _percent("holdout clients' accuracy"),
    "accuracy_worst": _percent("worst client", "worst"),
    TEST + AFTER: _percent("test accuracy after clustering"),
    "clients_reaching_target": _percent("clients at target"),
    "accuracy_variance": Column("variance over clients", "var. %²", 1e4, "%²"),
    CLUSTERS: Column("clusters", decimals=0),
    "ari": Column("ARI"),
    ROUNDS: Column("rounds", decimals=0),
    CLIENT_STEPS: Column("client steps", decimals=0),
    "bytes_up": Column("sent up", "MB up", 1e-6, "MB", 1),
    "bytes_down": Column("sent down", "MB down", 1e-6, "MB", 1),
    SECONDS: Column("seconds", decimals=1),
    "clustering_error": Column("clustering error"),
    "overlap_fp": Column("false positives", "false pos.", group=_HALF),
    "overlap_fn": Column("false negatives", "false neg.", group=_HALF),
    "equal_fp": Column("false positives", "false pos.", group=_SAME),
    "equal_fn": Column("false negatives", "false neg.", group=_SAME),
    "label_correlation": Column("correlation with labels", "labels", group=_ALIKE),
    "drift_correlation": Column("correlation with drift", "drift", group=_ALIKE),
    "data_correlation": Column("correlation with both", "both", group=_ALIKE),
    "uniformity": Column("uniformity (eq. 7)", " ", group="uniformity"),
    "uniformity_random": Column("uniformity of random clusters", "(random)", group="uniformity"),
    "uniformity_labels": Column("uniformity by labels", "(of labels)", group="uniformity"),
    "robustness": Column("robustness"),
    "robustness_clients": Column("robustness by client"),
}
# Columns of fractions, after a prefix that says of what: validation_accuracy_mean, ...
_FRACTIONS = re.compile(r"(tuned_)?(global_)?(holdout_|validation_)?(accuracy|clients_reaching)")


def column_of(key: str) -> Column:
    """
    >>> column_of("tuned_validation_accuracy_mean").scale, column_of("clusters").scale
    (100.0, 1.0)
    """
    return COLUMNS.get(key) or (_percent(key) if _FRACTIONS.match(key) else Column(key))


def known(value: object) -> float | None:
    """A number that is there and finite.

    >>> known(1), known(None), known(float("nan")), known("x")
    (1.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value) if math.isfinite(value) else None


def decimals_of(key: str, values: Iterable[object]) -> int:
    """How many decimals the shown values of a column have: all of them as many.

    >>> decimals_of("clusters", [3.0, 4.0]), decimals_of("clusters", [3.5, 4.0])
    (0, 1)
    """
    decimals = column_of(key).decimals
    return decimals or int(any((known(value) or 0) % 1 for value in values))


def number_text(key: str, value: object, error: object = None) -> str:
    """A recorded number as it is shown, without its unit; the error has as many decimals.

    >>> number_text("accuracy_mean", 0.9489, 0.01), number_text("clusters", 4.0, 0.71)
    ('94.89 ± 1.00', '4.0 ± 0.7')
    """
    number, spread, scale = known(value), known(error), column_of(key).scale
    if number is None:
        return MISSING
    decimals = decimals_of(key, (scale * number, scale * (spread or 0)))
    text = f"{scale * number:,.{decimals}f}"
    return f"{text} ± {scale * spread:,.{decimals}f}" if spread else text


def with_unit(key: str, value: object, error: object = None) -> str:
    """
    >>> with_unit("bytes_up", 3e6), with_unit("rounds", None)
    ('3.0 MB', '–')
    """
    text = number_text(key, value, error)
    return text if text == MISSING else f"{text} {column_of(key).unit}".rstrip()


def value_text(value: object) -> str:
    """A setting as a cell or label shows it.

    >>> value_text(0.30000000000000004), value_text("ward"), value_text(None)
    ('0.3', 'ward', '')
    """
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)

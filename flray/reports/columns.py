"""Display of recorded columns: heading, unit, scale and decimals of each, and texts of values.

Tables, figures and pages take these facts from `column_of` alone. Recorded accuracies are
fractions, recorded traffic is in bytes; what is shown is scaled (percent, MB).
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real

from flray import columns as recorded
from flray.columns import ACCURACY_COLUMNS, Column, ScoreColumn, ScoreColumns
from flray.measures import MEASURE_COLUMNS

MISSING = "–"
CLUSTERING_ERROR = "clustering_error"  # the sum of OVERLAP_FP and OVERLAP_FN


def measured_columns(scores: Sequence[ScoreColumns]) -> tuple[str, ...]:
    """Columns of a sweep's rows that its page shows, in this order."""
    score, *others = scores
    after = score.column("mean" + recorded.AFTER)
    return (
        *(score.validation, recorded.VALIDATION_LOSS_MEAN, score.mean, after),
        *(recorded.CLIENTS_REACHING_TARGET, score.column("worst")),
        *(score.column("mean", "holdout_"), *(other.mean for other in others)),
        *(recorded.CLUSTERS, recorded.ARI),
        *(CLUSTERING_ERROR, *(key for key, column in MEASURE_COLUMNS.items() if column.is_main)),
        *(recorded.CLIENT_STEPS, recorded.SECONDS),
    )


@dataclass(frozen=True)
class Heading:
    """The heading of a column of a table, and the decimals of the numbers below it.

    `key` identifies the column in the cells of a sheet; it is a recorded column, or any other text
    for computed columns such as "vs".

    >>> Heading("accuracy_mean after", "after", "accuracy %").title
    'accuracy % after'
    """

    key: str
    name: str
    group: str = ""  # second heading, above several columns
    decimals: int = 2
    higher_is_better: bool | None = None  # None: no number of the column is the best

    @property
    def title(self) -> str:
        """Both headings on one line, for formats without a second level."""
        return f"{self.group} {self.name}".strip()


def _percent(title: str) -> Column:
    return Column(title, scale=100.0, unit="%")


@cache
def _columns_of_score(score: ScoreColumns) -> dict[str, Column]:
    """The columns of a score: % is recorded as a fraction, other units as they are."""
    name, mean = score.title, "mean"
    scale, decimals = (100.0, 2) if score.unit == "%" else (1.0, 4)
    squared = f"{score.unit}²" if score.unit else ""
    titles = {
        score.mean: (f"test {name}", f"{name} {score.unit}".strip()),
        score.column(mean, "global_"): (f"global test {name}", "global"),
        score.column(mean, "tuned_"): (f"fine-tuned test {name}", "tuned"),
        score.column(mean, "tuned_global_"): (f"fine-tuned global test {name}", "tuned global"),
        score.validation: (f"validation {name}", "validation"),
        score.column(mean, "holdout_"): (f"holdout clients' {name}", ""),
        score.column("worst"): ("worst client", "worst"),
        score.mean + recorded.AFTER: (f"test {name} after clustering", ""),
    }
    shown = {
        key: Column(title, short, scale, score.unit, decimals)
        for key, (title, short) in titles.items()
    }
    spread = Column("variance over clients", f"var. {squared}".strip(), scale**2, squared, decimals)
    return shown | {score.column("variance"): spread}


COLUMNS = {
    **_columns_of_score(ACCURACY_COLUMNS),
    recorded.VALIDATION_LOSS_MEAN: Column("validation loss", "loss", decimals=4),
    recorded.CLIENTS_REACHING_TARGET: _percent("clients at target"),
    recorded.CLUSTERS: Column("clusters", decimals=0),
    recorded.ARI: Column("ARI"),
    recorded.ROUNDS: Column("rounds", decimals=0),
    recorded.CLIENT_STEPS: Column("client steps", decimals=0),
    recorded.BYTES_UP: Column("sent up", "MB up", 1e-6, "MB", 1),
    recorded.BYTES_DOWN: Column("sent down", "MB down", 1e-6, "MB", 1),
    recorded.SECONDS: Column("seconds", decimals=1),
    CLUSTERING_ERROR: Column("clustering error"),
    **MEASURE_COLUMNS,
}
# Columns of fractions, with prefixes for the protocol: validation_accuracy_mean, ...
_FRACTIONS = re.compile(r"(tuned_)?(global_)?(holdout_|validation_)?(accuracy|clients_reaching)")


def column_of(key: str) -> Column:
    """How a recorded column is shown; keys without an entry of their own have their name as title.

    Never fails: a column of a later version, or of a user's own measure, is shown as recorded;
    accuracies of any protocol and part are shown in percent.

    >>> column_of("tuned_validation_accuracy_mean").scale, column_of("clusters").scale
    (100.0, 1.0)
    """
    if isinstance(key, ScoreColumn):
        columns = _columns_of_score(key.score)
        return columns.get(key) or replace(columns[key.score.mean], title=str(key), short="")
    return COLUMNS.get(key) or (_percent(key) if _FRACTIONS.match(key) else Column(key))


def is_recorded(key: str) -> bool:
    """True for columns with a title of their own."""
    return isinstance(key, ScoreColumn) or key in COLUMNS


def finite(value: object) -> float:
    """A recorded number as a float; NaN for anything else: None, booleans, texts, infinity.

    >>> finite(1), finite(None), finite(float("inf")), finite("x")
    (1.0, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return math.nan
    return float(value)


def scaled(key: str, value: object) -> float:
    """A recorded number in the unit of its column; NaN without one.

    >>> scaled("accuracy_mean", 0.5)
    50.0
    """
    return column_of(key).scale * finite(value)


def decimals_of(key: str, values: Iterable[object]) -> int:
    """How many decimals all values of a column are shown with.

    Columns with fixed decimals have those; columns of counts have none, except for means over seeds
    that are not whole.

    Args:
        values: Numbers already in the unit of the column; what is no number is ignored.

    >>> decimals_of("clusters", [3.0, 4.0]), decimals_of("clusters", [3.5, 4.0])
    (0, 1)
    """
    return column_of(key).decimals or int(any(finite(value) % 1 > 0 for value in values))


def number_text(key: str, value: object, error: object = None) -> str:
    """A recorded number and its error, scaled, with equal decimals and without a unit.

    >>> number_text("accuracy_mean", 0.9489, 0.01), number_text("clusters", 4.0, 0.71)
    ('94.89 ± 1.00', '4.0 ± 0.7')
    """
    number, spread = scaled(key, value), scaled(key, error)
    if math.isnan(number):
        return MISSING
    decimals = decimals_of(key, (number, spread))
    return f"{number:,.{decimals}f}" + (f" ± {spread:,.{decimals}f}" if spread > 0 else "")


def with_unit(key: str, value: object, error: object = None) -> str:
    """`number_text` with the unit of the column.

    >>> with_unit("bytes_up", 3e6), with_unit("rounds", None)
    ('3.0 MB', '–')
    """
    text = number_text(key, value, error)
    return text if text == MISSING else f"{text} {column_of(key).unit}".rstrip()


def value_text(value: object) -> str:
    """A setting in a cell or label: floats with at most six digits, "" for none.

    >>> value_text(0.30000000000000004), value_text("ward"), value_text(None)
    ('0.3', 'ward', '')
    """
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)

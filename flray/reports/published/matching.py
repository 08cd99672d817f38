"""Which run belongs in which cell of a published table, as the table's YAML says under `match`.

docs/adding_a_table.md lists its keys. What a paper leaves open is no condition: runs that differ in
it compete for the cell.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from flray.reports.published.tables import Column, Row

Conditions = Mapping[str, Any]  # Any: YAML; by dotted key of the config, or summary.KEY

_OPERATORS = ("any", "at_least", "by_column", "mentions")


@dataclass(frozen=True)
class Metric:
    """Which number of a run a cell shows."""

    key: str  # of summary.json
    scale: float = 100.0  # from fractions to what the paper prints
    se: str | None = None  # the key of its standard error
    select: str | None = None  # what the papers' way of selecting looks at; None: the metric itself
    baseline: str | None = None  # the key of FedAvg's round that the ratio is taken to
    baseline_round: Literal["after_clustering", "last"] = "last"


@dataclass(frozen=True)
class Matcher:
    """The section `match` of a table."""

    runs: Conditions = field(default_factory=dict)
    columns: Mapping[str, Conditions] = field(default_factory=dict)  # by column entry
    methods: Mapping[str, Conditions] = field(default_factory=dict)  # by method of a row
    statistics: Mapping[str, Conditions] = field(default_factory=dict)  # by statistic of a column
    settings: Mapping[str, Any] = field(default_factory=dict)  # key, or {key, names}
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by statistic
    # By method, then by statistic: numbers that replace those of `numbers` in the rows of a method.
    method_numbers: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    round: str | None = None  # the setting of a row that is the round to read

    def conditions(self, row: "Row", column: "Column") -> dict[str, Any]:
        """Every condition on a run for this cell.

        Those of its method replace those of its settings, these those of its statistic, these those
        of its column, these those of `runs`.
        """
        merged = {**self.runs, **self.columns.get(column.entry, {})}
        merged |= self.statistics.get(column.statistic, {})
        for name, said in self.settings.items():
            if name in row.settings:
                key, names = (said["key"], said["names"]) if isinstance(said, dict) else (said, {})
                merged[key] = names.get(row.settings[name], row.settings[name])
        if self.round is not None:
            merged["rounds"] = {"at_least": row.settings[self.round]}
        merged |= self.methods.get(row.method or "", {})
        chosen = {
            key: wanted["by_column"][column.entry] if _operator(wanted) == "by_column" else wanted
            for key, wanted in merged.items()
        }
        return {key: wanted for key, wanted in chosen.items() if _operator(wanted) != "any"}

    def metric(self, row: "Row", column: "Column") -> Metric | None:
        own = self.method_numbers.get(row.method or "", {})
        said = own.get(column.statistic, self.numbers.get(column.statistic))
        return None if said is None else Metric(**said)

    def round_of(self, row: "Row") -> int | None:
        return None if self.round is None else row.settings[self.round]


def holds(value: Any, wanted: Any) -> bool:  # Any: configuration, YAML
    """True if a value of a configuration meets a condition; a list holds alternatives.

    >>> holds(5, {"at_least": 3}), holds(None, [None, 0]), holds("EMNIST", {"mentions": "mnist"})
    (True, True, True)
    """
    if isinstance(wanted, list):
        return any(
            value == each if isinstance(each, list) else holds(value, each) for each in wanted
        )
    match _operator(wanted):
        case "mentions":
            return re.search(wanted["mentions"], str(value), re.IGNORECASE) is not None
        case "at_least":
            return isinstance(value, int | float) and value >= wanted["at_least"]
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return math.isclose(value, wanted)
    return bool(value == wanted)


def condition_text(wanted: Any) -> str:  # Any: YAML
    """A condition in words.

    >>> [condition_text(each) for each in (5, [None, 0], {"at_least": 3}, [["identity"]])]
    ['5', 'null or 0', 'at least 3', '[identity]']
    """
    if isinstance(wanted, list):
        return " or ".join(
            f"[{', '.join(map(str, each))}]" if isinstance(each, list) else condition_text(each)
            for each in wanted
        )
    name = _operator(wanted)
    if name is None:
        return "null" if wanted is None else str(wanted)
    return f"{name.replace('_', ' ')} {wanted[name]}"


def _operator(wanted: Any) -> str | None:  # Any: YAML
    """The word of a condition that is not a plain value, None for one that is."""
    if not isinstance(wanted, dict):
        return None
    (name,) = wanted
    if name not in _OPERATORS:
        raise ValueError(f"unknown condition {name!r} in match; known: {', '.join(_OPERATORS)}")
    return str(name)

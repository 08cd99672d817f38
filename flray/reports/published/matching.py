"""Which run belongs in which cell of a published table: the section `match` of its YAML.

docs/adding_a_table.md lists its keys. What a paper leaves open is no condition: runs that differ in
it compete for the cell.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flray.reports.published.layout import TableColumn, TableRow

Conditions = Mapping[str, Any]  # Any: YAML; by dotted key of the config, or summary.KEY

_OPERATORS = ("any", "at_least", "by_column", "mentions")


@dataclass(frozen=True)
class Metric:
    """The number of a run that a cell shows, and how it is scaled, selected and compared."""

    key: str  # column of summary.json
    scale: float = 100.0  # from the recorded fraction to the unit that the paper prints
    se: str | None = None  # key of its standard error
    select: str | None = None  # key that the papers select runs by; None: the number itself
    # True: the value of the round in which it is best. Where it is one of test data, this is a
    # paper's way of reporting, and nothing else may use it
    best_round: bool = False
    baseline: str | None = None  # key of FedAvg's number that the ratio is taken to
    baseline_round: Literal["after_clustering", "last"] = "last"


@dataclass(frozen=True)
class Matcher:
    """The section `match` of a table: conditions on runs, and the numbers that cells show.

    >>> column, row = TableColumn("MNIST", "MNIST", entry="MNIST"), TableRow((), "", "Mine", {}, {})
    >>> matcher = Matcher(columns={"MNIST": {"dataset.name": "mnist"}}, runs={"rounds": 100})
    >>> matcher.conditions(row, column)
    {'rounds': 100, 'dataset.name': 'mnist'}
    """

    runs: Conditions = field(default_factory=dict)
    columns: Mapping[str, Conditions] = field(default_factory=dict)  # by column entry
    methods: Mapping[str, Conditions] = field(default_factory=dict)  # by method of a row
    statistics: Mapping[str, Conditions] = field(default_factory=dict)  # by statistic of a column
    settings: Mapping[str, Any] = field(default_factory=dict)  # key, or {key, names}
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by statistic
    # By method, then by statistic: numbers that replace those of `numbers` in the rows of a method.
    method_numbers: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    round: str | None = None  # the setting of a row that is the round to read

    def conditions(self, row: TableRow, column: TableColumn) -> dict[str, Any]:
        """The conditions on a run for this cell, by dotted key.

        In ascending priority they come from `runs`, the cell's column, its statistic, the settings
        of its row and its method.
        """
        merged = {**self.runs, **self.columns.get(column.entry, {})}
        merged |= self.statistics.get(column.statistic, {})
        for name, target in self.settings.items():
            if name in row.settings:
                rule = target if isinstance(target, dict) else {"key": target, "names": {}}
                merged[rule["key"]] = rule["names"].get(row.settings[name], row.settings[name])
        if self.round is not None:
            merged["rounds"] = {"at_least": row.settings[self.round]}
        merged |= self.methods.get(row.method or "", {})
        chosen = {
            key: wanted["by_column"][column.entry] if _operator(wanted) == "by_column" else wanted
            for key, wanted in merged.items()
        }
        return {key: wanted for key, wanted in chosen.items() if _operator(wanted) != "any"}

    def metric(self, row: TableRow, column: TableColumn) -> Metric | None:
        """The number that a cell shows; None where no run records it.

        Entries of `method_numbers` for the row's method replace those of `numbers`.
        """
        numbers = {**self.numbers, **self.method_numbers.get(row.method or "", {})}
        fields = numbers.get(column.statistic)
        return None if fields is None else Metric(**fields)

    def round_of(self, row: TableRow) -> int | None:
        """The round whose numbers the cells of a row show; None: the last.

        FL+HC's tables have rows for several rounds of the same run.
        """
        return None if self.round is None else row.settings[self.round]


def holds(value: Any, wanted: Any) -> bool:  # Any: configuration, YAML
    """True if a value of a configuration meets a condition; a list holds alternatives.

    >>> holds(5, {"at_least": 3}), holds(None, [None, 0]), holds("EMNIST", {"mentions": "mnist"})
    (True, True, True)
    """
    if isinstance(wanted, list):
        return any(value == w if isinstance(w, list) else holds(value, w) for w in wanted)
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

    >>> [condition_text(wanted) for wanted in (5, [None, 0], {"at_least": 3}, [["identity"]])]
    ['5', 'null or 0', 'at least 3', '[identity]']
    """
    if isinstance(wanted, list):
        return " or ".join(
            f"[{', '.join(map(str, value))}]" if isinstance(value, list) else condition_text(value)
            for value in wanted
        )
    name = _operator(wanted)
    if name is None:
        return "null" if wanted is None else str(wanted)
    return f"{name.replace('_', ' ')} {wanted[name]}"


def _operator(wanted: Any) -> str | None:  # Any: YAML
    """The operator of a condition, None for a plain value."""
    if not isinstance(wanted, dict):
        return None
    (name,) = wanted
    if name not in _OPERATORS:
        raise ValueError(f"unknown condition {name!r} in match; known: {', '.join(_OPERATORS)}")
    return str(name)

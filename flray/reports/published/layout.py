"""The parts of a published table: cells, columns and rows, whatever the layout of its YAML.

`flray.reports.published.tables.parse_table` makes them from a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flray.reports.columns import Heading

Raw = Mapping[str, Any]  # Any: YAML
Unit = Literal["percent", "percent²", "fraction", "rounds", "Mb", "formula"]


@dataclass(frozen=True)
class Published:
    """One printed cell; without a value the paper left it empty.

    A cell has a value or, in tables of formulas such as FL+HC's costs, a text.
    """

    value: float | None = None  # in the column's unit
    spread: float | None = None  # printed behind ±: standard error, or deviation over trials
    ratio: float | None = None  # FL+HC: to FedAvg in the same round, None where that was 0
    text: str | None = None  # a formula


@dataclass(frozen=True)
class TableColumn(Heading):
    """A column as the file lists it; `entry` is a dataset, a model or a method of its rows.

    >>> column = TableColumn("MNIST.var", "var.", "MNIST", unit="percent²")
    >>> column.title, column.lower_is_better
    ('MNIST var.', True)
    """

    entry: str = ""
    unit: Unit = "percent"
    statistic: str = "acc"  # which number of the entry, by the names of `match`
    field: str | None = None  # key of the number in the entry; None: `mean` or `value`
    # Largest difference to the paper, in points, of a number that counts as reproduced; None: there
    # is no such number, as for variances, rounds and traffic.
    tolerance: float | None = None

    @property
    def lower_is_better(self) -> bool:
        """True for variances, rounds and traffic; ranks of methods depend on it."""
        return self.unit in ("percent²", "rounds", "Mb")


@dataclass(frozen=True)
class TableRow:
    """A row with its printed cells.

    >>> TableRow(("L1", "comp."), "MNIST", None, {}, {}).title
    'MNIST, L1, comp.'
    """

    labels: tuple[str, ...]  # as printed, below the table's `row_headings`
    block: str  # heading above several rows, "" without one
    method: str | None  # None where rows are settings of one method
    settings: Raw
    cells: Mapping[str, Published]  # by column key
    note: str = ""

    @property
    def title(self) -> str:
        """Block and labels on one line, to name the row in messages."""
        return ", ".join((*filter(None, [self.block]), *self.labels))

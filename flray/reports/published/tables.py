"""The papers' tables in one shape, however their YAML is laid out."""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from flray.errors import ExperimentError
from flray.reports.published.costs import Cost, cost_of
from flray.reports.published.matching import Matcher
from flray.values import shown
from flray.wording import suggestion

FOLDER = Path(__file__).parent

Raw = Mapping[str, Any]  # Any: YAML
Unit = Literal["percent", "percent²", "fraction", "rounds", "Mb", "formula"]

# libyaml's, where PyYAML was built with it, is seven times as fast on these long files.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FILE = re.compile(r"(\w+)_table(\d+)")
# What can be printed at all: the variance of numbers in 0..100 is at most 50².
_RANGE: Mapping[Unit, tuple[float, float]] = {
    "percent": (0, 100),
    "percent²": (0, 2500),
    "fraction": (0, 1),
    "rounds": (1, 10_000),
    "Mb": (0, 1e6),
}
_LARGEST_RATIO = 100.0
_METHODS = {"Method": "{method}"}  # the headings of rows, and what stands below them
_DECIMALS: Mapping[Unit, int] = {
    "percent": 2,
    "percent²": 2,
    "fraction": 2,
    "rounds": 0,
    "Mb": 2,
    "formula": 0,
}


@dataclass(frozen=True)
class Published:
    """One printed cell; without a value it was left empty by the paper."""

    value: float | None = None  # in the column's unit
    spread: float | None = None  # what stands behind ±: standard error, or std over trials
    ratio: float | None = None  # FL+HC: to FedAvg at the same round, None where that was 0
    text: str | None = None  # a formula


@dataclass(frozen=True)
class Column:
    """A column; the fields are what the file says of it."""

    key: str
    entry: str  # which of a row's entries: a dataset, a model, a method
    name: str  # heading
    decimals: int
    unit: Unit = "percent"
    group: str = ""  # heading above several columns
    statistic: str = "acc"  # which number of it, by the names of `match`
    field: str | None = None  # of the entry that holds the number; None: `mean` or `value`

    @property
    def lower_is_better(self) -> bool:
        return self.unit in ("percent²", "rounds", "Mb")

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}".strip()


@dataclass(frozen=True)
class Row:
    labels: tuple[str, ...]  # as printed, below the table's `row_headings`
    block: str  # heading above several rows, "" where there is none
    method: str | None  # None where rows are settings of one method
    settings: Raw
    cells: Mapping[str, Published]  # by column key
    note: str = ""

    @property
    def title(self) -> str:
        return ", ".join((*filter(None, [self.block]), *self.labels))


@dataclass(frozen=True)
class Table:
    key: str  # flhc.4
    paper: str
    number: str  # as the paper counts: IV
    caption: str
    metric: str
    row_headings: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    settings: Raw
    cost: Cost
    note: str = ""
    match: Matcher = field(default_factory=Matcher)  # which runs fill it
    space: str | None = None  # the file in tune_spaces/ whose runs fill it

    @property
    def has_ratios(self) -> bool:
        return any(cell.ratio is not None for row in self.rows for cell in row.cells.values())

    @property
    def is_formulas(self) -> bool:
        return all(column.unit == "formula" for column in self.columns)

    @property
    def required_algorithms(self) -> tuple[str, ...]:
        """The registered names without which the table cannot be filled."""
        if self.is_formulas:
            return ()
        cells = [(row, column) for row in self.rows for column in self.columns]
        names = {self.match.conditions(*cell)["algorithm.name"] for cell in cells}
        return tuple(sorted(names | ({"fedavg"} if self.has_ratios else set())))


@functools.cache
def load_tables() -> Mapping[str, Table]:
    """All of them by key, papers in alphabetical order; `repa_figures.yaml` holds no table."""
    costs = _read("costs.yaml")["tables"]
    files = [path.name for path in sorted(FOLDER.glob("*_table*.yaml"))]
    raws = {".".join(_FILE.findall(name)[0]): _read(name) for name in files}
    return MappingProxyType(
        {
            key: parse_table(key, {**raw, "match": resolved_match(key, raws)}, cost_of(raw, costs))
            for key, raw in raws.items()
        }
    )


def _read(name: str) -> dict[str, Any]:  # Any: YAML
    text = (FOLDER / name).read_text(encoding="utf-8")
    held: dict[str, Any] = yaml.load(text, _Loader)
    return held


def resolved_match(key: str, raws: Mapping[str, Raw]) -> Raw:
    """The section `match` of a table, on top of that of the table it is `like`.

    A part of it that is null is left out, with what the other table has there.
    """
    own = dict(raws[key].get("match", {}))
    if "like" not in own:
        return own
    merged = dict(resolved_match(own.pop("like"), raws))
    for name, said in own.items():
        merged[name] = {**merged.get(name, {}), **said} if isinstance(said, dict) else said
    return {name: said for name, said in merged.items() if said is not None}


def find_table(name: str) -> Table:
    """A table by name; numerals may be roman, letters capital.

    >>> find_table("FLHC.iv").key
    'flhc.4'
    """
    tables = load_tables()
    paper, _, number = name.strip().lower().rpartition(".")
    key = f"{paper}.{number if number.isdigit() else _from_roman(number)}"
    if key in tables:
        return tables[key]
    meant = suggestion(key, tables)
    raise ExperimentError(f"unknown table {shown(name)}{meant}; known: {', '.join(tables)}")


def parse_table(key: str, raw: Raw, cost: Cost) -> Table:
    """One file's content in the common shape; what it lacks is left out for the check to find."""
    columns = tuple(_column(each) for each in raw["columns"])
    settings = raw.get("settings", {})
    return Table(
        key=key,
        paper=raw["paper"],
        number=str(raw["table"]),
        caption=raw["caption"],
        metric=raw.get("metric", ""),
        row_headings=tuple(raw.get("row_headings", _METHODS)),
        columns=columns,
        rows=tuple(_row(raw, entry, columns) for entry in raw["rows"]),
        settings=settings,
        cost=cost,
        note=raw.get("note") or settings.get("note", ""),
        match=Matcher(**raw.get("match", {})),
        space=raw.get("space"),
    )


def check_tables(tables: Mapping[str, Table]) -> list[str]:
    """What is wrong with them, a line each: [] when nothing is."""
    return [fault for table in tables.values() for fault in _faults(table)]


def _faults(table: Table) -> list[str]:
    faults = []
    for what, names in (
        ("column", [column.key for column in table.columns]),
        ("row", [row.title for row in table.rows]),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        faults += [f"{table.key}: {what} {name!r} is there twice" for name in twice]
        if not names:
            faults.append(f"{table.key}: no {what}s")
    if table.cost.steps is None and not table.cost.note:
        faults.append(f"{table.key}: neither a cost in costs.yaml nor a reason why there is none")
    for row in table.rows:
        keys = [column.key for column in table.columns]
        faults += [
            f"{table.key}: row {row.title!r} has {extra!r}, which is no column"
            for extra in row.cells
            if extra not in keys
        ]
        for column in table.columns:
            where = f"{table.key}: row {row.title!r}, column {column.key!r}"
            if column.key not in row.cells:
                faults.append(f"{where} is missing; an empty cell is written as null")
            else:
                faults += [f"{where}: {what}" for what in _implausible(column, row)]
    return faults


def _implausible(column: Column, row: Row) -> list[str]:
    cell = row.cells[column.key]
    if column.unit == "formula":
        return []
    low, high = _RANGE[column.unit]
    ranges = {"value": (low, high), "spread": (0, high - low), "ratio": (0, _LARGEST_RATIO)}
    return [
        f"{name} must be a number in {least:g}..{most:g} ({column.unit}), got {number!r}"
        for name, (least, most) in ranges.items()
        if (number := getattr(cell, name)) is not None and not _is_between(number, least, most)
    ]


def _is_between(number: object, least: float, most: float) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return least <= number <= most  # never true of NaN


def _column(raw: Raw | str) -> Column:
    """A column as the file lists it: the fields of `Column`, or its key alone."""
    given: Raw = {"key": raw} if isinstance(raw, str) else raw
    unit: Unit = given.get("unit", "percent")
    defaults = {"entry": given["key"], "name": given["key"], "decimals": _DECIMALS[unit]}
    return Column(**{**defaults, **given})


def _row(raw: Raw, entry: Raw, columns: Sequence[Column]) -> Row:
    settings = entry.get("settings", {})
    texts = raw.get("row_headings", _METHODS).values()
    labels = tuple(text.format(**{**settings, **entry}) for text in texts)
    blocks = [names[settings[name]] for name, names in raw.get("blocks", {}).items()]
    return Row(
        labels=labels,
        block=", ".join(blocks),
        method=" ".join(labels) if "method" in entry else None,
        settings=settings,
        cells=_cells(entry, columns),
        note=entry.get("note") or entry.get("provenance_warning", ""),
    )


def _cells(entry: Raw, columns: Sequence[Column]) -> dict[str, Published]:
    if columns and columns[0].unit == "formula":
        return {column.key: Published(text=entry[column.key]) for column in columns}
    values = entry["values"]
    if values is None:  # the paper's run did not complete
        return {column.key: Published() for column in columns}
    known = {column.entry for column in columns}
    cells = {extra: Published() for extra in values if extra not in known}
    for column in columns:
        if column.entry in values:
            cell = _cell(values[column.entry], column)
            cells |= {} if cell is None else {column.key: cell}
    return cells


def _cell(printed: Raw | None, column: Column) -> Published | None:
    """None where the number is not even there as null."""
    if printed is None:
        return Published()
    field = column.field or ("mean" if "mean" in printed else "value")
    if field not in printed:
        return None
    spreads = [printed[name] for name in ("std", "stderr") if name in printed]
    spread = spreads[0] if spreads and column.field is None else None
    return Published(printed[field], spread, printed.get("ratio_to_FL"))


def _from_roman(numeral: str) -> str:
    """
    >>> _from_roman("iv"), _from_roman("vi"), _from_roman("x?")
    ('4', '6', 'x?')
    """
    values = {"i": 1, "v": 5, "x": 10}
    if not numeral or set(numeral) - set(values):
        return numeral
    digits = [values[letter] for letter in numeral]
    following = [*digits[1:], 0]
    total = sum(-d if d < after else d for d, after in zip(digits, following, strict=True))
    return str(total)

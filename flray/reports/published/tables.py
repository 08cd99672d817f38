"""Published tables, read from the YAML files in this folder.

A file PAPER_tableN.yaml is the table PAPER.N; docs/adding_a_table.md describes its keys. The
package's other files say which runs fill it (`matching`, `filling`) and print it (`sheet`).
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from flray.errors import ExperimentError
from flray.reports.published.layout import Published, Raw, TableColumn, TableRow
from flray.reports.published.matching import Matcher
from flray.values import shown
from flray.wording import suggestion

FOLDER = Path(__file__).parent

# libyaml's loader, if PyYAML was built with it, is seven times as fast on these long files.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FILE = re.compile(r"(\w+)_table(\d+)")
_METHODS = {"Method": "{method}"}  # default headings of rows, and the text below them
_WHOLE_NUMBERS = ("rounds", "formula")  # units without decimals
TOLERANCE = 3.0  # points, of columns in percent whose file sets no other
_ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x")


@dataclass(frozen=True)
class Cost:
    """What it takes to run a table, from costs.yaml.

    Steps are estimates from the paper's settings, not measurements.
    """

    steps: int | None  # client SGD steps of the whole table, None where the note gives the reason
    note: str


@dataclass(frozen=True)
class Table:
    """A table of a paper: what was printed, and which runs fill it.

    `find_table` returns one. Printed numbers are in the unit of their column, as in the paper.

    >>> table = find_table("flhc.4")
    >>> table.number, table.columns[0].title, table.rows[8].cells["acc_round50"].value
    ('IV', 'test acc post cluster', 99.3)
    """

    key: str  # flhc.4
    paper: str
    number: str  # as the paper counts: IV
    caption: str
    metric: str
    row_headings: tuple[str, ...]
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    settings: Raw
    cost: Cost
    note: str = ""
    match: Matcher = field(default_factory=Matcher)
    space: str | None = None  # file in tune_spaces/ whose runs fill the table

    @property
    def has_ratios(self) -> bool:
        """True if the paper prints ratios to FedAvg; then FedAvg's runs are needed as well."""
        return any(cell.ratio is not None for row in self.rows for cell in row.cells.values())

    @property
    def is_formulas(self) -> bool:
        """True for a table of formulas, which no run can fill."""
        return all(column.unit == "formula" for column in self.columns)


@functools.cache
def load_tables() -> Mapping[str, Table]:
    """All tables by key, papers in alphabetical order; files are read once per process."""
    costs = _read("costs.yaml")["tables"]
    files = [path.name for path in sorted(FOLDER.glob("*_table*.yaml"))]
    raws = {".".join(_FILE.findall(name)[0]): _read(name) for name in files}
    tables = {
        key: parse_table(key, {**raw, "match": resolved_match(key, raws)}, _cost(raw, costs))
        for key, raw in raws.items()
    }
    return MappingProxyType(tables)


def _read(name: str) -> dict[str, Any]:  # Any: YAML
    text = (FOLDER / name).read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.load(text, _Loader)
    return content


def _cost(raw: Raw, entries: Raw) -> Cost:
    """The cost of a table; `cost` of its file names an entry of costs.yaml and the total in it."""
    cost = raw.get("cost", {})
    total = entries[cost["entry"]][cost["total"]] if "total" in cost else None
    # A total is one number, or one for each dataset or model.
    return Cost(sum(total.values()) if isinstance(total, dict) else total, cost.get("note", ""))


def resolved_match(key: str, raws: Mapping[str, Raw]) -> Raw:
    """The section `match` of a table, on top of that of the table that `like` names.

    A part of it that is null is left out, together with that part of the other table.

    >>> first = {"match": {"runs": {"rounds": 50, "seed": 0}, "round": "rounds"}}
    >>> second = {"match": {"like": "p.1", "runs": {"rounds": 20}, "round": None}}
    >>> resolved_match("p.2", {"p.1": first, "p.2": second})
    {'runs': {'rounds': 20, 'seed': 0}}
    """
    match = dict(raws[key].get("match", {}))
    if "like" not in match:
        return match
    merged = dict(resolved_match(match.pop("like"), raws))
    for name, part in match.items():
        merged[name] = {**merged.get(name, {}), **part} if isinstance(part, dict) else part
    return {name: part for name, part in merged.items() if part is not None}


def find_table(name: str) -> Table:
    """The table of a name such as flhc.4; numerals may be roman, letters capital.

    Raises:
        ExperimentError: There is no such table; the message lists all and names the nearest.

    >>> find_table("FLHC.iv").key
    'flhc.4'
    """
    tables = load_tables()
    paper, _, number = name.strip().lower().rpartition(".")
    key = f"{paper}.{_ROMAN.index(number) + 1 if number in _ROMAN else number}"
    if key in tables:
        return tables[key]
    meant = suggestion(key, tables)
    raise ExperimentError(f"unknown table {shown(name)}{meant}; known: {', '.join(tables)}")


def parse_table(key: str, raw: Raw, cost: Cost) -> Table:
    """The table of a file's content; cells that the file lacks are left out.

    Args:
        key: Paper and number, as in flhc.4.
        raw: The content of the file, in the format of docs/adding_a_table.md.
        cost: What it takes to run the table.
    """
    columns = tuple(_column(column) for column in raw["columns"])
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


def _column(raw: Raw | str) -> TableColumn:
    """A column as the file lists it: fields of `TableColumn`, or its key alone."""
    given: Raw = {"key": raw} if isinstance(raw, str) else raw
    unit = given.get("unit", "percent")
    defaults = {"entry": given["key"], "name": given["key"]}
    defaults |= {"decimals": 0 if unit in _WHOLE_NUMBERS else 2}
    defaults |= {"tolerance": TOLERANCE if unit == "percent" else None}
    return TableColumn(**{**defaults, **given})


def _row(raw: Raw, entry: Raw, columns: Sequence[TableColumn]) -> TableRow:
    """A row of the file: its labels, the block it stands in, and its cells."""
    settings = entry.get("settings", {})
    texts = raw.get("row_headings", _METHODS).values()
    labels = tuple(text.format(**{**settings, **entry}) for text in texts)
    blocks = [names[settings[name]] for name, names in raw.get("blocks", {}).items()]
    return TableRow(
        labels=labels,
        block=", ".join(blocks),
        method=" ".join(labels) if "method" in entry else None,
        settings=settings,
        cells=_cells(entry, columns),
        note=entry.get("note") or entry.get("provenance_warning", ""),
    )


def _cells(entry: Raw, columns: Sequence[TableColumn]) -> dict[str, Published]:
    """The printed cells of a row by column key; those that the file lacks are left out.

    Values of the file that no column shows are kept as empty cells under their own name.
    """
    if columns and columns[0].unit == "formula":
        return {column.key: Published(text=entry[column.key]) for column in columns}
    values = entry["values"]
    if values is None:  # the paper's run did not complete
        return {column.key: Published() for column in columns}
    entries = {column.entry for column in columns}
    cells = {extra: Published() for extra in values if extra not in entries}
    for column in columns:
        if column.entry in values:
            cell = _cell(values[column.entry], column)
            cells |= {} if cell is None else {column.key: cell}
    return cells


def _cell(printed: Raw | None, column: TableColumn) -> Published | None:
    """None where the number is not even there as null."""
    if printed is None:
        return Published()
    name = column.field or ("mean" if "mean" in printed else "value")
    if name not in printed:
        return None
    spread = None if column.field else printed.get("std", printed.get("stderr"))
    return Published(printed[name], spread, printed.get("ratio_to_FL"))

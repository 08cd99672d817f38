"""HTML from Python: elements that escape what they are given, tables, folds, cards of numbers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table as RichTable

MISSING = "–"
LONG = 30  # characters of a column's name
TALL = 25  # rows from which a table scrolls in a frame of its own


class Html(str):
    """Text that is HTML already; all other text is escaped where it enters an element."""

    __slots__ = ()


@dataclass(frozen=True)
class Number:
    """A table cell that is shown as text and sorted by its value."""

    text: str
    value: float | None


Cell = str | Number
Attribute = str | int | bool | None


def element(tag: str, *children: str, **attributes: Attribute) -> Html:
    """One element; `class_` and `data_value` are the attributes `class` and `data-value`.

    >>> element("p", "a < b", element("b", "!"), class_="note", hidden=None)
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    return Html(f"<{tag}{_attributes(attributes)}>{joined(children)}</{tag}>")


def void(tag: str, **attributes: Attribute) -> Html:
    """An element that has no content.

    >>> void("img", alt='"x"')
    '<img alt="&quot;x&quot;">'
    """
    return Html(f"<{tag}{_attributes(attributes)}>")


def joined(children: Iterable[str], between: str = "") -> Html:
    return Html(escape(between).join(c if isinstance(c, Html) else escape(c) for c in children))


def section(level: int, heading: str, *children: str, anchor: str | None = None) -> Html:
    """A heading and what belongs to it."""
    return element("section", element(f"h{level}", heading), *children, id=anchor)


def fold(summary: str, *children: str, is_open: bool = False, anchor: str | None = None) -> Html:
    """Something to be opened by those who want to see it."""
    return element(
        "details", element("summary", summary), *children, open=is_open or None, id=anchor
    )


def note(*children: str) -> Html:
    return element("p", *children, class_="note")


def command(text: str) -> Html:
    """Something to type into a shell."""
    return element("pre", element("code", text), class_="command")


def cards(numbers: Sequence[tuple[str, str, str]]) -> Html:
    """Headline numbers.

    Args:
        numbers: what it is, the number, a remark ("" for none).
    """
    return element("dl", *(_card(*number) for number in numbers), class_="cards")


def _card(label: str, value: str, remark: str) -> Html:
    small = [element("dd", remark, class_="remark")] if remark else []
    return element("div", element("dt", label), element("dd", value), *small)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    caption: str = "",
    *,
    is_sortable: bool = False,
) -> Html:
    """A table whose first column names its rows; numbers stand on the right."""
    listed = [list(row) for row in rows]
    numeric = [_is_numeric([row[k] for row in listed]) for k in range(len(head))]
    names = joined(
        element("th", _head(name), scope="col", class_="number" if is_number else None)
        for name, is_number in zip(head, numeric, strict=True)
    )
    body = joined(element("tr", *(_cell(k, c) for k, c in enumerate(row))) for row in listed)
    parts = [element("caption", caption)] if caption else []
    parts += [element("thead", element("tr", names)), element("tbody", body)]
    sortable = "sortable" if is_sortable else None
    frame = "scroll tall" if len(listed) >= TALL else "scroll"
    return element("div", element("table", *parts, class_=sortable), class_=frame)


def _head(name: str) -> str:
    """The name of a column; a long one is broken anywhere, so that it does not widen the table."""
    return name if len(name) <= LONG else element("span", name, class_="long")


def html_of(rich: RichTable) -> Html:
    """A table made for the terminal, as it stands."""
    columns = [[str(cell) for cell in column.cells] for column in rich.columns]
    right = [column.justify == "right" for column in rich.columns]
    rows = [
        [_as_number(text) if to_right else text for text, to_right in zip(row, right, strict=True)]
        for row in zip(*columns, strict=True)
    ]
    head = [str(column.header) for column in rich.columns]
    return table(head, rows, str(rich.title or ""), is_sortable=len(rows) > 2)


def pairs(rows: Mapping[str, str]) -> Html:
    """What something is, line by line."""
    lines = (
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in rows.items()
    )
    return element("div", element("table", element("tbody", *lines)), class_="scroll")


def _cell(place: int, cell: Cell) -> Html:
    text = cell.text if isinstance(cell, Number) else cell
    if place == 0:
        attributes: dict[str, Attribute] = {"scope": "row"}
    else:
        attributes = {"class_": "number" if isinstance(cell, Number) else None}
    if isinstance(cell, Number) and cell.value is not None:
        attributes["data_value"] = repr(float(cell.value))
    return element("th" if place == 0 else "td", text, **attributes)


def _as_number(text: str) -> Number:
    """A terminal's cell; it is sorted by the number that it begins with.

    >>> _as_number("+16.81 ± 0.20"), _as_number("nan")
    (Number(text='+16.81 ± 0.20', value=16.81), Number(text='–', value=None))
    """
    found = re.match(r"[+-]?[\d,]*\.?\d+", text)
    value = float(found[0].replace(",", "")) if found else None
    return Number(re.sub(r"\bnan\b", MISSING, text), value)


def _is_numeric(cells: Sequence[Cell]) -> bool:
    return any(isinstance(cell, Number) for cell in cells)


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    text = ""
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            text += f" {name}"
        elif value is not None and value is not False:
            text += f' {name}="{escape(str(value))}"'
    return text

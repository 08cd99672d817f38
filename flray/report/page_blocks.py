"""What a page is made of, as plain data: `templates/page.html` turns it into HTML.

A block is a mapping with a `kind`, which the template has a branch for, and the fields it reads.
"""

import base64
import io
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from flray.report.sheets import MISSING, Sheet
from flray.report.writers import cell_lines

Block = dict[str, Any]  # Any: fields of the kind

MAX_SVG_BYTES = 200_000
PNG_DPI = 130
CSS_PIXELS = 96  # an inch
_DROPPED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<defs>\s*</defs>", re.DOTALL
)
_HOLDS = re.compile(r'\sid="([^"]*)"')
_REFERS = re.compile(r'(?:xlink:)?href="#([^"]*)"|url\(#([^)]*)\)')


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text or chips, sorted by its value."""

    text: str = ""
    value: float | None = None
    is_number: bool = False
    chips: tuple[Mapping[str, str], ...] = ()  # text, title, colour


def number_cell(text: str, value: object) -> Cell:
    return Cell(text, known(value), is_number=True)


def section(heading: str, anchor: str, blocks: Sequence[Block]) -> Block:
    return {"kind": "section", "heading": heading, "anchor": anchor, "blocks": list(blocks)}


def fold(summary: str, blocks: Sequence[Block], anchor: str = "") -> Block:
    """A collapsible block."""
    return {"kind": "fold", "summary": summary, "blocks": list(blocks), "anchor": anchor}


def text(words: str, style: str = "") -> Block:
    return {"kind": "text", "text": words, "style": style}


def note(words: str) -> Block:
    return text(words, "note")


def cards(numbers: Iterable[tuple[str, str, str]]) -> Block:
    """Headline numbers: what it is, the number, a remark; missing numbers are left out."""
    return {"kind": "cards", "cards": [c for c in numbers if not c[1].startswith(MISSING)]}


def side_by_side(blocks: Sequence[Sequence[Block]], narrow: bool = False) -> Block:
    return {"kind": "side_by_side", "blocks": list(blocks), "narrow": narrow}


def pairs(tables: Mapping[str, Mapping[str, str]], style: str = "") -> Block:
    """Names and values, a table for each caption."""
    return {"kind": "pairs", "tables": list(tables.items()), "style": style}


def code(words: str) -> Block:
    return {"kind": "code", "text": words}


def command(words: str) -> Block:
    """Something to type into a shell."""
    return {"kind": "command", "text": words}


def typed(path: Path) -> str:
    """A path as it is typed where the page is written: relative below the current folder."""
    absolute = path.absolute()
    below = absolute.is_relative_to(Path.cwd())
    return shlex.quote(str(absolute.relative_to(Path.cwd()) if below else absolute))


def table(head: Sequence[str], rows: Iterable[Sequence[Cell | str]], caption: str = "") -> Block:
    """A table whose first column names its rows; three rows or more can be sorted."""
    listed = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    numeric = [any(row[k].is_number for row in listed) for k in range(len(head))]
    fields = {"head": list(head), "rows": listed, "numeric": numeric, "caption": caption}
    return {"kind": "table", "is_sortable": len(listed) > 2, **fields}


def sheet_blocks(sheet: Sheet) -> list[Block]:
    """A sheet with its notes; cells are sorted by our value."""
    lines, values = sheet.lines(), sheet.cells["value"]
    rows = [
        [
            *(Cell(str(label)) for label in sheet.labels.loc[row]),
            *(
                number_cell(
                    "\n".join(words for _, words in cell_lines(lines[row, heading.key])),
                    values.get((row, heading.key, "ours")),
                )
                for heading in sheet.headings
            ),
        ]
        for row in sheet.labels.index
    ]
    head = [*map(str, sheet.labels), *(heading.title for heading in sheet.headings)]
    return [table(head, rows, sheet.title), *map(note, sheet.notes)]


def figure(drawn: Figure, name: str, alt: str, caption: str = "") -> Block:
    """A figure as SVG, or as PNG where SVG would be large.

    Args:
        name: unique on the page; it goes in front of the SVG's own ids.
    """
    width = f"max-width:{drawn.get_size_inches()[0] * CSS_PIXELS:.0f}px"
    svg = _svg(drawn)
    if len(svg) <= MAX_SVG_BYTES:
        drawing = _with_own_ids(_opened(svg, alt, width), name)
    else:
        source = f"data:image/png;base64,{_png(drawn)}"
        drawing = f'<img src="{source}" alt="{escape(alt)}" style="{width}">'
    return {"kind": "figure", "drawing": drawing, "caption": caption}


def _svg(drawn: Figure) -> str:
    """The drawing alone: HTML needs no prologue, no namespaces and no line breaks."""
    buffer = io.StringIO()
    # The salt makes the same figure the same text.
    with matplotlib.rc_context({"svg.hashsalt": "flray", "svg.fonttype": "path"}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    words = buffer.getvalue()
    return re.sub(r"\s+", " ", _DROPPED.sub("", words[words.index("<svg") :]))


def _opened(svg: str, alt: str, width: str) -> str:
    """With an opening tag that scales and describes what is drawn."""
    end = svg.index(">") + 1
    box = re.search(r'viewBox="([^"]*)"', svg[:end])
    assert box is not None, svg[:end]
    tag = f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}" style="{width}">'
    return tag + svg[end:]


def _with_own_ids(svg: str, name: str) -> str:
    """Ids that no other figure has; those that nothing refers to go.

    >>> _with_own_ids('<g id="a"/><g id="b"/><use xlink:href="#b"/>', "x")
    '<g/><g id="x-b"/><use href="#x-b"/>'
    """
    used = {first or second for first, second in _REFERS.findall(svg)}

    def refer(found: re.Match[str]) -> str:
        return f'href="#{name}-{found[1]}"' if found[1] else f"url(#{name}-{found[2]})"

    def hold(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    return _REFERS.sub(refer, _HOLDS.sub(hold, svg)).replace("xlink:href", "href")


def _png(drawn: Figure) -> str:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=PNG_DPI)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def known(value: object) -> float | None:
    """A number that is there and finite.

    >>> known(1), known(None), known(float("nan")), known("x")
    (1.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def fixed(value: object, decimals: int = 2, scale: float = 1.0, unit: str = "") -> str:
    """
    >>> fixed(0.9489, scale=100, unit=" %"), fixed(3990, 0), fixed(None)
    ('94.89 %', '3,990', '–')
    """
    number = known(value)
    return MISSING if number is None else f"{scale * number:,.{decimals}f}{unit}"


def percent(value: object, decimals: int = 2) -> str:
    return fixed(value, decimals, 100, " %")


def duration(value: object) -> str:
    """
    >>> duration(6.59), duration(200), duration(7260)
    ('6.6 s', '3 min 20 s', '2 h 1 min')
    """
    number = known(value)
    if number is None or number < 60:
        return fixed(value, 1, unit=" s")
    if number < 3600:
        return f"{number // 60:.0f} min {number % 60:.0f} s"
    return f"{number // 3600:.0f} h {number % 3600 // 60:.0f} min"


def setting_text(value: object) -> str:
    """A value as YAML has it on one line.

    >>> setting_text(None), setting_text([1, 2]), setting_text("l2")
    ('null', '[1, 2]', 'l2')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

"""Writers of sheets: for the terminal, as Markdown, LaTeX and CSV. Pages have a template."""

from collections.abc import Iterable, Sequence
from typing import Literal

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from flray.reports.columns import MISSING, column_of, is_recorded
from flray.reports.sheets import GROUND_TRUTH, INCOMPLETE, Sheet

MAX_WIDTH = 21  # characters of a column in the terminal
MAX_LABEL = 16  # characters of a single column of labels; longer ones are folded

Format = Literal["rich", "md", "latex", "csv"]

_STYLE = {"ours": "bold", "paper": "dim", "difference": "", "test": "italic"}


def render_sheet(sheet: Sheet, form: Format) -> RenderableType:
    """The sheet in one of the formats: an object that rich prints for `rich`, else a text."""
    writers = {"rich": to_rich, "md": to_markdown, "latex": to_latex, "csv": to_csv}
    return writers[form](sheet)


def to_rich(sheet: Sheet) -> RenderableType:
    """A table for the terminal, with what is below it, its notes and its runs.

    Tables of single numbers are aligned to the right; tables with groups of columns and several
    lines per cell, as the papers', to the left and wrapped to fit into 100 characters.
    """
    grid = RichTable(
        title=sheet.title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        show_edge=False,
    )
    to_right = not any(heading.group for heading in sheet.headings)
    is_narrow = to_right and len(sheet.labels.columns) == 1
    for name in sheet.labels:
        grid.add_column(str(name), max_width=MAX_LABEL if is_narrow else None, overflow="fold")
    for heading in sheet.headings:
        title = f"{heading.group}\n{heading.name}" if heading.group else heading.name
        # Wider cells are wrapped, so that four such columns fit into 100 characters.
        width = None if to_right else MAX_WIDTH
        grid.add_column(title, justify="right" if to_right else "left", max_width=width)
    for block, labels, cells in sheet.rows():
        if block:
            grid.add_section()
            grid.add_row(Text(block, style="italic"))
        shown = [[Text(t.replace(" ± ", "±"), _STYLE[s]) for s, t in c.items()] for c in cells]
        grid.add_row(*map(Text, labels), *map(Text("\n").join, shown))
    parts: list[RenderableType] = [grid]
    if len(sheet.below):
        ranks = RichTable(*map(str, sheet.below), box=box.SIMPLE_HEAD)
        for texts in sheet.below.to_numpy():
            ranks.add_row(*map(Text, texts))
        parts.append(ranks)
    parts += [Text(note, style="dim") for note in sheet.notes]
    parts += [Text("runs", style="bold")] * bool(sheet.runs)
    parts += [Text(f"[{k}] {run}") for k, run in enumerate(sheet.runs, start=1)]
    return Group(*parts)


def to_markdown(sheet: Sheet) -> str:
    """A pipe table; the lines of a cell are separated by <br>, numbers of `Sheet.bold` are bold.

    >>> from flray.reports.sheets import sheet_of
    >>> labels = pd.DataFrame({"experiment": ["fedavg"]}, index=["fedavg"])
    >>> cells = {("fedavg", "ari", "ours"): {"value": 0.5}}
    >>> print(to_markdown(sheet_of("", labels, ["ari"], cells, ["a note"])), end="")
    | experiment | ARI |
    | --- | --- |
    | fedavg | 0.50 |
    <BLANKLINE>
    - a note
    """
    head = [*map(str, sheet.labels), *(heading.title for heading in sheet.headings)]
    title = [f"**{sheet.title}**", ""] if sheet.title else []
    out = [*title, *_pipes([head, ["---"] * len(head)])]
    for block, labels, cells in sheet.rows(stress=_bold):
        if block:
            out += _pipes([[f"*{block}*", *[""] * (len(head) - 1)]])
        out += _pipes([[*labels, *("<br>".join(cell.values()) for cell in cells)]])
    if len(sheet.below):
        rule = ["---"] * len(sheet.below.columns)
        out += ["", *_pipes([[*map(str, sheet.below)], rule, *sheet.below.to_numpy().tolist()])]
    out += ["", *(f"- {note}" for note in sheet.notes)]
    out += ["", "**Runs**", ""] * bool(sheet.runs)
    out += [f"{k}. {text}" for k, text in enumerate(sheet.runs, start=1)]
    return "\n".join(out) + "\n"


def _bold(text: str) -> str:
    """The text with its number in bold, without spread and ratio."""
    number, space, rest = text.partition(" ")
    return text if text == MISSING else f"**{number}**{space}{rest}"


def _pipes(rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in rows]


def to_latex(sheet: Sheet) -> str:
    r"""A booktabs table; notes and the runs behind it are comments.

    Special characters are escaped and marks become daggers. Several lines of a cell are one
    \shortstack. The document needs the package booktabs.
    """
    heads = [*(("", str(name)) for name in sheet.labels)]
    heads += [(heading.group, heading.name) for heading in sheet.headings]
    body = [
        [*map(_escape, labels), *(_stacked([_escape(t) for t in c.values()]) for c in cells)]
        for _, labels, cells in sheet.rows()
    ]
    if any(sheet.blocks):
        heads.insert(0, ("", ""))
        body = [[_escape(block), *row] for block, row in zip(sheet.blocks, body, strict=True)]
    names = pd.MultiIndex.from_tuples([(_escape(group), _escape(name)) for group, name in heads])
    has_groups = any(heading.group for heading in sheet.headings)
    text = pd.DataFrame(body, columns=names if has_groups else names.droplevel(0)).to_latex(
        index=False,
        caption=_escape(sheet.title) or None,
        column_format="l" * len(heads),
        multicolumn_format="l",
    )
    comments = [*sheet.notes, *("; ".join(row) for row in sheet.below.to_numpy())]
    comments += [f"[{k}] {run}" for k, run in enumerate(sheet.runs, start=1)]
    return text + "".join(f"% {comment}\n" for comment in comments)


def to_csv(sheet: Sheet) -> str:
    """A line for each row: its labels, then each number and, if a column has any, its error.

    Numbers are not rounded. If cells have seeds, a column has their number.

    >>> from flray.reports.sheets import sheet_of
    >>> labels = pd.DataFrame({"experiment": ["fedavg"]}, index=["fedavg"])
    >>> cells = {("fedavg", "ari", "ours"): {"value": 0.5, "error": 0.125, "seeds": (0, 1)}}
    >>> print(to_csv(sheet_of("", labels, ["ari"], cells)), end="")
    experiment,seeds,ARI,ARI ±
    fedavg,2,0.5,0.125
    """
    return numbers_of(sheet).to_csv(index=False)


def numbers_of(sheet: Sheet) -> pd.DataFrame:
    """The columns of `to_csv`, with the rows of the sheet as index."""
    frame = sheet.labels.copy()
    numbers = sheet.cells.reset_index("source", drop=True)
    seeds = numbers["seeds"].map(len).groupby("row").max()
    if (seeds > 0).any():
        frame["seeds"] = seeds
    for heading in sheet.headings:
        column = numbers.xs(heading.key, level="column")
        title = column_of(heading.key).label if is_recorded(heading.key) else heading.title
        frame[title] = column["value"]
        if column["error"].notna().any():
            frame[f"{title} ±"] = column["error"]
    return frame


def _stacked(texts: Sequence[str]) -> str:
    joined = r" \\ ".join(texts)
    return joined if len(texts) == 1 else rf"\shortstack[l]{{{joined}}}"


_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "ρ": r"$\rho$",
    "²": r"\textsuperscript{2}",
    GROUND_TRUTH: r"$\dagger$",
    INCOMPLETE: r"$\ddagger$",
    "·": r"$\cdot$",
    MISSING: "--",
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)

"""Writers of sheets: for the terminal, as Markdown and as LaTeX. Pages have a template."""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from flray.report.sheets import GROUND_TRUTH, INCOMPLETE, MISSING, Sheet

MAX_WIDTH = 21  # of a column in the terminal
MAX_LABEL = 16  # of a lone column of names; longer ones are folded

Format = Literal["rich", "md", "latex", "csv"]

_PREFIX = {"paper": "paper ", "difference": "diff. ", "test": "test "}
_STYLE = {"ours": "bold", "paper": "dim", "difference": "", "test": "italic"}


def cell_lines(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Source and text of each line of a cell; a formula or a lone number has no prefix."""
    if "ours" not in texts:
        return list(texts.items()) or [("ours", MISSING)]
    return [(source, _PREFIX.get(source, "") + text) for source, text in texts.items()]


def label_texts(sheet: Sheet) -> list[list[str]]:
    """The labels of each row; the first of several is left out where it repeats the one above."""
    rows = [[str(label) for label in row] for row in sheet.labels.to_numpy()]
    return [
        ["", *row[1:]] if k and len(row) > 1 and row[0] == rows[k - 1][0] else row
        for k, row in enumerate(rows)
    ]


def to_rich(sheet: Sheet) -> RenderableType:
    grid = RichTable(
        title=sheet.title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        show_edge=False,
    )
    to_right = not any(heading.group for heading in sheet.headings)
    alone = to_right and len(sheet.labels.columns) == 1
    for name in sheet.labels:
        grid.add_column(str(name), max_width=MAX_LABEL if alone else None, overflow="fold")
    for heading in sheet.headings:
        title = f"{heading.group}\n{heading.name}" if heading.group else heading.name
        # Wider cells are wrapped, so that four such columns fit into 100 characters.
        width = None if to_right else MAX_WIDTH
        grid.add_column(title, justify="right" if to_right else "left", max_width=width)
    lines, block = sheet.lines(), ""
    for k, (row, labels) in enumerate(zip(sheet.labels.index, label_texts(sheet), strict=True)):
        if sheet.blocks and sheet.blocks[k] != block:
            block = sheet.blocks[k]
            grid.add_section()
            grid.add_row(Text(block, style="italic"))
        cells = [_rich_cell(lines[row, heading.key]) for heading in sheet.headings]
        grid.add_row(*map(Text, labels), *cells)
    parts: list[RenderableType] = [grid]
    if len(sheet.below):
        ranks = RichTable(*map(str, sheet.below), box=box.SIMPLE_HEAD)
        for texts in sheet.below.to_numpy():
            ranks.add_row(*map(Text, texts))
        parts.append(ranks)
    parts += [Text(note, style="dim") for note in sheet.notes]
    if sheet.runs:
        parts.append(Text("runs", style="bold"))
    parts += [Text(f"[{k}] {text}") for k, text in enumerate(sheet.runs, start=1)]
    return Group(*parts)


def _rich_cell(texts: dict[str, str]) -> Text:
    lines = cell_lines(texts)
    shown = [Text(text.replace(" ± ", "±"), style=_STYLE[source]) for source, text in lines]
    return Text("\n").join(shown)


def to_markdown(sheet: Sheet) -> str:
    """A pipe table; the lines of a cell are separated by <br>, ours is bold."""
    head = [*map(str, sheet.labels), *(heading.title for heading in sheet.headings)]
    out = [f"**{sheet.title}**", "", _pipes(head), _pipes(["---"] * len(head))]
    lines, block = sheet.lines(), ""
    for k, (row, labels) in enumerate(zip(sheet.labels.index, label_texts(sheet), strict=True)):
        if sheet.blocks and sheet.blocks[k] != block:
            block = sheet.blocks[k]
            out.append(_pipes([f"*{block}*", *[""] * (len(head) - 1)]))
        cells = [cell_lines(lines[row, heading.key]) for heading in sheet.headings]
        out.append(_pipes([*labels, *("<br>".join(map(_markdown_line, cell)) for cell in cells)]))
    if len(sheet.below):
        out += ["", _pipes([*map(str, sheet.below)]), _pipes(["---"] * len(sheet.below.columns))]
        out += [_pipes(texts) for texts in sheet.below.to_numpy().tolist()]
    out += ["", *(f"- {note}" for note in sheet.notes)]
    if sheet.runs:
        out += ["", "**Runs**", ""]
    out += [f"{k}. {text}" for k, text in enumerate(sheet.runs, start=1)]
    return "\n".join(out) + "\n"


def _markdown_line(line: tuple[str, str]) -> str:
    source, text = line
    number, space, rest = text.partition(" ")
    is_bold = source == "ours" and text != MISSING
    return f"**{number}**{space}{rest}" if is_bold else text


def _pipes(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def to_latex(sheet: Sheet) -> str:
    """A booktabs table; notes and the runs behind it are comments."""
    has_groups = any(heading.group for heading in sheet.headings)
    lines = sheet.lines()
    columns: dict[tuple[str, str], list[str]] = {}
    if any(sheet.blocks):
        columns["", ""] = [_escape(block) for block in sheet.blocks]
    for k, name in enumerate(sheet.labels):
        columns["", _escape(str(name))] = [_escape(row[k]) for row in label_texts(sheet)]
    for heading in sheet.headings:
        cells = [cell_lines(lines[row, heading.key]) for row in sheet.labels.index]
        columns[_escape(heading.group), _escape(heading.name)] = [
            _stacked([_escape(text) for _, text in cell]) for cell in cells
        ]
    frame = pd.DataFrame(columns)
    if not has_groups:
        frame.columns = pd.Index([name for _, name in columns])
    text = frame.to_latex(
        index=False,
        caption=_escape(sheet.title),
        column_format="l" * len(columns),
        multicolumn_format="l",
    )
    below = [f"% {'; '.join(row)}" for row in sheet.below.to_numpy()]
    runs = [f"% [{k}] {behind}" for k, behind in enumerate(sheet.runs, start=1)]
    return text + "\n".join([*(f"% {note}" for note in sheet.notes), *below, *runs, ""])


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

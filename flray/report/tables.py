"""A paper's table with our numbers in it: for the terminal, as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from flray.published.tables import Column, Published, Table
from flray.report.cells import Cells, Filled, Ours
from flray.report.ranks import Place, Ranking, rank
from flray.report.runs import GROUND_TRUTH, GROUND_TRUTH_NOTE, INCOMPLETE, INCOMPLETE_NOTE

Format = Literal["rich", "md", "latex", "csv"]
MISSING = "–"

Behind = tuple[tuple[Path, ...], tuple[Path, ...]]  # the runs of a number, FedAvg's for its ratio


def render(table: Table, cells: Cells, form: Format) -> RenderableType:
    """The table in one of the formats; all but `rich` are text."""
    if form == "csv":
        return _csv(table, cells)
    writers: dict[Format, Callable[[_Sheet], RenderableType]] = {
        "rich": _rich,
        "md": _markdown,
        "latex": _latex,
    }
    return writers[form](_sheet(table, cells))


@dataclass(frozen=True)
class _Cell:
    """One cell as text."""

    ours: str  # "" for a formula, which no run can fill
    paper: str
    difference: str = ""
    test_selected: str = ""  # the papers' way, where there was a choice

    def line(self) -> str:
        text = f"{self.ours} / {self.paper}" if self.ours else self.paper
        text += f", {self.difference}" if self.difference else ""
        return text + (f"; test-selected {self.test_selected}" if self.test_selected else "")


@dataclass(frozen=True)
class _Line:
    block: str
    labels: tuple[str, ...]  # a label that repeats the one above is ""
    cells: tuple[_Cell, ...]


@dataclass(frozen=True)
class _Sheet:
    """What every format writes, laid out as the paper's table is."""

    table: Table
    lines: tuple[_Line, ...]
    ranks: tuple[tuple[str, str, str], ...]  # compared in, ranks, Spearman
    legend: tuple[str, ...]  # the runs behind number [1], [2], ...
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        table = self.table
        return f"{table.key} · {table.paper}, Table {table.number}. {table.caption}"

    @property
    def num_columns(self) -> int:
        return len(self.table.row_headings) + len(self.table.columns)


def _sheet(table: Table, cells: Cells) -> _Sheet:
    numbers = _numbers(cells)
    return _Sheet(
        table,
        tuple(_lines(table, cells, numbers)),
        tuple(_rank_line(table, ranking) for ranking in rank(table, cells)),
        tuple(_behind_text(behind) for behind in numbers),
        tuple(_notes(table, cells)),
    )


def _lines(table: Table, cells: Cells, numbers: dict[Behind, int]) -> Iterator[_Line]:
    above: tuple[str, ...] = ()
    for r, row in enumerate(table.rows):
        repeated = len(row.labels) > 1 and row.labels[:1] == above[:1]
        above = row.labels
        texts = []
        for column in table.columns:
            filled, printed = cells[r, column.key], row.cells[column.key]
            ours, test = filled.by_validation, filled.by_test
            texts.append(
                _Cell(
                    _ours_text(ours, column, numbers),
                    _paper_text(printed, column, table.has_ratios),
                    _difference(ours, printed, column),
                    "" if test is None else _ours_text(test, column, numbers),
                )
            )
        yield _Line(row.block, ("", *row.labels[1:]) if repeated else row.labels, tuple(texts))


def _ours_text(ours: Ours | None, column: Column, numbers: dict[Behind, int]) -> str:
    if ours is None:
        return "" if column.unit == "formula" else MISSING
    parts = [f"{ours.value:.{column.decimals}f}"]
    if ours.uses_ground_truth:
        parts[0] += GROUND_TRUTH
    if ours.missing_seeds:
        parts[0] += INCOMPLETE
    if ours.std is not None:
        parts.append(f"± {ours.std:.{column.decimals}f}")
    if ours.baselines:
        parts.append(_ratio_text(ours.ratio))
    parts.append(f"n={len(ours.seeds)}")
    if ours.error is not None:
        parts.append(f"se {ours.error:.{column.decimals}f}")
    return " ".join([*parts, f"[{numbers[_behind(ours)]}]"])


def _paper_text(printed: Published, column: Column, has_ratio: bool) -> str:
    if printed.text is not None:
        return printed.text
    if printed.value is None:
        return MISSING
    text = f"{printed.value:.{column.decimals}f}"
    if printed.spread is not None:
        text += f" ± {printed.spread:.{column.decimals}f}"
    return f"{text} {_ratio_text(printed.ratio)}" if has_ratio else text


def _ratio_text(ratio: float | None) -> str:
    return f"({MISSING})" if ratio is None else f"({ratio:.1f}x)"


def _difference(ours: Ours | None, printed: Published, column: Column) -> str:
    if ours is None or printed.value is None:
        return ""
    return f"{ours.value - printed.value:+.{column.decimals}f}"


def _behind(ours: Ours) -> Behind:
    return ours.runs, ours.baselines


def _numbers(cells: Cells) -> dict[Behind, int]:
    """Numbers for the sets of runs behind cells, as they come."""
    numbers: dict[Behind, int] = {}
    for filled in cells.values():
        for ours in (filled.by_validation, filled.by_test):
            if ours is not None:
                numbers.setdefault(_behind(ours), len(numbers) + 1)
    return numbers


def _behind_text(behind: Behind) -> str:
    runs, baselines = (", ".join(map(str, paths)) for paths in behind)
    return f"{runs}; FedAvg: {baselines}" if baselines else runs


def _rank_line(table: Table, ranking: Ranking) -> tuple[str, str, str]:
    ranks = [
        f"{_method(table, place)} {ours}/{ranking.paper[place]}"
        for place, ours in sorted(ranking.ours.items(), key=lambda item: item[1])
    ]
    spearman = MISSING if ranking.spearman is None else f"{ranking.spearman:.2f}"
    return ranking.title, ", ".join(ranks), spearman


def _method(table: Table, place: Place) -> str:
    r, key = place
    return table.rows[r].method or next(c.title for c in table.columns if c.key == key)


def _notes(table: Table, cells: Cells) -> Iterator[str]:
    filled = [cell for cell in cells.values() if cell.by_validation is not None]
    if not table.is_formulas:
        yield f"{len(filled)} of {len(cells)} cells are filled by runs; {MISSING} is missing."
    if filled:
        yield (
            "Ours, then the paper's and the difference; ours ± is the standard deviation over "
            "n seeds, [k] the runs listed below."
        )
    if any(cell.by_validation and cell.by_validation.error is not None for cell in filled):
        yield "se is the binomial standard error, which is what the paper's ± is."
    varied = sorted({key for cell in cells.values() for key in cell.varied})
    if any(cell.by_test for cell in cells.values()):
        yield (
            "Selected by validation accuracy, seed by seed, among runs that differ in "
            f"{', '.join(varied) or 'nothing but their folder'}. "
            "test-selected is the papers' way: the best by its own test number."
        )
    shown = [ours for c in cells.values() for ours in (c.by_validation, c.by_test) if ours]
    if any(ours.uses_ground_truth for ours in shown):
        yield GROUND_TRUTH_NOTE
    if any(ours.missing_seeds for ours in shown):
        yield INCOMPLETE_NOTE
    left_out = {path for cell in cells.values() for path in cell.left_out}
    if left_out:
        runs = "runs are" if len(left_out) > 1 else "run is"
        yield (
            f"{len(left_out)} {runs} left out of the choice: another seed of the configuration "
            "failed or did not finish."
        )
    if table.has_ratios and any(c.by_validation and not c.by_validation.baselines for c in filled):
        yield (
            "Ours without a ratio: no FedAvg run with these settings, seed and split has the round."
        )
    if any(c.by_validation and c.by_validation.ratio is not None for c in filled):
        yield "(x) ours is the mean over seeds of the ratio to FedAvg with the same seed and split."
    if table.metric:
        yield f"Paper: {table.metric}."
    if table.note:
        yield f"Paper: {table.note}."
    for note in dict.fromkeys(row.note for row in table.rows if row.note):
        rows = dict.fromkeys(", ".join(row.labels) for row in table.rows if row.note == note)
        yield f"Paper, {'; '.join(rows)}: {note}."


def _rich(sheet: _Sheet) -> Group:
    table = sheet.table
    grid = RichTable(
        title=sheet.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for heading in table.row_headings:
        grid.add_column(heading)
    for column in table.columns:
        grid.add_column(f"{column.group}\n{column.name}" if column.group else column.name)
    block = ""
    for line in sheet.lines:
        if line.block != block:
            block = line.block
            grid.add_section()
            grid.add_row(Text(block, style="italic"))
        grid.add_row(*map(Text, line.labels), *map(_rich_cell, line.cells))
    parts: list[RenderableType] = [grid, Text()]
    if sheet.ranks:
        ranks = RichTable("compared in", "ranks, ours/paper", "Spearman", box=box.SIMPLE_HEAD)
        for texts in sheet.ranks:
            ranks.add_row(*map(Text, texts))
        parts.append(ranks)
    parts += [Text(note) for note in sheet.notes]
    if sheet.legend:
        parts.append(Text("runs", style="bold"))
    parts += [Text(f"[{k}] {text}") for k, text in enumerate(sheet.legend, start=1)]
    return Group(*parts)


def _rich_cell(cell: _Cell) -> Text:
    if not cell.ours:
        return Text(cell.paper)
    text = Text(cell.ours, style="bold" if cell.ours != MISSING else "dim")
    text.append(f"\npaper {cell.paper}", style="not bold dim")
    if cell.difference:
        text.append(f" {cell.difference}", style="not bold")
    if cell.test_selected:
        text.append(f"\ntest-selected\n{cell.test_selected}", style="not bold italic")
    return text


def _markdown(sheet: _Sheet) -> str:
    table = sheet.table
    headings = [*table.row_headings, *(column.title for column in table.columns)]
    out = [f"**{sheet.title}**", "", _pipes(headings), _pipes(["---"] * sheet.num_columns)]
    block = ""
    for line in sheet.lines:
        if line.block != block:
            block = line.block
            out.append(_pipes([f"*{block}*", *[""] * (sheet.num_columns - 1)]))
        out.append(_pipes([*line.labels, *(cell.line() for cell in line.cells)]))
    if sheet.ranks:
        out += ["", _pipes(["compared in", "ranks, ours/paper", "Spearman"]), _pipes(["---"] * 3)]
        out += [_pipes(texts) for texts in sheet.ranks]
    out += ["", *(f"- {note}" for note in sheet.notes)]
    if sheet.legend:
        out += ["", "**Runs**", ""]
    out += [f"{k}. {text}" for k, text in enumerate(sheet.legend, start=1)]
    return "\n".join(out) + "\n"


def _pipes(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _latex(sheet: _Sheet) -> str:
    """A booktabs table; the runs behind it are comments."""
    table, num_labels = sheet.table, len(sheet.table.row_headings)
    out = [
        r"\begin{table}",
        rf"\caption{{{_escape(sheet.title)}}}",
        rf"\begin{{tabular}}{{{'l' * sheet.num_columns}}}",
        r"\toprule",
    ]
    if any(column.group for column in table.columns):
        groups = [(name, len(list(each))) for name, each in groupby(c.group for c in table.columns)]
        spans = [rf"\multicolumn{{{n}}}{{l}}{{{_escape(name)}}}" for name, n in groups]
        out.append(_ampersands(["", *[""] * (num_labels - 1), *spans]))
    names = [*table.row_headings, *(column.name for column in table.columns)]
    out += [_ampersands([_escape(name) for name in names]), r"\midrule"]
    block = ""
    for line in sheet.lines:
        if line.block != block:
            block = line.block
            out.append(rf"\multicolumn{{{sheet.num_columns}}}{{l}}{{{_escape(block)}}} \\")
        texts = [*line.labels, *(cell.line() for cell in line.cells)]
        out.append(_ampersands([_escape(text) for text in texts]))
    out += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    out += [f"% {note}" for note in sheet.notes]
    out += [f"% ranks, {where}: {ranks}; Spearman {rho}" for where, ranks, rho in sheet.ranks]
    out += [f"% [{k}] {text}" for k, text in enumerate(sheet.legend, start=1)]
    return "\n".join(out) + "\n"


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


def _ampersands(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


_CSV_HEADER = (
    *("table", "block", "row", "column", "unit"),
    *("ours", "std", "seeds", "se", "ratio"),
    *("paper", "paper_spread", "paper_ratio", "difference"),
    *("rank", "paper_rank", "spearman", "uses_ground_truth", "missing_seeds"),
    *("test_selected", "test_selected_std", "runs", "fedavg_runs", "test_selected_runs"),
)


def _csv(table: Table, cells: Cells) -> str:
    """A line for each cell, empty fields for what is missing; several runs are joined by `;`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV_HEADER, lineterminator="\n")
    writer.writeheader()
    rankings = rank(table, cells)
    for (r, key), filled in cells.items():
        row, column = table.rows[r], next(c for c in table.columns if c.key == key)
        printed = row.cells[key]
        writer.writerow(
            {
                "table": table.key,
                "block": row.block,
                "row": ", ".join(row.labels),
                "column": key,
                "unit": column.unit,
                "paper": printed.value if printed.text is None else printed.text,
                "paper_spread": printed.spread,
                "paper_ratio": printed.ratio,
                **_csv_ours(filled, printed),
                **_csv_ranks(rankings, (r, key)),
            }
        )
    return out.getvalue()


def _csv_ours(filled: Filled, printed: Published) -> dict[str, object]:
    fields: dict[str, object] = {}
    ours, test = filled.by_validation, filled.by_test
    if ours is not None:
        fields |= {
            "ours": ours.value,
            "std": ours.std,
            "seeds": len(ours.seeds),
            "se": ours.error,
            "ratio": ours.ratio,
            "difference": None if printed.value is None else ours.value - printed.value,
            "uses_ground_truth": ours.uses_ground_truth,
            "missing_seeds": ours.missing_seeds,
            "runs": _joined(ours.runs),
            "fedavg_runs": _joined(ours.baselines),
        }
    if test is not None:
        fields |= {
            "test_selected": test.value,
            "test_selected_std": test.std,
            "test_selected_runs": _joined(test.runs),
        }
    return fields


def _csv_ranks(rankings: Sequence[Ranking], place: Place) -> dict[str, object]:
    for ranking in rankings:
        if place in ranking.ours:
            ours, paper = ranking.ours[place], ranking.paper[place]
            return {"rank": ours, "paper_rank": paper, "spearman": ranking.spearman}
    return {}


def _joined(paths: Sequence[Path]) -> str:
    return ";".join(map(str, paths))

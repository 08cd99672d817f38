"""The form of every table: a long data frame of numbers, and its layout.

Each kind of table (comparison, best of a sweep, published table, measures) makes a `Sheet` with
`sheet_of`. `flray.reports.writers` writes sheets for the terminal and as text, templates write them
into pages, so that marks, decimals and ± are decided here once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from flray.columns import ARI, ScoreColumn
from flray.reports.columns import MISSING, Heading, column_of, decimals_of
from flray.reports.runs import RunRecord

GROUND_TRUTH, INCOMPLETE = "†", "‡"
GROUND_TRUTH_NOTE = (
    f"{GROUND_TRUTH} uses ground truth: labels or groups that a real server does not know."
)
INCOMPLETE_NOTE = (
    f"{INCOMPLETE} a seed of this configuration failed or did not finish: "
    "the number is of its other seeds."
)

Fields = dict[str, Any]  # fields of a cell by the names of FIELDS; Any: see there
Cells = Mapping[tuple[Any, str, str], Fields]  # by row, column and source; Any: an index of labels

PREFIXES = {"ours": "", "paper": "paper ", "difference": "diff. ", "test": "test "}  # by source
FIELDS = {  # fields of a cell with their defaults
    "value": np.nan,  # mean over seeds, in the unit of its column
    "error": np.nan,  # shown behind ±
    "seeds": (),
    "se": np.nan,  # recorded standard error, a mean over seeds
    "ratio": np.nan,  # ratio to FedAvg
    "has_ratio": False,  # True: show a ratio, MISSING if there is none
    "uses_ground_truth": False,
    "missing_seeds": 0,
    "text": "",  # shown instead of a value
    "runs": (),
    "baselines": (),  # runs that the ratio is taken to
}


@dataclass(frozen=True)
class Sheet:
    """A table that every writer writes: labels of rows, headings of columns, and cells.

    A cell has up to four numbers, one per source (`ours`, `paper`, `difference`, `test`).

    >>> labels = pd.DataFrame({"experiment": ["fedavg"]}, index=["fedavg"])
    >>> cells = {("fedavg", "accuracy_mean", "ours"): {"value": 78.125, "error": 0.5}}
    >>> sheet = sheet_of("one run", labels, ["accuracy_mean"], cells)
    >>> next(sheet.rows())
    ('', ['fedavg'], [{'ours': '78.12 ± 0.50'}])
    """

    title: str
    labels: pd.DataFrame  # a row of texts for each row of the table
    headings: tuple[Heading, ...]
    cells: pd.DataFrame  # as `numbers` returns it
    blocks: tuple[str, ...] = ()  # heading above each row; (): no such headings
    notes: tuple[str, ...] = ()
    below: pd.DataFrame = field(default_factory=pd.DataFrame)  # second table, of texts
    numbers_runs: bool = False  # True: cells refer to the runs behind them by number
    ratio_decimals: int = 2

    @cached_property
    def references(self) -> dict[tuple[Any, Any], int]:
        """The distinct pairs of runs and baselines behind numbers, counted from 1.

        Cells show the count in square brackets, `runs` lists what it stands for. Empty unless
        `numbers_runs`.
        """
        pairs = zip(self.cells["runs"], self.cells["baselines"], strict=True)
        distinct = dict.fromkeys(pair for pair in pairs if pair[0]) if self.numbers_runs else ()
        return {pair: k for k, pair in enumerate(distinct, start=1)}

    @property
    def runs(self) -> list[str]:
        """A line for each of [1], [2], ... with the runs behind it."""
        joined = [[", ".join(map(str, paths)) for paths in pair] for pair in self.references]
        return [f"{runs}; FedAvg: {base}" if base else runs for runs, base in joined]

    @cached_property
    def bold(self) -> set[tuple[Any, str]]:
        """The cells to stress, by row and column: ours beside a paper's, or the best of a column.

        The best are equal as shown. Rows that use ground truth, or have a text instead of a number,
        are not compared with the others.
        """
        sources = self.cells.index.get_level_values("source")
        ours = self.cells[sources == "ours"].droplevel("source")
        if "paper" in sources:
            return set(ours.index)
        is_apart = (ours["uses_ground_truth"].astype(bool) | (ours["text"] != "")).groupby("row")
        compared = ours["value"][~is_apart.transform("any")].dropna().unstack("column")
        best: set[tuple[Any, str]] = set()
        for heading in self.headings:
            values = compared.get(heading.key, pd.Series(dtype=float)).round(heading.decimals)
            if heading.higher_is_better is not None and values.nunique() > 1:
                top = values.max() if heading.higher_is_better else values.min()
                best |= {(row, heading.key) for row in values.index[values == top]}
        return best

    def lines(self) -> dict[tuple[Any, str], dict[str, str]]:
        """The text of every cell by source, in the order of PREFIXES.

        Keys are pairs of a row (index of `labels`) and a column's key; every pair has an entry, {}
        for a cell without a number. Where the paper has a number and no run fills the cell, ours is
        MISSING.
        """
        decimals = {heading.key: heading.decimals for heading in self.headings}
        texts: dict[tuple[Any, str], dict[str, str]] = {
            (row, key): {} for row in self.labels.index for key in decimals
        }
        records = self.cells.to_dict("records")
        for (row, column, source), cell in zip(self.cells.index.tolist(), records, strict=True):
            sign = "+" if source == "difference" else ""
            texts[row, column][source] = self._text(cell, decimals[column], sign)
            if source == "paper" and not cell["text"]:  # a run could fill the cell
                texts[row, column].setdefault("ours", MISSING)
        return {
            position: {source: by_source[source] for source in PREFIXES if source in by_source}
            for position, by_source in texts.items()
        }

    def rows(
        self, repeats: bool = False, stress: Callable[[str], str] = str
    ) -> Iterator[tuple[str, list[str], list[dict[str, str]]]]:
        """For each row the heading of a block that begins there, its labels, and its cells.

        A cell is its lines by source; a line begins with the name of its source, except ours and a
        number that stands alone.

        Args:
            repeats: Show the first of several labels also where it repeats the one above.
            stress: Changes the text of ours in the cells of `bold`.
        """
        lines, above, block = self.lines(), None, ""
        for k, (row, *labels) in enumerate(self.labels.itertuples()):
            begins = self.blocks[k] if self.blocks and self.blocks[k] != block else ""
            block = begins or block
            is_shown = repeats or len(labels) == 1 or labels[0] != above
            shown = labels if is_shown else ["", *labels[1:]]
            above = labels[0]
            cells = [_prefixed(lines[row, heading.key]) for heading in self.headings]
            for heading, cell in zip(self.headings, cells, strict=True):
                if (row, heading.key) in self.bold:
                    cell["ours"] = stress(cell["ours"])
            yield begins, [str(label) for label in shown], cells

    def _text(self, cell: Mapping[Any, Any], decimals: int, sign: str) -> str:
        """A number with its marks, error and ratio, its seeds, standard error and runs."""
        if cell["text"]:
            return str(cell["text"])
        text = MISSING
        if not np.isnan(cell["value"]):
            text = f"{cell['value']:{sign},.{decimals}f}"
            text += marks(cell["uses_ground_truth"], cell["missing_seeds"])
            if not np.isnan(cell["error"]):
                text += f" ± {cell['error']:,.{decimals}f}"
            if cell["has_ratio"]:
                ratio = f"{cell['ratio']:.{self.ratio_decimals}f}x"
                text += f" ({MISSING if np.isnan(cell['ratio']) else ratio})"
        if cell["seeds"] and self._numbers_of_seeds_differ:
            text += f" n={len(cell['seeds'])}"
        if not np.isnan(cell["se"]):
            text += f" se {cell['se']:.{decimals}f}"
        reference = self.references.get((cell["runs"], cell["baselines"]))
        return text if reference is None else f"{text} [{reference}]"

    @cached_property
    def _numbers_of_seeds_differ(self) -> bool:
        return len({len(seeds) for seeds in self.cells["seeds"] if seeds}) > 1


def sheet_of(
    title: str,
    labels: pd.DataFrame,
    columns: Sequence[str | Heading],
    cells: Cells,
    notes: Iterable[str] = (),
) -> Sheet:
    """A sheet with notes that explain the marks that occur in it.

    Args:
        title: Title of the table, "" for none.
        labels: A row of texts for each row of the table; its index are the rows of `cells`.
        columns: Headings, or keys of recorded columns, whose heading and decimals follow from
            `column_of` and the numbers.
        cells: Fields of each number, scaled to the unit of its column.
        notes: Sentences below the table.
    """
    frame = numbers(cells)
    headings = tuple(c if isinstance(c, Heading) else _heading(c, frame) for c in columns)
    return Sheet(title, labels, headings, frame, notes=(*notes, *mark_notes(frame)))


def numbers(cells: Cells) -> pd.DataFrame:
    """The cells of a sheet: a row for each number, a column for each of FIELDS.

    The index has the levels `row`, `column` and `source`, in the order of `cells`; fields that a
    cell does not have are the defaults of FIELDS, and None becomes NaN where numbers are expected.

    >>> frame = numbers({("fedavg", "ari", "ours"): {"value": 0.5, "error": None}})
    >>> frame.index.tolist(), frame["value"].tolist(), frame["error"].tolist()
    ([('fedavg', 'ari', 'ours')], [0.5], [nan])
    """
    frame = pd.DataFrame(
        [{**FIELDS, **cell} for cell in cells.values()],
        index=pd.MultiIndex.from_tuples(list(cells), names=["row", "column", "source"]),
        columns=list(FIELDS),
    )
    return frame.astype(dict.fromkeys(("value", "error", "se", "ratio"), float))


def seed_mean(values: Sequence[float]) -> Fields:
    """The fields of a mean over seeds: `value`, and the standard deviation as `error`.

    The deviation (ddof 1) is None for one seed, the mean NaN for none.

    >>> seed_mean([1.0, 3.0])["value"], seed_mean([1.0])["error"]
    (2.0, None)
    """
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"value": float(np.mean(values)) if len(values) else np.nan, "error": spread}


def mark_fields(runs: Sequence[RunRecord]) -> Fields:
    """The fields that mark a number of these runs: ground truth if one read it, missing seeds.

    Args:
        runs: At least one run; the largest `missing_seeds` counts.
    """
    return {
        "uses_ground_truth": any(run.uses_ground_truth for run in runs),
        "missing_seeds": max(run.missing_seeds for run in runs),
    }


def marks(uses_ground_truth: bool, missing_seeds: float) -> str:
    """The marks behind a number.

    >>> marks(True, 2)
    '†‡'
    """
    return GROUND_TRUTH * bool(uses_ground_truth) + INCOMPLETE * bool(missing_seeds > 0)


def mark_notes(cells: pd.DataFrame) -> Iterator[str]:
    """The meaning of each mark that occurs in the cells, as sentences for below the table."""
    if cells["uses_ground_truth"].any():
        yield GROUND_TRUTH_NOTE
    if (cells["missing_seeds"] > 0).any():
        yield INCOMPLETE_NOTE


def _heading(key: str, cells: pd.DataFrame) -> Heading:
    column = column_of(key)
    numbers_of_key = cells[cells.index.get_level_values("column") == key][["value", "error"]]
    decimals = decimals_of(key, numbers_of_key.to_numpy().flat)
    higher = True if key == ARI else None
    if isinstance(key, ScoreColumn):
        higher = key.score.higher_is_better and not key.endswith("variance")
    return Heading(key, column.short or column.title, column.group, decimals, higher)


def _prefixed(texts: Mapping[str, str]) -> dict[str, str]:
    if "ours" not in texts:
        return dict(texts) or {"ours": MISSING}
    return {source: PREFIXES[source] + text for source, text in texts.items()}

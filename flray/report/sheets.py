"""One shape for every table: a long DataFrame of numbers, and how it is laid out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

MISSING = "–"
GROUND_TRUTH, INCOMPLETE = "†", "‡"
GROUND_TRUTH_NOTE = (
    f"{GROUND_TRUTH} uses ground truth: labels or groups that a real server does not know."
)
INCOMPLETE_NOTE = (
    f"{INCOMPLETE} a seed of this configuration failed or did not finish: the number is of others."
)

PLACE = ["row", "column", "source"]  # the index; source is one of SOURCES
SOURCES = ("ours", "paper", "difference", "test")
FIELDS = {  # the columns, and what they hold where nothing is given
    "value": np.nan,  # in the unit of its column, a mean over seeds
    "error": np.nan,  # behind ±
    "seeds": (),
    "se": np.nan,  # the binomial standard error, a mean over seeds
    "ratio": np.nan,  # to FedAvg
    "has_ratio": False,  # a ratio belongs here, even if there is none
    "uses_ground_truth": False,
    "missing_seeds": 0,
    "text": "",  # in the place of a value
    "runs": (),
    "baselines": (),  # the runs that the ratio is taken to
}


@dataclass(frozen=True)
class Heading:
    """A column of numbers."""

    key: str
    name: str
    group: str = ""  # above several columns
    decimals: int = 2

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}".strip()


@dataclass(frozen=True)
class Sheet:
    """A table that every writer writes."""

    title: str
    labels: pd.DataFrame  # text; its index is the rows
    headings: tuple[Heading, ...]
    cells: pd.DataFrame  # as made by `numbers`
    blocks: tuple[str, ...] = ()  # the heading above each row; () for none
    notes: tuple[str, ...] = ()
    below: pd.DataFrame = field(default_factory=pd.DataFrame)  # text
    numbers_runs: bool = False  # cells name the runs behind them by number
    ratio_decimals: int = 2

    @property
    def behind(self) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """The distinct sets of runs and baselines behind numbers, in the order of cells."""
        if not self.numbers_runs:
            return []
        pairs = zip(self.cells["runs"], self.cells["baselines"], strict=True)
        return list(dict.fromkeys(pair for pair in pairs if pair[0]))

    @property
    def runs(self) -> list[str]:
        """Lines that say which runs are behind [1], [2], ..."""
        joined = [[", ".join(map(str, paths)) for paths in pair] for pair in self.behind]
        return [f"{runs}; FedAvg: {base}" if base else runs for runs, base in joined]

    @property
    def common_seeds(self) -> int | None:
        """The number of seeds if it is the same behind every number, else None."""
        counts = {len(seeds) for seeds in self.cells["seeds"] if seeds}
        return counts.pop() if len(counts) == 1 else None

    def lines(self) -> dict[tuple[Any, str], dict[str, str]]:
        """The text of every cell by source, in the order of SOURCES."""
        number = {pair: k for k, pair in enumerate(self.behind, start=1)}
        decimals = {heading.key: heading.decimals for heading in self.headings}
        found: dict[tuple[Any, str], dict[str, str]] = {
            (row, heading.key): {} for row in self.labels.index for heading in self.headings
        }
        records = self.cells.to_dict("records")
        for (row, column, source), cell in zip(self.cells.index.tolist(), records, strict=True):
            text = _text(cell, decimals[column], self.ratio_decimals, source == "difference")
            if cell["seeds"] and self.common_seeds is None:
                text += f" n={len(cell['seeds'])}"
            if not np.isnan(cell["se"]):
                text += f" se {cell['se']:.{decimals[column]}f}"
            if (cell["runs"], cell["baselines"]) in number:
                text += f" [{number[cell['runs'], cell['baselines']]}]"
            found[row, column][source] = text
            if source == "paper" and not cell["text"]:  # a run could fill the cell
                found[row, column].setdefault("ours", MISSING)
        return {
            place: {source: texts[source] for source in SOURCES if source in texts}
            for place, texts in found.items()
        }


def numbers(cells: Mapping[tuple[Any, str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """The frame of a sheet from the fields of each cell by row, column and source."""
    frame = pd.DataFrame(
        [{**FIELDS, **cell} for cell in cells.values()],
        index=pd.MultiIndex.from_tuples(list(cells), names=PLACE),
        columns=list(FIELDS),
    )
    return frame.astype(dict.fromkeys(("value", "error", "se", "ratio"), float))


def marks(uses_ground_truth: bool, missing_seeds: float) -> str:
    """
    >>> marks(True, 2)
    '†‡'
    """
    return GROUND_TRUTH * bool(uses_ground_truth) + INCOMPLETE * bool(missing_seeds > 0)


def mark_notes(cells: pd.DataFrame) -> Iterator[str]:
    """What the marks that occur in the cells mean."""
    if cells["uses_ground_truth"].any():
        yield GROUND_TRUTH_NOTE
    if (cells["missing_seeds"] > 0).any():
        yield INCOMPLETE_NOTE


def _text(cell: Mapping[Any, Any], decimals: int, ratio_decimals: int, is_signed: bool) -> str:
    if cell["text"]:
        return str(cell["text"])
    if np.isnan(cell["value"]):
        return MISSING
    text = f"{cell['value']:{'+' if is_signed else ''},.{decimals}f}"
    text += marks(cell["uses_ground_truth"], cell["missing_seeds"])
    if not np.isnan(cell["error"]):
        text += f" ± {cell['error']:,.{decimals}f}"
    if cell["has_ratio"]:
        ratio = cell["ratio"]
        text += f" ({MISSING})" if np.isnan(ratio) else f" ({ratio:.{ratio_decimals}f}x)"
    return text

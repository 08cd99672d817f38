"""A sweep over methods and splits as one comparison: chosen configurations, ranks, tables.

For each method and split the hyper-parameters are those with the best mean validation score over
seeds, judged as the models are: as deployed, or after local training. Test scores choose nothing.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from flray import columns as recorded
from flray.columns import FOLDER, STATUS, USES_GROUND_TRUTH, ScoreColumns
from flray.config.deciding import leaves
from flray.errors import ExperimentError
from flray.reports.columns import Heading, column_of, value_text
from flray.reports.mean_ranks import critical_difference, friedman, split_ranks
from flray.reports.sheets import Sheet, marks, sheet_of
from flray.reports.sweeps import MISSING_ROWS, NOT_FINISHED, SPREAD, Sweep, averaged, grouping
from flray.reports.writers import numbers_of
from flray.sweeps.ranking import ranks
from flray.wording import capitalised, counted

METHOD, SPLIT, TOLD = "method", "experiment", "told"
PROTOCOLS = {"as deployed": "", "after local training": "tuned_"}  # prefixes of columns
SHORT = {"as deployed": "deployed", "after local training": "tuned"}  # in headings
BYTES, WORST, SCORE, SETTINGS = "bytes", "worst", "score", "settings"
MEAN_RANK = "mean rank"
COSTS = {  # numbers of a method that do not depend on the protocol, with scale and decimals
    recorded.ARI: ("ARI", 1.0, 2),
    BYTES: ("MB", 1e-6, 1),
    recorded.CLIENT_STEPS: ("client steps", 1.0, 0),
    recorded.SECONDS: ("seconds", 1.0, 1),
}
RULE = (
    "Ranks are of means over seeds, equal scores share theirs. Methods with a score in every split "
    "are ranked among each other; others have, in brackets, the mean of the ranks they would have "
    "among them in the splits that they apply to."
)


@dataclass(frozen=True)
class Benchmark:
    """The methods of a sweep on its splits, under one protocol; `benchmarks_of` makes it."""

    protocol: str
    cells: pd.DataFrame  # by method and split: score, deviation, costs, settings, folder
    scores_of: dict[str, ScoreColumns]  # by split

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The score of each method (rows) in each split (columns), NaN where there is none."""
        return self._matrix(SCORE)

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """The rank of each method in each split (`mean_ranks.split_ranks`)."""
        return split_ranks(self.scores, [s.higher_is_better for s in self.scores_of.values()])

    @property
    def is_complete(self) -> "pd.Series[bool]":
        """True for the methods that have a score in every split."""
        return self.scores.notna().all(axis=1)

    @cached_property
    def mean_ranks(self) -> "pd.Series[float]":
        """The mean rank of each method, ascending; incomplete ones in between."""
        return self.ranks.mean(axis=1).sort_values(kind="stable")

    @property
    def difference(self) -> float:
        """The critical difference of the mean ranks of complete methods; NaN for fewer than two."""
        number = int(self.is_complete.sum())
        return critical_difference(number, self.ranks.shape[1]) if number > 1 else float("nan")

    @property
    def test(self) -> str:
        """The Friedman test and the critical difference in a sentence."""
        complete = self.ranks[self.is_complete]
        words = f"{self.protocol}: {counted(len(complete), 'method')} on "
        words += f"{counted(complete.shape[1], 'split')}"
        statistic, p = friedman(complete)
        if math.isnan(statistic):
            return f"{words}, too few to test"
        return (
            f"{words}, Friedman's χ² {statistic:.1f} (p = {p:.2g}), critical difference "
            f"{self.difference:.2f} (α = 5 %)"
        )

    @cached_property
    def usual_score(self) -> ScoreColumns:
        """The score that most splits have, the first one of equals."""
        return Counter(self.scores_of.values()).most_common(1)[0][0]

    @property
    def usual_splits(self) -> list[str]:
        """The splits that have `usual_score`."""
        return [split for split, score in self.scores_of.items() if score == self.usual_score]

    def column(self, name: str, splits: Sequence[str] | None = None) -> "pd.Series[float]":
        """The mean of a number of each method over its splits, or over those that are named."""
        matrix = self._matrix(name)
        return (matrix if splits is None else matrix[list(splits)]).mean(axis=1)

    def _matrix(self, name: str) -> pd.DataFrame:
        matrix = self.cells[name].unstack(SPLIT)
        order = self.cells.index.get_level_values(METHOD).unique()
        return matrix.reindex(index=order, columns=list(self.scores_of)).astype(float)


def is_benchmark(sweep: Sweep) -> bool:
    """True if the space of a sweep names methods."""
    return bool(sweep.space.get("methods")) and METHOD in sweep.rows


def joined(sweeps: Sequence[Sweep]) -> Sweep:
    """Several benchmarks as one, with the splits and methods of all of them.

    Raises:
        ExperimentError: Two of them have the same split.
    """
    if len(sweeps) == 1:
        return sweeps[0]
    parts, places = [], dict[str, Path]()
    for sweep in sweeps:
        folders = [str(sweep.path / str(folder)) for folder in sweep.rows[FOLDER]]
        rows = sweep.rows.assign(**{SPLIT: _splits(sweep), FOLDER: folders})
        parts.append(rows)
        for split in rows[SPLIT].unique():
            if (other := places.setdefault(split, sweep.path)) is not sweep.path:
                raise ExperimentError(f"split {split} is in {other} and in {sweep.path}: name one")
    methods = {name: keys for sweep in sweeps for name, keys in sweep.space["methods"].items()}
    scores = tuple(dict.fromkeys(score for sweep in sweeps for score in sweep.scores))
    space = {**sweeps[0].space, "methods": methods}
    rows = pd.concat(parts, ignore_index=True).copy()  # one block of memory for each type
    return Sweep(sweeps[0].path, rows, {}, space, scores)


def benchmarks_of(sweep: Sweep) -> list[Benchmark]:
    """A benchmark for each protocol that the rows were judged by, those as deployed first."""
    is_missing = sweep.rows[STATUS].isin(NOT_FINISHED)
    alike = grouping(sweep.rows, sweep.identifying)
    missing = is_missing.groupby(alike, dropna=False).transform("sum")
    rows = sweep.rows.assign(**{MISSING_ROWS: missing, SPLIT: _splits(sweep)})[~is_missing]
    rows[BYTES] = rows[[recorded.BYTES_UP, recorded.BYTES_DOWN]].sum(axis=1)
    scores_of = {str(name): _score_of(part) for name, part in rows.groupby(SPLIT, sort=False)}
    tried = _configurations(rows, sweep.identifying, set(scores_of.values()))
    benchmarks = []
    for protocol, prefix in PROTOCOLS.items():
        cells = {
            (str(method), str(split)): _cell(sweep, part, scores_of[str(split)], prefix)
            for (method, split), part in tried.groupby([METHOD, SPLIT], sort=False)
        }
        frame = pd.DataFrame.from_dict(cells, orient="index").rename_axis([METHOD, SPLIT])
        if frame[SCORE].notna().any():
            benchmarks.append(Benchmark(protocol, frame, scores_of))
    return benchmarks


def _splits(sweep: Sweep) -> "pd.Series[str] | str":
    """The split of each row; where there is one, rows lack it: the space has it, or the folder."""
    experiments = sweep.space.get("experiment")
    names = list(experiments) if isinstance(experiments, dict) else []
    return sweep.rows.get(SPLIT, names[0] if len(names) == 1 else sweep.path.name)


def _score_of(rows: pd.DataFrame) -> ScoreColumns:
    """The first score of the rows of a split; accuracy is not named in them."""
    first = rows.reindex(columns=[recorded.SCORE, recorded.SCORE_UNIT, recorded.SCORE_MODE]).iloc[0]
    if first.isna()[recorded.SCORE]:
        return recorded.ACCURACY_COLUMNS
    name, unit, mode = first.fillna("")
    return ScoreColumns(str(name), str(unit), mode == "max")


def _configurations(
    rows: pd.DataFrame, identifying: Sequence[str], scores: Collection[ScoreColumns]
) -> pd.DataFrame:
    """The means over seeds of each configuration of a method in a split, and its first folder."""
    judged = [
        score.column(*of) for score in scores for p in PROTOCOLS.values() for of in _judged(p)
    ]
    numbers = [*judged, *COSTS, USES_GROUND_TRUTH, MISSING_ROWS]
    keys = list(dict.fromkeys((METHOD, SPLIT, *identifying)))
    rows = rows.reindex(columns=list(dict.fromkeys((*keys, *numbers, FOLDER))))
    rows = rows.astype(dict.fromkeys(numbers, float))
    first = rows.groupby(keys, dropna=False, sort=False)[FOLDER].first()
    return averaged(rows, keys, numbers).assign(**{FOLDER: first.to_numpy()})


def _judged(prefix: str) -> tuple[tuple[str, str], ...]:
    """What a protocol reads of a score: its mean, its worst client, the mean that chooses."""
    return ("mean", prefix), ("worst", prefix), ("mean", f"{prefix}validation_")


def _cell(sweep: Sweep, tried: pd.DataFrame, score: ScoreColumns, prefix: str) -> dict[str, Any]:
    """The numbers of the configuration of a method in a split that validation chooses.

    Configurations of which rows are missing are chosen only if all miss some.
    """
    mean, worst, validation = (score.column(*of) for of in _judged(prefix))
    order = ranks(tried, validation, tried[MISSING_ROWS], score.higher_is_better)
    best = tried.iloc[int(order.to_numpy().argmin())]
    varied = [k for k in sweep.identifying if tried[k].nunique() > 1]
    return {
        SCORE: best[mean],
        SCORE + SPREAD: best[mean + SPREAD],
        WORST: best[worst],
        **{key: best[key] for key in (*COSTS, USES_GROUND_TRUTH, MISSING_ROWS, FOLDER)},
        SETTINGS: ", ".join(f"{sweep.names[k]} {value_text(best[k])}" for k in varied),
    }


def told_of(sweep: Sweep) -> dict[str, str]:
    """What each method was told, as texts: its own words, its number of models, its grid.

    A grid is what validation chose from; a number outside of one was given.
    """
    texts = {}
    for method, keys in sweep.space["methods"].items():
        named = {k.rpartition(".")[2]: v for k, v in leaves(keys).items()}
        words = [str(v) for k, v in named.items() if k == TOLD]
        words += [f"number {v}" for k, v in named.items() if k == "number" and type(v) is int]
        listed = [_grids(k, v) for k, v in named.items() if isinstance(v, list)]
        grids = {k: v for grid in listed for k, v in grid.items()}
        words += [f"{k} by validation of {', '.join(map(str, v))}" for k, v in grids.items()]
        texts[str(method)] = "; ".join(words)
    return texts


def _grids(key: str, values: list[Any]) -> dict[str, list[Any]]:  # Any: YAML
    """A list of values by its key; of mappings, a list for each key in which they differ.

    >>> _grids("partition", [{"name": "kmeans", "number": 2}, {"name": "kmeans", "number": 4}])
    {'number': [2, 4]}
    """
    if not all(isinstance(value, dict) for value in values):
        return {key: values}
    lists = {k: [value.get(k) for value in values] for k in values[0]}
    return {k: listed for k, listed in lists.items() if any(v != listed[0] for v in listed)}


def ranking_sheet(sweep: Sweep) -> Sheet:
    """Methods by mean rank: ranks, scores and worst clients of each protocol, costs, what was told.

    Scores and worst clients are means over the splits that a method applies to and that have the
    score of most splits.
    """
    benchmarks = benchmarks_of(sweep)
    first, told_texts = benchmarks[0], told_of(sweep)
    shown = [pair for benchmark in benchmarks for pair in _of_protocol(benchmark)]
    for key, (name, scale, decimals) in COSTS.items():
        better = True if key == recorded.ARI else None
        shown.append((Heading(key, name, "", decimals, better), scale * first.column(key)))
    cells: dict[tuple[Any, str, str], dict[str, Any]] = {}  # Any: see `Sheet`
    for heading, values in shown:
        is_rank = heading.name == MEAN_RANK
        for method, value in zip(values.index.astype(str), values.tolist(), strict=True):
            is_partial = is_rank and not first.is_complete[method]
            used = is_rank and first.column(USES_GROUND_TRUTH)[method] > 0
            missing = first.column(MISSING_ROWS)[method] if is_rank else 0
            cells[method, heading.key, "ours"] = {
                "value": value,
                "text": f"({value:.2f}){marks(used, missing)}" if is_partial else "",
                "uses_ground_truth": used,
                "missing_seeds": missing,
            }
    order = first.mean_ranks.index.astype(str)
    labels = pd.DataFrame({"method": order, "was told": [told_texts[m] for m in order]}, order)
    notes = [*(f"{capitalised(benchmark.test)}." for benchmark in benchmarks), RULE]
    if len(first.usual_splits) < len(first.scores_of):
        label = capitalised(column_of(first.usual_score.mean).label)
        judged = f"{len(first.usual_splits)} of {counted(len(first.scores_of), 'split')}"
        notes.append(f"{label} and worst client are means over the {judged} that have this score.")
    return sheet_of("methods by mean rank", labels, [h for h, _ in shown], cells, notes)


def all_numbers(sweep: Sweep) -> pd.DataFrame:
    """A row for each method: what `ranking_sheet` has, then its scores in each split."""
    frames = [numbers_of(ranking_sheet(sweep))]
    for benchmark in benchmarks_of(sweep):
        scores = numbers_of(score_sheet(benchmark)).drop(columns=METHOD)
        frames.append(scores.add_prefix(f"{SHORT[benchmark.protocol]} "))
    return pd.concat(frames, axis=1)


def _of_protocol(benchmark: Benchmark) -> "list[tuple[Heading, pd.Series[float]]]":
    """The columns of a protocol in the table of ranks: mean rank, score, worst client."""
    group = SHORT[benchmark.protocol]
    shown = [(Heading(f"rank {group}", MEAN_RANK, group, 2, False), benchmark.mean_ranks)]
    score, splits = benchmark.usual_score, benchmark.usual_splits
    unit = column_of(score.mean)
    for key, name in ((SCORE, unit.short), (WORST, "worst client")):
        heading = Heading(f"{key} {group}", name, group, unit.decimals, score.higher_is_better)
        shown.append((heading, unit.scale * benchmark.column(key, splits)))
    return shown


def score_sheet(benchmark: Benchmark) -> Sheet:
    """The score of each method in each split, mean ± standard deviation over seeds."""
    order, headings, cells = benchmark.mean_ranks.index, [], {}
    for split, score in benchmark.scores_of.items():
        column = column_of(score.mean)
        title, decimals = split.replace("_", " "), min(column.decimals, 3)
        headings.append(Heading(split, title, "", decimals, score.higher_is_better))
        for method, row in benchmark.cells.xs(split, level=SPLIT).iterrows():
            cells[method, split, "ours"] = {
                "value": column.scale * row[SCORE],
                "error": column.scale * row[SCORE + SPREAD],
                "uses_ground_truth": row[USES_GROUND_TRUTH] > 0,
                "missing_seeds": row[MISSING_ROWS],
            }
    units = dict.fromkeys(column_of(score.mean).label for score in benchmark.scores_of.values())
    title = f"{' and '.join(units)} {benchmark.protocol}, mean ± standard deviation over seeds"
    labels = pd.DataFrame({"method": order}, order)
    return sheet_of(title, labels, headings, cells)

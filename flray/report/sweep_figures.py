"""Figures of a sweep: accuracy against a number, heatmaps over two settings, all settings."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from flray.report.colours import Colour, for_figure, palette
from flray.report.figures import LOG_FROM
from flray.report.runs import GROUND_TRUTH, INCOMPLETE
from flray.report.sweep_record import (
    MISSING_ROWS,
    SEED,
    SPREAD,
    TEST,
    USES_GROUND_TRUTH,
    VALIDATION,
    Sweep,
    averaged,
    best_first,
    best_rows,
    short_names,
)

MIN_CURVE = 3  # values that a number must have to be an axis
LOG_RATIO = 20  # largest to smallest value from which an axis is logarithmic
MAX_LABELS = 14  # lines with a name of their own
MAX_CATEGORIES = 20  # values of a setting along a heatmap
MAX_ANNOTATED = 12  # rows or columns of a heatmap with numbers in it
BEST = "#D55E00"
TITLES = {
    TEST: "test accuracy (%)",
    VALIDATION: "validation accuracy (%)",
    "clusters": "clusters",
    "ari": "ARI",
    "clients_reaching_target": "clients at target (%)",
    "accuracy_mean_after_clustering": "test accuracy after clustering (%)",
    "accuracy_worst": "worst client (%)",
    "client_steps": "client steps",
    "seconds": "seconds",
}
# Columns of fractions, after a prefix that says of what: validation_accuracy_mean, ...
FRACTIONS = re.compile(r"(tuned_)?(global_)?(holdout_|validation_)?(accuracy|clients_reaching)")

Values = NDArray[np.float64]


def curve_keys(sweep: Sweep) -> list[str]:
    """Numbers that were varied enough to be an axis."""
    return [k for k in sweep.keys if sweep.is_number(k) and len(sweep.values(k)) >= MIN_CURVE]


def heatmap_pairs(sweep: Sweep) -> list[tuple[str, str]]:
    """Pairs of settings of few values each, pairs of names before those with numbers."""
    few = [key for key in sweep.keys if 1 < len(sweep.values(key)) <= MAX_CATEGORIES]
    few = [key for key in few if key in sweep.telling and not _is_drawn(sweep, key)]
    found = [pair for pair in combinations(few, 2) if _is_crossed(sweep.configurations, pair)]
    return sorted(found, key=lambda pair: sum(map(sweep.is_number, pair)))


def scale_of(column: str) -> float:
    """Fractions are shown as percent.

    >>> scale_of("accuracy_mean"), scale_of("tuned_validation_accuracy_mean"), scale_of("clusters")
    (100.0, 100.0, 1.0)
    """
    return 100.0 if FRACTIONS.match(column) else 1.0


def title_of(column: str) -> str:
    return TITLES.get(column, column)


@dataclass(frozen=True)
class _Line:
    label: str  # "" for one that shares the label of another
    colour: Colour
    points: pd.DataFrame  # as `averaged`, ascending in x
    width: float = 1.6


def curve_figure(sweep: Sweep, key: str) -> Figure:
    """Accuracy against a number and the clusters below it, as FLIS's Figs. 2 and 3.

    A line for each combination of the other settings, a band of one standard deviation over
    seeds; rows without the number (baselines) are dashed.
    """
    columns = _panels(sweep)
    lines = list(_lines(sweep, key))
    rows = -(-len(columns) // 2)
    figure = Figure(figsize=(11, 2.9 * rows + 1.4), layout="constrained")
    grid = figure.subplots(rows, min(2, len(columns)), sharex=True, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for axes, column in zip(panels, columns, strict=False):
        _draw_lines(axes, lines, key, column)
        _draw_baselines(axes, sweep, key, column)
        axes.set_ylabel(title_of(column))
        if column == "clusters":
            _count_axis(axes)
        _plain(axes)
    for axes in panels[len(columns) :]:
        axes.set_axis_off()
    values = sweep.values(key)
    if values[0] > 0 and values[-1] > LOG_RATIO * values[0]:
        panels[0].set_xscale("log")
    for axes in grid[-1]:
        axes.set_xlabel(for_figure(short_names(sweep.keys)[key]))
    _legend(figure, panels[0])
    return figure


def heatmap_figure(sweep: Sweep, across: str, down: str) -> Figure:
    """Test accuracy over two settings, each cell the best by the sweep's metric over the others."""
    cells = sweep.configurations.dropna(subset=[across, down])
    cells = best_rows(cells, [across, down], sweep.metric, sweep.is_maximised)
    shown = TEST if TEST in sweep.measured else sweep.metric
    x, y = _present(sweep, cells, across), _present(sweep, cells, down)
    places = [(y.index(b), x.index(a)) for a, b in zip(cells[across], cells[down], strict=True)]
    values = np.full((len(y), len(x)), np.nan)
    for place, value in zip(places, cells[shown], strict=True):
        values[place] = scale_of(shown) * value
    figure = Figure(figsize=(2.6 + 0.85 * len(x), 1.9 + 0.55 * len(y)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.92")
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=axes, label=title_of(shown))
    if max(values.shape) <= MAX_ANNOTATED:
        _annotate(axes, values, _notes(cells, places))
    names = short_names(sweep.keys)
    axes.set_xticks(range(len(x)), [_value_text(v) for v in x], rotation=30 if len(x) > 5 else 0)
    axes.set_yticks(range(len(y)), [_value_text(v) for v in y])
    axes.set(xlabel=for_figure(names[across]), ylabel=for_figure(names[down]))
    return figure


def parallel_figure(sweep: Sweep) -> Figure:
    """Every configuration as a line through its settings to what came out; the best is thick."""
    several = [key for key in sweep.keys if len(sweep.values(key)) > 1]
    both = sweep.configurations.dropna(subset=several)
    keys = [key for key in several if both[key].nunique() > 1]
    results = [c for c in (sweep.metric, TEST, "clusters") if c in sweep.measured]
    columns = list(dict.fromkeys([*keys, *results]))
    rows = sweep.configurations.dropna(subset=columns)
    # The best on top; of several that are equally good the first, as everywhere.
    rows = best_first(rows, sweep.metric, sweep.is_maximised)[::-1]
    figure = Figure(figsize=(max(8.0, 1.7 * len(columns) + 1.5), 4.6), layout="constrained")
    axes = figure.subplots()
    heights = np.stack([_heights(rows[column]) for column in columns], axis=1)  # (rows, columns)
    metric = scale_of(sweep.metric) * rows[sweep.metric].to_numpy(np.float64)
    norm = Normalize(metric.min(), metric.max()) if len(metric) else Normalize(0, 1)
    colours = colormaps["viridis"](norm(metric))
    for height, colour in zip(heights, colours, strict=True):
        axes.plot(height, color=colour, linewidth=1, alpha=0.6)
    if len(heights):
        axes.plot(heights[-1], color=BEST, linewidth=2.6)
    names = short_names(sweep.keys)
    for place, column in enumerate(columns):
        axes.axvline(place, color="0.3", linewidth=0.8)
        for height, text in _scale_labels(rows[column], scale_of(column)):
            label = axes.text(place + 0.03, height, text, fontsize=8, va="center")
            label.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1})
    titles = [
        for_figure(names.get(c, title_of(c))).replace(" accuracy", "\naccuracy") for c in columns
    ]
    axes.set_xticks(range(len(columns)), titles, fontsize=9)
    axes.set(yticks=[], xlim=(-0.1, len(columns) - 0.6), ylim=(-0.06, 1.06))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=axes, label=title_of(sweep.metric))
    return figure


def dots_figure(sweep: Sweep, key: str) -> Figure:
    """Validation and test accuracy for each value of a setting, a bar of one sd over seeds."""
    best = best_rows(
        sweep.configurations.dropna(subset=[key]), [key], sweep.metric, sweep.is_maximised
    )
    best = best.sort_values(sweep.metric, ascending=sweep.is_maximised)
    figure = Figure(figsize=(7.5, 1.5 + 0.4 * len(best)), layout="constrained")
    axes = figure.subplots()
    columns = [column for column in (VALIDATION, TEST) if column in sweep.measured]
    for place, (column, colour) in enumerate(zip(columns, palette(2), strict=False)):
        y = np.arange(len(best)) + 0.12 * (1 - 2 * place)
        spread = 100 * best[column + SPREAD].fillna(0).to_numpy(np.float64)
        x = 100 * best[column].to_numpy(np.float64)
        axes.errorbar(
            x, y, xerr=spread, fmt="o", color=colour, label=title_of(column).removesuffix(" (%)")
        )
    named = zip(best[key], marks_of(best), strict=True)
    axes.set_yticks(range(len(best)), [_value_text(value) + marks for value, marks in named])
    axes.set(xlabel="accuracy (%)", ylabel=for_figure(short_names(sweep.keys)[key]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _panels(sweep: Sweep) -> list[str]:
    """Test and validation, and below them what the clusters were."""
    wanted = (TEST, VALIDATION, "clusters", "ari", "clients_reaching_target")
    return [column for column in wanted if column in sweep.measured][:4]


def _lines(sweep: Sweep, key: str) -> Iterator[_Line]:
    rows = sweep.finished.dropna(subset=[key])
    others = [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]
    told = others
    if len(rows.drop_duplicates(others) if others else rows[:1]) > MAX_LABELS:
        told = [min(others, key=lambda k: rows[k].nunique(dropna=False))]  # a colour a value of it
    colours = _combination_colours(rows, told)
    points = sweep.configurations.dropna(subset=[key])
    by_seed = SEED in rows and rows[SEED].nunique() > 1 and not sweep.has_seeds
    if by_seed:  # draws of its own for every seed: there is nothing to average
        points = averaged(rows, [*others, SEED, key], sweep.measured)
    seen: set[str] = set()
    by = [*others, SEED] if by_seed else others
    for group in _groups(points, by):
        label = _combination(group.iloc[0], told)
        shown = "" if label in seen else label
        seen.add(label)
        yield _Line(shown, colours[label], group.sort_values(key), 0.9 if by_seed else 1.6)


def _groups(points: pd.DataFrame, by: Sequence[str]) -> Iterator[pd.DataFrame]:
    if not by:
        yield points
        return
    for _, group in points.groupby(list(by), dropna=False, sort=False):
        yield group


def _combination_colours(rows: pd.DataFrame, keys: Sequence[str]) -> dict[str, Colour]:
    labels = dict.fromkeys(_combination(row, keys) for _, row in rows.iterrows())
    return dict(zip(labels, palette(len(labels)), strict=True))


def _combination(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    """
    >>> _combination(pd.Series({"a.linkage": "ward", "b": None}), ["a.linkage", "b"])
    'ward'
    """
    return for_figure(", ".join(_value_text(row[key]) for key in keys if pd.notna(row[key])))


def _draw_lines(axes: Axes, lines: Sequence[_Line], key: str, column: str) -> None:
    scale = scale_of(column)
    for line in lines:
        x = line.points[key].to_numpy(np.float64)
        mean = scale * line.points[column].to_numpy(np.float64)
        spread = scale * line.points[column + SPREAD].fillna(0).to_numpy(np.float64)
        if spread.any():
            axes.fill_between(x, mean - spread, mean + spread, color=line.colour, alpha=0.15, lw=0)
        axes.plot(
            x,
            mean,
            color=line.colour,
            marker="o",
            markersize=3,
            linewidth=line.width,
            label=line.label or None,
        )


def _draw_baselines(axes: Axes, sweep: Sweep, key: str, column: str) -> None:
    """Rows that do not have the number are the same at every value of it."""
    without = sweep.configurations[sweep.configurations[key].isna()]
    styles = ("--", "-.", ":")
    for place, (_, row) in enumerate(without.iterrows()):
        if pd.isna(row[column]):
            continue
        axes.axhline(
            scale_of(column) * row[column],
            color="0.35",
            linewidth=1.2,
            linestyle=styles[place % len(styles)],
            label=_combination(row, sweep.keys) or "without",
        )


def _count_axis(axes: Axes) -> None:
    if axes.dataLim.y1 > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    kept = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label]
    if len(kept) < 2 or not all(isinstance(handle, Line2D) for handle, _ in kept):
        return
    longest = max(len(label) for _, label in kept)
    figure.legend(
        handles=[handle for handle, _ in kept],
        loc="outside lower center",
        ncols=max(1, min(5, len(kept), 130 // (longest + 6))),
        frameon=False,
        fontsize=9,
    )


def _present(sweep: Sweep, cells: pd.DataFrame, key: str) -> list[object]:
    held = set(cells[key])
    return [value for value in sweep.values(key) if value in held]


def _notes(cells: pd.DataFrame, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Marks of each cell, and the number of clusters behind it."""
    clusters = cells["clusters"] if "clusters" in cells else [np.nan] * len(cells)
    return {
        place: marks + (f"\n{value:.3g} clusters" if pd.notna(value) else "")
        for place, marks, value in zip(places, marks_of(cells), clusters, strict=True)
    }


def marks_of(configurations: pd.DataFrame) -> list[str]:
    """What stands behind the number of each configuration, "" where there is nothing to say."""
    used, missing = configurations[USES_GROUND_TRUTH] > 0, configurations[MISSING_ROWS] > 0
    return [
        f" {GROUND_TRUTH}" * bool(of_truth) + f" {INCOMPLETE}" * bool(incomplete)
        for of_truth, incomplete in zip(used, missing, strict=True)
    ]


def _annotate(axes: Axes, values: Values, notes: dict[tuple[int, int], str]) -> None:
    low, high = np.nanmin(values), np.nanmax(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            axes.text(column, row, "–", ha="center", va="center", color="0.4")
            continue
        ink = "black" if value > low + 0.6 * (high - low) else "white"
        text = f"{value:.1f}{notes.get((row, column), '')}"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)


def _heights(column: "pd.Series[Any]") -> Values:
    """(rows,) between 0 and 1: numbers to scale, names evenly in the order they came in."""
    if not pd.api.types.is_numeric_dtype(column):
        names = sorted(map(str, column.unique()))
        return np.array([names.index(str(v)) for v in column]) / max(len(names) - 1, 1)
    values: Values = column.to_numpy(np.float64)
    if _is_log(values):
        values = np.log(values)
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    return (values - low) / ((high - low) or 1.0)


def _scale_labels(column: "pd.Series[Any]", scale: float) -> Iterator[tuple[float, str]]:
    """Heights and texts along an axis: every name or every one of few numbers, else both ends."""
    heights = _heights(column)
    pairs = dict(zip(heights.tolist(), column.tolist(), strict=True))
    is_number = pd.api.types.is_numeric_dtype(column)
    if is_number and len(pairs) > 5:
        pairs = {h: pairs[h] for h in (min(pairs), max(pairs))}
    for height, value in pairs.items():
        yield height, f"{scale * float(str(value)):.4g}" if is_number else _value_text(value)


def _is_log(values: Values) -> bool:
    return bool(len(values) and values.min() > 0 and values.max() > LOG_RATIO * values.min())


def _is_drawn(sweep: Sweep, key: str) -> bool:
    """Has every row a value of its own, as random draws have?"""
    return sweep.is_number(key) and len(sweep.values(key)) >= len(sweep.configurations) > 4


def _is_crossed(rows: pd.DataFrame, pair: tuple[str, str]) -> bool:
    """Do both settings vary where a row has both? Baselines lack what others vary."""
    both = rows.dropna(subset=list(pair))
    return all(both[key].nunique() > 1 for key in pair)


def _value_text(value: object) -> str:
    """
    >>> _value_text(0.30000000000000004), _value_text("ward")
    ('0.3', 'ward')
    """
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return for_figure(text if len(text) <= 40 else f"{text[:39]}…")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)

"""Figures of a sweep: accuracy against a number, heatmaps over two settings, all settings."""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from flray.report.colours import Colour, for_figure, palette, plain
from flray.report.figures import count_axis, legend_below
from flray.report.sheets import marks
from flray.report.sweeps import (
    HOLDOUT,
    MISSING_ROWS,
    SEED,
    SPREAD,
    TEST,
    USES_GROUND_TRUTH,
    VALIDATION,
    Sweep,
    averaged,
    best_rows,
    short_names,
)

MIN_CURVE = 3  # values that a number must have to be an axis
LOG_RATIO = 20  # largest to smallest value from which an axis is logarithmic
MAX_PANELS = 4  # numbers that are drawn against a setting
MAX_FACETS = 4  # values of a setting whose lines get panels of their own
FACET_RATIO = 5  # of the medians of a number, from which they do
MAX_LABELS = 14  # lines with a name of their own
MAX_CATEGORIES = 20  # values of a setting along a heatmap
MAX_ANNOTATED = 12  # rows or columns of a heatmap with numbers in it
MIN_SPAN = 5.0  # points that the colours of a heatmap cover at least
BEST = "#D55E00"
TITLES = {
    TEST: "test accuracy (%)",
    VALIDATION: "validation accuracy (%)",
    HOLDOUT: "holdout clients' accuracy (%)",
    "clusters": "clusters",
    "ari": "ARI",
    "clients_reaching_target": "clients at target (%)",
    "accuracy_mean_after_clustering": "test accuracy after clustering (%)",
    "accuracy_worst": "worst client (%)",
    "client_steps": "client steps",
    "seconds": "seconds",
    "overlap_fp": "false positives",
    "overlap_fn": "false negatives",
    "label_correlation": "correlation with labels",
    "drift_correlation": "correlation with drift",
    "data_correlation": "correlation with both",
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


def marks_of(configurations: pd.DataFrame) -> list[str]:
    """The marks behind the number of each configuration."""
    pairs = zip(configurations[USES_GROUND_TRUTH], configurations[MISSING_ROWS], strict=True)
    return [f" {text}" if (text := marks(used > 0, missing)) else "" for used, missing in pairs]


def curve_figure(sweep: Sweep, key: str) -> Figure:
    """Accuracy against a number and the clusters below it, as FLIS's Figs. 2 and 3.

    A line for each combination of the other settings, a band of one standard deviation over
    seeds; rows without the number (baselines) are dashed. Values of a setting for which the number
    is of another magnitude have panels of their own.
    """
    wanted = (TEST, VALIDATION, HOLDOUT, "clusters", "ari", "clients_reaching_target")
    columns = [column for column in wanted if column in sweep.measured][:MAX_PANELS]
    facet = _facet_key(sweep, key)
    facets = [None] if facet is None else sweep.values(facet)
    points = curve_points(sweep, key, facet)
    labels = list(dict.fromkeys(points["label"]))
    colours = dict(zip(labels, palette(len(labels)), strict=True))
    if facet is None:  # two by two
        rows, across = -(-len(columns) // 2), min(2, len(columns))
        places = [(column, None) for column in columns]
    else:
        rows, across = len(columns), len(facets)
        places = [(column, value) for column in columns for value in facets]
    figure = Figure(figsize=(max(11, 3.2 * across), 2.7 * rows + 1.4), layout="constrained")
    grid = figure.subplots(
        rows, across, squeeze=False, sharex="col", sharey="row" if facet else "none"
    )
    for axes, (column, value) in zip(grid.flat, places, strict=False):
        own = points if facet is None else points[points[facet] == value]
        for _, line in own.groupby("line", sort=False):
            draw_line(axes, line.sort_values(key), key, column, colours[line["label"].iloc[0]])
        draw_baselines(axes, sweep, key, column)
        axes.set_ylabel(title_of(column))
        if column == "clusters":
            count_axis(axes)
        if facet is not None and axes in grid[0]:
            axes.set_title(f"{short_names(sweep.keys)[facet]}: {_value_text(value)}", fontsize=10)
        if is_log(own[key].to_numpy(np.float64)):
            axes.set_xscale("log")
        plain(axes)
    for axes in list(grid.flat)[len(places) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel(for_figure(short_names(sweep.keys)[key]))
    handles = [Line2D([], [], color=colour, label=label) for label, colour in colours.items()]
    dashed, texts = grid[0, 0].get_legend_handles_labels()
    handles += [line for line, text in zip(dashed, texts, strict=True) if text]
    if len(handles) > 1:
        legend_below(figure, [handle for handle in handles if handle.get_label()])
    return figure


def heatmap_figure(sweep: Sweep, across: str, down: str) -> Figure:
    """Test accuracy over two settings, each cell the best by the sweep's metric over the others."""
    cells = sweep.configurations.dropna(subset=[across, down])
    cells = best_rows(cells, [across, down], sweep.metric, sweep.is_maximised)
    shown = TEST if TEST in sweep.measured else sweep.metric
    clusters = cells["clusters"] if "clusters" in cells else [np.nan] * len(cells)
    percent = scale_of(shown) * cells[shown]
    texts = [
        f"{value:.1f}{mark}" + (f"\n{number:.3g} clusters" if pd.notna(number) else "")
        for value, mark, number in zip(percent, marks_of(cells), clusters, strict=True)
    ]
    cells = cells.assign(shown=percent, text=texts)
    tables = {
        name: cells.pivot(index=down, columns=across, values=name).reindex(
            index=_present(sweep, cells, down), columns=_present(sweep, cells, across)
        )
        for name in ("shown", "text")
    }
    values = tables["shown"]
    low, high = float(percent.min()), float(percent.max())
    size = (2.6 + 0.85 * len(values.columns), 2.1 + 0.55 * len(values))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.92")
    annotation = tables["text"].fillna("") if max(values.shape) <= MAX_ANNOTATED else False
    slack = max(0.0, MIN_SPAN - (high - low)) / 2 if scale_of(shown) > 1 else 0.0
    style = {"fmt": "", "annot_kws": {"fontsize": 8}, "cbar_kws": {"label": title_of(shown)}}
    limits = {
        "vmin": low - slack,
        "vmax": min(high + slack, 100.0) if scale_of(shown) > 1 else high,
    }
    x, y = ([_value_text(v) for v in axis] for axis in (values.columns, values.index))
    values = values.set_axis(x, axis=1).set_axis(y, axis=0)
    sns.heatmap(values, annot=annotation, cmap="viridis", ax=axes, **style, **limits)
    names = short_names(sweep.keys)
    axes.tick_params(axis="both", labelrotation=0)
    axes.set(xlabel=for_figure(names[across]), ylabel=for_figure(names[down]))
    axes.set_title(f"{low:.1f} to {high:.1f}, a span of {high - low:.1f}", fontsize=9)
    return figure


def parallel_figure(sweep: Sweep) -> Figure:
    """Every configuration as a line through its settings to what came out; the best is thick."""
    several = [key for key in sweep.keys if len(sweep.values(key)) > 1]
    both = sweep.configurations.dropna(subset=several)
    keys = [key for key in several if both[key].nunique() > 1]
    results = [c for c in (sweep.metric, TEST, "clusters") if c in sweep.measured]
    columns = list(dict.fromkeys([*keys, *results]))
    rows = sweep.ranked.dropna(subset=columns)[::-1]  # the best on top
    figure = Figure(figsize=(max(8.0, 1.7 * len(columns) + 1.5), 4.6), layout="constrained")
    axes = figure.subplots()
    heights = np.stack([_heights(rows[column]) for column in columns], axis=1)  # (rows, columns)
    metric = scale_of(sweep.metric) * rows[sweep.metric].to_numpy(np.float64)
    norm = Normalize(metric.min(), metric.max()) if len(metric) else Normalize(0, 1)
    for height, colour in zip(heights, colormaps["viridis"](norm(metric)), strict=True):
        axes.plot(height, color=colour, linewidth=1, alpha=0.6)
    if len(heights):
        axes.plot(heights[-1], color=BEST, linewidth=2.6)
    for place, column in enumerate(columns):
        axes.axvline(place, color="0.3", linewidth=0.8)
        for height, text in _scale_labels(rows[column], scale_of(column)):
            label = axes.text(place + 0.03, height, text, fontsize=8, va="center")
            label.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1})
    names = short_names(sweep.keys)
    titles = [for_figure(names.get(c, title_of(c))).replace(" acc", "\nacc") for c in columns]
    axes.set_xticks(range(len(columns)), titles, fontsize=9)
    axes.set(yticks=[], xlim=(-0.1, len(columns) - 0.6), ylim=(-0.06, 1.06))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=axes, label=title_of(sweep.metric))
    return figure


def dots_figure(sweep: Sweep, key: str) -> Figure:
    """Validation and test accuracy for each value of a setting, a bar of one sd over seeds."""
    known = sweep.configurations.dropna(subset=[key])
    best = best_rows(known, [key], sweep.metric, sweep.is_maximised)
    best = best.sort_values(sweep.metric, ascending=sweep.is_maximised)
    figure = Figure(figsize=(7.5, 1.5 + 0.4 * len(best)), layout="constrained")
    axes = figure.subplots()
    columns = [column for column in (VALIDATION, TEST) if column in sweep.measured]
    for place, (column, colour) in enumerate(zip(columns, ("0.6", "0.1"), strict=False)):
        y = np.arange(len(best)) + 0.12 * (1 - 2 * place)
        spread = 100 * best[column + SPREAD].fillna(0)
        title = title_of(column).removesuffix(" (%)")
        axes.errorbar(100 * best[column], y, xerr=spread, fmt="o", color=colour, label=title)
    named = zip(best[key], marks_of(best), strict=True)
    axes.set_yticks(range(len(best)), [_value_text(value) + mark for value, mark in named])
    axes.set(xlabel="accuracy (%)", ylabel=for_figure(short_names(sweep.keys)[key]))
    sns.despine(ax=axes)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _facet_key(sweep: Sweep, key: str) -> str | None:
    """The setting for whose values the number is of other magnitudes, as for L1 and cosine."""
    rows = sweep.configurations.dropna(subset=[key])
    for other in sweep.telling:
        if other in sweep.keys and 1 < rows[other].nunique() <= MAX_FACETS and other != key:
            middle = rows.groupby(other)[key].median()
            if middle.min() > 0 and middle.max() > FACET_RATIO * middle.min():
                return other
    return None


def curve_points(sweep: Sweep, key: str, facet: str | None) -> pd.DataFrame:
    """The points of a curve figure with the `line` they are on and its `label`."""
    rows = sweep.finished.dropna(subset=[key])
    others = [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]
    told = [k for k in others if k != facet]
    if len(rows.drop_duplicates(told) if told else rows[:1]) > MAX_LABELS:
        told = [min(told, key=lambda k: rows[k].nunique(dropna=False))]  # a colour for each value
    points, by = sweep.configurations.dropna(subset=[key]), others
    if SEED in rows and rows[SEED].nunique() > 1 and not sweep.has_seeds:
        by = [*others, SEED]  # each seed has values of its own: there is nothing to average
        points = averaged(rows, [*by, key], sweep.measured)
    lines = points.groupby(by, dropna=False, sort=False).ngroup() if by else 0
    labels = [_combination(row, told) for _, row in points.iterrows()]
    return points.assign(line=lines, label=labels)


def draw_line(axes: Axes, line: pd.DataFrame, key: str, column: str, colour: Colour) -> None:
    x, mean = line[key].to_numpy(np.float64), scale_of(column) * line[column].to_numpy(np.float64)
    spread = scale_of(column) * line[column + SPREAD].fillna(0).to_numpy(np.float64)
    if spread.any():
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
    axes.plot(x, mean, color=colour, marker="o", markersize=3, linewidth=1.4)


def draw_baselines(axes: Axes, sweep: Sweep, key: str, column: str) -> None:
    """Rows that do not have the number are the same at every value of it."""
    without = sweep.configurations[sweep.configurations[key].isna()].dropna(subset=[column])
    for place, (_, row) in enumerate(without.iterrows()):
        label, style = _combination(row, sweep.keys) or "without", ("--", "-.", ":")[place % 3]
        axes.axhline(scale_of(column) * row[column], label=label, color="0.35", lw=1.2, ls=style)


def _combination(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    """
    >>> _combination(pd.Series({"a.linkage": "ward", "b": None}), ["a.linkage", "b"])
    'ward'
    """
    return ", ".join(_value_text(row[key]) for key in keys if pd.notna(row[key]))


def _present(sweep: Sweep, cells: pd.DataFrame, key: str) -> list[object]:
    held = set(cells[key])
    return [value for value in sweep.values(key) if value in held]


def _heights(column: "pd.Series[Any]") -> Values:
    """(rows,) between 0 and 1: numbers to scale, names evenly."""
    if not pd.api.types.is_numeric_dtype(column):
        names = sorted(map(str, column.unique()))
        return np.array([names.index(str(v)) for v in column]) / max(len(names) - 1, 1)
    values: Values = column.to_numpy(np.float64)
    if is_log(values):
        values = np.log(values)
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    return (values - low) / ((high - low) or 1.0)


def _scale_labels(column: "pd.Series[Any]", scale: float) -> Iterator[tuple[float, str]]:
    """Heights and texts along an axis: every name or every one of few numbers, else both ends."""
    pairs = dict(zip(_heights(column).tolist(), column.tolist(), strict=True))
    is_number = pd.api.types.is_numeric_dtype(column)
    if is_number and len(pairs) > 5:
        pairs = {h: pairs[h] for h in (min(pairs), max(pairs))}
    for height, value in pairs.items():
        yield height, f"{scale * float(str(value)):.4g}" if is_number else _value_text(value)


def is_log(values: Values) -> bool:
    return bool(len(values) and values.min() > 0 and values.max() > LOG_RATIO * values.min())


def _is_drawn(sweep: Sweep, key: str) -> bool:
    """True if every row has a value of its own, as random draws have."""
    return sweep.is_number(key) and len(sweep.values(key)) >= len(sweep.configurations) > 4


def _is_crossed(rows: pd.DataFrame, pair: tuple[str, str]) -> bool:
    """True if both settings vary where a row has both; baselines lack what others vary."""
    both = rows.dropna(subset=list(pair))
    return all(both[key].nunique() > 1 for key in pair)


def _value_text(value: object) -> str:
    """
    >>> _value_text(0.30000000000000004), _value_text("ward")
    ('0.3', 'ward')
    """
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return for_figure(text if len(text) <= 40 else f"{text[:39]}…")

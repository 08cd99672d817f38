"""Figures of a sweep against a number: accuracy, clusters and measures of clusterings.

Each function returns None if the sweep measured nothing that it draws. A *facet* is a value of
another setting that has a column of panels of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flray import columns as recorded
from flray.columns import CLUSTERS, SEED
from flray.reports import columns, style
from flray.reports.columns import column_of
from flray.reports.sweeps import SPREAD, Sweep, averaged

MIN_CURVE = 3  # fewest values of a number that is an axis
LOG_RATIO = 20  # ratio of largest to smallest value above which an axis is logarithmic
MAX_PANELS = 4  # most columns drawn against a setting
MAX_FACETS = 4  # most values of a setting with panels of their own
FACET_RATIO = 5  # ratio of medians above which values of a setting have panels of their own
MAX_LABELS = 14  # most lines with a label of their own
DASHES = ("--", "-.", ":", (0, (8, 3)))
DOT = {"ls": "", "marker": "o", "ms": 4}
REFERENCES = {recorded.UNIFORMITY_LABELS: "--", recorded.UNIFORMITY_RANDOM: ":"}


def curve_keys(sweep: Sweep) -> list[str]:
    """The varied keys that are numbers with enough values to be an axis, at least MIN_CURVE."""
    return [k for k in sweep.keys if sweep.is_number(k) and len(sweep.values(k)) >= MIN_CURVE]


def curve_figure(sweep: Sweep, key: str) -> Figure | None:
    """The score and clusters against a number, as in FLIS's Figs. 2 and 3.

    If the magnitude of the number depends on another setting, as thresholds depend on the distance,
    the values of that setting have panels of their own.

    Args:
        key: The number on the x axis, one of `curve_keys`.
    """
    score = sweep.score
    curves = (
        *(score.mean, score.validation, score.column("mean", "holdout_")),
        *(CLUSTERS, recorded.ARI, recorded.CLIENTS_REACHING_TARGET),
    )
    shown = [column for column in curves if column in sweep.measured][:MAX_PANELS]
    return _curves(sweep, key, shown, _facet_key(sweep, key))


def error_figure(errors: pd.DataFrame) -> Figure:
    """False positives and, on top of them, false negatives by round, as in FLIS's Fig. 3.

    A client's *companions* are the other clients of its cluster. A false positive is a companion
    whose labels do not fit the client's, a false negative a client whose labels fit in another
    cluster. Each panel has its own rule for what labels fit.

    Args:
        errors: Columns overlap_fp, overlap_fn, equal_fp and equal_fn by round, as
            `flray.reports.measures.errors_by_round` returns them.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    truths = {"overlap": "at least half of a client's labels", "equal": "the same labels"}
    grid = figure.subplots(1, len(truths), sharey=True)
    t = errors.index.to_numpy(np.float64)
    edges = np.append(t - 0.5, t[-1:] + 0.5)
    for axes, (truth, companions) in zip(grid, truths.items(), strict=True):
        wrong, lacking = (errors[f"{truth}_{e}"].to_numpy(np.float64) for e in ("fp", "fn"))
        both = wrong + lacking
        axes.stairs(wrong, edges, fill=True, color="0.3", label="false positives")
        axes.stairs(both, edges, baseline=wrong, fill=True, color="0.75", label="false negatives")
        axes.set_title(f"right companions hold {companions}", fontsize=10)
        style.whole_rounds(axes)
        style.plain(axes)
    grid[0].set_ylabel("companions per client")
    style.legend_below(figure, grid[0].get_legend_handles_labels()[0])
    return figure


def clustering_error_figure(sweep: Sweep, key: str) -> Figure | None:
    """False positives, false negatives and their sum against a number, as FLIS's Fig. 3.

    All are companions per client (see `error_figure`). Small thresholds give
    false negatives, large ones false positives; the minimum of the sum is the threshold to take.
    """
    return _curves(sweep, key, (columns.CLUSTERING_ERROR, recorded.OVERLAP_FP, recorded.OVERLAP_FN))


def correlation_figure(sweep: Sweep, key: str) -> Figure | None:
    """Correlation of signatures with the similarity of data against a number, as REPA's Fig. 1.

    1 means that clients with similar data have signatures that are near each other.
    """
    return _curves(sweep, key, recorded.CORRELATIONS)


def uniformity_figure(sweep: Sweep, key: str) -> Figure | None:
    """Uniformity of clusters against a number, as in REPA's Fig. 2.

    For comparison also that of random clusters, and of clusters of the labels themselves.
    """
    return _curves(sweep, key, [recorded.UNIFORMITY], references=REFERENCES)


def _curves(
    sweep: Sweep,
    key: str,
    wanted: Sequence[str],
    facet: str | None = None,
    references: Mapping[str, str] = {},  # read only
) -> Figure | None:
    """A panel for each measured column against a number, and for each value of `facet`.

    A panel has a line for each combination of the other settings, with a band of one standard
    deviation over seeds; for a sampled setting, a point with a bar for each configuration. Rows
    without the number (baselines) and the columns of `references` are dashed.
    """
    shown = [column for column in wanted if column in sweep.measured]
    if not shown:
        return None
    points = _curve_points(sweep, key, facet)
    colours = style.colours_of(points["label"])
    without = sweep.configurations[sweep.configurations[key].isna()]
    facets = [None] if facet is None else sweep.values(facet)
    panels = [(column, value) for column in shown for value in facets]
    across = len(facets) if facet else 2 if len(shown) == 4 else len(shown)
    rows = -(-len(panels) // across)
    figure = Figure(figsize=(max(6.0, 4.2 * across), 2.7 * rows + 1.4), layout="constrained")
    grid = figure.subplots(
        rows, across, squeeze=False, sharex="col", sharey="row" if facet else "none"
    )
    dashed: dict[str, Line2D] = {}
    draw, entry = (_draw_points, DOT) if key in sweep.sampled else (_draw_line, {})
    for axes, (column, value) in zip(grid.flat, panels, strict=True):
        drawn = points if facet is None else points[points[facet] == value]
        for _, line in drawn.groupby("line", sort=False):
            draw(axes, line.sort_values(key), key, column, colours[line["label"].iloc[0]])
        dashed |= draw_dashed(axes, sweep, without, column)
        dashed |= _draw_references(axes, sweep, key, references)
        if column == CLUSTERS:
            style.count_axis(axes)
        axes.set_ylabel("" if facet and axes not in grid[:, 0] else column_of(column).label)
        if facet is not None and axes in grid[0]:
            axes.set_title(f"{sweep.names[facet]}: {setting_label(value)}")
        scale_axis(axes, drawn[key])
        style.plain(axes)
    for axes in grid[-1]:
        axes.set_xlabel(style.for_figure(sweep.names[key]))
    if len(handles := [*style.lines(colours, **entry), *dashed.values()]) > 1:
        style.legend_below(figure, handles)
    return figure


def _facet_key(sweep: Sweep, key: str) -> str | None:
    """The setting whose values change the magnitude of the number, as L1 and cosine do."""
    rows = sweep.configurations.dropna(subset=[key])
    for other in sweep.identifying:
        if other in sweep.keys and 1 < rows[other].nunique() <= MAX_FACETS and other != key:
            middle = rows.groupby(other)[key].median()
            if middle.min() > 0 and middle.max() > FACET_RATIO * middle.min():
                return other
    return None


def _curve_points(sweep: Sweep, key: str, facet: str | None) -> pd.DataFrame:
    """The points of a curve figure with the number of their `line` and its `label`."""
    rows = sweep.finished.dropna(subset=[key])
    others = varied_keys(sweep, rows, key)
    named = [k for k in others if k != facet]
    if len(rows.drop_duplicates(named) if named else rows[:1]) > MAX_LABELS:
        named = [min(named, key=lambda k: rows[k].nunique(dropna=False))]  # a colour for each value
    points, by = sweep.configurations.dropna(subset=[key]), others
    if rows[SEED].nunique() > 1 and not sweep.has_seeds:
        by = [*others, SEED]  # each seed has values of its own: there is nothing to average
        points = averaged(rows, [*by, key], sweep.measured)
    lines = points.groupby(by, dropna=False, sort=False).ngroup() if by else 0
    labels = [combination(row, named) for _, row in points.iterrows()]
    return points.assign(line=lines, label=labels)


def _means(
    line: pd.DataFrame, key: str, column: str
) -> tuple[style.Values, style.Values, style.Values]:
    """The values of a setting, the means of a column there, and deviations over seeds."""
    x, mean, spread = (line[name].to_numpy(np.float64) for name in (key, column, column + SPREAD))
    return x, column_of(column).scale * mean, column_of(column).scale * np.nan_to_num(spread)


def _draw_points(
    axes: Axes, line: pd.DataFrame, key: str, column: str, colour: style.Colour
) -> None:
    x, mean, spread = _means(line, key, column)
    bars = spread if spread.any() else None
    axes.errorbar(x, mean, bars, fmt="o", markersize=4, color=colour, elinewidth=0.8, alpha=0.7)


def _draw_line(axes: Axes, line: pd.DataFrame, key: str, column: str, colour: style.Colour) -> None:
    x, mean, spread = _means(line, key, column)
    if spread.any():
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
    axes.plot(x, mean, color=colour, marker="o", markersize=3, linewidth=1.4)


def _draw_references(
    axes: Axes, sweep: Sweep, key: str, references: Mapping[str, str]
) -> dict[str, Line2D]:
    """Draw means of columns with dashes of their own; the lines by title."""
    drawn = {}
    for column, dashes in references.items():
        if column in sweep.finished:
            mean, title = sweep.finished.groupby(key)[column].mean(), column_of(column).title
            (drawn[title],) = axes.plot(mean.index, mean, color="0.35", ls=dashes, label=title)
    return drawn


def draw_dashed(
    axes: Axes, sweep: Sweep, configurations: pd.DataFrame, column: str
) -> dict[str, Line2D]:
    """Draw a level line for each configuration without a value on the axis; the lines by label.

    These are baselines such as FedAvg, which has no threshold. The result are entries for a legend.
    """
    drawn = {}
    for k, (_, row) in enumerate(configurations.dropna(subset=[column]).iterrows()):
        label, dashes = combination(row, sweep.keys) or "without", DASHES[k % len(DASHES)]
        height = column_of(column).scale * row[column]
        drawn[label] = axes.axhline(height, label=label, color="0.35", lw=1.2, ls=dashes)
    return drawn


def scale_axis(axes: Axes, numbers: "pd.Series[float]") -> None:
    """Make the x axis logarithmic if its numbers are positive and of several magnitudes.

    That is, if the largest is more than `LOG_RATIO` times the smallest.
    """
    if len(numbers) and numbers.min() > 0 and numbers.max() > LOG_RATIO * numbers.min():
        axes.set_xscale("log")


def varied_keys(sweep: Sweep, rows: pd.DataFrame, key: str) -> list[str]:
    """The settings besides `key` that differ between rows."""
    return [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]


def combination(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    """The settings of a configuration under these keys as one label; missing ones are left out."""
    return ", ".join(setting_label(row[key]) for key in keys if pd.notna(row[key]))


def setting_label(value: object) -> str:
    """A value of a setting as text that fits into a figure."""
    return style.for_figure(columns.value_text(value))

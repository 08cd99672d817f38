"""Figures of a sweep: curves against a number, heatmaps of two settings, all settings at once.

Functions that return None have nothing to draw.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flray import columns as recorded
from flray.columns import CLUSTERS, FOLDER, ROUND, SEED
from flray.records.run_directory import RunDirectory
from flray.reports import style
from flray.reports.columns import (
    CLUSTERING_ERROR,
    HOLDOUT,
    TEST,
    VALIDATION,
    column_of,
    number_text,
    value_text,
)
from flray.reports.sheets import GROUND_TRUTH
from flray.reports.sweep_tables import mark_of
from flray.reports.sweeps import SPREAD, Sweep, averaged

MIN_CURVE = 3  # fewest values of a number that is an axis
LOG_RATIO = 20  # ratio of largest to smallest value above which an axis is logarithmic
MAX_PANELS = 4  # most columns drawn against a setting
MAX_FACETS = 4  # most values of a setting with panels of their own
FACET_RATIO = 5  # ratio of medians above which values of a setting have panels of their own
MAX_LABELS = 14  # most lines with a label of their own
MAX_CATEGORIES = 20  # most values of a setting along a heatmap
MAX_ANNOTATED = 12  # most rows or columns of a heatmap with numbers in its cells
MIN_SPAN = 5.0  # least percentage points that the colours of a heatmap cover
DASHES = ("--", "-.", ":", (0, (8, 3)))
DOT = {"ls": "", "marker": "o", "ms": 4}
RING = {"ls": "", "marker": "o", "mfc": "none", "ms": 9, "mew": 1.8}
CURVES = (
    *(TEST, VALIDATION, HOLDOUT),
    *(CLUSTERS, recorded.ARI, recorded.CLIENTS_REACHING_TARGET),
)
REFERENCES = {recorded.UNIFORMITY_LABELS: "--", recorded.UNIFORMITY_RANDOM: ":"}


def curve_keys(sweep: Sweep) -> list[str]:
    """The numeric settings with enough values to be an axis."""
    return [k for k in sweep.keys if sweep.is_number(k) and len(sweep.values(k)) >= MIN_CURVE]


def heatmap_pairs(sweep: Sweep) -> list[tuple[str, str]]:
    """Pairs of settings with few values each; pairs of names come before pairs with numbers."""

    def is_drawn(key: str) -> bool:
        """True if every configuration has a value of its own, as random draws have."""
        return sweep.is_number(key) and len(sweep.values(key)) >= len(sweep.configurations) > 4

    def is_crossed(pair: tuple[str, str]) -> bool:
        """True if both settings vary among the configurations that have both."""
        both = sweep.configurations.dropna(subset=list(pair))
        return all(both[key].nunique() > 1 for key in pair)

    few = [key for key in sweep.keys if 1 < len(sweep.values(key)) <= MAX_CATEGORIES]
    few = [key for key in few if key in sweep.identifying and not is_drawn(key)]
    crossed = [pair for pair in combinations(few, 2) if is_crossed(pair)]
    return sorted(crossed, key=lambda pair: sum(map(sweep.is_number, pair)))


def curve_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy and clusters against a number, as in FLIS's Figs. 2 and 3.

    If the magnitude of the number depends on another setting, as thresholds depend on the distance,
    the values of that setting have panels of their own.
    """
    shown = [column for column in CURVES if column in sweep.measured][:MAX_PANELS]
    return _curves(sweep, key, shown, _facet_key(sweep, key))


def clustering_error_figure(sweep: Sweep, key: str) -> Figure | None:
    """False positives, false negatives and their sum against a number, as FLIS's Fig. 3."""
    return _curves(sweep, key, (CLUSTERING_ERROR, recorded.OVERLAP_FP, recorded.OVERLAP_FN))


def correlation_figure(sweep: Sweep, key: str) -> Figure | None:
    """Correlation of signatures with the similarity of data against a number, as REPA's Fig. 1."""
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
    is_sampled = key in sweep.sampled
    for axes, (column, value) in zip(grid.flat, panels, strict=True):
        drawn = points if facet is None else points[points[facet] == value]
        for _, line in drawn.groupby("line", sort=False):
            colour = colours[line["label"].iloc[0]]
            _draw_line(axes, line.sort_values(key), (key, column), colour, is_sampled)
        dashed |= _draw_dashed(axes, sweep, without, column)
        dashed |= _draw_references(axes, sweep, key, references)
        if column == CLUSTERS:
            style.count_axis(axes)
        axes.set_ylabel("" if facet and axes not in grid[:, 0] else column_of(column).label)
        if facet is not None and axes in grid[0]:
            axes.set_title(f"{sweep.names[facet]}: {_value(value)}")
        _scale(axes, drawn[key])
        style.plain(axes)
    for axes in grid[-1]:
        axes.set_xlabel(style.for_figure(sweep.names[key]))
    entry = DOT if is_sampled else {}
    if len(handles := [*style.lines(colours, **entry), *dashed.values()]) > 1:
        style.legend_below(figure, handles)
    return figure


def evolution_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy by round, a colour for each value of a setting, as in REPA's Figs. 4 and 5.

    The panels are the validation part of the clients that train (VAL) and holdout clients (HO).
    Combinations of other settings differ in their dashes.
    """
    rounds, hue = _rounds_of(sweep, key), sweep.names[key]
    shown = [c for c in (VALIDATION, HOLDOUT) if c in rounds and rounds[c].notna().any()]
    if not shown:
        return None
    drawn = {"hue": hue, "palette": style.colours_of(rounds[hue]), "errorbar": None}
    drawn["style"] = "others" if rounds["others"].nunique() > 1 else None
    figure = Figure(figsize=(5.2 * len(shown), 4.2), layout="constrained")
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, column in zip(grid, shown, strict=True):
        percent = rounds.assign(percent=column_of(column).scale * rounds[column])
        legend = "full" if axes is grid[-1] else False
        sns.lineplot(percent, x=ROUND, y="percent", legend=legend, ax=axes, **drawn)
        axes.set_title({VALIDATION: "VAL: ", HOLDOUT: "HO: "}[column] + column_of(column).title)
        axes.set_ylabel("accuracy (%)")
        style.whole_rounds(axes)
        style.plain(axes)
    sns.move_legend(grid[-1], "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def heatmap_figure(sweep: Sweep, across: str, down: str) -> Figure:
    """Test accuracy by two settings; a cell is the best configuration over all other settings."""
    best = sweep.ranked.dropna(subset=[across, down]).drop_duplicates([across, down])
    column = TEST if TEST in sweep.measured else sweep.metric
    is_percent, heights = column_of(column).scale > 1, column_of(column).scale * best[column]
    texts = heights.map("{:.1f}".format) + best.apply(mark_of, axis=1)
    if CLUSTERS in best:
        texts += best[CLUSTERS].map(_counted)
    values, annotation = (
        best.assign(shown=shown)
        .pivot(index=down, columns=across, values="shown")
        .reindex(index=_present(sweep, best, down), columns=_present(sweep, best, across))
        .rename(index=_value, columns=_value)
        for shown in (heights, texts)
    )
    figure = Figure((2.6 + 0.85 * values.shape[1], 2.1 + 0.55 * len(values)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.92")
    low, high = float(heights.min()), float(heights.max())
    slack = max(0.0, MIN_SPAN - (high - low)) / 2 if is_percent else 0.0
    sns.heatmap(
        values,
        annot=annotation.fillna("") if max(values.shape) <= MAX_ANNOTATED else False,
        fmt="",
        annot_kws={"fontsize": 8},
        cbar_kws={"label": column_of(column).label},
        cmap="viridis",
        vmin=low - slack,
        vmax=min(high + slack, 100.0) if is_percent else high,
        ax=axes,
    )
    axes.tick_params(axis="both", labelrotation=0)
    x, y = (style.for_figure(sweep.names[key]) for key in (across, down))
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(f"{low:.1f} to {high:.1f}, a span of {high - low:.1f}", fontsize=9)
    return figure


def overview_figure(sweep: Sweep) -> Figure:
    """The accuracy of every configuration by each setting; best ringed, baselines dashed."""
    column = TEST if TEST in sweep.measured else sweep.metric
    tried = sweep.configurations.drop(sweep.baselines.index)
    keys = [key for key in sweep.keys if tried[key].nunique() > 1]
    figure = Figure(figsize=(max(6.0, 3.2 * len(keys)), 4.2), layout="constrained")
    grid = figure.subplots(1, len(keys), squeeze=False, sharey=True)[0]
    ringed = "best" + "".join(mark_of(row) for _, row in sweep.best.iterrows())
    handles = {"best": style.line(ringed, style.RED, **RING)}
    for axes, key in zip(grid, keys, strict=True):
        having = tried.dropna(subset=[key])
        x, y = _positions(axes, sweep, having, key), column_of(column).scale * having[column]
        axes.scatter(x, y, s=16, color="0.35", alpha=0.45, linewidths=0)
        is_best = having.index.isin(sweep.best.index)
        axes.plot(x[is_best], y[is_best], color=style.RED, **RING)
        handles |= _draw_dashed(axes, sweep, sweep.baselines, column)
        axes.set_xlabel(style.for_figure(sweep.names[key]))
        style.plain(axes)
    grid[0].set_ylabel(column_of(column).label)
    style.legend_below(figure, list(handles.values()))
    return figure


def importance_figure(sweep: Sweep) -> Figure | None:
    """The share of the metric's variance that each key explains, for a sampled sweep."""
    shares = 100 * sweep.importances[::-1]  # the largest on top
    if shares.empty:
        return None
    figure = Figure(figsize=(6, 1.2 + 0.35 * len(shares)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([style.for_figure(str(name)) for name in shares.index], shares, color="0.45")
    axes.bar_label(bars, fmt="%.0f %%", padding=3)
    axes.set(xlabel=f"share of the variance of {column_of(sweep.metric).title} (%)", xlim=(0, 100))
    sns.despine(ax=axes)
    return figure


def _positions(axes: Axes, sweep: Sweep, configurations: pd.DataFrame, key: str) -> style.Values:
    """Positions of configurations on the axis of a setting: numbers to scale, names in a row."""
    if key in curve_keys(sweep):
        _scale(axes, configurations[key])
        return configurations[key].to_numpy(np.float64)
    values = _present(sweep, configurations, key)
    is_marked = configurations.groupby(key)[recorded.USES_GROUND_TRUTH].max() > 0
    names = [_value(value) + f" {GROUND_TRUTH}" * bool(is_marked[value]) for value in values]
    axes.set_xticks(range(len(values)), names, rotation=30 if max(map(len, names)) > 8 else 0)
    axes.set_xlim(-0.5, len(values) - 0.5)
    positions: style.Values = configurations[key].map(values.index).to_numpy(np.float64)
    return positions + style.spread_out(len(configurations), 0.5)


def _scale(axes: Axes, numbers: "pd.Series[float]") -> None:
    """A logarithmic axis for positive numbers of several magnitudes."""
    if len(numbers) and numbers.min() > 0 and numbers.max() > LOG_RATIO * numbers.min():
        axes.set_xscale("log")


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
    others = _varied(sweep, rows, key)
    named = [k for k in others if k != facet]
    if len(rows.drop_duplicates(named) if named else rows[:1]) > MAX_LABELS:
        named = [min(named, key=lambda k: rows[k].nunique(dropna=False))]  # a colour for each value
    points, by = sweep.configurations.dropna(subset=[key]), others
    if rows[SEED].nunique() > 1 and not sweep.has_seeds:
        by = [*others, SEED]  # each seed has values of its own: there is nothing to average
        points = averaged(rows, [*by, key], sweep.measured)
    lines = points.groupby(by, dropna=False, sort=False).ngroup() if by else 0
    labels = [_combination(row, named) for _, row in points.iterrows()]
    return points.assign(line=lines, label=labels)


def _draw_line(
    axes: Axes,
    line: pd.DataFrame,
    columns: tuple[str, str],
    colour: style.Colour,
    is_sampled: bool,
) -> None:
    """Draw a measured column against a setting, (setting, column) in `columns`."""
    key, column = columns
    x, mean, spread = (line[name].to_numpy(np.float64) for name in (key, column, column + SPREAD))
    mean, spread = column_of(column).scale * mean, column_of(column).scale * np.nan_to_num(spread)
    has_spread = spread.any()
    if is_sampled:
        bars = spread if has_spread else None
        axes.errorbar(x, mean, bars, fmt="o", markersize=4, color=colour, elinewidth=0.8, alpha=0.7)
        return
    if has_spread:
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


def _draw_dashed(
    axes: Axes, sweep: Sweep, configurations: pd.DataFrame, column: str
) -> dict[str, Line2D]:
    """Draw a level line for each configuration without a value on the axis; the lines by label."""
    drawn = {}
    for k, (_, row) in enumerate(configurations.dropna(subset=[column]).iterrows()):
        label, dashes = _combination(row, sweep.keys) or "without", DASHES[k % len(DASHES)]
        height = column_of(column).scale * row[column]
        drawn[label] = axes.axhline(height, label=label, color="0.35", lw=1.2, ls=dashes)
    return drawn


def _rounds_of(sweep: Sweep, key: str) -> pd.DataFrame:
    """The rounds of all finished rows with the value of the setting, and other settings."""
    varied = _varied(sweep, sweep.finished, key)
    frames = [pd.DataFrame()]
    for _, row in sweep.finished.iterrows():
        run = RunDirectory(sweep.path / str(row[FOLDER]))
        if run.holds_run():
            setting = {sweep.names[key]: value_text(row[key]) or "without"}
            rounds = run.rounds().reindex(columns=[ROUND, VALIDATION, HOLDOUT])
            frames.append(rounds.assign(**setting, others=_combination(row, varied)))
    return pd.concat(frames, ignore_index=True)


def _varied(sweep: Sweep, rows: pd.DataFrame, key: str) -> list[str]:
    """The settings besides `key` that differ between rows."""
    return [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]


def _combination(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    return ", ".join(_value(row[key]) for key in keys if pd.notna(row[key]))


def _present(sweep: Sweep, cells: pd.DataFrame, key: str) -> list[Any]:  # Any: numbers or text
    return [value for value in sweep.values(key) if value in set(cells[key])]


def _counted(clusters: float) -> str:
    return f"\n{number_text(CLUSTERS, clusters)} cluster{'s' * (clusters != 1)}"


def _value(value: object) -> str:
    return style.for_figure(value_text(value))

"""Figures of a sweep: curves against a number, heatmaps over two settings, all settings at once."""

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
from flray.reports import columns, style
from flray.reports.columns import HOLDOUT, TEST, VALIDATION, column_of
from flray.reports.sheets import GROUND_TRUTH
from flray.reports.sweep_tables import mark_of
from flray.reports.sweeps import SPREAD, Sweep, averaged

MIN_CURVE = 3  # values that a number must have to be an axis
LOG_RATIO = 20  # largest to smallest value from which an axis is logarithmic
MAX_PANELS = 4  # numbers that are drawn against a setting
MAX_FACETS = 4  # values of a setting whose lines get panels of their own
FACET_RATIO = 5  # of the medians of a number, from which they do
MAX_LABELS = 14  # lines with a name of their own
MAX_CATEGORIES = 20  # values of a setting along a heatmap
MAX_ANNOTATED = 12  # rows or columns of a heatmap with numbers in it
MIN_SPAN = 5.0  # points that the colours of a heatmap cover at least
DASHES = ("--", "-.", ":", (0, (8, 3)))
DOT = {"ls": "", "marker": "o", "ms": 4}
RING = {"ls": "", "marker": "o", "mfc": "none", "ms": 9, "mew": 1.8}
CURVES = (
    *(TEST, VALIDATION, HOLDOUT),
    *(CLUSTERS, recorded.ARI, recorded.CLIENTS_REACHING_TARGET),
)
REFERENCES = {recorded.UNIFORMITY_LABELS: "--", recorded.UNIFORMITY_RANDOM: ":"}


def curve_keys(sweep: Sweep) -> list[str]:
    """Numeric settings with enough values to be an axis."""
    return [k for k in sweep.keys if sweep.is_number(k) and len(sweep.values(k)) >= MIN_CURVE]


def heatmap_pairs(sweep: Sweep) -> list[tuple[str, str]]:
    """Pairs of settings of few values each, pairs of names before those with numbers."""

    def is_drawn(key: str) -> bool:
        """True if every configuration has another value, as random draws have."""
        return sweep.is_number(key) and len(sweep.values(key)) >= len(sweep.configurations) > 4

    def is_crossed(pair: tuple[str, str]) -> bool:
        """True if both settings vary where a row has both; baselines lack what others vary."""
        both = sweep.configurations.dropna(subset=list(pair))
        return all(both[key].nunique() > 1 for key in pair)

    few = [key for key in sweep.keys if 1 < len(sweep.values(key)) <= MAX_CATEGORIES]
    few = [key for key in few if key in sweep.telling and not is_drawn(key)]
    found = [pair for pair in combinations(few, 2) if is_crossed(pair)]
    return sorted(found, key=lambda pair: sum(map(sweep.is_number, pair)))


def curve_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy and clusters against a number, as FLIS's Figs. 2 and 3.

    Values of a setting for which the number is of another magnitude have panels of their own.
    """
    shown = [column for column in CURVES if column in sweep.measured][:MAX_PANELS]
    return _curves(sweep, key, shown, _facet_key(sweep, key))


def clustering_error_figure(sweep: Sweep, key: str) -> Figure | None:
    """False positives, false negatives and their sum against a number, as FLIS's Fig. 3."""
    return _curves(sweep, key, (columns.CLUSTERING_ERROR, recorded.OVERLAP_FP, recorded.OVERLAP_FN))


def correlation_figure(sweep: Sweep, key: str) -> Figure | None:
    """Correlation of signatures with the similarity of data against a number, as REPA's Fig. 1."""
    return _curves(sweep, key, recorded.CORRELATIONS)


def uniformity_figure(sweep: Sweep, key: str) -> Figure | None:
    """Uniformity of clusters against a number, with that of random clusters and of clusters by
    the labels themselves, as REPA's Fig. 2."""
    return _curves(sweep, key, [recorded.UNIFORMITY], references=REFERENCES)


def _curves(
    sweep: Sweep,
    key: str,
    wanted: Sequence[str],
    facet: str | None = None,
    references: Mapping[str, str] = {},  # read only
) -> Figure | None:
    """A panel for each measured column against a number, and for each value of `facet`.

    A line for each combination of the other settings, with a band of one standard deviation over
    seeds; of a setting that was sampled, a point for each configuration, with a bar. Rows without
    the number (baselines) are dashed, as are columns of `references`.
    """
    shown = [column for column in wanted if column in sweep.measured]
    if not shown:
        return None
    points = _curve_points(sweep, key, facet)
    colours = style.colours_of(points["label"])
    without = sweep.configurations[sweep.configurations[key].isna()]
    facets = [None] if facet is None else sweep.values(facet)
    places = [(column, value) for column in shown for value in facets]
    across = len(facets) if facet else 2 if len(shown) == 4 else len(shown)
    rows = -(-len(places) // across)
    figure = Figure(figsize=(max(6.0, 4.2 * across), 2.7 * rows + 1.4), layout="constrained")
    grid = figure.subplots(
        rows, across, squeeze=False, sharex="col", sharey="row" if facet else "none"
    )
    dashed: dict[str, Line2D] = {}
    draw, entry = (_draw_points, DOT) if key in sweep.sampled else (_draw_line, {})
    for axes, (column, value) in zip(grid.flat, places, strict=True):
        own = points if facet is None else points[points[facet] == value]
        for _, line in own.groupby("line", sort=False):
            draw(axes, line.sort_values(key), key, column, colours[line["label"].iloc[0]])
        dashed |= _draw_dashed(axes, sweep, without, column)
        for name, dashes in references.items():
            if name in sweep.finished:
                mean, told = sweep.finished.groupby(key)[name].mean(), column_of(name).title
                (dashed[told],) = axes.plot(mean.index, mean, color="0.35", ls=dashes, label=told)
        if column == CLUSTERS:
            style.count_axis(axes)
        axes.set_ylabel("" if facet and axes not in grid[:, 0] else column_of(column).label)
        if facet is not None and axes in grid[0]:
            axes.set_title(f"{sweep.names[facet]}: {_value(value)}")
        _scale(axes, own[key])
        style.plain(axes)
    for axes in grid[-1]:
        axes.set_xlabel(style.for_figure(sweep.names[key]))
    if len(handles := [*style.lines(colours, **entry), *dashed.values()]) > 1:
        style.legend_below(figure, handles)
    return figure


def evolution_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy by round, a colour for each value of a setting, as REPA's Figs. 4 and 5: on the
    validation part of the clients that train (VAL), and of holdout clients (HO).

    Other settings have dashes of their own. None if the runs are no longer available.
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
        percent = rounds.assign(percent=100 * rounds[column])
        legend = "full" if axes is grid[-1] else False
        sns.lineplot(percent, x=ROUND, y="percent", legend=legend, ax=axes, **drawn)
        axes.set_title({VALIDATION: "VAL: ", HOLDOUT: "HO: "}[column] + column_of(column).title)
        axes.set_ylabel("accuracy (%)")
        style.whole_rounds(axes)
        style.plain(axes)
    sns.move_legend(grid[-1], "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def heatmap_figure(sweep: Sweep, across: str, down: str) -> Figure:
    """Test accuracy over two settings, each cell the best by the sweep's metric over the others."""
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
    """Every configuration's accuracy by each setting; the best is ringed, baselines are dashed."""
    column = TEST if TEST in sweep.measured else sweep.metric
    tried = sweep.configurations.drop(sweep.baselines.index)
    keys = [key for key in sweep.keys if tried[key].nunique() > 1]
    figure = Figure(figsize=(max(6.0, 3.2 * len(keys)), 4.2), layout="constrained")
    grid = figure.subplots(1, len(keys), squeeze=False, sharey=True)[0]
    ringed = "best" + "".join(mark_of(row) for _, row in sweep.best.iterrows())
    handles = {"best": style.line(ringed, style.RED, **RING)}
    for axes, key in zip(grid, keys, strict=True):
        own = tried.dropna(subset=[key])
        x, y = _places(axes, sweep, own, key), column_of(column).scale * own[column]
        axes.scatter(x, y, s=16, color="0.35", alpha=0.45, linewidths=0)
        is_best = own.index.isin(sweep.best.index)
        axes.plot(x[is_best], y[is_best], color=style.RED, **RING)
        handles |= _draw_dashed(axes, sweep, sweep.baselines, column)
        axes.set_xlabel(style.for_figure(sweep.names[key]))
        style.plain(axes)
    grid[0].set_ylabel(column_of(column).label)
    style.legend_below(figure, list(handles.values()))
    return figure


def importance_figure(sweep: Sweep) -> Figure | None:
    """How much of the metric's variance each key explains; None for a sweep that is no sample."""
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


def _places(axes: Axes, sweep: Sweep, own: pd.DataFrame, key: str) -> style.Values:
    """Where configurations stand on the axis of a setting: numbers to scale, names side by side."""
    if key in curve_keys(sweep):
        _scale(axes, own[key])
        return own[key].to_numpy(np.float64)
    values = _present(sweep, own, key)
    used = own.groupby(key)[recorded.USES_GROUND_TRUTH].max() > 0
    told = [_value(value) + f" {GROUND_TRUTH}" * bool(used[value]) for value in values]
    axes.set_xticks(range(len(values)), told, rotation=30 if max(map(len, told)) > 8 else 0)
    axes.set_xlim(-0.5, len(values) - 0.5)
    places: style.Values = own[key].map(values.index).to_numpy(np.float64)
    return places + style.spread_out(len(own), 0.5)


def _scale(axes: Axes, numbers: "pd.Series[float]") -> None:
    """A logarithmic axis for positive numbers of several magnitudes."""
    if len(numbers) and numbers.min() > 0 and numbers.max() > LOG_RATIO * numbers.min():
        axes.set_xscale("log")


def _facet_key(sweep: Sweep, key: str) -> str | None:
    """The setting whose values differ in the magnitude of the number, as L1 and cosine do."""
    rows = sweep.configurations.dropna(subset=[key])
    for other in sweep.telling:
        if other in sweep.keys and 1 < rows[other].nunique() <= MAX_FACETS and other != key:
            middle = rows.groupby(other)[key].median()
            if middle.min() > 0 and middle.max() > FACET_RATIO * middle.min():
                return other
    return None


def _curve_points(sweep: Sweep, key: str, facet: str | None) -> pd.DataFrame:
    """The points of a curve figure with the `line` they are on and its `label`."""
    rows = sweep.finished.dropna(subset=[key])
    others = _varied(sweep, rows, key)
    told = [k for k in others if k != facet]
    if len(rows.drop_duplicates(told) if told else rows[:1]) > MAX_LABELS:
        told = [min(told, key=lambda k: rows[k].nunique(dropna=False))]  # a colour for each value
    points, by = sweep.configurations.dropna(subset=[key]), others
    if rows[SEED].nunique() > 1 and not sweep.has_seeds:
        by = [*others, SEED]  # each seed has values of its own: there is nothing to average
        points = averaged(rows, [*by, key], sweep.measured)
    lines = points.groupby(by, dropna=False, sort=False).ngroup() if by else 0
    labels = [_combination(row, told) for _, row in points.iterrows()]
    return points.assign(line=lines, label=labels)


def _positions(
    line: pd.DataFrame, key: str, column: str
) -> tuple[style.Values, style.Values, style.Values]:
    """The values of a setting, the means of a column there and its spreads over seeds."""
    x, mean, spread = (line[name].to_numpy(np.float64) for name in (key, column, column + SPREAD))
    return x, column_of(column).scale * mean, column_of(column).scale * np.nan_to_num(spread)


def _draw_points(
    axes: Axes, line: pd.DataFrame, key: str, column: str, colour: style.Colour
) -> None:
    x, mean, spread = _positions(line, key, column)
    bars = spread if spread.any() else None
    axes.errorbar(x, mean, bars, fmt="o", markersize=4, color=colour, elinewidth=0.8, alpha=0.7)


def _draw_line(axes: Axes, line: pd.DataFrame, key: str, column: str, colour: style.Colour) -> None:
    x, mean, spread = _positions(line, key, column)
    if spread.any():
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
    axes.plot(x, mean, color=colour, marker="o", markersize=3, linewidth=1.4)


def _draw_dashed(
    axes: Axes, sweep: Sweep, configurations: pd.DataFrame, column: str
) -> dict[str, Line2D]:
    """Lines of configurations that do not depend on the axis, by their names."""
    drawn = {}
    for place, (_, row) in enumerate(configurations.dropna(subset=[column]).iterrows()):
        label, dashes = _combination(row, sweep.keys) or "without", DASHES[place % len(DASHES)]
        height = column_of(column).scale * row[column]
        drawn[label] = axes.axhline(height, label=label, color="0.35", lw=1.2, ls=dashes)
    return drawn


def _rounds_of(sweep: Sweep, key: str) -> pd.DataFrame:
    """The rounds of all finished rows with the value of the setting and `others`."""
    told = _varied(sweep, sweep.finished, key)
    frames = [pd.DataFrame()]
    for _, row in sweep.finished.iterrows():
        run = RunDirectory(sweep.path / str(row[FOLDER]))
        if run.holds_run():
            named = {sweep.names[key]: columns.value_text(row[key]) or "without"}
            rounds = run.rounds().reindex(columns=[ROUND, VALIDATION, HOLDOUT])
            frames.append(rounds.assign(**named, others=_combination(row, told)))
    return pd.concat(frames, ignore_index=True)


def _varied(sweep: Sweep, rows: pd.DataFrame, key: str) -> list[str]:
    """The other settings that differ between rows."""
    return [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]


def _combination(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    return ", ".join(_value(row[key]) for key in keys if pd.notna(row[key]))


def _present(sweep: Sweep, cells: pd.DataFrame, key: str) -> list[Any]:  # Any: numbers or text
    return [value for value in sweep.values(key) if value in set(cells[key])]


def _counted(clusters: float) -> str:
    return f"\n{columns.number_text(CLUSTERS, clusters)} cluster{'s' * (clusters != 1)}"


def _value(value: object) -> str:
    return style.for_figure(columns.value_text(value))

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
from numpy.typing import NDArray

from flray.records.columns import FOLDER, USES_GROUND_TRUTH
from flray.records.run_directory import RunDirectory
from flray.report import style
from flray.report.columns import (
    CORRELATIONS,
    HOLDOUT,
    TEST,
    VALIDATION,
    column_of,
    number_text,
    value_text,
)
from flray.report.sheets import marks
from flray.report.sweeps import MISSING_ROWS, SEED, SPREAD, Sweep, averaged

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
BEST = "#CC3311"  # of neither a method nor a group
CURVES = (TEST, VALIDATION, HOLDOUT, "clusters", "ari", "clients_reaching_target")
ERRORS = ("clustering_error", "overlap_fp", "overlap_fn")
REFERENCES = {"uniformity_labels": "--", "uniformity_random": ":"}

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


def curve_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy and clusters against a number, as FLIS's Figs. 2 and 3.

    Values of a setting for which the number is of another magnitude have panels of their own.
    """
    shown = [column for column in CURVES if column in sweep.measured][:MAX_PANELS]
    return _curves(sweep, key, shown, _facet_key(sweep, key))


def clustering_error_figure(sweep: Sweep, key: str) -> Figure | None:
    """False positives, false negatives and their sum against a number, as FLIS's Fig. 3."""
    return _curves(sweep, key, ERRORS)


def correlation_figure(sweep: Sweep, key: str) -> Figure | None:
    """Correlation of embeddings with the similarity of data against a number, as REPA's Fig. 1."""
    return _curves(sweep, key, CORRELATIONS)


def uniformity_figure(sweep: Sweep, key: str) -> Figure | None:
    """Uniformity of clusters against a number, with that of random clusters and of clusters by
    the labels themselves, as REPA's Fig. 2."""
    return _curves(sweep, key, ["uniformity"], references=REFERENCES)


def _curves(
    sweep: Sweep,
    key: str,
    columns: Sequence[str],
    facet: str | None = None,
    references: Mapping[str, str] = {},  # read only
) -> Figure | None:
    """A panel for each measured column against a number, and for each value of `facet`.

    A line for each combination of the other settings, with a band of one standard deviation over
    seeds; rows without the number (baselines) are dashed, as are columns of `references`.
    """
    columns = [column for column in columns if column in sweep.measured]
    if not columns:
        return None
    points = _curve_points(sweep, key, facet)
    colours = _colours(points["label"])
    facets = [None] if facet is None else sweep.values(facet)
    places = [(column, value) for column in columns for value in facets]
    across = len(facets) if facet else 2 if len(columns) == 4 else len(columns)
    rows = -(-len(places) // across)
    figure = Figure(figsize=(max(6.0, 4.2 * across), 2.7 * rows + 1.4), layout="constrained")
    grid = figure.subplots(
        rows, across, squeeze=False, sharex="col", sharey="row" if facet else "none"
    )
    dashed: dict[str, Line2D] = {}
    for axes, (column, value) in zip(grid.flat, places, strict=True):
        own = points if facet is None else points[points[facet] == value]
        for _, line in own.groupby("line", sort=False):
            _draw_line(axes, line.sort_values(key), key, column, colours[line["label"].iloc[0]])
        dashed |= _draw_baselines(axes, sweep, key, column)
        for name, dashes in references.items():
            if name in sweep.finished:
                mean, told = sweep.finished.groupby(key)[name].mean(), column_of(name).title
                (dashed[told],) = axes.plot(mean.index, mean, color="0.35", ls=dashes, label=told)
        if column == "clusters":
            style.count_axis(axes)
        axes.set_ylabel("" if facet and axes not in grid[:, 0] else column_of(column).label)
        if facet is not None and axes in grid[0]:
            axes.set_title(f"{sweep.names[facet]}: {style.for_figure(value_text(value))}")
        if is_log(own[key].to_numpy(np.float64)):
            axes.set_xscale("log")
        style.plain(axes)
    for axes in grid[-1]:
        axes.set_xlabel(style.for_figure(sweep.names[key]))
    if len(handles := [*style.lines(colours), *dashed.values()]) > 1:
        style.legend_below(figure, handles)
    return figure


def evolution_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy by round, a colour for each value of a setting, as REPA's Figs. 4 and 5: on the
    validation part of the clients that train (VAL), and of holdout clients (HO).

    Other settings have dashes of their own. None where the runs are not there any more.
    """
    rounds = _rounds_of(sweep, key)
    shown = [c for c in (VALIDATION, HOLDOUT) if c in rounds and rounds[c].notna().any()]
    if not shown:
        return None
    named = {"hue": sweep.names[key], "style": "others" if rounds["others"].nunique() > 1 else None}
    colours = _colours(rounds[named["hue"]])
    figure = Figure(figsize=(5.2 * len(shown), 4.2), layout="constrained")
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, column in zip(grid, shown, strict=True):
        percent = rounds.assign(accuracy=100 * rounds[column])
        last = axes is grid[-1]
        sns.lineplot(
            percent, x="round", y="accuracy", **named, palette=colours, errorbar=None,
            legend="full" if last else False, ax=axes,
        )  # fmt: skip
        axes.set_title({VALIDATION: "VAL: ", HOLDOUT: "HO: "}[column] + column_of(column).title)
        axes.set_ylabel("accuracy (%)")
        style.whole_rounds(axes)
        style.plain(axes)
    sns.move_legend(grid[-1], "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def heatmap_figure(sweep: Sweep, across: str, down: str) -> Figure:
    """Test accuracy over two settings, each cell the best by the sweep's metric over the others."""
    cells = sweep.best_by([across, down])
    shown = TEST if TEST in sweep.measured else sweep.metric
    scale = column_of(shown).scale
    percent = scale * cells[shown]
    texts = [f"{x:.1f}{mark}" for x, mark in zip(percent, marks_of(cells), strict=True)]
    if "clusters" in cells:
        found = zip(texts, cells["clusters"], strict=True)
        texts = [f"{t}\n{number_text('clusters', n)} cluster{'s' * (n != 1)}" for t, n in found]
    values, annotation = (
        pd.Series(held, pd.MultiIndex.from_frame(cells[[down, across]]))
        .unstack()
        .reindex(index=_present(sweep, cells, down), columns=_present(sweep, cells, across))
        .rename(index=_value, columns=_value)
        for held in (percent.to_numpy(), texts)
    )
    figure = Figure((2.6 + 0.85 * values.shape[1], 2.1 + 0.55 * len(values)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.92")
    low, high = float(percent.min()), float(percent.max())
    slack = max(0.0, MIN_SPAN - (high - low)) / 2 if scale > 1 else 0.0
    sns.heatmap(
        values,
        annot=annotation.fillna("") if max(values.shape) <= MAX_ANNOTATED else False,
        fmt="",
        annot_kws={"fontsize": 8},
        cbar_kws={"label": column_of(shown).label},
        cmap="viridis",
        vmin=low - slack,
        vmax=min(high + slack, 100.0) if scale > 1 else high,
        ax=axes,
    )
    axes.tick_params(axis="both", labelrotation=0)
    x, y = (style.for_figure(sweep.names[key]) for key in (across, down))
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(f"{low:.1f} to {high:.1f}, a span of {high - low:.1f}", fontsize=9)
    return figure


def overview_figure(sweep: Sweep) -> Figure:
    """Every configuration's accuracy by each setting; the best is ringed, baselines are dashed."""
    shown = TEST if TEST in sweep.measured else sweep.metric
    tried = sweep.configurations.drop(sweep.baselines.index)
    keys = [key for key in sweep.keys if tried[key].nunique() > 1]
    figure = Figure(figsize=(max(6.0, 3.2 * len(keys)), 4.2), layout="constrained")
    grid = figure.subplots(1, len(keys), squeeze=False, sharey=True)[0]
    ring = {"ls": "", "marker": "o", "mfc": "none", "ms": 9, "mew": 1.8}
    handles = {"best": style.line("best", BEST, **ring)}
    for axes, key in zip(grid, keys, strict=True):
        own = tried.dropna(subset=[key])
        x, y = _places(axes, sweep, own, key), column_of(shown).scale * own[shown]
        axes.scatter(x, y, s=16, color="0.35", alpha=0.45, linewidths=0)
        is_best = own.index.isin(sweep.best.index)
        axes.plot(x[is_best], y[is_best], color=BEST, **ring)
        handles |= _draw_baselines(axes, sweep, key, shown, sweep.baselines)
        axes.set_xlabel(style.for_figure(sweep.names[key]))
        style.plain(axes)
    grid[0].set_ylabel(column_of(shown).label)
    style.legend_below(figure, list(handles.values()))
    return figure


def marks_of(configurations: pd.DataFrame) -> list[str]:
    """The marks behind the number of each configuration."""
    pairs = zip(configurations[USES_GROUND_TRUTH], configurations[MISSING_ROWS], strict=True)
    return [f" {text}" if (text := marks(used > 0, missing)) else "" for used, missing in pairs]


def is_log(values: Values) -> bool:
    return bool(len(values) and values.min() > 0 and values.max() > LOG_RATIO * values.min())


def _places(axes: Axes, sweep: Sweep, own: pd.DataFrame, key: str) -> Values:
    """Where configurations stand on the axis of a setting: numbers to scale, names side by side."""
    if key in curve_keys(sweep):
        numbers: Values = own[key].to_numpy(np.float64)
        axes.set_xscale("log" if is_log(numbers) else "linear")
        return numbers
    values = _present(sweep, own, key)
    told = [
        _value(value) + marks_of(group[:1])[0]
        for value in values
        for group in [own[own[key] == value].sort_values(USES_GROUND_TRUTH, ascending=False)]
    ]
    axes.set_xticks(range(len(values)), told, rotation=30 if max(map(len, told)) > 8 else 0)
    axes.set_xlim(-0.5, len(values) - 0.5)
    places: Values = own[key].map(values.index).to_numpy(np.float64)
    return places + 0.5 * (np.arange(len(own)) * style.GOLDEN_RATIO % 1 - 0.5)


def _facet_key(sweep: Sweep, key: str) -> str | None:
    """The setting for whose values the number is of other magnitudes, as for L1 and cosine."""
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
    others = [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]
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


def _draw_line(axes: Axes, line: pd.DataFrame, key: str, column: str, colour: style.Colour) -> None:
    x, mean, spread = (line[name].to_numpy(np.float64) for name in (key, column, column + SPREAD))
    mean, spread = (column_of(column).scale * held for held in (mean, np.nan_to_num(spread)))
    if spread.any():
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
    axes.plot(x, mean, color=colour, marker="o", markersize=3, linewidth=1.4)


def _draw_baselines(
    axes: Axes, sweep: Sweep, key: str, column: str, rows: pd.DataFrame | None = None
) -> dict[str, Line2D]:
    """Rows that do not have the number are the same at every value of it; by their names."""
    if rows is None:
        rows = sweep.configurations[sweep.configurations[key].isna()]
    drawn = {}
    for place, (_, row) in enumerate(rows.dropna(subset=[column]).iterrows()):
        label, dashes = _combination(row, sweep.keys) or "without", DASHES[place % len(DASHES)]
        height = column_of(column).scale * row[column]
        drawn[label] = axes.axhline(height, label=label, color="0.35", lw=1.2, ls=dashes)
    return drawn


def _rounds_of(sweep: Sweep, key: str) -> pd.DataFrame:
    """The rounds of all finished rows with the value of the setting and `others`."""
    rows = sweep.finished
    told = [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]
    frames = [pd.DataFrame()]
    for _, row in rows.iterrows():
        run = RunDirectory(sweep.path / str(row[FOLDER]))
        if run.holds_run():
            named = {sweep.names[key]: value_text(row[key]) or "without"}
            rounds = run.rounds().reindex(columns=["round", VALIDATION, HOLDOUT])
            frames.append(rounds.assign(**named, others=_combination(row, told)))
    return pd.concat(frames, ignore_index=True)


def _colours(labels: "pd.Series[str]") -> dict[str, style.Colour]:
    distinct = list(dict.fromkeys(labels))
    return dict(zip(distinct, style.palette(len(distinct)), strict=True))


def _combination(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    """
    >>> _combination(pd.Series({"a.linkage": "ward", "b": None}), ["a.linkage", "b"])
    'ward'
    """
    return ", ".join(_value(row[key]) for key in keys if pd.notna(row[key]))


def _present(sweep: Sweep, cells: pd.DataFrame, key: str) -> list[Any]:  # Any: numbers or text
    return [value for value in sweep.values(key) if value in set(cells[key])]


def _is_drawn(sweep: Sweep, key: str) -> bool:
    """True if every row has a value of its own, as random draws have."""
    return sweep.is_number(key) and len(sweep.values(key)) >= len(sweep.configurations) > 4


def _is_crossed(rows: pd.DataFrame, pair: tuple[str, str]) -> bool:
    """True if both settings vary where a row has both; baselines lack what others vary."""
    both = rows.dropna(subset=list(pair))
    return all(both[key].nunique() > 1 for key in pair)


def _value(value: object) -> str:
    return style.for_figure(value_text(value))

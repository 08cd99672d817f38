"""Figures of a sweep: heatmaps of two settings, all settings at once, accuracy by round."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flray import columns as recorded
from flray.columns import CLUSTERS, FOLDER, ROUND
from flray.records.run_directory import RunDirectory
from flray.reports import style, sweep_curves
from flray.reports.columns import column_of, number_text, value_text
from flray.reports.sheets import GROUND_TRUTH
from flray.reports.sweep_tables import mark_of
from flray.reports.sweeps import Sweep

MAX_CATEGORIES = 20  # most values of a setting along a heatmap
MAX_ANNOTATED = 12  # most rows or columns of a heatmap with numbers in its cells
MIN_SPAN = 5.0  # least percentage points that the colours of a heatmap cover
RING = {"ls": "", "marker": "o", "mfc": "none", "ms": 9, "mew": 1.8}


def heatmap_pairs(sweep: Sweep) -> list[tuple[str, str]]:
    """Pairs of settings with few values each; pairs of names come before pairs with numbers.

    Both settings of a pair have two to MAX_CATEGORIES values, vary together, and were listed, not
    drawn at random.
    """

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


def evolution_figure(sweep: Sweep, key: str) -> Figure | None:
    """The score by round, a colour for each value of a setting, as in REPA's Figs. 4 and 5.

    The panels are the validation part of the clients that train (VAL) and holdout clients (HO).
    Combinations of other settings differ in their dashes. Lines are means over seeds. None if
    neither accuracy was recorded, or if the runs of the rows are no longer there.
    """
    rounds, hue = _rounds_of(sweep, key), sweep.names[key]
    panels = _panels(sweep)
    shown = [c for c in panels if c in rounds and rounds[c].notna().any()]
    if not shown:
        return None
    drawn = {"hue": hue, "palette": style.colours_of(rounds[hue]), "errorbar": None}
    drawn["style"] = "others" if rounds["others"].nunique() > 1 else None
    figure = Figure(figsize=(5.2 * len(shown), 4.2), layout="constrained")
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, column in zip(grid, shown, strict=True):
        scaled = rounds.assign(shown=column_of(column).scale * rounds[column])
        legend = "full" if axes is grid[-1] else False
        sns.lineplot(scaled, x=ROUND, y="shown", legend=legend, ax=axes, **drawn)
        axes.set_title(f"{panels[column]}: {column_of(column).title}")
        axes.set_ylabel(replace(column_of(column), title=sweep.score.title).label)
        style.whole_rounds(axes)
        style.plain(axes)
    sns.move_legend(grid[-1], "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def heatmap_figure(sweep: Sweep, across: str, down: str) -> Figure:
    """The test score by two settings; a cell is the best configuration over all other settings.

    Cells are annotated with the score, marks and number of clusters if there are few. The best is
    chosen by the metric of the sweep, not by the test score shown.

    Args:
        sweep: The sweep.
        across: The key whose values are columns.
        down: The key whose values are rows.
    """
    best = sweep.ranked.dropna(subset=[across, down]).drop_duplicates([across, down])
    column = sweep.score.mean if sweep.score.mean in sweep.measured else sweep.metric
    is_percent, heights = column_of(column).scale > 1, column_of(column).scale * best[column]
    form = "{:.1f}" if is_percent else "{:.3g}"
    texts = heights.map(form.format) + best.apply(mark_of, axis=1)
    if CLUSTERS in best:
        texts += best[CLUSTERS].map(_counted)
    values, annotation = (
        best.assign(shown=shown)
        .pivot(index=down, columns=across, values="shown")
        .reindex(index=_present(sweep, best, down), columns=_present(sweep, best, across))
        .rename(index=sweep_curves.setting_label, columns=sweep_curves.setting_label)
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
        vmax=max(high, min(high + slack, 100.0)),
        ax=axes,
    )
    axes.tick_params(axis="both", labelrotation=0)
    x, y = (style.for_figure(sweep.names[key]) for key in (across, down))
    axes.set(xlabel=x, ylabel=y)
    title = "{} to {}, a span of {}".format(*map(form.format, (low, high, high - low)))
    axes.set_title(title, fontsize=9)
    return figure


def overview_figure(sweep: Sweep) -> Figure:
    """The score of every configuration by each setting; best ringed, baselines dashed.

    Names of a setting that need ground truth are marked.
    """
    column = sweep.score.mean if sweep.score.mean in sweep.measured else sweep.metric
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
        handles |= sweep_curves.draw_dashed(axes, sweep, sweep.baselines, column)
        axes.set_xlabel(style.for_figure(sweep.names[key]))
        style.plain(axes)
    grid[0].set_ylabel(column_of(column).label)
    style.legend_below(figure, list(handles.values()))
    return figure


def importance_figure(sweep: Sweep) -> Figure | None:
    """The share of the metric's variance that each key explains, for a sampled sweep.

    Shares are those of `Sweep.importances` (fANOVA). None for a grid, where settings are compared
    one by one instead.
    """
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
    if key in sweep_curves.curve_keys(sweep):
        sweep_curves.scale_axis(axes, configurations[key])
        return configurations[key].to_numpy(np.float64)
    values = _present(sweep, configurations, key)
    is_marked = configurations.groupby(key)[recorded.USES_GROUND_TRUTH].max() > 0
    names = [
        sweep_curves.setting_label(value) + f" {GROUND_TRUTH}" * bool(is_marked[value])
        for value in values
    ]
    axes.set_xticks(range(len(values)), names, rotation=30 if max(map(len, names)) > 8 else 0)
    axes.set_xlim(-0.5, len(values) - 0.5)
    positions: style.Values = configurations[key].map(values.index).to_numpy(np.float64)
    return positions + style.spread_out(len(configurations), 0.5)


def _rounds_of(sweep: Sweep, key: str) -> pd.DataFrame:
    """The rounds of all finished rows with the value of the setting, and other settings."""
    varied = sweep_curves.varied_keys(sweep, sweep.finished, key)
    frames = [pd.DataFrame()]
    for _, row in sweep.finished.iterrows():
        run = RunDirectory(sweep.path / str(row[FOLDER]))
        if run.holds_run():
            setting = {sweep.names[key]: value_text(row[key]) or "without"}
            rounds = run.rounds().reindex(columns=[ROUND, *map(str, _panels(sweep))])
            frames.append(rounds.assign(**setting, others=sweep_curves.combination(row, varied)))
    return pd.concat(frames, ignore_index=True)


def _panels(sweep: Sweep) -> dict[str, str]:
    """The columns of REPA's Figs. 4 and 5, validation parts and holdout clients, with their names
    there."""
    return {sweep.score.validation: "VAL", sweep.score.column("mean", "holdout_"): "HO"}


def _present(sweep: Sweep, cells: pd.DataFrame, key: str) -> list[Any]:  # Any: numbers or text
    return [value for value in sweep.values(key) if value in set(cells[key])]


def _counted(clusters: float) -> str:
    return f"\n{number_text(CLUSTERS, clusters)} cluster{'s' * (clusters != 1)}"

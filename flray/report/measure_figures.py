"""Figures of what clusterings are measured by: FLIS's Fig. 3 and REPA's Figs. 1, 2, 4 and 5."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flray.records.run_directory import RunDirectory
from flray.report.colours import GREY, Colour, for_figure, palette, plain
from flray.report.figures import legend_below
from flray.report.sweep_figures import curve_points, draw_baselines, draw_line, is_log, title_of
from flray.report.sweeps import HOLDOUT, RUN, VALIDATION, Sweep, short_names

CORRELATIONS = ("label_correlation", "drift_correlation", "data_correlation")
REFERENCES = (
    ("uniformity_labels", "k-means of the labels", "dashed"),
    ("uniformity_random", "random", "dotted"),
)
# Settings over which the course of training is drawn: REPA's number of clusters and fraction fit.
EVOLVING = ("algorithm.clustering.partition.number", "participation")
WRONG, LACKING = "#D55E00", "#0072B2"  # false positives, false negatives
LINES = ("-", "--", ":", "-.")


def error_figure(errors: pd.DataFrame) -> Figure:
    """The clustering error of a run by round, as FLIS's Fig. 3: false positives and, on top of
    them, false negatives, by both truths.

    Args:
        errors: by round, with columns overlap_fp, overlap_fn, equal_fp and equal_fn.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    truths = {"overlap": "at least half of a client's labels", "equal": "the same labels"}
    grid = figure.subplots(1, len(truths), sharey=True)
    for axes, (truth, told) in zip(grid, truths.items(), strict=True):
        t = errors.index.to_numpy(np.float64)
        edges = np.append(t - 0.5, t[-1:] + 0.5)
        wrong = errors[f"{truth}_fp"].to_numpy(np.float64)
        both = wrong + errors[f"{truth}_fn"].to_numpy(np.float64)
        axes.stairs(wrong, edges, fill=True, color=WRONG, label="false positives")
        axes.stairs(both, edges, baseline=wrong, fill=True, color=LACKING, label="false negatives")
        axes.set_title(f"right companions hold {told}", fontsize=10)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain(axes)
    grid[0].set_ylabel("clients, for each client")
    handles, _ = grid[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def clustering_error_figure(sweep: Sweep, key: str) -> Figure:
    """False positives, false negatives and their sum against a number, as FLIS's Fig. 3."""
    points = curve_points(sweep, key, None)
    points = points.assign(
        error=points["overlap_fp"] + points["overlap_fn"], error_sd=np.nan
    )  # the spread of a sum is not that of its parts
    titles = {"error": "clustering error", "overlap_fp": "false positives"}
    return _panels(sweep, key, points, titles | {"overlap_fn": "false negatives"})


def correlation_figure(sweep: Sweep, key: str) -> Figure:
    """Correlation of embeddings with the similarity of data against a number, as REPA's Fig. 1."""
    shown = {name: title_of(name) for name in CORRELATIONS if name in sweep.measured}
    return _panels(sweep, key, curve_points(sweep, key, None), shown)


def uniformity_figure(sweep: Sweep, key: str) -> Figure:
    """Uniformity of clusters against a number, with that of random clusters and of clusters by
    the labels themselves, as REPA's Fig. 2."""
    points = curve_points(sweep, key, None)
    figure = _panels(sweep, key, points, {"uniformity": "uniformity (eq. 7)"}, has_legend=False)
    axes = figure.axes[0]
    handles = _line_handles(points)
    rows = sweep.finished.dropna(subset=[key])
    for name, told, style in REFERENCES:
        if name in rows and rows[name].notna().any():
            mean = rows.groupby(key)[name].mean()
            handles += axes.plot(
                mean.index, mean, color=GREY, linestyle=style, linewidth=1.4, label=told
            )
    legend_below(figure, handles)
    return figure


def evolution_figure(sweep: Sweep, key: str) -> Figure | None:
    """Accuracy by round, a colour for each value of a setting, as REPA's Figs. 4 and 5: on the
    validation part of the clients that train (VAL), and of holdout clients (HO).

    Other settings have lines of their own kind. None where the runs are not there any more.
    """
    rounds = _rounds_of(sweep, key)
    shown = {VALIDATION: "VAL", HOLDOUT: "HO"}
    shown = {c: told for c, told in shown.items() if c in rounds and rounds[c].notna().any()}
    if not shown:
        return None
    values = [value for value in sweep.values(key) if value in set(rounds[key].dropna())]
    colours: dict[Any, Colour] = dict(zip(values, palette(len(values)), strict=True))
    others = list(dict.fromkeys(rounds["other"]))
    figure = Figure(figsize=(5.2 * len(shown), 4.2), layout="constrained")
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, (column, told) in zip(grid, shown.items(), strict=True):
        known = rounds.dropna(subset=[column])
        for (value, other), own in known.groupby([key, "other"], dropna=False, sort=False):
            mean = 100 * own.groupby("round")[column].mean()
            style = LINES[others.index(other) % len(LINES)]
            axes.plot(mean.index, mean, color=colours.get(value, GREY), ls=style, lw=1.4)
        axes.set_title(f"{told}: {title_of(column).removesuffix(' (%)')}", fontsize=10)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain(axes)
    grid[0].set_ylabel("accuracy (%)")
    name = short_names(sweep.keys)[key]
    handles = [
        Line2D([], [], color=colour, label=for_figure(f"{name} {value:g}"))
        for value, colour in colours.items()
    ]
    if rounds[key].isna().any():
        handles.append(Line2D([], [], color=GREY, label=f"without {for_figure(name)}"))
    if len(others) > 1:
        handles += [
            Line2D([], [], color="black", ls=LINES[k % len(LINES)], label=for_figure(other))
            for k, other in enumerate(others)
        ]
    legend_below(figure, handles)
    return figure


def _rounds_of(sweep: Sweep, key: str) -> pd.DataFrame:
    """The rounds of all finished rows with the value of the setting and `other`, the others'."""
    rows = sweep.finished
    told = [k for k in sweep.keys if k != key and rows[k].nunique(dropna=False) > 1]
    frames = []
    for _, row in rows.iterrows():
        run = RunDirectory(sweep.path / str(row.get(RUN)))
        if not run.holds_run():
            continue
        other = ", ".join(str(row[k]) for k in told if pd.notna(row[k]))
        columns = ["round", VALIDATION, HOLDOUT]
        frames.append(run.rounds().reindex(columns=columns).assign(**{key: row[key]}, other=other))
    empty = pd.DataFrame(columns=["round", VALIDATION, HOLDOUT, key, "other"])
    return pd.concat(frames, ignore_index=True) if frames else empty


def _panels(
    sweep: Sweep,
    key: str,
    points: pd.DataFrame,
    titles: dict[str, str],
    has_legend: bool = True,
) -> Figure:
    """A panel for each column against a number, a line for each combination of other settings."""
    colours = _colours(points)
    figure = Figure(figsize=(max(6.0, 4.4 * len(titles)), 3.8), layout="constrained")
    grid = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, (column, told) in zip(grid, titles.items(), strict=True):
        for _, line in points.dropna(subset=[column]).groupby("line", sort=False):
            draw_line(axes, line.sort_values(key), key, column, colours[line["label"].iloc[0]])
        if column in sweep.measured:
            draw_baselines(axes, sweep, key, column)
        _finish(axes, points[key].to_numpy(np.float64), short_names(sweep.keys)[key], told)
    if has_legend and len(colours) > 1:
        legend_below(figure, _line_handles(points))
    return figure


def _finish(axes: Axes, values: Any, name: str, told: str) -> None:  # Any: numbers
    axes.set(xlabel=for_figure(name), ylabel=told)
    if is_log(values):
        axes.set_xscale("log")
    plain(axes)


def _colours(points: pd.DataFrame) -> dict[str, Colour]:
    labels = list(dict.fromkeys(points["label"]))
    return dict(zip(labels, palette(len(labels)), strict=True))


def _line_handles(points: pd.DataFrame) -> list[Line2D]:
    named: Sequence[tuple[str, Colour]] = list(_colours(points).items())
    return [Line2D([], [], color=colour, label=label or "found") for label, colour in named]

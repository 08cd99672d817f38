"""Figures of runs: accuracy by round and by client, what was sent and what took time."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flray.records.clusterings import read_clustering
from flray.report.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.report.configuration import look_up
from flray.report.runs import Experiments, RunRecord, read_run
from flray.report.sheets import GROUND_TRUTH
from flray.report.style import (
    GOLDEN_RATIO,
    GREY,
    GROUPS,
    Colour,
    count_axis,
    for_figure,
    legend_below,
    line,
    lines,
    palette,
    plain,
    whole_rounds,
)

DPI = 150
EVENT = "#CC3311"  # of neither a method nor a group
EVENT_DOTS = (0, (1, 1.5))
MAX_BANDS = 4  # more experiments than this would hide each other
MAX_LINES = 8  # more clusterings than this are ticks at the foot
MAX_STRIPS = 20  # clusters side by side
MAX_EVENTS = 3  # more clusterings than this: only the last is drawn
FEW_POINTS = 20  # are marked one by one
THRESHOLD = "algorithm.clustering.partition.threshold"
# A phase that runs inside another one; its time is taken out of the other's.
_INSIDE = {"probe": "signature"}


def write_figures(experiments: Experiments, folder: Path) -> list[Path]:
    """Draw everything that the run directories hold into PNGs; returns their paths."""
    _check_names([name for name, runs in experiments.items() if runs[0].clusterings])
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, figure in _figures(experiments):
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def figures_of(run: Path) -> list[Path]:
    """The figures of one run, in its own directory."""
    return write_figures({"run": [read_run(run, "run")]}, run / "figures")


def _figures(experiments: Experiments) -> Iterator[tuple[str, Figure]]:
    """What can be drawn, by file name; one at a time, since figures are large."""
    every = [run for runs in experiments.values() for run in runs]
    if any(len(run.evaluated()) for run in every):
        yield "accuracy", accuracy_figure(experiments)
    if any(len(run.last_test()) for run in every):
        yield "clients", clients_figure(experiments)
    for name, (first, *others) in experiments.items():
        events = sorted(first.clusterings)
        for t in events if len(events) <= MAX_EVENTS else events[-1:]:
            title = for_figure(f"{first.label if others else name}, {when(t)}", 200)
            found, stem = read_clustering(first.clusterings[t]), f"{_file_name(name)}_round_{t}"
            threshold = look_up(first.config, THRESHOLD)
            yield f"{stem}_distance", distance_figure(found, title, threshold)
            yield f"{stem}_embedding", embedding_figure(found, title)
            yield f"{stem}_graph", graph_figure(found, title)


def when(t: int) -> str:
    return "before the first round" if t == 0 else f"after round {t}"


def accuracy_figure(experiments: Experiments) -> Figure:
    """Mean accuracy by round, a line for each experiment; below it the number of clusters.

    The band is one standard deviation over seeds; of single runs, down to the worst decile.
    """
    data = _joined(experiments, RunRecord.evaluated)
    data = data.assign(accuracy=100 * data["accuracy_mean"].astype(float))
    clustered = bool((data["clusters"] > 1).any())
    colours = dict(zip(experiments, palette(len(experiments)), strict=True))
    figure = Figure(figsize=(7, 5.6 if clustered else 4.4), layout="constrained")
    ratios = [3.2, 1] if clustered else [1]
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    top: Axes = grid[0]
    has_seeds = any(len(runs) > 1 for runs in experiments.values())
    few = data.groupby("experiment", sort=False)["round"].nunique().max() <= FEW_POINTS
    hue = {"hue": "experiment", "palette": colours, "hue_order": list(colours), "legend": False}
    marks = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if few else {}
    bar = "sd" if has_seeds else None
    sns.lineplot(data, x="round", y="accuracy", errorbar=bar, ax=top, **hue, **marks)
    told = ""
    if has_seeds:
        told = "; band: one standard deviation over seeds"
    elif len(experiments) <= MAX_BANDS:
        told = "; band: down to the mean of the worst decile"
        for name, own in data.groupby("experiment", sort=False):
            low = 100 * own["accuracy_worst_decile"].to_numpy(np.float64)
            x, colour = own["round"].to_numpy(), colours[str(name)]
            top.fill_between(x, low, own["accuracy"], color=colour, alpha=0.15, linewidth=0)
    top.set_title(f"Mean over clients{told}", fontsize=10)
    handles = lines({_titled(name, runs): colours[name] for name, runs in experiments.items()})
    handles += _percent_axis(top, experiments)
    if clustered:
        counts, step = data.dropna(subset=["clusters"]), {"drawstyle": "steps-post"}
        sns.lineplot(counts, x="round", y="clusters", errorbar=bar, ax=grid[1], **step, **hue)
        count_axis(grid[1])
    for draw in (_draw_clusterings, _draw_events):
        handles += draw(list(grid), experiments)
    for axes in grid:
        plain(axes)
    whole_rounds(grid[-1])
    legend_below(figure, handles)
    return figure


def clients_figure(experiments: Experiments) -> Figure:
    """Every client's test accuracy: sorted, a line for each experiment over all its seeds; below
    it a panel for each experiment by cluster (one seed) or by seed, coloured by planted group."""
    data = _joined(experiments, RunRecord.last_test)
    data = data.assign(accuracy=100 * data["accuracy"].astype(float))
    shown = {name: data[data["experiment"] == name] for name in experiments}
    shown = {name: own for name, own in shown.items() if len(own)}
    strips = {name: by for name, own in shown.items() if (by := _strip_column(own))}
    columns = min(3, max(1, len(strips)))
    rows = -(-len(strips) // columns)
    figure = Figure(figsize=(7.5, 3.8 + 2.4 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.3] + [1] * rows)
    top = figure.add_subplot(grid[0, :])
    colours = dict(zip(experiments, palette(len(experiments)), strict=True))
    handles = []
    for name, own in shown.items():
        accuracy = np.sort(own["accuracy"].to_numpy(np.float64))
        share = 100 * (np.arange(len(accuracy)) + 0.5) / len(accuracy)
        marker = "o" if len(accuracy) <= FEW_POINTS else ""
        top.plot(share, accuracy, color=colours[name], marker=marker, markersize=3)
        variance = own.groupby("seed", dropna=False)["accuracy"].var(ddof=0).mean()
        told = f"mean {accuracy.mean():.1f} %, variance {variance:.1f} %²"
        handles.append(line(f"{_titled(name, experiments[name])}: {told}", colours[name]))
    handles += _percent_axis(top, {name: experiments[name] for name in shown})
    top.set(xlabel="clients, worst to best (%)", xlim=(0, 100))
    top.set_title("Test accuracy of every client at the last evaluation", fontsize=10)
    plain(top)
    planted = sorted(data["group"].dropna().unique()) if "group" in data else []
    of_group = dict(zip(planted, palette(len(planted), GROUPS), strict=True))
    for k, (name, by) in enumerate(strips.items()):
        axes = figure.add_subplot(grid[1 + k // columns, k % columns], sharey=top)
        _draw_strips(axes, shown[name], by, of_group)
        axes.set_title(for_figure(name, 24), fontsize=9)
        axes.set_ylabel("" if k % columns else "test accuracy (%)")
        axes.tick_params(labelleft=k % columns == 0)
        plain(axes)
    legend_below(figure, handles)
    if 0 < len(of_group) <= MAX_STRIPS and strips:
        dots = lines({f"{g:.0f}": colour for g, colour in of_group.items()}, ls="", marker="o")
        legend = figure.legend(handles=dots, loc="outside right upper", frameon=False, fontsize=9)
        legend.set_title("planted\ngroup")
    return figure


def efficiency_figure(experiments: Experiments) -> Figure:
    """Mean test accuracy against the bytes sent in both directions until then, over seeds."""

    def sent(run: RunRecord) -> pd.DataFrame:
        so_far = run.rounds.filter(regex="^bytes_(up|down)_").sum(axis=1).cumsum()
        return run.evaluated().assign(sent=so_far)

    data = _joined(experiments, sent)
    mean = data.groupby(["experiment", "round"], sort=False)[["sent", "accuracy_mean"]].mean()
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
    unit = next((name for name, size in units.items() if mean["sent"].max() >= size), "bytes")
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    axes = figure.subplots()
    for (name, runs), colour in zip(experiments.items(), palette(len(experiments)), strict=True):
        if name in mean.index:
            x, y = mean.loc[name]["sent"] / units[unit], 100 * mean.loc[name]["accuracy_mean"]
            marker = "o" if len(x) <= FEW_POINTS else ""
            label = _titled(name, runs)
            axes.plot(x, y, color=colour, marker=marker, markersize=3, label=label)
    axes.set(xlabel=f"{unit} sent up and down so far", ylabel="test accuracy (%)")
    axes.set_title("Accuracy against communication", fontsize=10)
    plain(axes)
    if len(experiments) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def bytes_by_kind(rounds: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """What was sent in each round in one direction, a column for each kind that ever was."""
    columns = [str(name) for name in rounds if str(name).startswith(prefix)]
    kinds = rounds[sorted(columns)].fillna(0).rename(columns=lambda name: name.removeprefix(prefix))
    kept: pd.DataFrame = kinds.loc[:, kinds.any()].set_axis(rounds["round"])
    return kept


def seconds_by_phase(rounds: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each round by phase; phases do not overlap, `other` is what none of them took."""
    phases = bytes_by_kind(rounds, "seconds_")
    for inner, outer in _INSIDE.items():
        if inner in phases and outer in phases:
            phases[outer] = (phases[outer] - phases[inner]).clip(lower=0)
    if "seconds" in rounds and len(phases.columns):
        total = rounds["seconds"].fillna(0).to_numpy(np.float64)
        phases["other"] = np.maximum(total - phases.sum(axis=1), 0)
    return phases[phases.sum().sort_values(ascending=False, kind="stable").index]


def error_figure(errors: pd.DataFrame) -> Figure:
    """The clustering error of a run by round, as FLIS's Fig. 3: false positives and, on top of
    them, false negatives, by both truths.

    Args:
        errors: by round, with columns overlap_fp, overlap_fn, equal_fp and equal_fn.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    truths = {"overlap": "at least half of a client's labels", "equal": "the same labels"}
    grid = figure.subplots(1, len(truths), sharey=True)
    t = errors.index.to_numpy(np.float64)
    edges = np.append(t - 0.5, t[-1:] + 0.5)
    for axes, (truth, told) in zip(grid, truths.items(), strict=True):
        wrong = errors[f"{truth}_fp"].to_numpy(np.float64)
        both = wrong + errors[f"{truth}_fn"].to_numpy(np.float64)
        axes.stairs(wrong, edges, fill=True, color="0.3", label="false positives")
        axes.stairs(both, edges, baseline=wrong, fill=True, color="0.75", label="false negatives")
        axes.set_title(f"right companions hold {told}", fontsize=10)
        whole_rounds(axes)
        plain(axes)
    grid[0].set_ylabel("clients, for each client")
    handles, _ = grid[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _joined(experiments: Experiments, read: Callable[[RunRecord], pd.DataFrame]) -> pd.DataFrame:
    """The frames of all runs with their experiment and seed."""
    return pd.concat(
        [
            read(run).assign(experiment=name, seed=run.seed)
            for name, runs in experiments.items()
            for run in runs
        ],
        ignore_index=True,
    )


def _strip_column(own: pd.DataFrame) -> str | None:
    """What the panel of an experiment is split by: seed, the model clients share, or group."""
    if own["seed"].nunique() > 1:
        return "seed"
    for column in ("model", "group"):
        if column in own and 1 < own[column].nunique() <= MAX_STRIPS:
            return column
    return None


def _draw_strips(axes: Axes, own: pd.DataFrame, by: str, of_group: Mapping[float, Colour]) -> None:
    """A column of dots for each value; grey where only other experiments have planted groups."""
    names = sorted(own[by].dropna().astype(int).unique())
    place = own[by].map({name: k for k, name in enumerate(names)}).to_numpy(np.float64)
    jitter = 0.6 * (np.arange(len(own)) * GOLDEN_RATIO % 1 - 0.5)
    clusters = [GREY] * len(names) if of_group or by == "seed" else palette(len(names), GROUPS)
    groups = own["group"] if "group" in own else pd.Series(np.nan, index=own.index)
    colours = [of_group.get(g, clusters[int(k)]) for g, k in zip(groups, place, strict=True)]
    axes.scatter(place + jitter, own["accuracy"], s=12, c=colours, linewidths=0, alpha=0.8)
    means = own["accuracy"].groupby(place).mean()
    axes.hlines(means, means.index - 0.4, means.index + 0.4, color="0.2", linewidth=1.2)
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.tick_params(axis="x", labelsize=9 if len(names) <= 10 else 6)
    axes.set_xlabel({"model": "cluster", "seed": "seed"}.get(by, "planted group"))


def _percent_axis(axes: Axes, experiments: Experiments) -> list[Line2D]:
    """Test accuracy upwards, with a dotted line at each target."""
    configs = [runs[0].config for runs in experiments.values()]
    targets = {float(t) for c in configs if (t := look_up(c, "evaluate.target")) is not None}
    drawn = [
        axes.axhline(100 * t, color="0.45", lw=0.8, ls=":", label=f"target {100 * t:.4g} %")
        for t in sorted(targets)
    ]
    axes.set_ylim(max(axes.get_ylim()[0], -2), min(axes.get_ylim()[1], 102))
    axes.set_ylabel("test accuracy (%)")
    return drawn


def _draw_events(column: Sequence[Axes], experiments: Experiments) -> list[Line2D]:
    """A line of dots at the start of each round in which data changed or clients came or went."""
    runs = [run for each in experiments.values() for run in each]
    rounds = {(event["round"], event["kind"]) for r in runs for event in r.config.get("events", [])}
    last = max((int(run.config.get("rounds", 0)) for run in runs), default=0)
    there = sorted((t, kind) for t, kind in rounds if t <= last)
    for axes in column:
        for t in {t for t, _ in there}:
            axes.axvline(t - 0.5, color=EVENT, linewidth=1.2, linestyle=EVENT_DOTS)
    told = ", ".join(dict.fromkeys(kind for _, kind in there))
    return [line(f"event: {told}", EVENT, linestyle=EVENT_DOTS)] if there else []


def _draw_clusterings(column: Sequence[Axes], experiments: Experiments) -> list[Line2D]:
    """A dashed line after each round that ended in a clustering; ticks where they are many."""
    events = [run.clusterings for runs in experiments.values() for run in runs]
    few = {t for each in events if len(each) <= MAX_LINES for t in each}
    many = {t for each in events for t in each} - few
    for axes in column:
        for t in sorted(few):
            axes.axvline(t, color="0.3", linewidth=1, linestyle="--")
        for t in sorted(many):
            axes.axvline(t, ymax=0.03, color="0.3", linewidth=1)
    handles = [line("clustering", GREY, linestyle="--")] if few else []
    foot = line("clustering (at the foot)", GREY, linestyle="", marker="|")
    return handles + ([foot] if many else [])


def _titled(name: str, runs: Sequence[RunRecord]) -> str:
    if not any(len(run.evaluated()) for run in runs):
        return f"{for_figure(name)} (not evaluated yet)"
    marked = for_figure(name) + f" {GROUND_TRUTH}" * any(run.uses_ground_truth for run in runs)
    seeds = ", ".join(str(run.seed) for run in runs)
    return f"{marked} (seeds {seeds})" if len(runs) > 1 else marked


def _file_name(name: str) -> str:
    """What of a run's name a file name can hold.

    >>> _file_name("flhc/mnist seed=0")
    'flhc_mnist_seed=0'
    """
    return re.sub(r"[^\w.=+-]+", "_", name).strip("_")


def _check_names(names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(_file_name(name), name)
        if other != name:
            raise ValueError(f"figures of {other!r} and {name!r} would have one name: rename one")

"""Figures of runs: accuracy by round, by client and by what was sent; clustering errors."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flray import columns as recorded
from flray.columns import ACCURACY, ACCURACY_MEAN, CLUSTERS, GROUP, MODEL, ROUND, SEED
from flray.config.overrides import THRESHOLD
from flray.errors import ExperimentError
from flray.records.clusterings import read_clustering
from flray.reports import style
from flray.reports.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.reports.runs import Experiments, RunRecord, read_run
from flray.reports.sheets import GROUND_TRUTH
from flray.values import file_name

DPI = 150
# Formats of files, without the date: a figure of the same runs is the same file.
METADATA = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}
EVENT_DOTS = (0, (1, 1.5))
MAX_BANDS = 4  # more experiments than this would hide each other
MAX_LINES = 8  # more clusterings than this are ticks at the foot
MAX_STRIPS = 20  # clusters side by side
MAX_EVENTS = 3  # more clusterings than this: only the last is drawn
FEW_POINTS = 20  # are marked one by one


def write_figures(experiments: Experiments, folder: Path) -> list[Path]:
    """Draw all figures of the experiments as PNG files; returns their paths."""
    stems = {name: file_name(name) for name, runs in experiments.items() if runs[0].clusterings}
    alike = [name for name in stems if Counter(stems.values())[stems[name]] > 1]
    if alike:
        raise ValueError(f"figures of {alike} would have one name: rename one")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, figure in _figures(experiments):
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure into a file, whose name decides its format."""
    if file.suffix not in METADATA:
        raise ExperimentError(f"a figure is one of {', '.join(METADATA)}, got {file.name!r}")
    file.parent.mkdir(parents=True, exist_ok=True)
    # Fonts that journals accept in a PDF, and names of elements that do not change in an SVG.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "flray"}):
        figure.savefig(file, dpi=DPI, metadata=METADATA[file.suffix])


def figures_of(run: Path) -> list[Path]:
    """The figures of one run, in its own directory."""
    return write_figures({"run": [read_run(run, "run")]}, run / "figures")


def _figures(experiments: Experiments) -> Iterator[tuple[str, Figure]]:
    """The figures with their file names; one at a time, since figures are large."""
    every = [run for runs in experiments.values() for run in runs]
    if any(run.is_evaluated for run in every):
        yield "accuracy", accuracy_figure(experiments)
    if any(len(run.last_test()) for run in every):
        yield "clients", clients_figure(experiments)
    for name, (first, *others) in experiments.items():
        events = sorted(first.clusterings)
        for t in events if len(events) <= MAX_EVENTS else events[-1:]:
            title = style.for_figure(f"{first.label if others else name}, {when(t)}", 200)
            found, stem = read_clustering(first.clusterings[t]), f"{file_name(name)}_round_{t}"
            yield f"{stem}_distance", distance_figure(found, title, first.value(THRESHOLD))
            yield f"{stem}_embedding", embedding_figure(found, title)
            yield f"{stem}_graph", graph_figure(found, title)


def when(t: int) -> str:
    return "before the first round" if t == 0 else f"after round {t}"


def accuracy_figure(experiments: Experiments) -> Figure:
    """Mean accuracy by round, a line for each experiment; below it the number of clusters.

    The band is one standard deviation over seeds; of single runs, down to the worst decile.
    """
    data = _joined(experiments, RunRecord.evaluated)
    data["percent"] = 100 * data[ACCURACY_MEAN].astype(float)
    heights = [3.2, 1] if (data[CLUSTERS] > 1).any() else [1]
    figure = Figure(figsize=(7, 3.2 + 1.2 * len(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    grid: list[Axes] = [*panels[:, 0]]
    top = grid[0]
    colours = style.colours_of(experiments)
    has_seeds = any(len(runs) > 1 for runs in experiments.values())
    drawn = {"hue": "experiment", "palette": colours, "hue_order": list(colours), "legend": False}
    drawn |= {"errorbar": "sd" if has_seeds else None}
    few = data.groupby("experiment", sort=False)[ROUND].nunique().max() <= FEW_POINTS
    marks = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if few else {}
    sns.lineplot(data, x=ROUND, y="percent", ax=top, **drawn, **marks)
    told = "; band: one standard deviation over seeds" if has_seeds else ""
    if not has_seeds and len(experiments) <= MAX_BANDS:
        told = "; band: down to the mean of the worst decile"
        for name, own in data.groupby("experiment", sort=False):
            low = 100 * own[recorded.ACCURACY_WORST_DECILE].to_numpy(np.float64)
            x, colour = own[ROUND].to_numpy(), colours[str(name)]
            top.fill_between(x, low, own["percent"], color=colour, alpha=0.15, linewidth=0)
    top.set_title(f"Mean over clients{told}", fontsize=10)
    handles = style.lines(
        {_titled(name, runs): colours[name] for name, runs in experiments.items()}
    )
    handles += _percent_axis(top, experiments)
    for axes in grid[1:]:
        counts = data.dropna(subset=[CLUSTERS])
        sns.lineplot(counts, x=ROUND, y=CLUSTERS, ax=axes, drawstyle="steps-post", **drawn)
        style.count_axis(axes)
    handles += _draw_clusterings(grid, experiments) + _draw_events(grid, experiments)
    for axes in grid:
        style.plain(axes)
    style.whole_rounds(grid[-1])
    style.legend_below(figure, handles)
    return figure


def clients_figure(experiments: Experiments) -> Figure:
    """Every client's test accuracy: sorted, a line for each experiment over all its seeds; below
    it a panel for each experiment by cluster (one seed) or by seed, coloured by planted group."""
    data = _joined(experiments, RunRecord.last_test)
    data["percent"] = 100 * data[ACCURACY].astype(float)
    shown = {str(name): own for name, own in data.groupby("experiment", sort=False)}
    strips = {name: by for name, own in shown.items() if (by := _strip_column(own))}
    columns = min(3, max(1, len(strips)))
    rows = -(-len(strips) // columns)
    figure = Figure(figsize=(7.5, 3.8 + 2.4 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.3] + [1] * rows)
    top = figure.add_subplot(grid[0, :])
    handles = []
    for name, colour in style.colours_of(experiments).items():
        if name in shown:
            own, label = shown[name], _titled(name, experiments[name])
            percent = np.sort(own["percent"].to_numpy(np.float64))
            share = 100 * (np.arange(len(percent)) + 0.5) / len(percent)
            top.plot(share, percent, color=colour, marker=_marker(percent), markersize=3)
            variance = own.groupby(SEED, dropna=False)["percent"].var(ddof=0).mean()
            told = f"{label}: mean {percent.mean():.1f} %, variance {variance:.1f} %²"
            handles.append(style.line(told, colour))
    handles += _percent_axis(top, {name: experiments[name] for name in shown})
    top.set(xlabel="clients, worst to best (%)", xlim=(0, 100))
    top.set_title("Test accuracy of every client at the last evaluation", fontsize=10)
    style.plain(top)
    planted = sorted(data[GROUP].dropna().unique()) if GROUP in data else []
    of_group = dict(zip(planted, style.palette(len(planted), style.GROUPS), strict=True))
    for k, (name, by) in enumerate(strips.items()):
        axes = figure.add_subplot(grid[1 + k // columns, k % columns], sharey=top)
        _draw_strips(axes, shown[name], by, of_group)
        axes.set_title(style.for_figure(name, 24), fontsize=9)
        axes.set_ylabel("" if k % columns else "test accuracy (%)")
        axes.tick_params(labelleft=k % columns == 0)
        style.plain(axes)
    style.legend_below(figure, handles)
    if 0 < len(of_group) <= MAX_STRIPS and strips:
        dots = style.lines({f"{g:.0f}": c for g, c in of_group.items()}, ls="", marker="o")
        legend = figure.legend(handles=dots, loc="outside right upper", frameon=False, fontsize=9)
        legend.set_title("planted\ngroup")
    return figure


def efficiency_figure(experiments: Experiments) -> Figure:
    """Mean test accuracy against the bytes sent in both directions until then, over seeds."""

    def sent(run: RunRecord) -> pd.DataFrame:
        so_far = (
            run.rounds.filter(regex=f"^({recorded.BYTES_UP}|{recorded.BYTES_DOWN})_")
            .sum(axis=1)
            .cumsum()
        )
        return run.evaluated().assign(sent=so_far)

    data = _joined(experiments, sent)
    mean = data.groupby(["experiment", ROUND], sort=False)[["sent", ACCURACY_MEAN]].mean()
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
    unit = next((name for name, size in units.items() if mean["sent"].max() >= size), "bytes")
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, colour in style.colours_of(experiments).items():
        if name in mean.index:
            x, y = mean.loc[name]["sent"] / units[unit], 100 * mean.loc[name][ACCURACY_MEAN]
            label = _titled(name, experiments[name])
            axes.plot(x, y, color=colour, marker=_marker(x), markersize=3, label=label)
    axes.set(xlabel=f"{unit} sent up and down so far", ylabel="test accuracy (%)")
    axes.set_title("Accuracy against communication", fontsize=10)
    style.plain(axes)
    if len(experiments) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def error_figure(errors: pd.DataFrame) -> Figure:
    """False positives and, on top of them, false negatives by round (the index), as FLIS's Fig. 3:
    overlap_fp and overlap_fn beside equal_fp and equal_fn."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    truths = {"overlap": "at least half of a client's labels", "equal": "the same labels"}
    grid = figure.subplots(1, len(truths), sharey=True)
    t = errors.index.to_numpy(np.float64)
    edges = np.append(t - 0.5, t[-1:] + 0.5)
    for axes, (truth, told) in zip(grid, truths.items(), strict=True):
        wrong, lacking = (errors[f"{truth}_{e}"].to_numpy(np.float64) for e in ("fp", "fn"))
        both = wrong + lacking
        axes.stairs(wrong, edges, fill=True, color="0.3", label="false positives")
        axes.stairs(both, edges, baseline=wrong, fill=True, color="0.75", label="false negatives")
        axes.set_title(f"right companions hold {told}", fontsize=10)
        style.whole_rounds(axes)
        style.plain(axes)
    grid[0].set_ylabel("companions per client")
    style.legend_below(figure, grid[0].get_legend_handles_labels()[0])
    return figure


def _joined(experiments: Experiments, read: Callable[[RunRecord], pd.DataFrame]) -> pd.DataFrame:
    """The frames of all runs with their experiment and seed."""
    runs = [(name, run) for name, runs in experiments.items() for run in runs]
    frames = [read(run).assign(experiment=name, seed=run.seed) for name, run in runs]
    return pd.concat(frames, ignore_index=True)


def _marker(points: Sized) -> str:
    return "o" if len(points) <= FEW_POINTS else ""


def _strip_column(own: pd.DataFrame) -> str | None:
    """What the panel of an experiment is split by: seed, the model clients share, or group."""
    if own[SEED].nunique() > 1:
        return SEED
    few = [c for c in (MODEL, GROUP) if c in own and 1 < own[c].nunique() <= MAX_STRIPS]
    return few[0] if few else None


def _draw_strips(
    axes: Axes, own: pd.DataFrame, by: str, of_group: Mapping[float, style.Colour]
) -> None:
    """A column of dots for each value; grey where only other experiments have planted groups."""
    names = sorted(own[by].dropna().astype(int).unique())
    place = own[by].map({name: k for k, name in enumerate(names)}).to_numpy(np.float64)
    is_grey = of_group or by == SEED
    of_place = [style.GREY] * len(names) if is_grey else style.palette(len(names), style.GROUPS)
    groups = own[GROUP] if GROUP in own else pd.Series(np.nan, index=own.index)
    colours = [of_group.get(g, of_place[int(k)]) for g, k in zip(groups, place, strict=True)]
    x = place + style.spread_out(len(own), 0.6)
    axes.scatter(x, own["percent"], s=12, c=colours, linewidths=0, alpha=0.8)
    means = own["percent"].groupby(place).mean()
    axes.hlines(means, means.index - 0.4, means.index + 0.4, color="0.2", linewidth=1.2)
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.tick_params(axis="x", labelsize=9 if len(names) <= 10 else 6)
    axes.set_xlabel({MODEL: "cluster", SEED: "seed"}.get(by, "planted group"))


def _percent_axis(axes: Axes, experiments: Experiments) -> list[Line2D]:
    """Test accuracy upwards, with a dotted line at each target."""
    wanted = {runs[0].value("evaluate.target") for runs in experiments.values()} - {None}
    drawn = [
        axes.axhline(100 * t, color="0.45", lw=0.8, ls=":", label=f"target {100 * t:.4g} %")
        for t in sorted(map(float, wanted))
    ]
    axes.set_ylim(max(axes.get_ylim()[0], -2), min(axes.get_ylim()[1], 102))
    axes.set_ylabel("test accuracy (%)")
    return drawn


def _draw_events(column: Sequence[Axes], experiments: Experiments) -> list[Line2D]:
    """A line of dots at the start of each round in which data changed or clients came or went."""
    configs = [run.config for runs in experiments.values() for run in runs]
    last = max((int(config.get(recorded.ROUNDS, 0)) for config in configs), default=0)
    events = {(event["round"], event["kind"]) for c in configs for event in c.get("events", [])}
    drawn = sorted((t, kind) for t, kind in events if t <= last)
    for axes in column:
        for t in {t for t, _ in drawn}:
            axes.axvline(t - 0.5, color=style.RED, linewidth=1.2, linestyle=EVENT_DOTS)
    told = ", ".join(dict.fromkeys(kind for _, kind in drawn))
    return [style.line(f"event: {told}", style.RED, linestyle=EVENT_DOTS)] if drawn else []


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
    dashes = style.line("clustering", style.GREY, linestyle="--")
    foot = style.line("clustering (at the foot)", style.GREY, linestyle="", marker="|")
    return [dashes] * bool(few) + [foot] * bool(many)


def _titled(name: str, runs: Sequence[RunRecord]) -> str:
    """An entry of a legend."""
    title = style.for_figure(name)
    if not any(run.is_evaluated for run in runs):
        return f"{title} (not evaluated yet)"
    title += f" {GROUND_TRUTH}" * any(run.uses_ground_truth for run in runs)
    seeds = ", ".join(str(run.seed) for run in runs)
    return f"{title} (seeds {seeds})" if len(runs) > 1 else title

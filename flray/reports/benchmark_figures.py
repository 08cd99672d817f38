"""Figures of a benchmark: mean ranks with their critical difference, a heatmap, dots per split."""

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from flray.reports import style
from flray.reports.benchmark import SCORE, SPLIT, Benchmark
from flray.reports.columns import column_of
from flray.reports.mean_ranks import indistinct
from flray.reports.sweeps import SPREAD

ROW = 0.24  # inches of a method


def ranks_figure(benchmark: Benchmark) -> Figure | None:
    """Mean ranks on an axis, bars over methods that do not differ significantly (Demšar's Fig. 1).

    Only methods with a score in every split are drawn; None for fewer than two.
    """
    ranks = benchmark.mean_ranks[benchmark.is_complete]
    if len(ranks) < 2:
        return None
    half, bars = (len(ranks) + 1) // 2, indistinct(ranks.tolist(), benchmark.difference)
    low, high = np.floor(ranks.iloc[0]), np.ceil(ranks.iloc[-1])
    depth = 0.5 * len(bars) + 0.6
    figure = Figure(figsize=(8.6, 1.3 + ROW * (half + depth)), layout="constrained")
    axes = figure.subplots()
    for k, (method, rank) in enumerate(ranks.items()):
        is_left = k < half
        row, edge = (k if is_left else len(ranks) - 1 - k), low - 0.2 if is_left else high + 0.2
        y = -depth - row
        axes.plot([rank, rank, edge], [0, y, y], color="0.45", linewidth=0.8)
        text, side = f"{method} {rank:.2f}", "right" if is_left else "left"
        axes.text(edge, y, f" {style.for_figure(text)} ", ha=side, va="center", fontsize=9)
    for k, (first, last) in enumerate(bars):
        ends = [ranks.iloc[first] - 0.04, ranks.iloc[last] + 0.04]
        axes.plot(ends, [-0.5 * (k + 1)] * 2, color=style.GREY, linewidth=3.5)
    span = high - low
    axes.plot(
        [low, low + benchmark.difference], [1.6, 1.6], color=style.RED, marker="|", linewidth=1.5
    )
    axes.text(low, 1.9, f"critical difference {benchmark.difference:.2f}", fontsize=9)
    axes.set(xlim=(low - 0.45 * span, high + 0.45 * span), ylim=(-depth - half, 2.8), yticks=[])
    axes.set_xticks(np.arange(low, high + 1, max(1, span // 8)))
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    axes.spines["top"].set(position=("data", 0), bounds=(low, high))
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, labelsize=8)
    axes.set_title(f"mean rank {benchmark.protocol} (1 is best)", fontsize=11)
    return figure


def methods_figure(benchmark: Benchmark) -> Figure:
    """A heatmap of methods × splits: colours are ranks in the split, numbers are scores."""
    order = benchmark.mean_ranks.index
    ranks = benchmark.ranks.loc[order]
    scales = [column_of(score.mean).scale for score in benchmark.scores_of.values()]
    scores = benchmark.scores.loc[order] * scales
    texts = scores.map(lambda value: "" if np.isnan(value) else f"{value:.3g}")
    figure = Figure((2.2 + 0.95 * ranks.shape[1], 1.2 + 0.3 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.92")
    bar = {"label": "rank in the split", "aspect": 40}
    options = {"cmap": "viridis_r", "fmt": "", "annot_kws": {"fontsize": 8}, "cbar_kws": bar}
    sns.heatmap(ranks, annot=texts, ax=axes, linewidths=0.5, **options)
    axes.set_xticklabels([str(name).replace("_", "\n") for name in ranks], fontsize=8, rotation=0)
    axes.tick_params(axis="y", rotation=0)
    axes.set(xlabel="", ylabel="", title=f"{benchmark.protocol}; grey: no score")
    return figure


def dots_figure(benchmark: Benchmark) -> Figure:
    """A panel per split with a dot per method, best mean rank on top; lines are ± one deviation."""
    order, splits = benchmark.mean_ranks.index[::-1], benchmark.scores_of
    across = min(4, len(splits))
    down = -(-len(splits) // across)
    size = (1.6 + 2.4 * across, down * (0.8 + ROW * len(order)))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True).flat
    for (split, score), axes in zip(splits.items(), grid, strict=False):  # leaves the rest of grid
        cells = benchmark.cells.xs(split, level=SPLIT).reindex(order)
        scale = column_of(score.mean).scale
        values, spread = scale * cells[SCORE], scale * cells[SCORE + SPREAD].fillna(0)
        axes.errorbar(values, range(len(order)), xerr=spread, fmt="o", color="#0072B2", ms=4)
        axes.set_yticks(range(len(order)), [style.for_figure(str(m)) for m in order], fontsize=8)
        axes.set_title(split.replace("_", " "), fontsize=10)
        axes.set_xlabel(column_of(score.mean).label, fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(color="0.92", linewidth=0.6)
        sns.despine(ax=axes)
    for axes in list(grid):
        axes.set_axis_off()
    return figure

"""Figures of runs: accuracy by round, by client and by what was sent.

All take the runs of each experiment by name and return a matplotlib `Figure` that nobody else
holds; nothing is shown on a screen and no state of matplotlib changes. An experiment has the same
colour in each of them. Experiments that read ground truth are marked in the legend.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flray import columns as recorded
from flray.columns import ARI, CLUSTERS, GROUP, MODEL, ROUND, SEED, Column
from flray.errors import ExperimentError
from flray.reports import style
from flray.reports.columns import column_of
from flray.reports.runs import Experiments, RunRecord, score_of
from flray.reports.sheets import GROUND_TRUTH
from flray.server.summary import last_trained_score
from flray.wording import capitalised

EVENT_DOTS = (0, (1, 1.5))
MAX_BANDS = 4  # most experiments with bands, which would hide each other
MAX_LINES = 8  # most clusterings of a run drawn as lines; more are ticks at the foot
MAX_STRIPS = 20  # most clusters side by side
MAX_DOTS = 2000  # most clients of a panel drawn as dots, sampled from more; means are of all
FEW_POINTS = 20  # most points of a line with a marker each
SEEDS_BAND = "; band: one standard deviation over seeds"


def accuracy_figure(experiments: Experiments) -> Figure:
    """Mean score by round, a line for each experiment, above the number of clusters and their ARI.

    ARI is shown where clusters were compared with planted groups.

    The band is one standard deviation over seeds; for single runs, it reaches to the mean of the
    worst decile of clients. Vertical lines mark clusterings and events, a dotted horizontal
    line each target.

    Args:
        experiments: The runs of each experiment by name. Runs without an evaluation have an entry
            in the legend and no line.
    """
    data = _joined(experiments, RunRecord.evaluated)
    score, scale = score_of(experiments), column_of(score_of(experiments).mean).scale
    data["shown"] = scale * data[score.mean].astype(float)
    below = [c for c in (CLUSTERS, ARI) if c in data and (data[CLUSTERS] > 1).any()]
    below = [column for column in below if data[column].notna().any()]
    heights = [3.2, *(1 for _ in below)]
    figure = Figure(figsize=(7, 3.2 + 1.2 * len(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    grid: list[Axes] = [*panels[:, 0]]
    top = grid[0]
    colours = style.colours_of(experiments)
    has_seeds, drawn = _has_seeds(experiments), _drawing(experiments)
    few = data.groupby("experiment", sort=False)[ROUND].nunique().max() <= FEW_POINTS
    marks = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if few else {}
    sns.lineplot(data, x=ROUND, y="shown", ax=top, **drawn, **marks)
    band = SEEDS_BAND if has_seeds else ""
    if not has_seeds and len(experiments) <= MAX_BANDS:
        way = "down" if score.higher_is_better else "up"
        band = f"; band: {way} to the mean of the worst decile"
        for name, rows in data.groupby("experiment", sort=False):
            worst = scale * rows[score.column("worst_decile")].to_numpy(np.float64)
            x, colour = rows[ROUND].to_numpy(), colours[str(name)]
            top.fill_between(x, worst, rows["shown"], color=colour, alpha=0.15, linewidth=0)
    top.set_title(f"Mean over clients{band}", fontsize=10)
    titled = {_titled(name, runs): colours[name] for name, runs in experiments.items()}
    handles = style.lines(titled) + _score_axis(top, experiments)
    for axes, column in zip(grid[1:], below, strict=True):
        numbers = data.dropna(subset=[column])
        sns.lineplot(numbers, x=ROUND, y=column, ax=axes, drawstyle="steps-post", **drawn)
        if column == CLUSTERS:
            style.count_axis(axes)
    if ARI in below:
        grid[-1].set(ylabel="ARI", ylim=(min(grid[-1].get_ylim()[0], -0.05), 1.05))
    handles += _draw_clusterings(grid, experiments) + _draw_events(grid, experiments)
    for axes in grid:
        style.plain(axes)
    style.whole_rounds(grid[-1])
    style.legend_below(figure, handles)
    return figure


def last_trained_figure(experiments: Experiments) -> Figure:
    """Mean score by round of the model that each client trained last, as FLIS judges its clients.

    Args:
        experiments: The runs of each experiment by name. Those without such scores are left out.

    Raises:
        ExperimentError: No run has them, which `evaluate.last_trained` records.
    """
    score, column = score_of(experiments), column_of(score_of(experiments).mean)

    def course(run: RunRecord) -> pd.DataFrame:
        if score.name not in run.clients:
            return pd.DataFrame({ROUND: [], "shown": []})
        mean = last_trained_score(run.clients, score.name)
        return pd.DataFrame({ROUND: mean.index, "shown": column.scale * mean.to_numpy()})

    data = _joined(experiments, course)
    if data.empty:
        raise ExperimentError(
            "no run has scores of the models that clients trained last; run it with "
            "evaluate.last_trained=true"
        )
    shown = {name: runs for name, runs in experiments.items() if name in set(data["experiment"])}
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    sns.lineplot(data, x=ROUND, y="shown", ax=axes, **_drawing(shown))
    band = SEEDS_BAND if _has_seeds(shown) else ""
    axes.set_title(f"Models that clients trained last, mean{band}", fontsize=10)
    colours = style.colours_of(shown)
    handles = style.lines({_titled(name, runs): colours[name] for name, runs in shown.items()})
    handles += _score_axis(axes, shown)
    style.plain(axes)
    style.whole_rounds(axes)
    style.legend_below(figure, handles)
    return figure


def clients_figure(experiments: Experiments) -> Figure:
    """The score of every client at the last evaluation on test parts.

    On top, clients of all seeds from worst to best, a line for each experiment. Below, a panel for
    each experiment by cluster (one seed) or by seed, coloured by planted group.

    Args:
        experiments: The runs of each experiment by name.
    """
    data = _joined(experiments, RunRecord.last_test)
    score, column = score_of(experiments), column_of(score_of(experiments).mean)
    data["shown"] = column.scale * data[score.name].astype(float)
    by_name = data[data["shown"].notna()].groupby("experiment", sort=False)
    shown = {str(name): clients for name, clients in by_name}
    strips = {name: by for name, clients in shown.items() if (by := _strip_column(clients))}
    columns = min(3, max(1, len(strips)))
    rows = -(-len(strips) // columns)
    figure = Figure(figsize=(7.5, 3.8 + 2.4 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.3] + [1] * rows)
    top = figure.add_subplot(grid[0, :])
    handles = []
    for name, colour in style.colours_of(experiments).items():
        if name in shown:
            clients, label = shown[name], _titled(name, experiments[name])
            values = np.sort(clients["shown"].dropna().to_numpy(np.float64))
            values = values if score.higher_is_better else values[::-1]
            share = 100 * (np.arange(len(values)) + 0.5) / len(values)
            top.plot(share, values, color=colour, marker=_marker(values), markersize=3)
            variance = clients.groupby(SEED, dropna=False)["shown"].var(ddof=0).mean()
            entry = f"{label}: {_mean_and_variance(values.mean(), variance, column)}"
            handles.append(style.line(entry, colour))
    handles += _score_axis(top, {name: experiments[name] for name in shown} or experiments)
    top.set(xlabel="clients, worst to best (%)", xlim=(0, 100))
    title = f"{capitalised(column.title)} of every client at the last evaluation"
    top.set_title(title, fontsize=10)
    style.plain(top)
    names_of_groups = {run.group_names for runs in experiments.values() for run in runs}
    names = names_of_groups.pop() if len(names_of_groups) == 1 else ()
    planted = sorted(data[GROUP].dropna().unique()) if GROUP in data else []
    of_group = dict(zip(planted, style.palette(len(planted), style.GROUPS), strict=True))
    for k, (name, by) in enumerate(strips.items()):
        axes = figure.add_subplot(grid[1 + k // columns, k % columns], sharey=top)
        _draw_strips(axes, shown[name], by, of_group, names)
        axes.set_title(style.for_figure(name, 24), fontsize=9)
        axes.set_ylabel("" if k % columns else column.label)
        axes.tick_params(labelleft=k % columns == 0)
        style.plain(axes)
    style.legend_below(figure, handles)
    if 0 < len(of_group) <= MAX_STRIPS and strips:
        of_name = {_group_name(g, names): c for g, c in of_group.items()}
        dots = style.lines(of_name, ls="", marker="o")
        legend = figure.legend(handles=dots, loc="outside right upper", frameon=False, fontsize=9)
        legend.set_title("planted\ngroup")
    return figure


def efficiency_figure(experiments: Experiments) -> Figure:
    """Mean score over seeds against the bytes sent so far in both directions.

    Bytes are counted in all rounds, also in those without an evaluation. The unit (bytes to GB)
    follows from the largest number.

    Args:
        experiments: The runs of each experiment by name.
    """

    def sent(run: RunRecord) -> pd.DataFrame:
        kinds = run.rounds.filter(regex=f"^({recorded.BYTES_UP}|{recorded.BYTES_DOWN})_")
        return run.evaluated().assign(sent=kinds.sum(axis=1).cumsum())

    data, test = _joined(experiments, sent), score_of(experiments).mean
    scale = column_of(test).scale
    mean = data.groupby(["experiment", ROUND], sort=False)[["sent", test]].mean()
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
    unit = next((name for name, size in units.items() if mean["sent"].max() >= size), "bytes")
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, colour in style.colours_of(experiments).items():
        if name in mean.index:
            x, y = mean.loc[name]["sent"] / units[unit], scale * mean.loc[name][test]
            label = _titled(name, experiments[name])
            axes.plot(x, y, color=colour, marker=_marker(x), markersize=3, label=label)
    axes.set(xlabel=f"{unit} sent up and down so far", ylabel=column_of(test).label)
    axes.set_title(f"{capitalised(test.score.title)} against communication", fontsize=10)
    style.plain(axes)
    if len(experiments) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def _joined(experiments: Experiments, read: Callable[[RunRecord], pd.DataFrame]) -> pd.DataFrame:
    """The frames of all runs with their experiment and seed."""
    runs = [(name, run) for name, runs in experiments.items() for run in runs]
    frames = [read(run).assign(experiment=name, seed=run.seed) for name, run in runs]
    return pd.concat(frames, ignore_index=True)


def _has_seeds(experiments: Experiments) -> bool:
    return any(len(runs) > 1 for runs in experiments.values())


def _drawing(experiments: Experiments) -> dict[str, Any]:
    """How seaborn draws lines of experiments: in their colours, with a band over seeds."""
    colours = style.colours_of(experiments)
    drawn = {"hue": "experiment", "palette": colours, "hue_order": list(colours), "legend": False}
    return drawn | {"errorbar": "sd" if _has_seeds(experiments) else None}


def _marker(points: Sized) -> str:
    return "o" if len(points) <= FEW_POINTS else ""


def _strip_column(clients: pd.DataFrame) -> str | None:
    """The column that splits the panel of an experiment: seed, shared model, or group."""
    if clients[SEED].nunique() > 1:
        return SEED
    few = [c for c in (MODEL, GROUP) if c in clients and 1 < clients[c].nunique() <= MAX_STRIPS]
    return few[0] if few else None


def _group_name(group: float, names: Sequence[str]) -> str:
    return style.for_figure(names[int(group)], 24) if group < len(names) else f"{group:.0f}"


def _draw_strips(
    axes: Axes,
    clients: pd.DataFrame,
    by: str,
    of_group: Mapping[float, style.Colour],
    group_names: Sequence[str],
) -> None:
    """A strip of dots for each value of `by`; grey if only other experiments have groups.

    Of more than `MAX_DOTS` clients a sample is drawn, always the same, and the axis tells so.
    """
    names = sorted(clients[by].dropna().astype(int).unique())
    positions = {name: k for k, name in enumerate(names)}
    means = clients["shown"].groupby(clients[by].map(positions)).mean()
    note = ""
    if len(clients) > MAX_DOTS:
        note = f" ({MAX_DOTS:,} of {len(clients):,} clients)"
        clients = clients.sample(MAX_DOTS, random_state=0).sort_index()
    strip = clients[by].map(positions).to_numpy(np.float64)
    is_grey = of_group or by == SEED
    of_strip = [style.GREY] * len(names) if is_grey else style.palette(len(names), style.GROUPS)
    groups = clients[GROUP] if GROUP in clients else pd.Series(np.nan, index=clients.index)
    colours = [of_group.get(g, of_strip[int(k)]) for g, k in zip(groups, strip, strict=True)]
    x = strip + style.spread_out(len(clients), 0.6)
    axes.scatter(x, clients["shown"], s=12, c=colours, linewidths=0, alpha=0.8)
    axes.hlines(means, means.index - 0.4, means.index + 0.4, color="0.2", linewidth=1.2)
    labels = [_group_name(name, group_names if by == GROUP else ()) for name in names]
    axes.set_xticks(range(len(names)), labels)
    axes.tick_params(axis="x", labelsize=9 if len(names) <= 10 else 6)
    axes.set_xlabel({MODEL: "cluster", SEED: "seed"}.get(by, "planted group") + note)


def _score_axis(axes: Axes, experiments: Experiments) -> list[Line2D]:
    """Make the y axis the score, with a dotted line at each target; returns these lines."""
    column = column_of(score_of(experiments).mean)
    targets = {runs[0].value("evaluate.target") for runs in experiments.values()} - {None}
    drawn = []
    for t in sorted(column.scale * float(target) for target in targets):
        label = f"target {t:.4g} {column.unit}".rstrip()
        drawn.append(axes.axhline(t, color="0.45", lw=0.8, ls=":", label=label))
    if column.unit == "%" and score_of(experiments).higher_is_better:
        axes.set_ylim(max(axes.get_ylim()[0], -2), min(axes.get_ylim()[1], 102))
    axes.set_ylabel(column.label)
    return drawn


def _mean_and_variance(mean: float, variance: float, column: Column) -> str:
    """Both in the unit of the score, with one decimal for percent."""
    if column.unit == "%":
        return f"mean {mean:.1f} %, variance {variance:.1f} %²"
    squared = f" {column.unit}²" if column.unit else ""
    return f"mean {mean:.4g} {column.unit}".rstrip() + f", variance {variance:.4g}{squared}"


def _draw_events(column: Sequence[Axes], experiments: Experiments) -> list[Line2D]:
    """Draw a dotted line at the start of each round with an event; returns the legend's entry."""
    configs = [run.config for runs in experiments.values() for run in runs]
    last = max((int(config.get(recorded.ROUNDS, 0)) for config in configs), default=0)
    events = {(event["round"], event["kind"]) for c in configs for event in c.get("events", [])}
    drawn = sorted((t, kind) for t, kind in events if t <= last)
    for axes in column:
        for t in {t for t, _ in drawn}:
            axes.axvline(t - 0.5, color=style.RED, linewidth=1.2, linestyle=EVENT_DOTS)
    kinds = ", ".join(dict.fromkeys(kind for _, kind in drawn))
    return [style.line(f"event: {kinds}", style.RED, linestyle=EVENT_DOTS)] if drawn else []


def _draw_clusterings(column: Sequence[Axes], experiments: Experiments) -> list[Line2D]:
    """Draw a dashed line after each round with a clustering, ticks if a run has many of them."""
    events = [run.clusterings for runs in experiments.values() for run in runs]
    few = {t for rounds in events if len(rounds) <= MAX_LINES for t in rounds}
    many = {t for rounds in events for t in rounds} - few
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

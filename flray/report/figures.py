"""Figures of runs: accuracy by round and by client, and every figure there is as a file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from flray.errors import ExperimentError
from flray.records.clusterings import clustering_files, read_clustering
from flray.records.run_directory import Config, RunDirectory
from flray.report.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.report.colours import GOLDEN_RATIO, GREY, Colour, for_figure, palette

DPI = 150
MAX_BANDS = 4  # more runs than this would hide each other
MAX_LINES = 8  # more clusterings of a run than this are ticks at the foot
MAX_STRIPS = 20  # clusters side by side
MAX_EVENTS = 3  # more clusterings than this: only the last is drawn
LOG_FROM = 20  # clusters
FEW_POINTS = 20  # are marked one by one


@dataclass(frozen=True)
class Run:
    """What figures show of a run."""

    rounds: pd.DataFrame  # as RunDirectory.rounds
    clients: pd.DataFrame  # as RunDirectory.clients
    clusterings: Mapping[int, Path] = field(default_factory=dict)  # files by round
    target: float | None = None  # accuracy
    threshold: float | None = None  # of the dendrogram

    def evaluated(self) -> pd.DataFrame:
        """The rounds that have an accuracy."""
        columns = ["round", "accuracy_mean", "accuracy_worst_decile", "clusters"]
        return self.rounds.reindex(columns=columns).dropna(subset=["accuracy_mean"])

    def last_test(self) -> pd.DataFrame:
        """A row for each client at the last evaluation on its test part."""
        test = self.clients[self.clients["part"] == "test"]
        last: pd.DataFrame = test[test["round"] == test["round"].max()]
        return last


def read_run(path: Path) -> Run:
    directory = RunDirectory(path)
    if not directory.holds_run():
        raise ExperimentError(f"{path} holds no run: it has no config.yaml")
    config = directory.config()
    return Run(
        directory.rounds(),
        directory.clients(),
        clustering_files(path),
        _number(config, "evaluate.target"),
        _number(config, "algorithm.clustering.partition.threshold"),
    )


def write_figures(runs: Mapping[str, Path], folder: Path) -> list[Path]:
    """Draw everything that the run directories hold into PNGs, and say where they are.

    Args:
        runs: run directories by the name they have in legends and file names.
    """
    read = {name: read_run(path) for name, path in runs.items()}
    _check_names([name for name, run in read.items() if run.clusterings])
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, figure in _figures({for_figure(name): run for name, run in read.items()}):
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def figures_of(run: Path) -> list[Path]:
    """The figures of one run, in its own directory."""
    return write_figures({"run": run}, run / "figures")


def _figures(runs: Mapping[str, Run]) -> Iterator[tuple[str, Figure]]:
    """What can be drawn, by file name; one at a time, for figures are large."""
    if any(len(run.evaluated()) for run in runs.values()):
        yield "accuracy", accuracy_figure(runs)
    if any(len(run.last_test()) for run in runs.values()):
        yield "clients", clients_figure(runs)
    for name, run in runs.items():
        for t in _drawn_events(run):
            clustering, title = read_clustering(run.clusterings[t]), _event_title(name, t)
            stem = f"{_file_name(name)}_round_{t}"
            yield f"{stem}_distance", distance_figure(clustering, title, run.threshold)
            yield f"{stem}_embedding", embedding_figure(clustering, title)
            yield f"{stem}_graph", graph_figure(clustering, title)


def accuracy_figure(runs: Mapping[str, Run]) -> Figure:
    """Mean accuracy by round, a line a run; the number of clusters below if there are several."""
    clustered = any(run.evaluated()["clusters"].max() > 1 for run in runs.values())
    ratios = [3.2, 1] if clustered else [1]
    figure = Figure(figsize=(7, 5.4 if clustered else 4.2), layout="constrained")
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)
    column: list[Axes] = list(grid[:, 0])
    banded = len(runs) <= MAX_BANDS
    handles: list[Artist] = []
    for (name, run), colour in zip(runs.items(), palette(len(runs)), strict=True):
        handles.append(_draw_accuracy(column[0], name, run, colour, banded=banded))
        if clustered:
            counts = run.evaluated().dropna(subset=["clusters"])
            column[1].step(counts["round"], counts["clusters"], where="post", color=colour)
    column[0].set_ylabel("test accuracy (%)")
    note = "; band: down to the mean of the worst decile" if banded else ""
    column[0].set_title(f"Mean over clients{note}", fontsize=10)
    handles += _draw_targets(column[0], runs)
    _limit_percent(column[0])
    handles += _draw_events(column, runs)
    if clustered:
        _count_axis(column[1])
    for axes in column:
        _plain(axes)
    column[-1].set_xlabel("round")
    column[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _legend_below(figure, handles)
    return figure


def clients_figure(runs: Mapping[str, Run]) -> Figure:
    """Every client's test accuracy: sorted, a line a run, and below it by cluster or group."""
    tests = {name: run.last_test() for name, run in runs.items()}
    tests = {name: test for name, test in tests.items() if len(test)}
    strips = {name: by for name, test in tests.items() if (by := _strip_column(test))}
    columns = min(3, max(1, len(strips)))
    rows = -(-len(strips) // columns)
    figure = Figure(figsize=(7.5, 3.6 + 2.4 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.3] + [1] * rows)
    top = figure.add_subplot(grid[0, :])
    handles: list[Artist] = [
        _draw_sorted(top, name, test, colour)
        for (name, test), colour in zip(tests.items(), palette(len(tests)), strict=True)
    ]
    handles += _draw_targets(top, {name: runs[name] for name in tests})
    _limit_percent(top)
    top.set(xlabel="clients, worst to best (%)", ylabel="test accuracy (%)", xlim=(0, 100))
    top.set_title("Test accuracy of every client at the last evaluation", fontsize=10)
    _plain(top)
    of_group = _group_colours([tests[name] for name in strips])
    for k, (name, by) in enumerate(strips.items()):
        axes = figure.add_subplot(grid[1 + k // columns, k % columns], sharey=top)
        _draw_strips(axes, tests[name], by, of_group)
        axes.set_title(_end_of(name, 24), fontsize=9)
        if k % columns == 0:
            axes.set_ylabel("test accuracy (%)")
        else:
            axes.tick_params(labelleft=False)
        _plain(axes)
    _legend_below(figure, handles)
    if 0 < len(of_group) <= MAX_STRIPS:
        dots: list[Artist] = [
            Line2D([], [], linestyle="", marker="o", color=colour, label=str(group))
            for group, colour in of_group.items()
        ]
        legend = figure.legend(handles=dots, loc="outside right upper", frameon=False, fontsize=9)
        legend.set_title("planted\ngroup")
    return figure


def _draw_accuracy(axes: Axes, name: str, run: Run, colour: Colour, *, banded: bool) -> Line2D:
    rows = run.evaluated()
    t, mean = rows["round"].to_numpy(), 100 * rows["accuracy_mean"].to_numpy()
    worst = 100 * rows["accuracy_worst_decile"].to_numpy(np.float64)
    if banded:
        axes.fill_between(t, worst, mean, color=colour, alpha=0.15, linewidth=0)
    label = _end_of(name, 60) + ("" if len(t) else " (not evaluated yet)")
    marker = "o" if len(t) <= FEW_POINTS else ""
    return axes.plot(t, mean, color=colour, label=label, marker=marker, markersize=3)[0]


def _draw_targets(axes: Axes, runs: Mapping[str, Run]) -> list[Line2D]:
    targets = sorted({run.target for run in runs.values() if run.target is not None})
    return [
        axes.axhline(
            100 * target,
            color="0.45",
            linewidth=0.8,
            linestyle=":",
            label=f"target {100 * target:.4g} %",
        )
        for target in targets
    ]


def _draw_events(column: Sequence[Axes], runs: Mapping[str, Run]) -> list[Line2D]:
    """A dashed line after each round that ended in a clustering; ticks where they are many."""
    few = {t for run in runs.values() if len(run.clusterings) <= MAX_LINES for t in run.clusterings}
    many = {t for run in runs.values() for t in run.clusterings} - few
    for axes in column:
        for t in sorted(few):
            axes.axvline(t, color="0.3", linewidth=1, linestyle="--")
        for t in sorted(many):
            axes.axvline(t, ymax=0.03, color="0.3", linewidth=1)
    handles = []
    if few:
        handles.append(Line2D([], [], color="0.3", linewidth=1, linestyle="--", label="clustering"))
    if many:
        label = "clustering (at the foot)"
        handles.append(Line2D([], [], color="0.3", linestyle="", marker="|", label=label))
    return handles


def _count_axis(axes: Axes) -> None:
    axes.set_ylabel("clusters")
    highest = axes.dataLim.y1
    if highest > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        axes.set_ylim(0, 1.1 * highest)


def _draw_sorted(axes: Axes, name: str, test: pd.DataFrame, colour: Colour) -> Line2D:
    accuracy = 100 * np.sort(test["accuracy"].to_numpy(np.float64))
    share = 100 * (np.arange(len(accuracy)) + 0.5) / len(accuracy)
    label = (
        f"{_end_of(name, 40)}: mean {accuracy.mean():.1f} %, variance {accuracy.var():.1f} %², "
        f"round {test['round'].iloc[0]}"
    )
    marker = "o" if len(accuracy) <= FEW_POINTS else ""
    return axes.plot(share, accuracy, color=colour, label=label, marker=marker, markersize=3)[0]


def _strip_column(test: pd.DataFrame) -> str | None:
    """What to tell a run's clients apart by: the model they share, else their planted group."""
    for column in ("model", "group"):
        if column in test and 1 < test[column].nunique() <= MAX_STRIPS:
            return column
    return None


def _group_colours(tests: Sequence[pd.DataFrame]) -> dict[int, Colour]:
    """One colour for a planted group in every panel."""
    planted = sorted({int(g) for test in tests if "group" in test for g in test["group"].dropna()})
    return dict(zip(planted, palette(len(planted)), strict=True))


def _draw_strips(axes: Axes, test: pd.DataFrame, by: str, of_group: Mapping[int, Colour]) -> None:
    """A column of dots for each cluster or group, coloured by planted group.

    Where only other runs have groups the dots are grey, where none has, a colour a cluster.
    """
    names = np.unique(test[by].to_numpy(np.int64)).tolist()
    own = [GREY] * len(names) if of_group else palette(len(names))
    groups = test["group"] if "group" in test else pd.Series(np.nan, index=test.index)
    for place, name in enumerate(names):
        who = test[by] == name
        accuracy = 100 * test["accuracy"][who].to_numpy(np.float64)
        x = place + 0.6 * (np.arange(len(accuracy)) * GOLDEN_RATIO % 1 - 0.5)
        colours = [of_group.get(group, own[place]) for group in groups[who]]
        axes.scatter(x, accuracy, s=12, c=colours, linewidths=0, alpha=0.8)
        axes.hlines(accuracy.mean(), place - 0.4, place + 0.4, color="0.2", linewidth=1.2)
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.tick_params(axis="x", labelsize=9 if len(names) <= 10 else 6)
    axes.set_xlabel("cluster" if by == "model" else "planted group")


def _limit_percent(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2), min(high, 102))


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(4, len(handles), 95 // (longest + 6)))
    figure.legend(
        handles=list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def _drawn_events(run: Run) -> list[int]:
    events = sorted(run.clusterings)
    return events if len(events) <= MAX_EVENTS else events[-1:]


def _event_title(name: str, t: int) -> str:
    return f"{name}, before the first round" if t == 0 else f"{name}, after round {t}"


def _end_of(name: str, length: int) -> str:
    """A name that fits; what tells runs apart tends to stand at the end.

    >>> _end_of("experiments/flt/seed=3", 8)
    '…/seed=3'
    """
    return name if len(name) <= length else f"…{name[1 - length :]}"


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


def _number(config: Config, key: str) -> float | None:
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None

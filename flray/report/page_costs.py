"""What a run cost: bytes by kind, seconds by phase, and accuracy against what was sent."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from flray.report.colours import Colour, for_figure, palette
from flray.report.figures import FEW_POINTS, Run
from flray.report.page_elements import Cell, Html, Number, element, table
from flray.report.page_embed import embed
from flray.report.page_numbers import byte_unit, count, fixed, megabytes

UP, DOWN, SECONDS = "bytes_up_", "bytes_down_", "seconds_"
# A phase that runs inside another one; its time is taken out of the other's.
INSIDE = {"probe": "signature"}
NAME_LENGTH = 40

Series = dict[str, NDArray[np.float64]]  # a value a round, by kind or phase


def bytes_by_kind(rounds: pd.DataFrame, prefix: str) -> Series:
    """What was sent in each round in one direction; kinds that never were are left out."""
    found = {
        str(column).removeprefix(prefix): rounds[column].fillna(0).to_numpy(np.float64)
        for column in rounds
        if str(column).startswith(prefix)
    }
    return {kind: values for kind, values in sorted(found.items()) if values.any()}


def seconds_by_phase(rounds: pd.DataFrame) -> Series:
    """Seconds of each round by phase; phases do not overlap, `other` is what none of them took."""
    phases = bytes_by_kind(rounds, SECONDS)
    for inner, outer in INSIDE.items():
        if inner in phases and outer in phases:
            phases[outer] = np.maximum(phases[outer] - phases[inner], 0)
    if "seconds" in rounds and phases:
        total = rounds["seconds"].fillna(0).to_numpy(np.float64)
        phases["other"] = np.maximum(total - np.sum(list(phases.values()), axis=0), 0)
    return dict(sorted(phases.items(), key=lambda phase: -phase[1].sum()))


def costs(run: Run, name: str) -> Html:
    """Figures and tables of what a run sent and where its time went.

    Args:
        name: of the figures, unique on the page.
    """
    up, down = bytes_by_kind(run.rounds, UP), bytes_by_kind(run.rounds, DOWN)
    phases = seconds_by_phase(run.rounds)
    parts = []
    if up or down:
        alt = f"Bytes sent in each round by kind: {', '.join(sorted(up | down))}"
        drawn = embed(traffic_figure(run.rounds["round"], up, down), f"{name}-traffic", alt)
        parts.append(element("div", drawn, _bytes_table(up, down)))
    if (up or down) and len(run.evaluated()):
        alt = "Mean test accuracy against the bytes sent until then"
        parts.append(embed(efficiency_figure({"": run}), f"{name}-efficiency", alt))
    if phases:
        alt = f"Seconds of each round by phase: {', '.join(phases)}"
        drawn = embed(time_figure(run.rounds["round"], phases), f"{name}-time", alt)
        parts.append(element("div", drawn, _seconds_table(phases)))
    return element("div", *parts, class_="figures three")


def traffic_figure(t: "pd.Series[int]", up: Series, down: Series) -> Figure:
    """Bytes of each round, a layer a kind: sent by clients above, sent to them below."""
    kinds = sorted(up | down)
    colours = dict(zip(kinds, palette(len(kinds)), strict=True))
    tops = [np.sum(list(side.values()), axis=0).max() for side in (up, down) if side]
    size, unit = byte_unit(max(tops))
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    axes = figure.subplots()
    _stack(axes, t, {kind: values / size for kind, values in up.items()}, colours)
    _stack(axes, t, {kind: -values / size for kind, values in down.items()}, colours)
    axes.axhline(0, color="0.2", linewidth=0.8)
    axes.set_ylabel(f"{unit} a round:  ← down   up →")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))
    axes.set_title("Communication by kind", fontsize=10)
    _finish(axes, len(kinds))
    return figure


def time_figure(t: "pd.Series[int]", phases: Series) -> Figure:
    """Seconds of each round, a layer a phase."""
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    axes = figure.subplots()
    _stack(axes, t, phases, dict(zip(phases, palette(len(phases)), strict=True)))
    axes.set_ylabel("seconds a round")
    axes.set_title("Time by phase", fontsize=10)
    _finish(axes, len(phases))
    return figure


def efficiency_figure(runs: Mapping[str, Run]) -> Figure:
    """Mean test accuracy against the bytes sent in both directions until then, a line a run."""
    curves = {name: _accuracy_by_bytes(run) for name, run in runs.items()}
    largest = max((sent.max() for sent, _ in curves.values() if len(sent)), default=0.0)
    size, unit = byte_unit(largest)
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    axes = figure.subplots()
    for (name, (sent, accuracy)), colour in zip(curves.items(), palette(len(curves)), strict=True):
        marker = "o" if len(sent) <= FEW_POINTS else ""
        label = for_figure(name[-NAME_LENGTH:])
        axes.plot(sent / size, accuracy, color=colour, marker=marker, markersize=3, label=label)
    axes.set(xlabel=f"{unit} sent up and down so far", ylabel="test accuracy (%)")
    axes.set_title("Accuracy against communication", fontsize=10)
    _plain(axes)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def _accuracy_by_bytes(run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes until each evaluation, and percent."""
    sent = run.rounds.filter(regex=f"^({UP}|{DOWN})").sum(axis=1).cumsum()
    evaluated = run.evaluated()
    accuracy = 100 * evaluated["accuracy_mean"].to_numpy(np.float64)
    return sent.loc[evaluated.index].to_numpy(np.float64), accuracy


def _stack(axes: Axes, t: "pd.Series[int]", layers: Series, colours: Mapping[str, Colour]) -> None:
    """One path a layer, however many rounds there are."""
    edges = np.append(t.to_numpy(np.float64) - 0.5, float(t.iloc[-1]) + 0.5)
    base = np.zeros(len(t))
    shown = set(axes.get_legend_handles_labels()[1])
    for name, values in layers.items():
        label = None if name in shown else for_figure(name)
        top = base + values
        axes.stairs(top, edges, baseline=base, fill=True, color=colours[name], label=label)
        base = top


def _finish(axes: Axes, num_layers: int) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    _plain(axes)
    axes.figure.legend(
        loc="outside lower center", ncols=min(4, num_layers), frameon=False, fontsize=9
    )


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _bytes_table(up: Series, down: Series) -> Html:
    rows: list[list[Cell]] = []
    for kind in sorted(up | down):
        sums = [float(side[kind].sum()) if kind in side else 0.0 for side in (up, down)]
        rows.append([kind, *(Number(megabytes(value), value) for value in sums)])
    return table(["kind", "up", "down"], rows, "bytes of the whole run")


def _seconds_table(phases: Series) -> Html:
    sums = {phase: float(values.sum()) for phase, values in phases.items()}
    total = sum(sums.values()) or 1.0
    rows: list[list[Cell]] = [
        [
            phase,
            Number(f"{fixed(value)} s", value),
            Number(f"{count(100 * value / total)} %", value),
        ]
        for phase, value in sums.items()
    ]
    return table(["phase", "seconds", "share"], rows, "time of the whole run")

"""Several runs on the page: one paired table, joint figures, then each run by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from rich.table import Table

from flray.report.colours import for_figure
from flray.report.console import clustering_table, comparison_table
from flray.report.figures import Run, accuracy_figure, clients_figure
from flray.report.page_costs import efficiency_figure
from flray.report.page_elements import (
    Cell,
    Html,
    Number,
    element,
    fold,
    html_of,
    joined,
    note,
    section,
    table,
)
from flray.report.page_embed import embed
from flray.report.page_folders import PageRun
from flray.report.page_numbers import known, percent
from flray.report.page_run import run_sections
from flray.report.page_settings import differing_settings
from flray.report.runs import GROUND_TRUTH_NOTE, Plain, RunRecord

MAX_DETAILED = 12  # runs that are shown one by one
MAX_LINES = 20  # experiments in one figure

Experiments = Mapping[str, Sequence[PageRun]]

# What the paired table reads; a run without, say, a validation part has a gap there.
_COMPARED = (
    *("accuracy_mean", "accuracy_se_clients", "accuracy_worst", "accuracy_variance", "clusters"),
    *("validation_accuracy_mean", "bytes_up", "bytes_down", "seconds"),
)


def runs_sections(
    experiments: Experiments, name: str, level: int = 2
) -> list[tuple[str, str, Html]]:
    """Heading, anchor and section of each part.

    Args:
        name: unique on the page; anchors and figures begin with it.
        level: of the headings.
    """
    parts = [("Side by side", f"{name}-overview", _overview(experiments))]
    drawn = dict(list(experiments.items())[:MAX_LINES])
    if (figures := _joint_figures(drawn, name)) is not None:
        parts.append(("Accuracy by round and by client", f"{name}-accuracy", figures))
    if (differing := differing_settings(experiments)) is not None:
        parts.append(("Settings that differ", f"{name}-settings", differing))
    parts.append(("Each run", f"{name}-each", _each(experiments, name, level)))
    return [
        (heading, anchor, section(level, heading, body, anchor=anchor))
        for heading, anchor, body in parts
    ]


def mean_over_seeds(runs: Sequence[PageRun]) -> Run:
    """One line for the seeds of an experiment: mean by round, clients of the first seed."""
    shown = [run.shown for run in runs]
    if len(shown) == 1:
        return shown[0]
    rounds = pd.concat([each.rounds for each in shown]).groupby("round", as_index=False)
    events = {t: path for each in shown for t, path in each.clusterings.items()}
    mean: pd.DataFrame = rounds.mean(numeric_only=True)
    return replace(shown[0], rounds=mean, clusterings=dict(sorted(events.items())))


def _overview(experiments: Experiments) -> Html:
    parts: list[Html] = []
    finished = {
        name: [r for r in runs if r.summary is not None] for name, runs in experiments.items()
    }
    finished = {name: runs for name, runs in finished.items() if runs}
    if finished:
        summaries = {
            name: [_full(r.numbers) | {"uses_ground_truth": r.uses_ground_truth} for r in runs]
            for name, runs in finished.items()
        }
        parts.append(html_of(comparison_table(summaries)))
        clustered = _clustering_table(finished)
        parts += [html_of(clustered)] if clustered is not None else []
        if any(run.uses_ground_truth for runs in finished.values() for run in runs):
            parts.append(note(GROUND_TRUTH_NOTE))
    unfinished = [r for runs in experiments.values() for r in runs if r.summary is None]
    if unfinished:
        parts.append(_unfinished_table(unfinished))
    return joined(parts)


def _clustering_table(finished: Experiments) -> Table | None:
    """FL+HC's own columns; of experiments that cluster, the seeds that did."""
    runs = {
        name: [RunRecord(r.path, r.config, r.numbers) for r in each]
        for name, each in finished.items()
    }
    return clustering_table(runs) if len(runs) > 1 else None


def _unfinished_table(runs: Sequence[PageRun]) -> Html:
    rows: list[list[Cell]] = []
    for run in runs:
        accuracy = run.numbers.get("accuracy_mean")
        done = run.numbers["rounds"]
        text = f"{done} of {run.config.get('rounds', '?')}"
        rows.append([run.label, Number(text, done), Number(percent(accuracy), known(accuracy))])
    return table(["not finished", "rounds", "test accuracy so far"], rows)


def _joint_figures(experiments: Experiments, name: str) -> Html | None:
    shown = {for_figure(each): mean_over_seeds(runs) for each, runs in experiments.items()}
    num_seeds = max(len(runs) for runs in experiments.values())
    over = f"Mean over up to {num_seeds} seeds." if num_seeds > 1 else ""
    figures = []
    if any(len(run.evaluated()) for run in shown.values()):
        alt = f"Mean test accuracy by round of {', '.join(experiments)}"
        figures.append(embed(accuracy_figure(shown), f"{name}-joint-accuracy", alt, over))
        alt = f"Test accuracy against bytes sent of {', '.join(experiments)}"
        drawn = efficiency_figure(shown)
        figures.append(embed(drawn, f"{name}-joint-efficiency", alt, over))
    if any(len(run.last_test()) for run in shown.values()):
        alt = f"Test accuracy of every client of {', '.join(experiments)}"
        first = "Clients of the first seed." if num_seeds > 1 else ""
        figures.insert(1, embed(clients_figure(shown), f"{name}-joint-clients", alt, first))
    return element("div", *figures, class_="figures") if figures else None


def _each(experiments: Experiments, name: str, level: int) -> Html:
    """Runs one by one, folded; where they are many, the first seed of the first experiments."""
    every = [run for runs in experiments.values() for run in runs]
    chosen = every
    if len(every) > MAX_DETAILED:
        chosen = [runs[0] for runs in experiments.values()][:MAX_DETAILED]
    parts = list(_folded(chosen, name, level + 1))
    if len(chosen) < len(every):
        parts.append(
            note(
                f"Shown are {len(chosen)} of {len(every)} runs, the first seed of each experiment; "
                "flray report with the folder of a run shows that run."
            )
        )
    return joined(parts)


def _folded(runs: Sequence[PageRun], name: str, level: int) -> Iterator[Html]:
    for number, run in enumerate(runs):
        anchor = f"{name}-run{number}"
        summary = f"{run.label}: {run.title}, {percent(run.numbers.get('accuracy_mean'))}"
        if run.summary is None:
            summary += " (not finished)"
        bodies = [body for _, _, body in run_sections(run, anchor, level)]
        yield fold(summary, *bodies, anchor=anchor)


def _full(numbers: Plain) -> dict[str, Any]:  # Any: JSON
    """The numbers with NaN for those that are missing."""
    gaps = {key: float("nan") for key in _COMPARED if numbers.get(key) is None}
    return {**numbers, **gaps}

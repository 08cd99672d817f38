"""`flray compare`: one table and one figure of chosen runs.

The table alone is on standard output, so that it can be written to a file.
"""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from flray.cli.campaign import resume_command
from flray.errors import ExperimentError
from flray.reports.benchmark import (
    SHORT,
    all_numbers,
    benchmarks_of,
    is_benchmark,
    joined,
    ranking_sheet,
    score_sheet,
)
from flray.reports.benchmark_figures import dots_figure, methods_figure, ranks_figure
from flray.reports.comparison import clustering_sheet, comparison_sheet, measured_of
from flray.reports.figure_files import save_figure
from flray.reports.figures import (
    accuracy_figure,
    clients_figure,
    efficiency_figure,
    last_trained_figure,
)
from flray.reports.page_run import MAX_LINES
from flray.reports.runs import Experiments, by_experiment, find_runs, finished, row_runs
from flray.reports.sheets import Sheet
from flray.reports.sweeps import Sweep, holds_sweep, read_sweep
from flray.reports.writers import Format, render_sheet

BENCHMARK_FIGURES = {"ranks": ranks_figure, "methods": methods_figure, "dots": dots_figure}
FIGURES = {
    "accuracy": accuracy_figure,
    "last_trained": last_trained_figure,
    "clients": clients_figure,
    "efficiency": efficiency_figure,
}


def experiments_in(folders: Sequence[Path]) -> Experiments:
    """The finished runs in and below the folders by experiment, in the order of the folders.

    Rows of sweeps count as runs. Unfinished runs are left out, with a line on standard error.

    Raises:
        ExperimentError: There is no run below a folder, or none is finished.
    """
    runs, sweeps = find_runs(folders)
    every = [*runs, *(run for sweep in sweeps for run in row_runs(sweep))]
    unfinished = [run for run in every if run.summary is None]
    done = finished(by_experiment(every))
    if not done:
        started = next((resume_command(run.path) for run in runs if run.summary is None), None)
        path = sweeps[0].path if sweeps else folders[0]
        command = started or f"flray sweep --out {shlex.quote(str(path))} --resume"
        raise ExperimentError(
            f"no run below {', '.join(map(str, folders))} is finished; go on with: {command}"
        )
    for run in unfinished:
        click.echo(f"left out, since it is not finished: {run.label} ({run.path})", err=True)
    return done


def show_comparison(experiments: Experiments, form: Format, console: Console) -> None:
    """Print the table of the experiments, and unless as CSV that of the round after clustering."""
    comparison = comparison_sheet(experiments, measured_of(experiments))
    _show([comparison, clustering_sheet(experiments)], form, console)


def benchmark_in(folders: Sequence[Path]) -> Sweep | None:
    """The sweeps over methods in the folders as one; None if a folder has something else."""
    sweeps = [read_sweep(folder) for folder in folders if holds_sweep(folder)]
    if len(sweeps) < len(folders) or not all(map(is_benchmark, sweeps)):
        return None
    return joined(sweeps)


def show_benchmark(sweep: Sweep, form: Format, console: Console) -> None:
    """Print the methods of a sweep by mean rank, and by split; as CSV both are one table."""
    if form == "csv":
        console.out(all_numbers(sweep).to_csv(index=False), end="", highlight=False)
    else:
        _show([ranking_sheet(sweep), *map(score_sheet, benchmarks_of(sweep))], form, console)


def _show(sheets: Sequence[Sheet | None], form: Format, console: Console) -> None:
    """Print the sheets that there are; as CSV the first alone."""
    for sheet in filter(None, sheets[:1] if form == "csv" else sheets):
        rendered = render_sheet(sheet, form)
        if isinstance(rendered, str):
            console.out(rendered, end="" if form == "csv" else "\n", highlight=False)
        else:
            console.print(rendered)


def write_benchmark_figure(sweep: Sweep, file: Path, kind: str, protocol: str) -> None:
    """Draw a figure of BENCHMARK_FIGURES into a file; `protocol` is a value of SHORT.

    Raises:
        ExperimentError: It is no figure of a benchmark, or there is nothing to draw.
    """
    benchmarks = {SHORT[benchmark.protocol]: benchmark for benchmark in benchmarks_of(sweep)}
    if protocol not in benchmarks:
        raise ExperimentError(
            f"--protocol {protocol}: these methods were judged {', '.join(benchmarks)} only; "
            "evaluate.fine_tune judges models after local training"
        )
    figure = BENCHMARK_FIGURES.get(kind, lambda _: None)(benchmarks[protocol])
    if figure is None:
        kinds = ", ".join(BENCHMARK_FIGURES)
        raise ExperimentError(f"--kind {kind} cannot be drawn of these methods; known: {kinds}")
    save_figure(figure, file)
    click.echo(f"figure: {file}", err=True)


def write_figure(experiments: Experiments, file: Path, kind: str) -> None:
    """Draw a figure of the experiments into a file, whose name decides its format.

    Args:
        experiments: The runs of each experiment; the first `MAX_LINES` are drawn.
        file: A file that ends with .pdf, .svg or .png.
        kind: A key of FIGURES.

    Raises:
        ExperimentError: It is a figure of a benchmark, or there is nothing to draw.
    """
    if kind not in FIGURES:
        raise ExperimentError(
            f"--kind {kind} is a figure of a sweep over methods; known for runs: "
            f"{', '.join(FIGURES)}"
        )
    drawn = dict(itertools.islice(experiments.items(), MAX_LINES))
    if len(drawn) < len(experiments):
        message = f"the first {MAX_LINES} of {len(experiments)} experiments are drawn: name fewer"
        click.echo(message, err=True)
    save_figure(FIGURES[kind](drawn), file)
    click.echo(f"figure: {file}", err=True)

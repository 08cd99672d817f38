"""`flray run`: from arguments to runs, one after another, to one table."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flray.cli.keeper import (
    MOST_RESTARTS,
    Detached,
    raise_what_the_keeper_said,
    start_keeper,
    watch,
)
from flray.cli.stopping import noticing_sigterm
from flray.config.build import describe, run_experiment
from flray.config.experiment import (
    Experiment,
    evaluated_together,
    override,
    parse_experiment,
    read_yaml,
)
from flray.errors import ExperimentError
from flray.records.lock import check_free, holder
from flray.records.mirror import Mirror
from flray.records.run_directory import RunDirectory
from flray.report.comparison import clustering_sheet, comparison_sheet, round_line
from flray.report.figures import figures_of, write_figures
from flray.report.runs import RunRecord, by_experiment
from flray.report.writers import to_rich
from flray.sweep.tracking import tracked

__all__ = ["PlannedRun", "attach_to", "describe", "plan_runs", "run_all"]

RUNS = Path("runs")
Summary = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class PlannedRun:
    name: str  # of the experiment; its seeds share it
    experiment: Experiment
    out: Path


def plan_runs(arguments: Sequence[str], out: Path | None, resume: bool) -> list[PlannedRun]:
    """Every file with every seed, each with a folder of its own."""
    files = [Path(a) for a in arguments if "=" not in a] or demo_files()
    overrides = [a for a in arguments if "=" in a and not a.startswith("seeds=")]
    num_seeds = _number_of_seeds([a for a in arguments if a.startswith("seeds=")])
    names = _names(files)
    root = out or _default_folder("+".join(names), resume)
    if resume and not root.is_dir():
        raise ExperimentError(f"nothing to resume: there is no folder {root}; leave out --resume")
    alone = len(files) == 1 and num_seeds == 1
    runs = []
    for name, path in zip(names, files, strict=True):
        plain = override(read_yaml(path), overrides)
        first_seed = parse_experiment(plain).settings.seed
        for seed in range(first_seed, first_seed + num_seeds):
            folder = root if alone else root / name / f"seed_{seed}"
            runs.append(PlannedRun(name, parse_experiment({**plain, "seed": seed}), folder))
    together = evaluated_together([run.experiment for run in runs])
    return [replace(run, experiment=each) for run, each in zip(runs, together, strict=True)]


def demo_files() -> list[Path]:
    """The experiments that come with the package."""
    folder = Path(str(resources.files("flray") / "demo"))
    return sorted(folder.glob("*.yaml"))


def run_all(
    runs: Sequence[PlannedRun],
    console: Console,
    resume: bool,
    max_minutes: float | None,
    mirror: Mirror | None = None,
) -> None:
    """Run them in order, show each round, end in one table; stop in time where a limit is given."""
    deadline = float("inf") if max_minutes is None else perf_counter() + 60 * max_minutes
    with noticing_sigterm(console.print) as is_ending:
        done = _run_in_order(
            runs, console, resume, lambda: is_ending() or perf_counter() > deadline, mirror
        )
    if done is not None:
        _conclude(runs, done, console)


def _run_in_order(
    runs: Sequence[PlannedRun],
    console: Console,
    resume: bool,
    should_stop: Callable[[], bool],
    mirror: Mirror | None,
) -> list[RunRecord] | None:
    """Run one after another; None if there is more to do."""
    done: list[RunRecord] = []
    for planned in runs:
        if done and should_stop():
            console.print("stopped; the same command with --out and --resume goes on")
            return None
        seed = planned.experiment.settings.seed
        console.print(f"[bold]{planned.name}[/] · seed {seed} · {planned.out}", soft_wrap=True)
        try:
            summary = _run_one(planned, console, resume, should_stop, mirror)
        except Detached:
            console.print(f"detached; the run goes on: flray attach {planned.out}", soft_wrap=True)
            return None
        except KeyboardInterrupt:
            console.print("interrupted; the same command with --out and --resume goes on")
            raise click.Abort from None
        if summary is None:
            console.print("stopped; the same command with --out and --resume goes on")
            return None
        done.append(RunRecord(planned.out, planned.experiment.plain, summary, planned.name))
    return done


def _conclude(runs: Sequence[PlannedRun], done: Sequence[RunRecord], console: Console) -> None:
    """One table of all runs, and their figures."""
    console.print(to_rich(comparison_sheet(by_experiment(done))))
    for planned in runs:
        console.print(f"{planned.name}: {planned.out}", soft_wrap=True)
    clusterings = clustering_sheet(by_experiment(done))
    if clusterings is not None:
        console.print(to_rich(clusterings))
    folder = common_folder([planned.out for planned in runs]) / "figures"
    drawn = write_figures(by_experiment(done), folder)
    console.print(f"{len(drawn)} figures: {folder}", soft_wrap=True)


def common_folder(paths: Sequence[Path]) -> Path:
    """The folder that holds all of them; of one it is itself.

    >>> common_folder([Path("a/x/s"), Path("a/y/s")]).as_posix()
    'a'
    """
    return Path(os.path.commonpath([str(path) for path in paths]))


def _run_one(
    planned: PlannedRun,
    console: Console,
    resume: bool,
    should_stop: Callable[[], bool],
    mirror: Mirror | None,
) -> Summary | None:
    num_rounds = planned.experiment.settings.rounds
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(planned.name, total=num_rounds)

    def show(row: Summary) -> None:
        console.print(round_line(row, num_rounds), soft_wrap=True)
        bar.update(task, completed=row["round"])

    def show_and_copy(row: Summary) -> None:
        show(row)
        if mirror is not None:
            mirror.push_sometimes()

    with bar if console.is_terminal else nullcontext():
        if planned.experiment.settings.execution.executor == "ray":
            url = None if mirror is None else mirror.url
            return _run_kept(planned, resume, show, console.print, should_stop, url)
        with tracked(planned.experiment, planned.out, show_and_copy, figures_of) as on_round:
            out = planned.out
            return run_experiment(planned.experiment, out, resume, on_round, should_stop).summary


def _run_kept(
    planned: PlannedRun,
    resume: bool,
    show: Callable[[Summary], None],
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    mirror: str | None,
) -> Summary | None:
    """Run on Ray in a process of its own, which may be left alone and attached to again."""
    directory = RunDirectory(planned.out)
    plain = planned.experiment.plain
    (directory.check_resume if resume else directory.check_start)(plain)
    if (summary := directory.summary()) is not None:
        return summary
    check_free(planned.out)
    for restart in range(MOST_RESTARTS + 1):
        process = start_keeper(planned.experiment, planned.out, resume or restart > 0, mirror)
        watch(planned.out, lambda: process.poll() is None, show, say, should_stop)  # noqa: B023
        if process.returncode != -signal.SIGKILL or should_stop():
            break
        if restart < MOST_RESTARTS:
            say("the keeper was killed: going on from the last checkpoint")
    raise_what_the_keeper_said(process, planned.out)
    return directory.summary()


def attach_to(out: Path, console: Console) -> None:
    """Watch a run by its directory until it ends; then its table, or how to go on."""
    directory = RunDirectory(out)
    if not directory.holds_run():
        raise ExperimentError(f"{out} holds no run; expected a folder that `flray run` made")
    num_rounds = directory.config().get("rounds")
    if not isinstance(num_rounds, int):
        raise ExperimentError(f"{out / 'config.yaml'} is damaged: it has no number of rounds")
    for row in directory.rows()[-1:]:
        console.print(round_line(row, num_rounds), soft_wrap=True)
    try:
        watch(
            out,
            lambda: holder(out) is not None,
            lambda row: console.print(round_line(row, num_rounds), soft_wrap=True),
            console.print,
            lambda: False,
        )
    except Detached:
        console.print(f"detached; the run goes on: flray attach {out}", soft_wrap=True)
        return
    summary = directory.summary()
    if summary is None:
        console.print(f"nobody runs {out}; go on with: flray run ... --out {out} --resume")
    else:
        run = RunRecord(out, directory.config(), summary)
        console.print(to_rich(comparison_sheet({str(summary["algorithm"]): [run]})))


def _number_of_seeds(given: Sequence[str]) -> int:
    text = given[-1].removeprefix("seeds=") if given else "1"
    if not text.isdecimal() or int(text) < 1:
        raise ExperimentError(f"seeds must be a whole number >= 1, got {text!r}, as in seeds=3")
    return int(text)


def _names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its stem, with folders in front where stems repeat.

    >>> _names([Path("a/x.yaml"), Path("b/x.yaml"), Path("b/y.yaml")])
    ['a_x', 'b_x', 'y']
    """
    stems = [path.stem for path in files]
    names = [
        path.stem if stems.count(path.stem) == 1 else f"{path.resolve().parent.name}_{path.stem}"
        for path in files
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ExperimentError(f"two experiment files have the name {twice[0]!r}: rename one")
    return names


def _default_folder(name: str, resume: bool) -> Path:
    """A new folder below runs/, or the newest one of this name to go on with."""
    before = sorted((RUNS / name).glob("*"))
    if resume and before:
        return before[-1]
    return RUNS / name / datetime.now().strftime("%Y%m%d-%H%M%S-%f")

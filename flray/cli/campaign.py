"""`flray run`: from arguments to runs, one after another or side by side, to one table."""

import json
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flray.cli.arguments import files_and_overrides
from flray.cli.drawing import Finished, conclude, draw_figures
from flray.cli.keeper import dismiss
from flray.cli.stopping import noticing_sigterm
from flray.cli.together import Job, run_together, runs_at_a_time
from flray.cli.watching import (
    Detached,
    raise_what_the_keeper_said,
    start_keeper,
    watch,
)
from flray.columns import ROUND
from flray.config.experiment import Experiment, evaluated_together, parse_experiment, read_yaml
from flray.config.overrides import override
from flray.config.reading import Plain
from flray.config.several import named_experiments
from flray.config.shipped import demo_files, find_file, is_space
from flray.errors import ExperimentError
from flray.files import replace_text
from flray.imports import require_own_modules
from flray.records.command import COMMAND, read_command
from flray.records.inside import path_below, refuse_links_out
from flray.records.lock import check_free, holder
from flray.records.mirror import Mirror
from flray.records.run_directory import RunDirectory
from flray.reports.lines import event_line, round_line, with_merges
from flray.runs.launch import run_experiment
from flray.runs.remarks import remarks
from flray.server.actor import MOST_RESTARTS
from flray.server.summary import checked_summary
from flray.tracking.mirrors import tracked, tracking_remarks
from flray.values import file_name

__all__ = ["CampaignRun", "attach_to", "campaign_runs", "run_all"]

RUNS = Path("runs")
Summary = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class CampaignRun:
    """One of the runs that a command is to start or to go on with."""

    name: str  # of the experiment; its seeds share it
    experiment: Experiment
    out: Path
    command: "Command | None" = None  # that it belongs to


@dataclass(frozen=True)
class Command:
    """What `flray run` was told: kept in its folder, so that --resume needs nothing else."""

    root: Path
    overrides: tuple[str, ...]
    runs: tuple[CampaignRun, ...]
    changed: tuple[str, ...] = ()  # keys that runs may go on with other values of

    def write(self) -> None:
        runs = [
            {
                "name": run.name,
                "folder": os.path.relpath(run.out, self.root),
                "experiment": run.experiment.plain,
            }
            for run in self.runs
        ]
        text = json.dumps({"overrides": self.overrides, "runs": runs}, indent=1)
        replace_text(self.root / COMMAND, text)


def resume_command(root: Path | str) -> str:
    """What to type to go on with the runs of a folder."""
    return f"flray run --out {shlex.quote(str(root))} --resume"


def campaign_runs(arguments: Sequence[str], out: Path | None, resume: bool) -> list[CampaignRun]:
    """Every file with every listed component and seed, each with a folder of its own.

    With resume, what the command was told before is told again; without a file, the runs are those
    that the folder holds.
    """
    given, overrides = files_and_overrides(arguments)
    files = [Path(file) for file in given]
    if resume and not files and out is not None:
        return _held_runs(out, overrides)
    for file in files:
        if is_space(find_file(file) or file):
            raise ExperimentError(f"{file} is a space, not an experiment; type flray sweep {file}")
    files = files or demo_files()
    names = _names(files)
    joined = "+".join(names)
    root = out or _default_folder(joined if len(files) == 1 else file_name(joined), resume)
    if resume and not root.is_dir():
        where = (
            f"there is no folder {root}" if out else f"no run of {root.parent.name} below {RUNS}"
        )
        raise ExperimentError(
            f"nothing to resume: {where}; leave out --resume, or type the folder of the run, as in "
            f"{resume_command(RUNS / 'mine')}"
        )
    changed = _keys(overrides)
    if resume:
        refuse_links_out(root)
        overrides = [*read_command(root).get("overrides", []), *overrides]
    plain = {
        name: override(read_yaml(path), overrides) for name, path in zip(names, files, strict=True)
    }
    named = named_experiments(plain)
    runs = [
        CampaignRun(each.name, each.experiment, root / each.folder if len(named) > 1 else root)
        for each in named
    ]
    together = evaluated_together([run.experiment for run in runs])
    runs = [replace(run, experiment=each) for run, each in zip(runs, together, strict=True)]
    command = Command(root, tuple(overrides), tuple(runs), changed)
    return [replace(run, command=command) for run in runs]


def _keys(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(item.partition("=")[0] for item in overrides)


def _held_runs(root: Path, overrides: Sequence[str]) -> list[CampaignRun]:
    """The runs that a folder was made for, with what is told now."""
    refuse_links_out(root)
    command = read_command(root)
    if command:
        told = [*command["overrides"], *overrides]
        runs = [
            CampaignRun(each["name"], _held(root, folder, overrides, each["experiment"]), folder)
            for each in command["runs"]
            for folder in [path_below(root, each["folder"])]
        ]
    elif RunDirectory(root).holds_run():
        told = list(overrides)
        runs = [CampaignRun(root.name, _held(root, root, overrides, {}), root)]
    else:
        raise ExperimentError(f"nothing to resume: {root} holds no run; leave out --resume")
    command_now = Command(root, tuple(told), tuple(runs), _keys(overrides))
    return [replace(run, command=command_now) for run in runs]


def _held(root: Path, folder: Path, overrides: Sequence[str], told: Plain) -> Experiment:
    """What a run that was started holds, and otherwise what the command was told of it."""
    directory = RunDirectory(folder)
    plain = dict(directory.config() if directory.holds_run() else told)
    require_own_modules(plain, root)
    return parse_experiment(override(plain, overrides))


def run_all(
    runs: Sequence[CampaignRun],
    console: Console,
    resume: bool,
    max_minutes: float | None,
    mirror: Mirror | None = None,
    together: int | None = None,
) -> None:
    """Run them, show each round, end in one table; stop in time where a limit is given.

    Args:
        together: runs at a time; None: as many as a GPU takes, one on a CPU.
    """
    for run in runs:
        if resume and run.command is not None:
            RunDirectory(run.out).change_settings(run.experiment.plain, run.command.changed)
    deadline = float("inf") if max_minutes is None else perf_counter() + 60 * max_minutes
    at_a_time = runs_at_a_time([run.experiment for run in runs], together)
    if not any(run.experiment.settings.execution.executor == "ray" for run in runs):
        dismiss()
    with noticing_sigterm(console.print) as is_ending:
        should_stop = lambda: is_ending() or perf_counter() > deadline  # noqa: E731
        if at_a_time > 1:
            done = _run_side_by_side(runs, at_a_time, console, resume, should_stop, mirror)
        else:
            done = _run_in_order(runs, console, resume, should_stop, mirror)
    if done is not None:
        conclude(done, console, None if mirror is None else mirror.url)


def _run_in_order(
    runs: Sequence[CampaignRun],
    console: Console,
    resume: bool,
    should_stop: Callable[[], bool],
    mirror: Mirror | None,
) -> list[Finished] | None:
    """Run one after another; None if there is more to do."""
    done: list[Finished] = []
    for run in runs:
        if done and should_stop():
            _show_stopped("stopped", run, console, mirror)
            return None
        seed = run.experiment.settings.seed
        where = f" · seed {seed} · {run.out}"
        console.print(Text.assemble((run.name, "bold"), where), soft_wrap=True)
        try:
            summary = _run_one(run, console, resume, should_stop, mirror)
        except Detached:
            console.print(detached_line(run.out), soft_wrap=True, markup=False)
            return None
        except KeyboardInterrupt:
            _show_stopped("interrupted", run, console, mirror)
            raise click.Abort from None
        if summary is None:
            _show_stopped("stopped", run, console, mirror)
            return None
        done.append(Finished(run.out, run.experiment.plain, summary, run.name))
    return done


def _run_side_by_side(
    runs: Sequence[CampaignRun],
    at_a_time: int,
    console: Console,
    resume: bool,
    should_stop: Callable[[], bool],
    mirror: Mirror | None,
) -> list[Finished] | None:
    """Run several at a time, each in a process of its own; None if there is more to do."""
    names = [f"{run.name} · seed {run.experiment.settings.seed}" for run in runs]
    console.print(f"{len(runs)} runs, {at_a_time} at a time", soft_wrap=True)
    for name, run in zip(names, runs, strict=True):
        console.print(Text.assemble((name, "bold"), f" · {run.out}"), soft_wrap=True)
    told = [remark for run in runs for remark in _remarks(run)]
    for remark in dict.fromkeys(told):
        console.print(f"note: {remark}", soft_wrap=True, markup=False)
    begun: set[int] = set()

    def show(number: int, row: Summary) -> None:
        run = runs[number]
        if run.command is not None and not begun:
            run.command.write()
        begun.add(number)
        _show_round(run, row, console, f"{names[number]} · ")
        if mirror is not None:
            mirror.push_sometimes()

    jobs = [Job(run.experiment, run.out, resume) for run in runs]
    try:
        summaries = run_together(jobs, at_a_time, show, should_stop)
    except KeyboardInterrupt:
        _show_stopped("interrupted", runs[0], console, mirror)
        raise click.Abort from None
    if None in summaries:
        _show_stopped("stopped", runs[0], console, mirror)
        return None
    return [
        Finished(run.out, run.experiment.plain, summary, run.name)
        for run, summary in zip(runs, summaries, strict=True)
        if summary is not None
    ]


def _remarks(run: CampaignRun) -> list[str]:
    return [*remarks(run.experiment), *tracking_remarks(run.experiment)]


def _show_round(run: CampaignRun, row: Summary, console: Console, prefix: str = "") -> None:
    """A line of a round; before it what happened to the data in it."""
    if told := event_line(run.experiment.plain["events"], row[ROUND]):
        console.print(f"{prefix}{told}", soft_wrap=True, markup=False)
    shown = with_merges(row, run.out, run.experiment.plain)
    line = round_line(shown, run.experiment.settings.rounds)
    console.print(f"{prefix}{line}", soft_wrap=True)


def _show_stopped(how: str, run: CampaignRun, console: Console, mirror: Mirror | None) -> None:
    root = run.command.root if run.command else run.out
    command = resume_command(root if mirror is None else mirror.url)
    console.print(f"{how}; go on with: {command}", soft_wrap=True, markup=False)


def detached_line(out: Path) -> str:
    return f"detached; the run goes on; watch it with: flray attach {shlex.quote(str(out))}"


def _run_one(
    run: CampaignRun,
    console: Console,
    resume: bool,
    should_stop: Callable[[], bool],
    mirror: Mirror | None,
) -> Summary | None:
    num_rounds = run.experiment.settings.rounds
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(run.name, total=num_rounds)

    for remark in _remarks(run):
        console.print(f"note: {remark}", soft_wrap=True, markup=False)
    begun: list[int] = []

    def show(row: Summary) -> None:
        if run.command is not None and not begun:
            run.command.write()
        begun.append(row[ROUND])
        _show_round(run, row, console)
        bar.update(task, completed=row[ROUND])

    def show_and_copy(row: Summary) -> None:
        show(row)
        if mirror is not None:
            mirror.push_sometimes()

    with bar if console.is_terminal else nullcontext():
        if run.experiment.settings.execution.executor == "ray":
            url = None if mirror is None else mirror.url
            return _run_kept(run, resume, show, console.print, should_stop, url)
        with tracked(run.experiment, run.out, show_and_copy, draw_figures) as on_round:
            out = run.out
            return run_experiment(run.experiment, out, resume, on_round, should_stop).summary


def _run_kept(
    run: CampaignRun,
    resume: bool,
    show: Callable[[Summary], None],
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    mirror: str | None,
) -> Summary | None:
    """Run on Ray in a process of its own, which may be left alone and attached to again."""
    directory = RunDirectory(run.out)
    plain = run.experiment.plain
    (directory.check_resume if resume else directory.check_start)(plain)
    if directory.is_finished(plain):
        return checked_summary(directory)
    check_free(run.out)
    for restart in range(MOST_RESTARTS + 1):
        process = start_keeper(run.experiment, run.out, mirror)
        if run.command is not None:
            run.command.write()
        watch(run.out, lambda: process.poll() is None, show, say, should_stop)  # noqa: B023
        if process.returncode != -signal.SIGKILL or should_stop():
            break
        if restart < MOST_RESTARTS:
            say("the keeper was killed: going on from the last checkpoint")
    raise_what_the_keeper_said(process, run.out)
    return checked_summary(directory)


def attach_to(out: Path, console: Console) -> None:
    """Watch a run by its directory until it ends; then its table, or how to go on."""
    directory = RunDirectory(out)
    if not directory.holds_run():
        if held := [str(out / each["folder"]) for each in read_command(out).get("runs", [])]:
            folders = ", ".join(held)
            raise ExperimentError(
                f"{out} holds {len(held)} runs; name the folder of one: {folders}"
            )
        raise ExperimentError(f"{out} holds no run; expected a folder that `flray run` made")
    config = directory.config()
    if not isinstance(config.get("rounds"), int):
        raise ExperimentError(f"{out / 'config.yaml'} is damaged: it has no number of rounds")

    def show(row: Summary) -> None:
        console.print(round_line(with_merges(row, out, config), config["rounds"]), soft_wrap=True)

    for row in directory.rows()[-1:]:
        show(row)
    try:
        watch(
            out,
            lambda: holder(out) is not None,
            show,
            console.print,
            lambda: False,
        )
    except Detached:
        console.print(detached_line(out), soft_wrap=True, markup=False)
        return
    summary = checked_summary(directory)
    root, name, others = _campaign_of(out)
    if summary is None:
        told = f"nobody runs {out}; go on with: {resume_command(root)}"
        console.print(told, soft_wrap=True, markup=False)
        return
    conclude([Finished(out, directory.config(), summary, name)], console)
    if others:
        told = f"{others} runs of the same command are left: {resume_command(root)}"
        console.print(told, soft_wrap=True, markup=False)


def _campaign_of(out: Path) -> tuple[Path, str, int]:
    """Where the command of a run is kept, the run's name, and how many others are unfinished."""
    for root in (out, *out.absolute().parents[:2]):
        runs = read_command(root).get("runs", [])
        mine = [each for each in runs if (root / each["folder"]).absolute() == out.absolute()]
        if mine:
            folders = [path_below(root, each["folder"]) for each in runs]
            left = sum(RunDirectory(each).summary() is None for each in folders)
            here = Path(os.path.relpath(root))
            return here if here.parts[:1] != ("..",) else root, mine[0]["name"], left
    return out, out.name, 0


def _names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its stem, with folders in front where stems repeat.

    >>> _names([Path("a/x.yaml"), Path("b/x.yaml"), Path("b/y.yaml")])
    ['a_x', 'b_x', 'y']
    """
    if repeated := [str(path) for path in files if files.count(path) > 1]:
        raise ExperimentError(f"{repeated[0]} is given twice; for several seeds type seeds=2")
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

"""`flray run` and `flray attach`: runs in order or side by side, shown round by round."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import click
from rich.console import Console
from rich.text import Text

from flray.cli.campaign import Campaign, CampaignRun, campaign_of, resume_command
from flray.cli.group import draw_figures, progress_bar
from flray.columns import ROUND
from flray.errors import ExperimentError
from flray.records.command import read_command
from flray.records.lock import holder
from flray.records.mirror import Mirror
from flray.records.run_directory import RunDirectory
from flray.reports.lines import event_line, line_of_run
from flray.runs.conduct import Monitor, ShouldStop, noticing_sigterm
from flray.runs.launch import run_experiment
from flray.runs.remarks import remarks
from flray.runs.together import ForkedRun, run_together, runs_at_a_time
from flray.runs.watching import Detached, Watcher, run_kept
from flray.server.evaluation import RoundRow
from flray.server.summary import checked_summary
from flray.tracking.mirrors import tracking_remarks
from flray.wording import counted


def run_all(
    campaign: Campaign,
    console: Console,
    max_minutes: float | None = None,
    mirror: Mirror | None = None,
    together: int | None = None,
) -> None:
    """Run a campaign, show each round and end in one table, unless it is stopped before.

    Ctrl-C and SIGTERM stop it so that --resume goes on; a run on Ray can also be left alone.

    Args:
        campaign: The runs of the command.
        max_minutes: Minutes after which the round in progress is the last one.
        mirror: Copies the folder to a URL meanwhile.
        together: Runs at a time; None: as many as a GPU takes, one on a CPU.

    Raises:
        click.Abort: The runs were interrupted; the way to go on has been printed.
    """
    runs = campaign.runs
    for run in runs:
        if campaign.resume:
            RunDirectory(run.out).change_settings(run.experiment.plain, campaign.changed)
    deadline = float("inf") if max_minutes is None else perf_counter() + 60 * max_minutes
    at_a_time = runs_at_a_time([run.experiment for run in runs], together)
    display = Display(campaign, console, mirror)
    run_them = _run_in_order if at_a_time == 1 else _run_side_by_side
    with noticing_sigterm(console.print) as is_ending:
        try:
            is_done = run_them(display, at_a_time, lambda: is_ending() or perf_counter() > deadline)
        except Detached as detached:
            return console.out(detached)
        except KeyboardInterrupt:
            display.show_stopped("interrupted")
            raise click.Abort from None
    return display.show_results() if is_done else display.show_stopped("stopped")


def _is_on_ray(run: CampaignRun) -> bool:
    return run.experiment.settings.execution.executor == "ray"


def _run_in_order(display: "Display", _at_a_time: int, should_stop: ShouldStop) -> bool:
    """Run one after another; True when all are done."""
    for number, run in enumerate(display.campaign.runs):
        if number and should_stop():
            return False
        display.show_title(run.name, f" · seed {run.experiment.settings.seed} · {run.out}")
        display.show_remarks([run])
        if not _run_one(run, display, should_stop):
            return False
    return True


def _run_one(run: CampaignRun, display: "Display", should_stop: ShouldStop) -> bool:
    """Run in this process or, on Ray, in a keeper; True when it is done."""
    resume = display.campaign.resume
    is_finished = RunDirectory(run.out).is_finished(run.experiment.plain)
    with display.progress(run) as show:
        if _is_on_ray(run) and not is_finished:
            watcher = Watcher(show, display.console.out, should_stop, display.campaign.write)
            summary = run_kept(run.experiment, run.out, resume, watcher, display.url)
        else:
            monitor = Monitor(show, should_stop, draw_figures)
            summary = run_experiment(run.experiment, run.out, resume, monitor)
    return summary is not None


def _run_side_by_side(display: "Display", at_a_time: int, should_stop: ShouldStop) -> bool:
    """Run several at a time, each in a process of its own; True when all are done."""
    runs = display.campaign.runs
    names = [f"{run.name} · seed {run.experiment.settings.seed}" for run in runs]
    display.console.out(f"{len(runs)} runs, {at_a_time} at a time")
    for name, run in zip(names, runs, strict=True):
        display.show_title(name, f" · {run.out}")
    display.show_remarks(runs)

    def show(number: int, row: RoundRow) -> None:
        display.show_round(runs[number], row, f"{names[number]} · ")

    forked = [ForkedRun(run.experiment, run.out, display.campaign.resume) for run in runs]
    return run_together(forked, at_a_time, show, should_stop, draw_figures)


@dataclass
class Display:
    """What the terminal shows of a campaign, and the copy of its folder at a URL.

    The first round that is shown writes command.json: a command that is refused leaves no file.
    Remarks are lines that begin with "note:"; errors are not shown here but raised.
    """

    campaign: Campaign
    console: Console
    mirror: Mirror | None = None
    is_begun: bool = False  # True once a round has been shown

    @property
    def url(self) -> str | None:
        """Where the folder of the command has a copy; None: it has none."""
        return None if self.mirror is None else self.mirror.url

    def show_title(self, name: str, rest: str) -> None:
        """Print a line with a name in bold before the rest."""
        self.console.print(Text.assemble((name, "bold"), rest), soft_wrap=True)

    def show_remarks(self, runs: Iterable[CampaignRun]) -> None:
        """Print what users may not expect of these runs, each remark once."""
        lines = [line for run in runs for line in remarks_on(run)]
        for line in dict.fromkeys(lines):
            self.console.out(f"note: {line}")

    def show_round(self, run: CampaignRun, row: RoundRow, prefix: str = "") -> None:
        """Print a line about a round, after one about what happened to the data in it.

        Copies the folder of the command to its URL now and then, unless a keeper does.

        Args:
            row: The row of its round, as rounds.parquet has it.
            prefix: Begins each line, to tell apart runs side by side.
        """
        if not self.is_begun:
            self.campaign.write()
            self.is_begun = True
        plain = run.experiment.plain
        if event := event_line(plain["events"], row[ROUND]):
            self.console.out(f"{prefix}{event}")
        self.console.out(f"{prefix}{line_of_run(row, run.out, plain)}")
        if self.mirror is not None and not _is_on_ray(run):
            self.mirror.push_sometimes()

    @contextmanager
    def progress(self, run: CampaignRun) -> Iterator[Callable[[RoundRow], None]]:
        """Yield what shows a round of a run, with a bar below it in a terminal.

        The bar is removed when the block ends; lines of rounds stay.
        """
        with progress_bar(self.console, run.name, run.experiment.settings.rounds) as advance:

            def show(row: RoundRow) -> None:
                self.show_round(run, row)
                advance(row[ROUND])

            yield show

    def show_stopped(self, how: str) -> None:
        """Print how to go on with the command."""
        self.console.out(f"{how}; go on with: {resume_command(self.url or self.campaign.root)}")

    def show_results(self) -> None:
        """Print the table of all runs and draw their figures."""
        from flray.cli.concluding import show_results  # imported late: it imports matplotlib

        runs = {run.out: run.name for run in self.campaign.runs}
        show_results(runs, self.console, self.url)


def remarks_on(run: CampaignRun) -> list[str]:
    """What a user may not expect of a run or of its tracking, as sentences without a full stop."""
    return [*remarks(run.experiment), *tracking_remarks(run.experiment)]


def attach_to(out: Path, console: Console) -> None:
    """Watch a run by its directory until it ends; then print its table, or how to go on.

    Works for every run that some process conducts, on Ray or not, also where the user may only read
    its folder: then no figures are drawn. Ctrl-C asks whether to stay, to stop the run or to leave
    it.

    Args:
        out: The run directory.

    Raises:
        ExperimentError: The folder holds no run, or several, which the message lists.
    """
    directory = RunDirectory(out)
    if not directory.holds_run():
        if folders := [str(out / run["folder"]) for run in read_command(out).get("runs", [])]:
            raise ExperimentError(
                f"{out} holds {len(folders)} runs; name the folder of one: {', '.join(folders)}"
            )
        raise ExperimentError(f"{out} holds no run; expected a folder that `flray run` made")
    config = directory.config()
    if not isinstance(config.get("rounds"), int):
        raise ExperimentError(f"{out / 'config.yaml'} is damaged: it has no number of rounds")

    def show(row: RoundRow) -> None:
        console.out(line_of_run(row, out, config))

    for row in directory.rows()[-1:]:
        show(row)
    try:
        Watcher(show, console.out).watch(out, lambda: holder(out) is not None)
    except Detached as detached:
        return console.out(detached)
    root, name, num_left = campaign_of(out)
    if checked_summary(directory) is None:
        return console.out(f"nobody runs {out}; go on with: {resume_command(root)}")
    from flray.cli.concluding import show_results  # imported late: it imports matplotlib

    show_results({out: name}, console)
    if num_left:
        console.out(f"{counted(num_left, 'run')} of the same command left: {resume_command(root)}")

"""The group of all commands, their errors and exit codes, and the options that several share."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flray import __version__
from flray.cli.places import Place
from flray.errors import ClientFailure, ExperimentError, ServerLost
from flray.values import shown

FAILED, BAD_EXPERIMENT, INTERRUPTED = 1, 2, 130
WIDTH_OF_A_PIPE = 120

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class Commands(click.Group):
    """The group of commands; an OSError about a file becomes an ExperimentError of one line.

    So a full disk or a missing permission exits with one line and code 2, and no traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:  # Any: what a command returns
        """Run the command that was typed; Any: what it returns."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if isinstance(error, ExperimentError) or error.filename is None:
                raise
            raise ExperimentError(
                f"cannot read or write {shown(str(error.filename))}: {error.strerror}; check the "
                "path and its permissions, or choose another"
            ) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Experiments in clustered federated learning: described in YAML, run anywhere.

    \b
    flray run                                  the embedded demo, no download
    flray run a.yaml b.yaml seeds=3            compare two experiments over three seeds
    flray run a.yaml train.lr=0.1 rounds=20    any key can be set as it stands in the file
    flray run a.yaml "algorithm=[fedavg, flhc]"   compare methods
    flray sweep tune_spaces/flhc_digits.yaml   a space of experiments, nothing trained twice
    flray plan a.yaml                          how long will it take, and what binds?
    flray table flhc.4 · flray report runs/x   the paper's table, a page
    flray compare runs/a runs/b --format latex a table and a figure of your own runs
    flray init flhc                            an experiment file to start from
    flray list algorithms · flray keys train   what there is to choose from, and every key
    """


def resumable(kind: str, note: str) -> Decorator:
    """The options --out, --resume and --max-minutes of a command that can be stopped.

    A decorator; the command gets the arguments `out`, `resume` and `max_minutes`.

    Args:
        kind: What the command computes, as in "Folder or URL of the run".
        note: What follows in the help of --out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option(
                "--max-minutes",
                type=click.FloatRange(min=0),
                help="Stop after the round in which so many minutes have passed, a sweep so early "
                "that its table is written by then; --resume goes on.",
            ),
            click.option(
                "--resume",
                is_flag=True,
                help=f"Go on where the {kind} in --out, or the newest, stopped.",
            ),
            click.option(
                "--out", type=Place(), help=f"Folder or URL (s3://...) of the {kind}{note}"
            ),
        ):
            command = option(command)
        return command

    return decorate


format_option = click.option(
    "--format",
    "form",
    type=click.Choice(("rich", "md", "latex", "csv")),
    default="rich",
    show_default=True,
)


def output_file(name: str, text: str) -> Decorator:
    """An option for a file, as in `--out page.html`."""
    return click.option(name, type=click.Path(path_type=Path, dir_okay=False), help=text)


def open_console() -> Console:
    """Standard output as the commands print to it: no colours of numbers, no markup, no emoji.

    A pipe is WIDTH_OF_A_PIPE columns wide, a terminal as wide as it is.
    """
    # Names of files may look like markup, names of classes like emoji (mine:Key: ...)
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    console = plain()
    # A pipe has no width of its own: rich would fold tables at 80 columns.
    return console if console.is_terminal else plain(width=WIDTH_OF_A_PIPE)


@contextmanager
def progress_bar(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar below what is printed, in a terminal; yields what to call with the progress.

    Nothing is shown if the console is a pipe or a file.

    Args:
        console: Where to show it; print through the same console meanwhile.
        name: Text before the bar.
        total: Progress at which it is full.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    is_hidden = not console.is_terminal
    remaining = TimeRemainingColumn()
    with Progress(*columns, remaining, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task(name, total=total)
        yield lambda completed: bar.update(task, completed=completed)


def draw_figures(run: Path) -> Sequence[Path]:
    """The figures of a run directory, as PNG files; matplotlib is imported when they are drawn.

    What runs are given as `draw`, so that packages below the reports need not import them.
    """
    from flray.reports.figure_files import figures_of

    return figures_of(run)


def main() -> None:
    """Run the command line; exits with 2 for a wrong experiment, 1 for a failed run.

    Both print one line on standard error and no traceback. Ctrl-C exits with 130.
    """
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
    logging.basicConfig(format="%(message)s")  # to stderr
    logging.getLogger("flray").setLevel(logging.INFO)  # an encoder being pre-trained
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        advice = f" See {context.command_path} --help." if context else ""
        errors.out(f"error: {error.format_message()}{advice}", style="red")
        sys.exit(error.exit_code)
    except ExperimentError as error:
        errors.out(f"error: {error}", style="red")
        sys.exit(BAD_EXPERIMENT)
    except (ClientFailure, ServerLost) as error:
        errors.out(f"failed: {error}", style="red")
        sys.exit(FAILED)

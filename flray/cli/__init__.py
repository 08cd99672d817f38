"""The command line: what people type."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console

from flray import __version__
from flray.cli.arguments import TakingKeys
from flray.errors import ClientFailure, ExperimentError, ServerLost
from flray.values import shown

FAILED, BAD_EXPERIMENT, INTERRUPTED = 1, 2, 130
WIDTH_OF_A_PIPE = 120
TABLE_FORMATS = ("rich", "md", "latex", "csv")
SHIPPED = ("experiments", "spaces")
KINDS = ("algorithms", "datasets", "splits", "models", "stages")


class Place(click.Path):
    """A folder, as a Path, or a URL, as text."""

    name = "folder or URL"

    def __init__(self, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # Any: click's own
        if isinstance(value, str) and "://" in value:
            return value
        return super().convert(value, param, ctx)


class Commands(click.Group):
    """Turns files and folders that cannot be read or written into errors of one line."""

    def invoke(self, ctx: click.Context) -> Any:  # Any: what a command returns
        try:
            return super().invoke(ctx)
        except OSError as error:
            if isinstance(error, ExperimentError) or error.filename is None:
                raise
            raise ExperimentError(
                f"cannot read or write {shown(str(error.filename))}: {error.strerror}; check the "
                "path and its permissions, or choose another"
            ) from error


# Commands import what they need when they run: torch and Lightning take seconds, --help must not.


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


@cli.command(cls=TakingKeys)
@click.argument("arguments", nargs=-1, metavar="[EXPERIMENT.yaml]... [key=value]...")
@click.option(
    "--out",
    type=Place(),
    help="Folder or URL (s3://...) of the run, or of all of them.  [default: below runs/]",
)
@click.option(
    "--resume", is_flag=True, help="Go on where the run in --out, or the newest, stopped."
)
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0),
    help="Stop after the round in which so many minutes have passed; --resume goes on.",
)
@click.option(
    "--together",
    type=click.IntRange(min=1),
    help="Runs at a time, each in a process.  [default: as many as a GPU takes, 1 on a CPU]",
)
def run(
    arguments: tuple[str, ...],
    out: Path | str | None,
    resume: bool,
    max_minutes: float | None,
    together: int | None,
) -> None:
    """Run one or several experiments; several, or seeds=N, end in one paired table.

    Without a file the embedded demo runs: FL+HC against FedAvg on scikit-learn's digits, where
    groups of clients swapped labels.

    \b
    flray run experiments/flhc/mnist_label_swap.yaml execution.device=cpu --out runs/swap
    flray run experiments/flhc/mnist_label_swap.yaml execution.device=cpu --out runs/swap --resume
    """
    from flray.cli.keeper import start_early

    start_early(arguments)  # first: what follows imports torch
    from flray.cli.campaign import campaign_runs, run_all
    from flray.cli.places import mirrored

    with mirrored(out) as (folder, mirror):
        runs = campaign_runs(arguments, folder, resume)
        run_all(runs, _console(), resume, max_minutes, mirror, together)


@cli.command(cls=TakingKeys)
@click.argument("arguments", nargs=-1, required=True, metavar="SPACE.yaml [key=value]...")
@click.option(
    "--out",
    type=Place(),
    help="Folder or URL (s3://...) of the sweep.  [default: a new one below runs/]",
)
@click.option(
    "--resume", is_flag=True, help="Go on where the sweep in --out, or the newest, stopped."
)
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0),
    help="Stop after the rounds in which so many minutes have passed; --resume goes on.",
)
def sweep(
    arguments: tuple[str, ...], out: Path | str | None, resume: bool, max_minutes: float | None
) -> None:
    """Run every experiment of a space with Ray Tune, and train nothing twice.

    \b
    flray sweep tune_spaces/flhc_digits.yaml                  on embedded data
    flray sweep tune_spaces/flhc_table4.yaml seed=1 --out runs/table4
    flray table flhc.4 --runs runs/table4                     the paper's table
    flray report runs/table4                                  a page to look at

    A space names an experiment and what it varies; search, scheduler, concurrency and more are
    keys of it too (docs/spaces.md), and any of them can be set as key=value.
    """
    from flray.cli.places import mirrored
    from flray.cli.sweeping import sweep

    with mirrored(out) as (folder, mirror):
        sweep(arguments, folder, resume, max_minutes, _console(), mirror)


@cli.command(cls=TakingKeys)
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    metavar="EXPERIMENT.yaml|SPACE.yaml|CLUSTER.yaml... [key=value]...",
)
def check(arguments: tuple[str, ...]) -> None:
    """Would these run? Deals the data and builds the model, but trains nothing.

    \b
    flray check experiments/flhc/*.yaml
    flray check tune_spaces/flhc_table4.yaml seed=1
    flray check cluster.yaml                       would `ray up` take it? needs no account
    """
    from flray.cli.checking import check_files

    if check_files(arguments, _console(), cli):
        sys.exit(BAD_EXPERIMENT)


@cli.command(cls=TakingKeys)
@click.argument("arguments", nargs=-1, metavar="[EXPERIMENT.yaml]... [key=value]...")
@click.option("--gpus", type=click.FloatRange(min=0), help="GPUs of a node for client actors.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Rates of another machine; nothing is measured here.",
)
@click.option(
    "--save-profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the rates of this machine for --profile.",
)
def plan(
    arguments: tuple[str, ...],
    gpus: float | None,
    nodes: int,
    profile: Path | None,
    save_profile: Path | None,
) -> None:
    """What will an experiment take? Time, client steps, bytes and memory, and what binds.

    Its rounds are rehearsed with clients that train a few steps only, which takes seconds.

    \b
    flray plan experiments/flhc/mnist_label_swap.yaml
    flray plan experiments/flhc/mnist_label_swap.yaml --save-profile gpu.json    where the GPU is
    flray plan experiments/flhc/mnist_label_swap.yaml rounds=500 --profile gpu.json --gpus 4
    """
    from flray.cli.planning import plan_files

    plan_files(arguments, gpus, nodes, profile, save_profile, _console())


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=Place(exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page.  [default: report.html in the first folder, of a URL here]",
)
def report(folders: tuple[Path | str, ...], out: Path | None) -> None:
    """One self-contained HTML page of a run, several runs, or a sweep."""
    from flray.cli.places import fetched
    from flray.cli.reporting import write_report

    local = tuple(fetched(folder) for folder in folders)
    if isinstance(folders[0], str) and out is None:
        out = Path("report.html")
    write_report(local, out, _console())


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=Place(exists=True), metavar="RUNS...")
@click.option(
    "--format", "form", type=click.Choice(TABLE_FORMATS), default="rich", show_default=True
)
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file for a figure of the same runs: .pdf, .svg or .png.",
)
@click.option(
    "--kind",
    type=click.Choice(("accuracy", "clients", "efficiency")),
    default="accuracy",
    show_default=True,
    help="The figure: accuracy by round, of every client, or against the bytes sent.",
)
def compare(
    folders: tuple[Path | str, ...],
    form: Literal["rich", "md", "latex", "csv"],
    figure: Path | None,
    kind: str,
) -> None:
    """A table, and a figure, of your own runs side by side.

    RUNS are folders or URLs of runs, of experiments with several seeds, or of sweeps, whose rows
    are then compared; all that lies below them counts.

    \b
    flray compare runs/fedavg runs/flhc                      in the terminal
    flray compare runs/both --format latex > both.tex        for a paper; md and csv too
    flray compare runs/both --figure both.pdf                accuracy by round
    flray compare runs/both --figure sent.pdf --kind efficiency

    Numbers are means, ± the standard deviation over seeds. Differences and ratios are to FedAvg
    where it is among the runs, else to the first one named.
    """
    from flray.cli.comparing import experiments_in, show_comparison, write_figure
    from flray.cli.places import fetched

    experiments = experiments_in([fetched(folder) for folder in folders])
    if figure is not None:
        write_figure(experiments, figure, kind)
    show_comparison(experiments, form, _console())


@cli.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--client", type=click.IntRange(min=0), help="Whose model.")
@click.option("--table", type=click.Choice(("rounds", "clients")), help="A table, as CSV.")
def export(run: Path, file: Path, client: int | None, table: str | None) -> None:
    """Write a client's model as a Lightning checkpoint, or a table of a run as CSV.

    \b
    flray export runs/mine --client 3 client3.ckpt
    flray export runs/mine --table rounds rounds.csv

    In Python: Module.load_from_checkpoint("client3.ckpt"), or
    torch.load("client3.ckpt", weights_only=True)["state_dict"].
    """
    from flray.files import is_plain, write_output
    from flray.result import load_one

    if (client is None) == (table is None):
        raise click.UsageError("give one of --client and --table")
    if not file.parent.is_dir():
        raise ExperimentError(f"there is no folder {file.parent} to write {file.name} to")
    result = load_one(run)
    if client is not None:
        result.export(client, file)
    else:
        frame = result.rounds if table == "rounds" else result.clients
        write_output(file, lambda path: frame.to_csv(path, index=False))
    if is_plain(file):  # it may be on its way to standard output
        _console().print(f"written: {file}", soft_wrap=True, markup=False)


@cli.command()
@click.argument("arguments", nargs=-1, required=True, metavar="ENCODER.yaml [key=value]...")
def pretrain(arguments: tuple[str, ...]) -> None:
    """Pre-train an encoder, for FLT; it is kept by a hash of what decides it.

    \b
    flray pretrain experiments/encoders/fashion_mnist.yaml
    flray pretrain experiments/encoders/fashion_mnist.yaml epochs=5 model.loss=bce
    """
    from flray.cli.pretrain import run_pretraining

    run_pretraining(arguments, _console())


@cli.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
def attach(run: Path) -> None:
    """Watch a run that goes on without you: rounds as they come, then the table."""
    from flray.cli.campaign import attach_to

    attach_to(run, _console())


@cli.command(hidden=True)
def keep() -> None:
    """Drive a run on Ray; what `flray run` starts in the background."""
    from flray.cli.keeper import keep

    keep()


@cli.command()
@click.argument("name", metavar="TABLE")
@click.option(
    "--runs",
    type=Place(),
    default=Path("runs"),
    show_default=True,
    help="Folder or URL below which finished runs are looked for.",
)
@click.option(
    "--format", "form", type=click.Choice(TABLE_FORMATS), default="rich", show_default=True
)
def table(name: str, runs: Path | str, form: Literal["rich", "md", "latex", "csv"]) -> None:
    """A published table with our numbers beside the paper's.

    \b
    flray table flhc.4                     FL+HC, Table IV, from the runs below runs/
    flray table flt.I --format md          Roman numerals are numbers too
    flray list tables                      all of them, and what they cost
    """
    from flray.cli.places import fetched
    from flray.cli.tables import show_table

    show_table(name, fetched(runs), form, _console())


@cli.command("list")
@click.argument("kind", type=click.Choice((*KINDS, *SHIPPED, "tables")), required=False)
def list_(kind: str | None) -> None:
    """What an experiment can be made of, shipped experiments and spaces, and published tables."""
    from flray.cli.listing import component_tables, shipped_table
    from flray.cli.tables import tables_listing

    for each in (kind,) if kind else (*KINDS, *SHIPPED, "tables"):
        if each == "tables":
            _console().print(tables_listing())
        elif each in SHIPPED:
            _console().print(shipped_table(each))
        else:
            for listed in component_tables(each):
                _console().print(listed)


@cli.command()
@click.argument("prefix", metavar="[KEY|COMPONENT]", required=False)
def keys(prefix: str | None) -> None:
    """Every key of an experiment: allowed values, default, what it is.

    \b
    flray keys                     the keys of every experiment
    flray keys execution           one of them and those below it
    flray keys flhc                the keys of a component: algorithm, split, stage, ...
    """
    from flray.cli.listing import key_tables

    for table in key_tables(prefix):
        _console().print(table)


@cli.command()
@click.argument("name", metavar="[METHOD|EXPERIMENT]", required=False)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file to write.")
def init(name: str | None, out: Path | None) -> None:
    """Write an experiment to start from into the current folder.

    \b
    flray init                          a blank one: FedAvg on embedded data
    flray init flhc                     a method on embedded data, its keys as comments
    flray init flhc/mnist_label_swap    a copy of a paper's experiment (flray list experiments)
    """
    from flray.cli.starting import write_start

    write_start(name, out, _console())


def _console() -> Console:
    plain = partial(Console, highlight=False, markup=False)  # names of files may look like markup
    console = plain()
    # A pipe has no width of its own: rich would fold tables at 80 columns.
    return console if console.is_terminal else plain(width=WIDTH_OF_A_PIPE)


def main() -> None:
    """Run the command line; what is wrong with an experiment is one message, not a traceback."""
    errors = Console(stderr=True, highlight=False, markup=False)
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
        errors.print(f"error: {error.format_message()}{advice}", style="red", soft_wrap=True)
        sys.exit(error.exit_code)
    except ExperimentError as error:
        errors.print(f"error: {error}", style="red", soft_wrap=True)
        sys.exit(BAD_EXPERIMENT)
    except (ClientFailure, ServerLost) as error:
        errors.print(f"failed: {error}", style="red", soft_wrap=True)
        sys.exit(FAILED)

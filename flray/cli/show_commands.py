"""Commands that show or write what there is: report, compare, export, table, list, keys, init."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flray.cli.group import cli, format_option, open_console, output_file
from flray.cli.places import RUNS, Place, fetched
from flray.errors import ExperimentError

if TYPE_CHECKING:
    from flray.reports.writers import Format  # imported for types only: it imports pandas

SHIPPED = ("experiments", "spaces")
KINDS = ("algorithms", "datasets", "splits", "models", "stages")


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=Place(exists=True))
@output_file("--out", "The page.  [default: report.html in the first folder, of a URL here]")
def report(folders: tuple[Path | str, ...], out: Path | None) -> None:
    """One self-contained HTML page of a run, several runs, or a sweep.

    \b
    flray report runs/mine                      report.html in that folder
    flray report runs/a runs/b --out both.html  runs side by side
    """
    from flray.files import is_plain
    from flray.reports.page import write_page

    if isinstance(folders[0], str) and out is None:
        out = Path("report.html")
    page = write_page([fetched(folder) for folder in folders], out)
    if is_plain(page):  # it may be on its way to standard output
        size = page.stat().st_size / 1e6
        open_console().out(f"report: {page} ({size:.1f} MB)")


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=Place(exists=True), metavar="RUNS...")
@format_option
@output_file("--figure", "A file for a figure of the same runs: .pdf, .svg or .png.")
@click.option(
    "--kind",
    type=click.Choice(
        ("accuracy", "last_trained", "clients", "efficiency", "ranks", "methods", "dots")
    ),
    default="accuracy",
    show_default=True,
    help="The figure: accuracy by round, as given or of the models that clients trained last, of "
    "every client, or against the bytes sent; of a sweep over methods "
    "their mean ranks, a heatmap of methods and splits, or dots per split.",
)
@click.option(
    "--protocol",
    type=click.Choice(("deployed", "tuned")),
    default="deployed",
    show_default=True,
    help="Models that the figure of a sweep over methods judges: as deployed, or after local "
    "training.",
)
def compare(
    folders: tuple[Path | str, ...], form: "Format", figure: Path | None, kind: str, protocol: str
) -> None:
    """A table, and a figure, of your own runs side by side.

    RUNS are folders or URLs of runs, of experiments with several seeds, or of sweeps, whose rows
    are then compared; all that lies below them counts.

    \b
    flray compare runs/fedavg runs/flhc                      in the terminal
    flray compare runs/both --format latex > both.tex        for a paper; md and csv too
    flray compare runs/both --figure both.pdf                accuracy by round
    flray compare runs/both --figure sent.pdf --kind efficiency
    flray compare runs/flis --figure last.pdf --kind last_trained
    flray compare runs/benchmark --figure ranks.pdf --kind ranks

    Numbers are means, ± the standard deviation over seeds. Differences and ratios are to FedAvg on
    the same data where it is among the runs, else to the first one on them. Methods of a sweep over
    methods are ranked instead, those of several such sweeps on the splits of all.
    """
    from flray.cli import comparing

    paths = [fetched(folder) for folder in folders]
    benchmark = comparing.benchmark_in(paths)
    if benchmark is not None:
        if figure is not None:
            comparing.write_benchmark_figure(benchmark, figure, kind, protocol)
        comparing.show_benchmark(benchmark, form, open_console())
        return
    if protocol != "deployed":
        raise click.UsageError(
            f"--protocol {protocol} is for a sweep over methods; the runs here have the figures "
            "of --kind accuracy, last_trained, clients and efficiency."
        )
    experiments = comparing.experiments_in(paths)
    if figure is not None:
        comparing.write_figure(experiments, figure, kind)
    comparing.show_comparison(experiments, form, open_console())


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
        raise click.UsageError("give one of --client and --table.")
    if not file.parent.is_dir():
        raise ExperimentError(f"there is no folder {file.parent} to write {file.name} to")
    result = load_one(run)
    if client is not None:
        result.export(client, file)
        if weights := result.mixture(client):
            click.echo(
                f"client {client} uses a mixture of {len(weights)} models; this is the one with "
                f"the largest weight, {max(weights):.2f}",
                err=True,
            )
    else:
        frame = result.rounds if table == "rounds" else result.clients
        write_output(file, lambda path: frame.to_csv(path, index=False))
    if is_plain(file):  # it may be on its way to standard output
        open_console().out(f"written: {file}")


@cli.command()
@click.argument("name", metavar="TABLE")
@click.option(
    "--runs",
    type=Place(),
    multiple=True,
    default=[RUNS],
    show_default=True,
    help="Folder or URL below which finished runs are looked for; links in it are followed. "
    "May be given several times.",
)
@format_option
def table(name: str, runs: tuple[Path | str, ...], form: "Format") -> None:
    """A published table with our numbers beside the paper's.

    \b
    flray table flhc.4                     FL+HC, Table IV, from the runs below runs/
    flray table flt.I --format md          Roman numerals are numbers too
    flray list tables                      all of them, and what they cost
    """
    from flray.cli.tables import show_table

    show_table(name, [fetched(folder) for folder in runs], form, open_console())


@cli.command("list")
@click.argument(
    "kind", metavar="[KIND]", type=click.Choice((*KINDS, *SHIPPED, "tables")), required=False
)
def list_(kind: str | None) -> None:
    """What an experiment can be made of, shipped experiments and spaces, and published tables.

    Kinds are algorithms, datasets, splits, models, stages, experiments, spaces and tables.

    \b
    flray list                everything
    flray list algorithms     one kind, with the keys of each and their defaults
    """
    from flray.cli.listing import component_tables, shipped_table
    from flray.cli.tables import tables_listing

    console = open_console()
    for name in (kind,) if kind else (*KINDS, *SHIPPED, "tables"):
        if name == "tables":
            console.print(tables_listing())
        elif name in SHIPPED:
            console.print(shipped_table(name))
        else:
            for table in component_tables(name):
                console.print(table)


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
        open_console().print(table)


@cli.command()
@click.argument("name", metavar="[METHOD|EXPERIMENT]", required=False)
@output_file("--out", "The file to write.")
def init(name: str | None, out: Path | None) -> None:
    """Write an experiment to start from into the current folder.

    \b
    flray init                          a blank one: FedAvg on embedded data
    flray init flhc                     a method on embedded data, its keys as comments
    flray init flhc/mnist_label_swap    a copy of a paper's experiment (flray list experiments)
    """
    from flray.cli.starting import write_start

    write_start(name, out, open_console())

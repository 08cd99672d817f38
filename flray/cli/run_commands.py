"""Commands that compute: run, attach, sweep, check, plan, pretrain."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from flray.cli.arguments import TakingKeys, files_and_overrides
from flray.cli.group import BAD_EXPERIMENT, cli, draw_figures, open_console, output_file, resumable
from flray.cli.places import mirrored


@cli.command(cls=TakingKeys)
@click.argument("arguments", nargs=-1, metavar="[EXPERIMENT.yaml]... [key=value]...")
@resumable("run", ", or of all of them.  [default: below runs/]")
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
    from flray.runs.keeper import start_early

    start_early(*files_and_overrides(arguments))  # first: what follows imports torch
    from flray.cli.campaign import read_campaign
    from flray.cli.running import run_all

    with mirrored(out) as (folder, mirror):
        campaign = read_campaign(arguments, folder, resume)
        run_all(campaign, open_console(), max_minutes, mirror, together)


def some_of_space(command: Callable[..., None]) -> Callable[..., None]:
    """The options --methods and --splits, which the command gets as texts."""
    methods = "Some methods of the space, or your own: a,b,mine.yaml"
    splits = "Some experiments of the space: mnist_*,har_device"
    command = click.option("--splits", default="", help=splits)(command)
    return click.option("--methods", default="", help=methods)(command)


def chosen(part: Mapping[str, str]) -> tuple[str, ...]:
    """What --methods and --splits choose, as `key=value` of a space.

    >>> chosen({"methods": "fedavg,flhc", "splits": ""})
    ('methods=[fedavg,flhc]',)
    """
    return tuple(f"{key}=[{names}]" for key, names in part.items() if names)


@cli.command(cls=TakingKeys)
@click.argument("arguments", nargs=-1, metavar="SPACE.yaml [key=value]...")
@resumable("sweep", ".  [default: a new one below runs/]")
@some_of_space
def sweep(
    arguments: tuple[str, ...],
    out: Path | str | None,
    resume: bool,
    max_minutes: float | None,
    **part: str,
) -> None:
    """Run every experiment of a space with Ray Tune, and train nothing twice.

    \b
    flray sweep tune_spaces/flhc_digits.yaml                  on embedded data
    flray sweep tune_spaces/flhc_table4.yaml seed=1 --out runs/table4
    flray table flhc.4 --runs runs/table4                     the paper's table
    flray report runs/table4                                  a page to look at
    flray sweep --out runs/table4 --resume                    go on where it stopped
    flray sweep clustered_benchmark_digits --methods fedavg,flhc --splits label_swap

    A space names an experiment and what it varies; search, scheduler, concurrency and more are
    keys of it too (docs/spaces.md), and any of them can be set as key=value.
    """
    from flray.cli.sweeping import sweep

    with mirrored(out) as (folder, mirror):
        sweep(arguments + chosen(part), folder, resume, max_minutes, open_console(), mirror)


@cli.command(cls=TakingKeys)
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    metavar="EXPERIMENT.yaml|SPACE.yaml|CLUSTER.yaml... [key=value]...",
)
def check(arguments: tuple[str, ...]) -> None:
    """Would these run? Deals the data, builds the model and trains one batch.

    \b
    flray check experiments/flhc/*.yaml
    flray check tune_spaces/flhc_table4.yaml seed=1
    flray check cluster.yaml                       would `ray up` take it? needs no account
    """
    from flray.cli.checking import check_files

    if check_files(arguments, open_console(), cli):
        sys.exit(BAD_EXPERIMENT)


@cli.command(cls=TakingKeys)
@click.argument("arguments", nargs=-1, metavar="[EXPERIMENT.yaml | SPACE.yaml]... [key=value]...")
@click.option("--gpus", type=click.FloatRange(min=0), help="GPUs of a node for client actors.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--clusters",
    type=click.IntRange(min=1),
    help="Clusters that a clustering by trained models will find.  [default: as many as the split "
    "has groups, else 1]",
)
@some_of_space
@output_file("--profile", "Rates of another machine; nothing is measured here.")
@output_file("--save-profile", "Keep the rates of this machine for --profile.")
def plan(
    arguments: tuple[str, ...],
    gpus: float | None,
    nodes: int,
    clusters: int | None,
    profile: Path | None,
    save_profile: Path | None,
    **part: str,
) -> None:
    """What will an experiment take? Time, client steps, bytes and memory, and what binds.

    Its rounds are rehearsed with clients that train a few steps only, which takes seconds. Clusters
    that depend on training are assumed. Of a space, the row with the median number of client steps
    is rehearsed.

    \b
    flray plan experiments/flhc/mnist_label_swap.yaml
    flray plan experiments/flhc/mnist_label_swap.yaml --save-profile gpu.json    where the GPU is
    flray plan experiments/flhc/mnist_label_swap.yaml rounds=500 --profile gpu.json --gpus 4
    flray plan experiments/flhc/mnist_pathological.yaml --clusters 5
    flray plan tune_spaces/flhc_digits.yaml concurrency=2
    flray plan clustered_benchmark_digits --methods fedavg,flhc --splits label_swap
    """
    from flray.cli.planning import Assumptions, plan_files

    assumptions = Assumptions(gpus, nodes, profile, clusters)
    plan_files(arguments, assumptions, chosen(part), save_profile, open_console())


@cli.command()
@click.argument("arguments", nargs=-1, required=True, metavar="ENCODER.yaml [key=value]...")
def pretrain(arguments: tuple[str, ...]) -> None:
    """Pre-train an encoder, for FLT; it is kept by a hash of what decides it.

    \b
    flray pretrain experiments/encoders/fashion_mnist.yaml
    flray pretrain experiments/encoders/fashion_mnist.yaml epochs=5 model.loss=bce
    """
    from flray.cli.pretrain import run_pretraining

    run_pretraining(arguments, open_console())


@cli.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
def attach(run: Path) -> None:
    """Watch a run that goes on without you: rounds as they come, then the table.

    Ctrl-C asks whether to stay, to stop the run or to leave it alone. Reading the folder is
    enough to watch the run of another user; to stop it and to draw its figures takes writing.

    \b
    flray attach runs/mine
    """
    from flray.cli.running import attach_to

    attach_to(run, open_console())


@cli.command(hidden=True)
def keep() -> None:
    """Drive a run on Ray; what `flray run` starts in the background."""
    from flray.runs.keeper import keep

    keep(draw_figures)

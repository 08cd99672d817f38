"""`flray plan`: what an experiment will take, before it runs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from flray.cli.arguments import files_and_overrides
from flray.cli.campaign import CampaignRun, read_campaign
from flray.config.experiment import Experiment
from flray.config.shipped import SPACES, find_file, is_space
from flray.errors import ExperimentError
from flray.execution.resources import Actors
from flray.forecast.encoders import EncoderTime, times_of_encoders
from flray.forecast.forecast import Forecast
from flray.forecast.forecast import forecast as make_forecast
from flray.forecast.sampling import Rate
from flray.runs.remarks import encoder_remark
from flray.wording import counted

REMEDIES = {
    "start": "nothing to gain",
    "training": "more client actors or a GPU (execution.executor=ray, execution.actors)",
    "evaluation": "evaluate less often (evaluate.every)",
    "encoder": "a GPU: train it there once with `flray pretrain`",
    "fine-tuning": "a GPU, or fewer epochs (algorithm.clustering.signature.epochs)",
    "server": "mixing and checkpoints follow the models of a round: a smaller model or cohort",
    "transfer": "larger blocks (execution.block) or fewer actors",
}


@dataclass(frozen=True)
class Assumptions:
    """Facts about machine and clusters that a plan is given instead of measuring them."""

    gpus: float | None  # GPUs of a node for client actors; None: as the experiment asks for
    nodes: int  # Nodes with so many GPUs each
    profile: Path | None  # A file of rates of another machine; nothing is measured then
    clusters: int | None  # Clusters that a clustering finds; None: as many as a split has groups


def plan_files(
    arguments: Sequence[str],
    assumptions: Assumptions,
    part: Sequence[str],
    save: Path | None,
    console: Console,
) -> None:
    """Print what each experiment will take, and keep the rates that were measured if asked to.

    Args:
        arguments: Files and `key=value`, as for `flray run`.
        part: What --methods and --splits choose of spaces, as `key=value`.
        save: A file for the rates of this machine.
    """
    rates = None if assumptions.profile is None else read_profile(assumptions.profile)
    make = partial(make_forecast, rates=rates, clusters=assumptions.clusters)
    measured: dict[str, Rate] = {}
    files, overrides = files_and_overrides(arguments)
    spaces = [f for f in files if is_space(find_file(f) or find_file(f, SPACES) or Path(f))]
    if spaces and assumptions.gpus is not None:
        raise ExperimentError(
            f"--gpus is for experiments, got the space {spaces[0]}: set its concurrency instead, "
            f"as in flray plan {spaces[0]} concurrency=4"
        )
    if part and not spaces:
        raise ExperimentError(
            "--methods and --splits choose rows of a space, and no space was given; name one, as "
            "in flray plan clustered_benchmark_digits --methods fedavg,flhc"
        )
    for file in spaces:
        with console.status(f"rehearsing a row of {file}"):
            lines, forecast = plan_space(file, [*overrides, *part], make)
        measured |= forecast.rates
        console.out("\n".join(lines))
    rest = [argument for argument in arguments if argument not in spaces]
    runs = () if spaces and len(spaces) == len(files) else read_campaign(rest, None, False).runs
    for run in runs:
        processes = _processes(run, assumptions)
        with console.status(f"rehearsing {run.name}"):
            forecast = make(run.experiment, processes)
        measured |= forecast.rates
        for line in describe_forecast(run.name, forecast):
            console.out(line)
    if save is not None:
        text = json.dumps({kind: asdict(rate) for kind, rate in measured.items()}, indent=1)
        save.write_text(text + "\n", encoding="utf-8")


def plan_space(
    file: str, overrides: Sequence[str], make: Callable[[Experiment], Forecast]
) -> tuple[list[str], Forecast]:
    """The lines on a space, and the forecast of its row with the median number of client steps.

    The time of the sweep follows from that row's time per client step.

    Args:
        make: What forecasts an experiment.
    """
    from flray.sweeps.describing import describe_space, planned_rows  # imports Ray
    from flray.sweeps.space import read_space

    space = read_space(Path(file), overrides)
    rows = planned_rows(space)
    middle = sorted(range(len(rows.steps)), key=rows.steps.__getitem__)[len(rows.steps) // 2]
    typical = make(rows.experiments[middle])
    at_a_time = space.options.concurrency or 1
    rates = dict(typical.rates)
    encoders = times_of_encoders(rows.experiments, rates)
    alone = typical.total_s - typical.seconds.get("encoder", 0.0)  # encoders are trained once
    seconds = alone / max(1, typical.client_steps) * rows.at_most / at_a_time
    seconds += sum(time.seconds for time in encoders)
    memory = typical.memory_per_process * typical.processes
    lines = [
        f"{Path(file).stem}: {describe_space(space, rows)}",
        f"  at most {counted(rows.at_most, 'client step')} with rounds that rows share; rows that "
        "end in the same clusters share more",
        f"  a typical row ({rows.experiments[middle].algorithm.name}, "
        f"{counted(typical.client_steps, 'client step')}): about {duration(alone)}, "
        f"{decimal(memory)} of memory",
        *map(_trained_first, encoders),
        *_assumed(typical),
        f"  all rows, {at_a_time} at a time: about {duration(seconds)} and "
        f"{decimal(memory * at_a_time)} of memory, if each has the resources of the typical row",
    ]
    return lines, replace(typical, rates=rates)


def read_profile(path: Path) -> dict[str, Rate]:
    """The rates in a file of --save-profile, by kind of block.

    Raises:
        ExperimentError: The file cannot be read, or is no such file.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return {kind: Rate(**rate) for kind, rate in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ExperimentError(
            f"{path} is no profile of `flray plan --save-profile`: {error}"
        ) from error


def _processes(run: CampaignRun, assumptions: Assumptions) -> int | None:
    """Client actors that fit on so many GPUs of each node; None: those the experiment asks for."""
    if assumptions.gpus is None:
        return None
    actors: Actors = run.experiment.settings.execution.actors
    if not actors.num_gpus:
        raise ExperimentError(
            "--gpus asks how many client actors fit, and they use no GPU: set "
            "execution.executor=ray execution.actors.num_gpus=0.1"
        )
    fit = int(assumptions.nodes * assumptions.gpus / actors.num_gpus + 1e-6)
    return max(1, min(fit, actors.count if isinstance(actors.count, int) else fit))


def describe_forecast(name: str, forecast: Forecast) -> list[str]:
    """The lines that `flray plan` prints of an experiment: time, work, memory, what to change."""
    shares = ", ".join(
        f"{part} {seconds:.1f} s" for part, seconds in forecast.seconds.items() if seconds >= 0.05
    )
    sizes = (forecast.memory_per_process, forecast.bytes_down, forecast.bytes_up)
    memory, down, up = map(decimal, sizes)
    lines = [
        f"{name}: about {duration(forecast.total_s)} ({shares})",
        f"  {counted(forecast.rounds, 'round')}, "
        f"{counted(forecast.client_steps, 'client step')}, {down} down, {up} up",
        f"  {forecast.processes} training at a time, {memory} of memory each",
        f"  {forecast.binding} takes most: {REMEDIES[forecast.binding]}",
    ]
    if not forecast.is_rehearsed:
        lines.append("  later rounds were taken to be like the first ones")
    return lines + list(map(_trained_first, forecast.encoders)) + _assumed(forecast)


def _trained_first(time: EncoderTime) -> str:
    """The line on an encoder that is trained before the first round."""
    remark = encoder_remark(time.encoder)
    return f"  {remark} for all runs and rows that name it; about {duration(time.seconds)}"


def _assumed(forecast: Forecast) -> list[str]:
    """The line on clusters that a forecast assumes, if it does."""
    if forecast.clusters is None:
        return []
    number = counted(forecast.clusters, "cluster")
    return [f"  assumes that training leads to {number}; where you expect others, add --clusters N"]


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them.

    >>> duration(8.04), duration(600), duration(9000)
    ('8.0 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""`flray plan`: what an experiment will take, before it runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flray.cli.campaign import CampaignRun, read_campaign
from flray.errors import ExperimentError
from flray.execution.resources import Actors
from flray.forecast.forecast import Forecast, forecast
from flray.forecast.sampling import Rate
from flray.wording import counted

REMEDIES = {
    "start": "nothing to gain",
    "training": "more client actors or a GPU (execution.executor=ray, execution.actors)",
    "evaluation": "evaluate less often (evaluate.every)",
    "server": "mixing and checkpoints follow the models of a round: a smaller model or cohort",
    "transfer": "larger blocks (execution.block) or fewer actors",
}


def plan_files(
    arguments: Sequence[str],
    gpus: float | None,
    nodes: int,
    profile: Path | None,
    save: Path | None,
    console: Console,
) -> None:
    """Say of each experiment what it will take."""
    rates = None if profile is None else read_profile(profile)
    measured: dict[str, Rate] = {}
    for run in read_campaign(arguments, None, resume=False).runs:
        processes = _processes(run, gpus, nodes)
        with console.status(f"rehearsing {run.name}"):
            found = forecast(run.experiment, processes, rates)
        measured |= found.rates
        for line in described(run.name, found):
            console.print(line, soft_wrap=True)
    if save is not None:
        text = json.dumps({kind: asdict(rate) for kind, rate in measured.items()}, indent=1)
        save.write_text(text + "\n", encoding="utf-8")


def read_profile(path: Path) -> dict[str, Rate]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return {kind: Rate(**rate) for kind, rate in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ExperimentError(
            f"{path} is no profile of `flray plan --save-profile`: {error}"
        ) from error


def _processes(run: CampaignRun, gpus: float | None, nodes: int) -> int | None:
    """Client actors that fit on so many GPUs of each node; None: those the experiment asks for."""
    if gpus is None:
        return None
    actors: Actors = run.experiment.settings.execution.actors
    if not actors.num_gpus:
        raise ExperimentError(
            "--gpus asks how many client actors fit, and they use no GPU: set "
            "execution.executor=ray execution.actors.num_gpus=0.1"
        )
    fit = int(nodes * gpus / actors.num_gpus + 1e-6)
    return max(1, min(fit, actors.count if isinstance(actors.count, int) else fit))


def described(name: str, found: Forecast) -> list[str]:
    """Lines for people."""
    shares = ", ".join(
        f"{part} {seconds:.1f} s" for part, seconds in found.seconds.items() if seconds >= 0.05
    )
    lines = [
        f"{name}: about {duration(found.total_s)} ({shares})",
        f"  {counted(found.rounds, 'round')}, {counted(found.client_steps, 'client step')}, "
        f"{size(found.bytes_down)} down, {size(found.bytes_up)} up",
        f"  {found.processes} training at a time, {size(found.memory_per_process)} of memory each",
        f"  {found.binding} takes most: {REMEDIES[found.binding]}",
    ]
    if not found.is_rehearsed:
        lines.append("  later rounds were taken to be like the first ones")
    return lines


def duration(seconds: float) -> str:
    """For people.

    >>> duration(8.04), duration(600), duration(9000)
    ('8.0 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    """For people.

    >>> size(1200), size(3.5e9)
    ('1.2 kB', '3.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"

"""Launch a run: in this process, or as a server actor with client actors on Ray."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flray.config.experiment import Experiment
from flray.execution.resources import ActorPlan
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.server.actor import Run, run_on_actors, start_processes
from flray.server.evaluation import RoundRow
from flray.server.loop import ignore, never
from flray.server.summary import checked_summary

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start
from flray.runs.assemble import build_server, with_recorded_block
from flray.runs.preparing import prepare


@dataclass(frozen=True)
class Result:
    """A run directory read back."""

    path: Path
    summary: dict[str, Any] | None  # Any: JSON; None when the run was stopped before its last round
    rounds: "pd.DataFrame"
    clients: "pd.DataFrame"


def run_experiment(
    experiment: Experiment,
    out: Path,
    resume: bool = False,
    on_round: Callable[[RoundRow], None] = ignore,
    should_stop: Callable[[], bool] = never,
) -> Result:
    """Run an experiment into the folder `out`; with resume, go on where it stopped."""
    directory = RunDirectory(out.absolute())
    (directory.check_resume if resume else directory.check_start)(experiment.plain)
    if not directory.is_finished(experiment.plain):
        build = partial(build_server, experiment)
        with locked(directory.path):
            if experiment.settings.execution.executor == "ray":
                threads = experiment.settings.execution.threads or 1
                processes = start_processes(plan_of(experiment, directory), threads)
                run_on_actors(Run(build, directory.path, on_round, should_stop), processes)
            else:
                build(directory, on_round, should_stop).run()
    return Result(out, checked_summary(directory), directory.rounds(), directory.clients())


def plan_of(experiment: Experiment, directory: RunDirectory) -> ActorPlan:
    """What the actors of an experiment ask for; its data are dealt to know it."""
    recorded = with_recorded_block(experiment, directory)
    plan = prepare(recorded, recorded.settings.execution.actors).plan
    assert plan is not None  # of executor ray
    return plan

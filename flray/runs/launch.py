"""Launch a run: in this process, or with a server actor and client actors that this one drives."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from flray.config.experiment import Experiment
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import build_server, prepare_in
from flray.runs.conduct import Monitor, OnRound, ShouldStop, conduct
from flray.runs.preparing import Prepared
from flray.server.evaluation import RoundRow
from flray.server.summary import checked_summary

UNWATCHED = Monitor()
_log = logging.getLogger("flray")


def run_experiment(
    experiment: Experiment, out: Path, resume: bool = False, monitor: Monitor = UNWATCHED
) -> RoundRow | None:
    """Run an experiment into the folder `out` and return its summary; None if it was stopped.

    With executor inline its rounds are computed in this process. With executor ray this process is
    the driver: it starts a server actor and client actors, and starts them again if they are lost.
    A run that is finished already is not computed again.

    Args:
        out: The run directory.
        resume: Go on where the run in `out` stopped; False: `out` must not hold a run.
        monitor: Called after each round, and asked whether to stop.

    Raises:
        ExperimentError: The experiment is wrong, or `out` holds another run or is in use.
        ClientFailure: A client failed and `on_client_failure` is "raise".

    >>> from tempfile import TemporaryDirectory
    >>> from flray.config.experiment import parse_experiment
    >>> experiment = parse_experiment({
    ...     "dataset": {"name": "digits", "size": 8},
    ...     "split": {"name": "iid", "clients": 4},
    ...     "model": "mlp200",
    ...     "algorithm": "fedavg",
    ...     "rounds": 2,
    ...     "execution": {"threads": 1},
    ... })
    >>> with TemporaryDirectory() as folder:
    ...     run_experiment(experiment, Path(folder, "run"))["rounds"]
    2
    """
    directory = RunDirectory(out.absolute())
    (directory.check_resume if resume else directory.check_start)(experiment.plain)
    if directory.is_finished(experiment.plain):  # but a tracker may still lack rounds of it
        conduct(lambda *_: True, directory.path, monitor, experiment)
        return checked_summary(directory)
    on_ray = experiment.settings.execution.executor == "ray"
    compute = _compute_on_actors if on_ray else _compute_here
    conduct(partial(compute, experiment, directory), directory.path, monitor, experiment)
    return directory.summary()


def _compute_here(
    experiment: Experiment, directory: RunDirectory, on_round: OnRound, should_stop: ShouldStop
) -> bool:
    """Compute the rounds in this process."""
    experiment, parts = _prepared(experiment, directory)
    server = build_server(experiment, parts, directory)
    return replace(server, on_round=on_round, should_stop=should_stop).run()


def _prepared(experiment: Experiment, directory: RunDirectory) -> tuple[Experiment, Prepared]:
    """As `prepare_in`; logs a remark if models cannot be trained together."""
    experiment, parts = prepare_in(directory, experiment)
    if parts.engine_remark:
        _log.info("note: %s", parts.engine_remark)
    return experiment, parts


def _compute_on_actors(
    experiment: Experiment, directory: RunDirectory, on_round: OnRound, should_stop: ShouldStop
) -> bool:
    """Compute the rounds on actors; the data are dealt here and sent to the server."""
    from flray.server.actor import Run, pickled, run_on_actors, start_processes  # imports Ray

    experiment, parts = _prepared(experiment, directory)
    assert parts.plan is not None  # executor ray has a plan
    processes = start_processes(parts.plan, parts.payload.settings.threads)
    build = pickled(partial(build_server, experiment, parts))
    return run_on_actors(Run(build, directory.path, on_round, should_stop), processes)

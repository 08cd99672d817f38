"""Ray Tune as it runs the trials of a sweep; its own state and output are not kept."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from flray.config.experiment import Experiment, parse_experiment
from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import Row as RoundRow
from flray.server.loop import ignore
from flray.sweep.allotment import bundles, cluster_resources
from flray.sweep.folder import run_path
from flray.sweep.search import RowSearch
from flray.sweep.space import Asha, Options, OptunaSearch
from flray.sweep.trial import Job, run_row

FOLDER = "tune"  # Tune's own files, of no use once it has ended
SHOW_EVERY_S = 1.0
MOST_PENDING = 16  # trials that wait for a place

# Tune's own output would run through our progress lines; its trials stay in the driver's folder,
# from which data and modules are looked for.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def run_trials(
    search: RowSearch,
    job: Job,
    options: Options,
    scheduler: TrialScheduler | None,
    show: Callable[[int], None],
) -> list[tune.Result]:
    """Run what the search hands out; `show` gets the number of trials at work, now and then."""
    there = cluster_resources()

    def placement(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        experiment = parse_experiment(config["rows"][0].plain)
        return tune.PlacementGroupFactory(bundles(experiment, options, there))

    trainable = tune.with_parameters(run_trial, job=job, metric=options.metric)
    # Tune would start one process at a time for a search that is not its own.
    pending = 1 if isinstance(options.search, OptunaSearch) else MOST_PENDING
    with _quiet(pending), _tune_folder(job.folder) as storage:
        tuner = tune.Tuner(
            tune.with_resources(trainable, placement),
            tune_config=tune.TuneConfig(
                search_alg=search,
                num_samples=-1,  # until the search has no more
                max_concurrent_trials=options.concurrency,
                scheduler=scheduler,
                reuse_actors=True,  # a process with torch takes seconds to start
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=str(storage),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=1),  # of processes
                callbacks=[_Showing(show)],
            ),
        )
        results = tuner.fit()
    return [results[place] for place in range(len(results))]


def run_trial(config: Mapping[str, Any], job: Job, metric: str) -> dict[str, Any]:
    """What Tune calls: run the rows of a trial, and return the mean of their metric."""
    values = []
    for row in config["rows"]:
        state = run_row(row, job, _Report(metric) if job.is_scheduled else ignore)
        summary = {}
        if state.status in ("done", "shared") and state.run is not None:
            summary = RunDirectory(job.folder / run_path(state.run)).summary() or {}
        values.append(summary.get(metric))
    result: dict[str, Any] = {"is_over": True, "round": config["rows"][0].plain["rounds"]}
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        result[metric] = float(np.mean(known))
    return result


class _Report:
    """Reports each round to Tune with the metric as it was when it was last evaluated."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._value: float | None = None
        self._waiting: RoundRow | None = None

    def __call__(self, row: RoundRow) -> None:
        # A round is reported once the next one is there: Tune may end the trial for it, and the
        # last one must write its summary.
        before, self._waiting = self._waiting, row
        if before is not None:
            self._value = before.get(self._metric, self._value)
            if self._value is not None:
                tune.report({"round": before["round"], self._metric: self._value})


def scheduler_of(options: Options, experiments: Sequence[Experiment]) -> TrialScheduler | None:
    """The scheduler that a space asks for; None: every trial runs to its end."""
    scheduler = options.scheduler
    if not isinstance(scheduler, Asha):
        return None
    rounds = max(experiment.settings.rounds for experiment in experiments)
    if scheduler.grace > rounds:
        raise ExperimentError(
            f"scheduler.grace must be at most the {rounds} rounds of the trials, "
            f"got {scheduler.grace}"
        )
    return ASHAScheduler(
        time_attr="round",
        metric=options.metric,
        mode=options.mode,
        max_t=rounds + 1,  # or it would end trials that are about to write their summary
        grace_period=scheduler.grace,
        reduction_factor=scheduler.reduction,
    )


class _Showing(TrialProgressCallback):
    """Says which trials are at work; stands in the place of Tune's own, which prints."""

    def __init__(self, show: Callable[[int], None]) -> None:
        super().__init__()
        self._show, self._next = show, 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune writes its callbacks down to restore them, which nobody will; a terminal cannot be.
        return _Showing, (_show_nothing,)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if monotonic() >= self._next:
            self._next = monotonic() + SHOW_EVERY_S
            self._show(sum(t.status == "RUNNING" for t in trials))

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        """Print nothing."""

    on_trial_error = on_trial_complete = on_trial_result


def _show_nothing(running: int) -> None:
    pass


@contextmanager
def _tune_folder(folder: Path) -> Iterator[Path]:
    """A place for what Tune writes, which holds nothing that the sweep's folder does not."""
    path = folder / FOLDER
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _quiet(pending: int) -> Iterator[None]:
    logger = logging.getLogger("ray.tune")
    settings = ENVIRONMENT | {"TUNE_MAX_PENDING_TRIALS_PG": str(pending)}
    level, before = logger.level, {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})

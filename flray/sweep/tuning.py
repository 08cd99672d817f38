"""Ray Tune as it runs the trials of a sweep; its own state and output are not kept."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from flray.config.experiment import Experiment, parse_experiment
from flray.errors import ExperimentError
from flray.execution.cluster import reachable_resources
from flray.execution.ray_pool import Patience
from flray.records.columns import ROUND
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow
from flray.server.loop import ignore, never
from flray.sweep.allotment import bundles
from flray.sweep.folder import alive_file, run_path
from flray.sweep.search import RowSearch
from flray.sweep.space import Asha, Options, OptunaSearch
from flray.sweep.trial import Job, run_row

FOLDER = "tune"  # Tune's own files, of no use once it has ended
SHOW_EVERY_S = 1.0
SIGN = "sign"  # of a trial that goes on: the end of a round, or a moment of waiting for another
LATE_S = 60.0
MOST_PENDING = 16  # trials that wait for a place

# Tune's own output would run through our progress lines; its trials stay in the driver's folder,
# from which data and modules are looked for.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


@dataclass
class TrialWatch:
    """Shows how many trials are at work, tells them to stop, and ends those that hang.

    A trial that hangs is one whose process shows no sign of going on for far longer than any trial
    took between two signs. Tune starts it once more, which after the end of the sweep's time does
    nothing.
    """

    job: Job
    show: Callable[[int], None]
    should_stop: Callable[[], bool] = never
    patience: Patience = field(default_factory=lambda: Patience(least_s=600.0))
    signs: dict[str, float] = field(default_factory=dict)  # the last of each trial, by the clock

    def step(self, trials: Sequence[Any]) -> None:
        """Look at Tune's trials. Any: Tune's own class."""
        cache = self.job.cache
        if self.should_stop() and cache.wish is not None:
            cache.wish.touch()
        running = [trial for trial in trials if trial.status == "RUNNING"]
        self.signs = {trial.trial_id: self._sign(trial) for trial in running}
        limit = self.allowed_s(cache.is_late())
        for trial in running:
            actor = trial.temporary_state.ray_actor
            if actor is not None and time() - self.signs[trial.trial_id] > limit:
                ray.kill(actor)
                self.signs[trial.trial_id] = time()
        self.show(len(running))

    def allowed_s(self, is_late: bool) -> float:
        """How long a trial may go without a sign; once the time is over, about two rounds."""
        if not is_late:
            return self.patience.of(SIGN)
        return max(LATE_S, 2 * self.patience.longest_s.get(SIGN, 0.0))

    def _sign(self, trial: Any) -> float:
        """When the trial last showed that it goes on; when it was seen first, if it has not."""
        before = self.signs.get(trial.trial_id)
        rows = [row.number for row in trial.config["rows"]]
        files = [alive_file(self.job.folder, number) for number in rows]
        stamps = [file.stat().st_mtime for file in files if file.exists()]
        if before is None:
            return time()
        latest = max([before, *stamps])
        if latest > before:
            self.patience.learn(SIGN, latest - before)
        return latest


def run_trials(
    search: RowSearch,
    job: Job,
    options: Options,
    scheduler: TrialScheduler | None,
    watch: TrialWatch,
) -> list[tune.Result]:
    """Run what the search hands out, watched over now and then."""
    there = reachable_resources()

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
                callbacks=[_Following(watch.step)],
            ),
        )
        results = tuner.fit()
    return [results[place] for place in range(len(results))]


def run_trial(config: Mapping[str, Any], job: Job, metric: str) -> dict[str, Any]:
    """What Tune calls: run the rows of a trial, and return the mean of their metric."""
    values = []
    for row in config["rows"]:
        state = run_row(row, job, _Report(metric) if job.is_scheduled else ignore)
        directory = RunDirectory(job.folder / run_path(row.number))
        summary = directory.summary() if state.is_done else None
        values.append((summary or {}).get(metric))
    result: dict[str, Any] = {"is_over": True, ROUND: config["rows"][0].plain["rounds"]}
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
                tune.report({ROUND: before[ROUND], self._metric: self._value})


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
        time_attr=ROUND,
        metric=options.metric,
        mode=options.mode,
        max_t=rounds + 1,  # or it would end trials that are about to write their summary
        grace_period=scheduler.grace,
        reduction_factor=scheduler.reduction,
    )


class _Following(TrialProgressCallback):
    """Calls `step` with the trials now and then; stands in for Tune's own, which prints."""

    def __init__(self, step: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._step, self._next = step, 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune writes its callbacks down to restore them, which nobody will; a terminal cannot be.
        return _Following, (_do_nothing,)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if monotonic() >= self._next:
            self._next = monotonic() + SHOW_EVERY_S
            self._step(trials)

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        """Print nothing."""

    on_trial_error = on_trial_complete = on_trial_result


def _do_nothing(trials: list[Any]) -> None:
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

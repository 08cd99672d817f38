"""Ray Tune as it runs the trials of a sweep; its own state and output are not kept.

Tune places trials, restarts them if their process dies, asks the search for rows and, with a
scheduler, stops trials. Resuming, tables and reports are those of the sweep's folder.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from flray.columns import ROUND
from flray.config.experiment import Experiment
from flray.errors import ExperimentError
from flray.execution.nodes import reachable_nodes
from flray.execution.patience import Patience
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow
from flray.server.loop import ignore, never
from flray.sweeps.allotment import bundles
from flray.sweeps.folder import alive_file, run_path
from flray.sweeps.rows import experiment_of
from flray.sweeps.search import RowSearch
from flray.sweeps.space import Asha, Options, OptunaSearch
from flray.sweeps.trial import TrialContext, run_row

FOLDER = "tune"  # Tune's own files, of no use once it has ended
SHOW_EVERY_S = 1.0
SIGN = "sign"  # a sign of progress: the end of a round, or a moment of waiting for another trial
LATE_S = 60.0  # shortest time without a sign after the sweep's time is over
MOST_PENDING = 16  # trials that wait for resources
MOST_LOST = 8  # trials in a row whose processes died, after which a sweep stops

# Trials stay in the driver's folder, from which data and modules are looked for.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints a heading even when silent
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class TrialWatch(TrialProgressCallback):
    """Watches the trials of a sweep, in the place of Tune's own progress callback, which prints.

    It shows how many trials are running, asks them to stop, and ends those that hang. A trial hangs
    if its process shows no sign of progress for far longer than any trial took between two signs.
    Tune starts it once more; after the end of the sweep's time such a start does nothing. It runs
    in the driver's process, between two steps of Tune.

    Args:
        context: Folder and cache of the sweep.
        show: Called with the last round of each running trial, 0 before its first one, and the
            rounds of its row.
        should_stop: Asked in each look; True makes the file `context.cache.wish`, which trials see.
    """

    def __init__(
        self,
        context: TrialContext,
        show: Callable[[Sequence[tuple[int, int]]], None],
        should_stop: Callable[[], bool] = never,
    ) -> None:
        super().__init__()
        self.context, self.show, self.should_stop = context, show, should_stop
        self.patience = Patience(least_s=600.0)
        self.signs: dict[str, float] = {}  # time of the last sign of each trial, by its id
        self.num_lost = 0  # trials in a row whose processes died
        self._next = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune pickles its callbacks to restore them, which is not needed; a terminal cannot be.
        return tune.Callback, ()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Look at the trials now and then. Any: Tune's own class."""
        if time() >= self._next:
            self._next = time() + SHOW_EVERY_S
            self.step(trials)

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        """Print nothing."""

    def on_trial_complete(self, *args: Any, **info: Any) -> None:
        """Count from the start: processes live."""
        self.num_lost = 0

    def on_trial_error(self, *args: Any, **info: Any) -> None:
        """Stop the sweep if process after process dies: the machine is broken, not the rows."""
        self.num_lost += 1
        if self.num_lost >= MOST_LOST and self.context.cache.wish is not None:
            self.context.cache.wish.touch()

    def step(self, trials: Sequence[Any]) -> None:
        """Look at all trials once: pass on the wish to stop, end those that hang, show the rest."""
        cache = self.context.cache
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
        self.show([self._rounds(trial) for trial in running])

    def allowed_s(self, is_late: bool) -> float:
        """Seconds that a trial may show no sign; after the end of the time, about two rounds."""
        if not is_late:
            return self.patience.of(SIGN)
        return max(LATE_S, 2 * self.patience.longest_s.get(SIGN, 0.0))

    def _sign(self, trial: Any) -> float:
        """The time of the trial's last sign; if it has shown none, when it was first seen."""
        before = self.signs.get(trial.trial_id)
        if before is None:
            return time()
        latest = max([before, *(file.stat().st_mtime for file in self._alive_files(trial))])
        if latest > before:
            self.patience.learn(SIGN, latest - before)
        return latest

    def _rounds(self, trial: Any) -> tuple[int, int]:
        """The last round of the row that a trial runs, 0 if none has ended, and its rounds."""
        files, rows = self._alive_files(trial), trial.config["rows"]
        last = files[-1].read_text(encoding="utf-8") if files else ""
        current = rows[max(len(files) - 1, 0)]
        return int(last or 0), current.plain["rounds"]  # empty: it has been touched alone

    def _alive_files(self, trial: Any) -> list[Path]:
        """The files that the rows of a trial touch, of rows that have begun."""
        files = [alive_file(self.context.folder, row.number) for row in trial.config["rows"]]
        return [file for file in files if file.exists()]


def run_trials(
    search: RowSearch, options: Options, scheduler: TrialScheduler | None, watch: TrialWatch
) -> list[tune.Result]:
    """Run the trials that the search returns with Ray Tune, each with the resources it asks for.

    Trials reuse processes. A trial whose process died is started once more. Tune's own files are
    removed: the sweep's folder holds everything.

    Args:
        search: Which rows to run; asked until it has no more.
        options: Concurrency and metric of the space.
        scheduler: Stops trials early; None: every trial runs to its end.
        watch: Shows progress and ends trials that hang.

    Returns:
        Tune's result of each trial, whose `error` is set if its process died twice.
    """
    context, nodes = watch.context, reachable_nodes()

    def placement(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        experiment = experiment_of(config["rows"][0].plain)
        return tune.PlacementGroupFactory(bundles(experiment, options, nodes))

    trainable = tune.with_parameters(run_trial, context=context, metric=options.metric)
    # Tune would start one process at a time for a search that is not its own.
    pending = 1 if isinstance(options.search, OptunaSearch) else MOST_PENDING
    storage = context.folder / FOLDER
    shutil.rmtree(storage, ignore_errors=True)  # left by a sweep that was killed
    with _quiet(pending):
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
                failure_config=tune.FailureConfig(max_failures=1),  # lost processes
                callbacks=[watch],
            ),
        )
        try:
            results = tuner.fit()
        finally:
            shutil.rmtree(storage, ignore_errors=True)
    return [results[index] for index in range(len(results))]


def run_trial(config: Mapping[str, Any], context: TrialContext, metric: str) -> dict[str, Any]:
    """Run the rows of a trial and return the mean of their metric; called by Tune.

    The mean is left out if a row has none. Tune also gets `is_over`, by which the driver tells a
    trial that ended from one that a scheduler stopped.

    Args:
        config: `rows`, one row or, with Optuna, one for each seed.
        context: What trials share.
        metric: Key of summary.json.
    """
    values: list[Any] = []  # Any: numbers, or None where a row has no such number
    rounds = config["rows"][0].plain["rounds"]
    for row in config["rows"]:
        report = _reporting(metric, rounds) if context.is_scheduled else ignore
        ended = run_row(row, context, report)
        directory = RunDirectory(context.folder / run_path(row.number))
        summary = directory.summary() if ended.is_done else None
        values.append((summary or {}).get(metric))
    mean = {} if None in values else {metric: float(np.mean(values))}
    return {"is_over": True, ROUND: rounds, **mean}


def _reporting(metric: str, rounds: int) -> Callable[[RoundRow], None]:
    """A function that reports each round to Tune, with the last value of the metric.

    The last round is not reported: Tune may end a trial after a report, before it has written its
    summary.
    """
    latest: dict[str, float] = {}

    def report(row: RoundRow) -> None:
        latest.update({name: row[name] for name in (ROUND, metric) if name in row})
        if metric in latest and row[ROUND] < rounds:
            tune.report(dict(latest))

    return report


def scheduler_of(options: Options, experiments: Sequence[Experiment]) -> TrialScheduler | None:
    """The scheduler that a space asks for; None: every trial runs to its end.

    Args:
        experiments: Experiments of all rows, or of examples of them, for their rounds.

    Raises:
        ExperimentError: The grace period is longer than any trial.
    """
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
        max_t=rounds + 1,  # one more, so that trials can write their summary
        grace_period=scheduler.grace,
        reduction_factor=scheduler.reduction,
    )


@contextmanager
def _quiet(pending: int) -> Iterator[None]:
    """Silence the log lines of Tune, which would mix with our progress lines."""
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

"""Trials: Ray Tune runs the continuations of a sweep, each to its end or to the scheduler's word.

A trial is a run directory: Tune is told of its rounds, but everything lies there, so a sweep goes
on by its directories alone.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Literal

from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from flray.config.build import build_server
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError
from flray.execution.executor import CLIENT_ERRORS
from flray.records.atomic import replace_text
from flray.records.lock import holder, locked
from flray.records.run_directory import RunDirectory
from flray.records.strands import Strands
from flray.server.evaluation import Row
from flray.sweep.allotment import bundles, cluster_resources
from flray.sweep.growth import said
from flray.sweep.space import Asha, Options
from flray.sweep.tracking import Draw, no_figures, tracked
from flray.sweep.tree import Run

STATE = "tune"  # Tune's own files, of no use once it has ended
OUTCOMES = "trials"
LOCK_TIMEOUT_S = 60.0  # for a trial of a killed sweep to notice that it is alone
SHOW_EVERY_S = 1.0

# Tune's own output would run through our progress lines; its trials stay in the driver's folder,
# from which data and modules are looked for.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}

Status = Literal["done", "failed", "stopped", "unfinished"]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended; stopped: by the scheduler, in the middle."""

    status: Status
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """What a trial needs to know beside its run."""

    folder: Path  # of the sweep
    metric: str | None  # that a scheduler looks at
    deadline: float  # by the clock; .inf: none
    pool: Any = None  # the dispatcher of shared client actors; None: a trial has its own
    draw: Draw = no_figures  # what W&B is shown of a run


def outcome_of(run: Run, folder: Path) -> Outcome:
    """How the run's last trial ended, by what it left behind."""
    path = folder / run.path
    if RunDirectory(path).summary() is not None or Strands(path).is_finished():
        return Outcome("done")
    told = _outcome_path(folder, run.key)
    if not told.is_file():
        return Outcome("unfinished")
    return Outcome(**json.loads(told.read_text(encoding="utf-8")))


def run_trials(
    runs: Sequence[Run], job: Job, options: Options, show: Callable[[Sequence[str]], None]
) -> None:
    """Bring the runs to their ends; `show` is told which are running, now and then."""
    if not runs:
        return
    by_key = {run.key: run for run in runs}
    resources = {run.key: _placement(run, options) for run in runs}
    trainable = tune.with_parameters(run_trial, runs=by_key, job=job)
    with _quiet(), _state_folder(job.folder) as storage:
        tuner = tune.Tuner(
            tune.with_resources(trainable, lambda config: resources[config["run"]]),
            param_space={"run": tune.grid_search(list(by_key))},
            tune_config=tune.TuneConfig(
                max_concurrent_trials=options.concurrency,
                scheduler=_scheduler(runs, options),
                reuse_actors=True,  # a process with torch takes seconds to start
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=str(storage),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=1),  # of processes, not of clients
                checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
                callbacks=[_Showing(show)],
            ),
        )
        results = tuner.fit()
    for result in (results[place] for place in range(len(results))):
        assert result.config is not None
        _record_end(by_key[result.config["run"]], result, job, options)


def _placement(run: Run, options: Options) -> tune.PlacementGroupFactory:
    experiment = parse_experiment(run.plain)
    return tune.PlacementGroupFactory(bundles(experiment, options, cluster_resources()))


def _scheduler(runs: Sequence[Run], options: Options) -> TrialScheduler | None:
    scheduler = options.scheduler
    if not isinstance(scheduler, Asha):
        return None
    rounds = max(run.plain["rounds"] for run in runs)
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


def _record_end(run: Run, result: tune.Result, job: Job, options: Options) -> None:
    """Write down what the trial itself could not."""
    if outcome_of(run, job.folder).status != "unfinished":
        return
    told = _outcome_path(job.folder, run.key).is_file()
    if result.error is not None:
        _write_outcome(job.folder, run.key, Outcome("failed", _crash(result.error)))
    elif not told and result.metrics and isinstance(options.scheduler, Asha):
        _write_outcome(job.folder, run.key, Outcome("stopped"))


def _crash(error: Exception) -> str:
    return said(getattr(error, "cause", None) or error)


def run_trial(config: Mapping[str, str], runs: Mapping[str, Run], job: Job) -> None:
    """What Tune calls: go on with a run directory and report its rounds."""
    run = runs[config["run"]]
    if _is_over(job.deadline):
        return _write_outcome(job.folder, run.key, Outcome("unfinished"))
    _outcome_path(job.folder, run.key).unlink(missing_ok=True)
    try:
        is_done = _run(run, job)
    except CLIENT_ERRORS as error:
        outcome = Outcome("failed", said(error))
    else:
        outcome = Outcome("done" if is_done else "unfinished")
    return _write_outcome(job.folder, run.key, outcome)


def _run(run: Run, job: Job) -> bool:
    experiment = parse_experiment(run.plain)
    path = job.folder / run.path
    directory = RunDirectory(path)
    directory.check_resume(experiment.plain)
    _wait_for_lock(path)
    report = _Report(run, job, experiment.settings.rounds)
    followed: AbstractContextManager[Callable[[Row], None]] = nullcontext(report)
    if Strands(path).only() is None:  # the numbers of some clients alone are not yet a run's
        followed = tracked(experiment, path, report, job.draw, job.folder.name)
    with followed as on_round, locked(path):
        should_stop = partial(_is_over, job.deadline)
        server = build_server(experiment, directory, on_round, should_stop, job.pool)
        try:  # in this very process: actors of its clients are in the trial's placement group
            is_done = server.run()
        finally:
            server.fed.executor.close()
    report.last()
    if is_done:
        # Many runs with a model for each cluster fill a disk; config.yaml gives these bits again.
        shutil.rmtree(directory.checkpoints, ignore_errors=True)
    return is_done


def _is_over(deadline: float) -> bool:
    return time() > deadline


class _Report:
    """Tells Tune of a round once the next is there: it may end a trial for what it is told."""

    def __init__(self, run: Run, job: Job, num_rounds: int) -> None:
        self.run, self.metric, self.num_rounds = run, job.metric, num_rounds
        self.value: float | None = None  # the metric, as it was when it was last evaluated
        self.waiting: Row | None = None

    def __call__(self, row: Row) -> None:
        if row["round"] == self.num_rounds:
            self.waiting = row
        else:
            self._send(row)

    def last(self) -> None:
        """Tell of the last round, now that the summary is written."""
        if self.waiting is not None:
            self._send(self.waiting)

    def _send(self, row: Row) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if self.metric is not None:
            self.value = numbers.get(self.metric, self.value)
            if self.value is None:
                self._require_metric(row)
                return
            numbers[self.metric] = self.value
        with tempfile.TemporaryDirectory() as place:
            where = {"run": self.run.path, "round": row["round"]}
            (Path(place) / "where.json").write_text(json.dumps(where))
            tune.report(numbers, checkpoint=tune.Checkpoint.from_directory(place))

    def _require_metric(self, row: Row) -> None:
        """An evaluated round without the metric will never have it."""
        if "accuracy_mean" in row:
            known = ", ".join(sorted(key for key in row if not key.startswith("seconds")))
            raise ExperimentError(f"no round has the metric {self.metric!r}; known: {known}")


def _wait_for_lock(path: Path) -> None:
    """A trial of a sweep that was killed may still hold the directory for a moment."""
    deadline = monotonic() + LOCK_TIMEOUT_S
    while holder(path) is not None and monotonic() < deadline:
        sleep(0.2)


def _outcome_path(folder: Path, key: str) -> Path:
    return folder / OUTCOMES / f"{key}.json"


def _write_outcome(folder: Path, key: str, outcome: Outcome) -> None:
    path = _outcome_path(folder, key)
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps({"status": outcome.status, "error": outcome.error}))


class _Showing(TrialProgressCallback):
    """Says which runs have a trial at work; stands in the place of Tune's own, which prints."""

    def __init__(self, show: Callable[[Sequence[str]], None]) -> None:
        super().__init__()
        self._show, self._next = show, 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune writes its callbacks down to restore them, which nobody will; a terminal cannot be.
        return _Showing, (_show_nothing,)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if monotonic() >= self._next:
            self._next = monotonic() + SHOW_EVERY_S
            self._show([t.config["run"] for t in trials if t.status == "RUNNING"])

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        """Print nothing."""

    on_trial_error = on_trial_complete = on_trial_result


def _show_nothing(running: Sequence[str]) -> None:
    pass


@contextmanager
def _state_folder(folder: Path) -> Iterator[Path]:
    """A place for what Tune writes, which holds nothing that the run directories do not."""
    path = folder / STATE
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("ray.tune")
    level, before = logger.level, {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})

"""The driver of a sweep: checks, trials of Ray Tune over a shared cache, table and report."""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from flray.client.plan import num_local_steps
from flray.config.build import deal
from flray.config.experiment import Experiment, parse_experiment
from flray.errors import ExperimentError
from flray.execution.cluster import connected
from flray.execution.federation import cohort_size
from flray.execution.shared_pool import start_shared_pool
from flray.records.environment import environment
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import Row as RoundRow
from flray.sweep.allotment import bundles, cluster_resources, shared_plan
from flray.sweep.cache import Cache, one_line_message
from flray.sweep.components import KIND as COMPONENT
from flray.sweep.folder import (
    RowState,
    best_of,
    check_folder,
    open_folder,
    read_report,
    read_states,
    run_path,
    table_of,
    write_report,
    write_state,
    write_table,
)
from flray.sweep.keys import code_version, device_of, digest, prefix_key
from flray.sweep.metrics import check_metric
from flray.sweep.rows import Row, expand, possible, rounds_to_cluster_after
from flray.sweep.search import RowSearch, Suggestions, again
from flray.sweep.space import Asha, OptunaSearch, Space
from flray.sweep.tracking import Draw, no_figures, track_table, tracked
from flray.sweep.trial import Job, branches, run_row

TUNE = "tune"  # Tune's own files, of no use once it has ended
SHOW_EVERY_S = 1.0
MOST_PENDING = 16  # trials that wait for a place
KINDS = {"prefixes": "prefix", "observations": "observation", "distances": "distance"}
KINDS |= {"trees": "tree"}

# Tune's own output would run through our progress lines; its trials stay in the driver's folder,
# from which data and modules are looked for.
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


@dataclass(frozen=True)
class Progress:
    """How far a sweep is, in rows."""

    rows: int
    done: int = 0  # shared ones included
    failed: int = 0
    running: int = 0
    shared: int = 0  # without a run of their own
    best: float | None = None  # of the metric, so far


@dataclass(frozen=True)
class Watch:
    """What is shown of a sweep while it runs."""

    show: Callable[[Progress], None] = lambda _: None
    draw: Draw = no_figures  # the figures that W&B gets of a run


@dataclass(frozen=True)
class SweepResult:
    path: Path
    report: dict[str, Any]  # Any: JSON; what sweep.json holds
    table: pd.DataFrame  # what rows.parquet holds


WATCH_NOTHING = Watch()


def run_sweep(
    space: Space,
    out: Path,
    resume: bool = False,
    max_minutes: float | None = None,
    watch: Watch = WATCH_NOTHING,
) -> SweepResult:
    """Run a sweep into the folder `out`; with resume, go on where it stopped."""
    deadline = float("inf") if max_minutes is None else time() + 60 * max_minutes
    begin = perf_counter()
    some = possible(space)
    out, code = out.absolute(), code_version()
    check_folder(out, space, code, resume)
    experiments = [parse_experiment(row.plain) for row in some]
    check_metric(space, experiments)
    _ask_for_data(experiments)
    with connected():
        there = cluster_resources()
        asked = list({digest(e.plain["execution"]): e for e in experiments}.values())
        if space.options.client_actors == "shared":
            shared_plan(asked)  # or refuse
        for experiment in asked:
            bundles(experiment, space.options, there)
        scheduler = _scheduler(space, experiments)
        with locked(out), _client_actors(space, asked) as pool:
            open_folder(out, space, code)
            root = Path(space.options.cache or out / "cache").absolute()
            cache = Cache(root, read_report(out)["id"], uuid4().hex, deadline)
            job = Job(
                folder=out,
                cache=cache,
                code=dict(code),
                has_gpu=there.get("GPU", 0.0) > 0,
                wanted=rounds_to_cluster_after(space),
                is_scheduled=space.is_scheduled,
                pool=pool,
                draw=watch.draw,
            )
            sweep = _Sweep(space, job, expand(space), watch)
            sweep.run(scheduler)
            seconds = read_report(out)["seconds"] + perf_counter() - begin
            return sweep.report({"code": dict(code), "seconds": round(seconds, 3)})


def _ask_for_data(experiments: Sequence[Experiment]) -> None:
    """Load each dataset and encoder once, so that a missing one is not reported by every trial."""
    encoders: dict[str, Any] = {}  # Any: encoders of signatures, by what decides them
    distinct = {digest([e.plain["dataset"], e.plain["split"]]): e for e in experiments}
    for experiment in distinct.values():
        deal(experiment, experiment.dataset.build().load())
    for experiment in experiments:
        pipeline = getattr(experiment.algorithm.build(), "clustering", None)
        encoder = getattr(getattr(pipeline, "signature", None), "encoder", None)
        if encoder is not None:
            encoders[encoder.key()] = encoder
    for encoder in encoders.values():
        encoder.kind()  # reads the encoder's record, or else its dataset


@dataclass(frozen=True)
class _Sweep:
    space: Space
    job: Job
    known: tuple[Row, ...]  # before anything ran
    watch: Watch

    @property
    def folder(self) -> Path:
        return self.job.folder

    @property
    def num_rows(self) -> int:
        search = self.space.options.search
        if not isinstance(search, OptunaSearch):
            return len(self.known)
        seeds = self.space.varied.get("seed")
        return len(self.known) + search.samples * len(getattr(seeds, "values", "1"))

    def states(self) -> list[RowState]:
        """Of every row that is known by now, in the order of their numbers."""
        found = read_states(self.folder)
        for row in self.known:
            point = row.merge_point
            place = point.place if point else None
            found.setdefault(
                row.number, RowState(row.number, row.overrides, row.plain, merge_place=place)
            )
        return [found[number] for number in sorted(found)]

    def run(self, scheduler: TrialScheduler | None) -> None:
        """Bring every row to its end, or to the scheduler's decision."""
        states = {state.number: state for state in self.states()}
        for state in states.values():
            # A failure is tried again; what was left when the time was over or by a kill too.
            if state.status not in ("done", "shared", "stopped"):
                states[state.number] = replace(state, status="unfinished", error=None)
        suggestions, rows = self._suggestions(states), list(self.known)
        first = len(self.known)
        rows += [again(self.space, s) for s in states.values() if s.number >= first]
        waiting = [row for row in rows if states[row.number].status == "unfinished"]
        if waiting or (suggestions is not None and suggestions.are_left):
            search = RowSearch(_interleaved(waiting, self.job), suggestions)
            self._fit(search, scheduler)
        self._show({}, is_last=True)

    def _suggestions(self, states: Mapping[int, RowState]) -> Suggestions | None:
        if not isinstance(self.space.options.search, OptunaSearch):
            return None
        first = len(self.known)
        before = [state for state in states.values() if state.number >= first]
        return Suggestions(self.space, first, before, self._value)

    def _value(self, state: RowState) -> float | None:
        """The metric of a row that is done."""
        if state.run is None or state.status not in ("done", "shared"):
            return None
        summary = RunDirectory(self.folder / run_path(state.run)).summary() or {}
        value = summary.get(self.space.options.metric)
        return None if value is None else float(value)

    def _fit(self, search: RowSearch, scheduler: TrialScheduler | None) -> None:
        options, there = self.space.options, cluster_resources()

        def placement(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
            experiment = parse_experiment(config["rows"][0].plain)
            return tune.PlacementGroupFactory(bundles(experiment, options, there))

        trainable = tune.with_parameters(
            run_trial, job=self.job, metric=options.metric, is_scheduled=self.space.is_scheduled
        )
        # Tune would start one process at a time for a search that is not its own.
        pending = 1 if isinstance(options.search, OptunaSearch) else MOST_PENDING
        with _quiet(pending), _tune_folder(self.folder) as storage:
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
                    callbacks=[_Showing(self._show)],
                ),
            )
            results = tuner.fit()
        for result in (results[place] for place in range(len(results))):
            assert result.config is not None
            for row in result.config["rows"]:
                self._record_end(row.number, result)

    def _record_end(self, number: int, result: tune.Result) -> None:
        """Write down what the trial itself could not."""
        state = read_states(self.folder).get(number)
        if state is None or state.status != "unfinished":
            return
        if result.error is not None:
            cause = getattr(result.error, "cause", None) or result.error
            write_state(self.folder, replace(state, status="failed", error=one_line_message(cause)))
        elif self.space.is_scheduled and result.metrics and not result.metrics.get("is_over"):
            write_state(self.folder, replace(state, status="stopped"))

    def _show(self, running: Mapping[str, Any], is_last: bool = False) -> None:
        states = self.states()
        found = Counter(state.status for state in states)
        values = [v for state in states if (v := self._value(state)) is not None]
        best = max if self.space.options.mode == "max" else min
        self.watch.show(
            Progress(
                rows=len(states) if is_last else max(self.num_rows, len(states)),
                done=found["done"] + found["shared"] + found["stopped"],
                failed=found["failed"],
                running=len(running),
                shared=found["shared"],
                best=best(values) if values else None,
            )
        )

    def report(self, known: dict[str, Any]) -> SweepResult:
        """Write table and report, and mirror what W&B has not got."""
        states = self.states()
        self._mirror(states)
        frame = table_of(self.folder, states)
        write_table(self.folder, frame)
        counts = Counter(state.status for state in states)
        names = ("done", "shared", "failed", "stopped", "unfinished")
        report = {
            **read_report(self.folder),
            "rows": len(states),
            **{name: counts[name] for name in names},
            **self._counts(states),
            **self._costs(states, frame),
            "metric": self.space.options.metric,
            "mode": self.space.options.mode,
            "best": best_of(states, frame, self.space.options),
            **known,
            "commit": environment()["commit"],
        }
        write_report(self.folder, report)
        if counts["done"] + counts["shared"] + counts["stopped"] == len(states):
            self._shrink()
        tracking = parse_experiment(dict(states[0].plain)).settings.tracking
        track_table(tracking, self.folder, "rows", frame, {"space": self.space.plain})
        return SweepResult(self.folder, report, frame)

    def _shrink(self) -> None:
        """A sweep whose rows are done needs a cache of its own no more, but for what it cost."""
        if self.space.options.cache is None:
            for path in self.job.cache.root.glob("*/*"):
                if path.is_dir():
                    shutil.rmtree(path)

    def _mirror(self, states: Sequence[RowState]) -> None:
        """Tell W&B of runs that were put together, if the experiment says so.

        Only when all is trained: an upload takes seconds, for which a trial would have to wait.
        """
        for state in states:
            if state.components and state.status == "done" and state.run is not None:
                experiment = parse_experiment(dict(state.plain))
                path, group = self.folder / run_path(state.run), self.folder.name
                with tracked(experiment, path, draw=self.watch.draw, group=group):
                    pass

    def _counts(self, states: Sequence[RowState]) -> dict[str, int]:
        """How much there was of everything that rows share, as far as this sweep computed it."""
        cache = self.job.cache
        return {
            **{name: len(cache.costs(kind)) for name, kind in KINDS.items()},
            "runs": len({state.run for state in states if state.run is not None}),
            "components": sum(len(state.components) for state in states),
            "components_trained": len(cache.costs(COMPONENT)),
        }

    def _costs(self, states: Sequence[RowState], frame: pd.DataFrame) -> dict[str, Any]:
        """Client steps that were trained, and those of every row run on its own."""
        kinds = ("prefix", "observation", COMPONENT)
        trained = sum(sum(self.job.cache.costs(kind).values()) for kind in kinds)
        trained += sum(self._steps_of(state) for state in states)
        naive = int(frame["client_steps"].fillna(0).sum()) if "client_steps" in frame else 0
        ratio = naive / trained if trained and naive else None
        return {"client_steps_trained": trained, "client_steps_naive": naive, "ratio": ratio}

    def _steps_of(self, state: RowState) -> int:
        """What the row's own run trained, without what is in the cache."""
        if state.run is None or state.begin is None or not state.is_own:
            return state.steps_added
        rounds = RunDirectory(self.folder / run_path(state.run)).rounds()
        if "client_steps" not in rounds:
            return 0
        later = rounds.loc[rounds["round"] > state.begin, "client_steps"]
        return int(later.fillna(0).sum()) + state.steps_added


def run_trial(
    config: Mapping[str, Any], job: Job, metric: str, is_scheduled: bool
) -> dict[str, Any]:
    """What Tune calls: run the rows of a trial, and return the mean of their metric."""
    values = []
    is_over = True
    for row in config["rows"]:
        report = _Report(metric) if is_scheduled else None
        state = run_row(row, job, report or (lambda _: None))
        is_over = is_over and state.status != "unfinished"
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


def _interleaved(rows: Sequence[Row], job: Job) -> list[Row]:
    """The rows in turns of their prefixes, so that trials at a time do not wait for one prefix."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        experiment = parse_experiment(row.plain)
        device = device_of(experiment, job.has_gpu)
        groups.setdefault(prefix_key(row.plain, job.code, device), []).append(row)
    turns = {id(row): turn for group in groups.values() for turn, row in enumerate(group)}
    return sorted(rows, key=lambda row: turns[id(row)])


def _scheduler(space: Space, experiments: Sequence[Experiment]) -> TrialScheduler | None:
    scheduler = space.options.scheduler
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
        metric=space.options.metric,
        mode=space.options.mode,
        max_t=rounds + 1,  # or it would end trials that are about to write their summary
        grace_period=scheduler.grace,
        reduction_factor=scheduler.reduction,
    )


class _Showing(TrialProgressCallback):
    """Says which trials are at work; stands in the place of Tune's own, which prints."""

    def __init__(self, show: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._show, self._next = show, 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune writes its callbacks down to restore them, which nobody will; a terminal cannot be.
        return _Showing, (_show_nothing,)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if monotonic() >= self._next:
            self._next = monotonic() + SHOW_EVERY_S
            self._show({t.trial_id: t for t in trials if t.status == "RUNNING"})

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        """Print nothing."""

    on_trial_error = on_trial_complete = on_trial_result


def _show_nothing(running: Mapping[str, Any]) -> None:
    pass


@contextmanager
def _tune_folder(folder: Path) -> Iterator[Path]:
    """A place for what Tune writes, which holds nothing that the sweep's folder does not."""
    path = folder / TUNE
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


@contextmanager
def _client_actors(space: Space, experiments: Sequence[Experiment]) -> Iterator[Any]:
    """The dispatcher of one pool for all trials, if the space asks for it; gone at the end."""
    if space.options.client_actors == "own":
        yield None
        return
    pool = start_shared_pool(shared_plan(experiments), experiments[0].settings.execution.threads)
    try:
        yield pool
    finally:
        ray.kill(pool)  # and with it the actors it owns


def describe_space(space: Space) -> str:
    """What a sweep would be, in a sentence; deals the data, but trains nothing."""
    rows = possible(space)
    experiments = [parse_experiment(row.plain) for row in rows]
    check_metric(space, experiments)
    per_round: dict[str, float] = {}
    steps = []
    for experiment in experiments:
        decides = ("dataset", "split", "train", "participation", "seed")
        key = digest([experiment.plain[name] for name in decides])
        if key not in per_round:
            per_round[key] = _steps_a_round(experiment)
        steps.append(per_round[key] * experiment.settings.rounds)
    branching = [e for e in experiments if branches(e)]
    prefixes = {prefix_key(e.plain, code_version(), device_of(e, False)) for e in branching}
    search = space.options.search
    if isinstance(search, OptunaSearch):
        num_known = len(expand(space))
        return (
            f"{search.samples} suggestions of Optuna and {num_known} baselines; one by one they "
            f"would take about {np.mean(steps) * (search.samples + num_known):,.0f} client steps"
        )
    return (
        f"{len(rows)} rows: {len(branching)} branch from {len(prefixes)} prefixes, "
        f"{len(rows) - len(branching)} are runs of their own; one by one they would take "
        f"about {sum(steps):,.0f} client steps"
    )


def _steps_a_round(experiment: Experiment) -> float:
    """Expected client steps of a cohort drawn from all clients."""
    split = deal(experiment, experiment.dataset.build().load())
    sizes = split.num_train_examples[split.clients]
    num_heard = cohort_size(len(sizes), experiment.settings.participation)
    return num_heard * float(np.mean(num_local_steps(sizes, experiment.settings.train)))

"""The driver of a sweep: checks, trials of Ray Tune over a shared cache, table and report."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, time
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import ray
from ray import tune
from ray.tune.schedulers import TrialScheduler

from flray.config.build import deal
from flray.config.experiment import Experiment, parse_experiment
from flray.errors import one_line_message
from flray.execution.cluster import connected, reachable_resources
from flray.execution.shared_pool import start_shared_pool
from flray.records.columns import CLIENT_STEPS, ROUND
from flray.records.environment import environment
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.server.loop import never
from flray.sweep.allotment import bundles, shared_plan
from flray.sweep.cache import Cache
from flray.sweep.components import KIND as COMPONENT
from flray.sweep.describing import check_metric
from flray.sweep.folder import (
    RowState,
    best_of,
    check_folder,
    configurations,
    new_state,
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
from flray.sweep.rows import SweepRow, expand, possible, rounds_to_cluster_after
from flray.sweep.search import RowSearch, Suggestions, again, seeds_of
from flray.sweep.space import OptunaSearch, Space
from flray.sweep.trial import Job
from flray.sweep.tuning import TrialWatch, run_trials, scheduler_of
from flray.tracking.mirrors import Draw, no_figures, track_table, tracked

STOP = "stop.wish"  # in the sweep's folder: it is to stop
STATUSES = ("done", "shared", "failed", "stopped", "unfinished")


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
    should_stop: Callable[[], bool] = never


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
        there = reachable_resources()
        asked = list({digest(e.plain["execution"]): e for e in experiments}.values())
        if space.options.client_actors == "shared":
            shared_plan(asked)  # or refuse
        for experiment in asked:
            bundles(experiment, space.options, there)
        scheduler = scheduler_of(space.options, experiments)
        with locked(out), _client_actors(space, asked) as pool:
            open_folder(out, space, code)
            root = Path(space.options.cache or out / "cache").absolute()
            wish = out / STOP
            wish.unlink(missing_ok=True)
            cache = Cache(root, read_report(out)["id"], uuid4().hex, deadline, wish)
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
            try:
                sweep.run(scheduler)
            finally:
                wish.unlink(missing_ok=True)
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
    known: tuple[SweepRow, ...]  # before anything ran
    watch: Watch

    @property
    def folder(self) -> Path:
        return self.job.folder

    @property
    def num_rows(self) -> int:
        search = self.space.options.search
        if not isinstance(search, OptunaSearch):
            return len(self.known)
        return len(self.known) + search.samples * len(seeds_of(self.space))

    def states(self) -> list[RowState]:
        """Of every row that is known by now, in the order of their numbers."""
        found = {row.number: new_state(row) for row in self.known} | read_states(self.folder)
        return [found[number] for number in sorted(found)]

    def run(self, scheduler: TrialScheduler | None) -> None:
        """Bring every row to its end, or to the scheduler's decision; failures are tried again."""
        first, states = len(self.known), self.states()
        suggested = [state for state in states if state.number >= first]
        suggestions = None
        if isinstance(self.space.options.search, OptunaSearch):
            suggestions = Suggestions(self.space, first, suggested, self._value)
        rows = [*self.known, *(again(self.space, state) for state in suggested)]
        ended = {state.number for state in states if state.is_done or state.status == "stopped"}
        waiting = [row for row in rows if row.number not in ended]
        is_left = waiting or (suggestions is not None and suggestions.are_left)
        if is_left and not self.job.cache.is_over():
            self._fit(RowSearch(_interleaved(waiting, self.job), suggestions), scheduler)
        self._show(0)

    def _value(self, state: RowState) -> float | None:
        """The metric of a row that is done."""
        if not state.is_done:
            return None
        summary = RunDirectory(self.folder / run_path(state.number)).summary() or {}
        value = summary.get(self.space.options.metric)
        return None if value is None else float(value)

    def _fit(self, search: RowSearch, scheduler: TrialScheduler | None) -> None:
        watch = TrialWatch(self.job, self._show, self.watch.should_stop)
        for result in run_trials(search, self.job, self.space.options, scheduler, watch):
            assert result.config is not None
            for row in result.config["rows"]:
                self._record_end(row.number, result)

    def _record_end(self, number: int, result: tune.Result) -> None:
        """Record what the trial itself could not: a dead process, a scheduler's decision."""
        state = read_states(self.folder, number).get(number)
        if state is None or state.status != "unfinished":
            return
        if result.error is not None:
            cause = getattr(result.error, "cause", None) or result.error
            write_state(self.folder, replace(state, status="failed", error=one_line_message(cause)))
        elif self.space.is_scheduled and result.metrics and not result.metrics.get("is_over"):
            write_state(self.folder, replace(state, status="stopped"))

    def _show(self, running: int) -> None:
        states = self.states()
        found = Counter(state.status for state in states)
        values = [[self._value(state) for state in each] for each in configurations(states)]
        means = [float(np.mean(each)) for each in values if None not in each]  # type: ignore[arg-type]
        best = max if self.space.options.mode == "max" else min
        self.watch.show(
            Progress(
                rows=max(self.num_rows, len(states)),
                done=found["done"] + found["shared"] + found["stopped"],
                failed=found["failed"],
                running=running,
                shared=found["shared"],
                best=best(means) if means else None,
            )
        )

    def report(self, known: dict[str, Any]) -> SweepResult:
        """Write table and report, and mirror what W&B does not have yet."""
        states = self.states()
        self._mirror(states)
        frame = table_of(self.folder, states)
        write_table(self.folder, frame)
        counts = Counter(state.status for state in states)
        counts["unfinished"] += max(self.num_rows - len(states), 0)  # not suggested yet
        report = {
            **read_report(self.folder),
            "rows": max(self.num_rows, len(states)),
            **{name: counts[name] for name in STATUSES},
            **self._counts(states),
            **self._costs(states, frame),
            "metric": self.space.options.metric,
            "mode": self.space.options.mode,
            "best": best_of(states, frame, self.space.options),
            **known,
            "commit": environment()["commit"],
        }
        write_report(self.folder, report)
        if counts["failed"] + counts["unfinished"] == 0 and self.space.options.cache is None:
            for entry in self.job.cache.root.glob("*/*/"):  # files keep what they cost
                shutil.rmtree(entry)
        tracking = parse_experiment(possible(self.space)[0].plain).settings.tracking
        track_table(tracking, self.folder, "rows", frame, {"space": self.space.plain})
        return SweepResult(self.folder, report, frame)

    def _mirror(self, states: Sequence[RowState]) -> None:
        """Send runs that were put together to W&B, if the experiment asks for it.

        Only when all is trained: an upload takes seconds, for which a trial would have to wait.
        """
        for state in states:
            if state.components and state.status == "done":
                experiment = parse_experiment(dict(state.plain))
                path, group = self.folder / run_path(state.number), self.folder.name
                with tracked(experiment, path, draw=self.watch.draw, group=group):
                    pass

    def _counts(self, states: Sequence[RowState]) -> dict[str, int]:
        """How many of everything that rows share there were, as far as this sweep computed it."""
        kinds = ("prefix", "observation", "distance", "tree", COMPONENT)
        keys = {kind: list(self.job.cache.costs(kind)) for kind in kinds}
        return {
            "prefixes": len({key.partition("-")[0] for key in keys["prefix"]}),
            "observations": len(keys["observation"]),
            "distances": len(keys["distance"]),
            "trees": len(keys["tree"]),
            "runs": len({state.run for state in states if state.run is not None}),
            "components": sum(len(state.components) for state in states),
            "components_trained": len(keys[COMPONENT]),
        }

    def _costs(self, states: Sequence[RowState], frame: pd.DataFrame) -> dict[str, Any]:
        """Client steps that were trained, and those of every row run on its own."""
        kinds = ("prefix", "observation", COMPONENT)
        trained = sum(sum(self.job.cache.costs(kind).values()) for kind in kinds)
        trained += sum(self._steps_of(state) for state in states)
        naive = int(frame[CLIENT_STEPS].fillna(0).sum()) if CLIENT_STEPS in frame else 0
        ratio = naive / trained if trained and naive else None
        return {"client_steps_trained": trained, "client_steps_naive": naive, "ratio": ratio}

    def _steps_of(self, state: RowState) -> int:
        """What the row's own run trained, finished or not, without what is in the cache."""
        if state.begin is None or state.status == "shared":
            return state.steps_placed
        rows = RunDirectory(self.folder / run_path(state.number)).rows()
        later: int = sum(row.get(CLIENT_STEPS, 0) for row in rows if row[ROUND] > state.begin)
        return state.steps_placed + max(later - state.steps_found, 0)


def _interleaved(rows: Sequence[SweepRow], job: Job) -> list[SweepRow]:
    """The rows in turns of their prefixes, so that trials at a time do not wait for one prefix."""
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        experiment = parse_experiment(row.plain)
        device = device_of(experiment, job.has_gpu)
        groups.setdefault(prefix_key(row.plain, job.code, device), []).append(row)
    turns = {id(row): turn for group in groups.values() for turn, row in enumerate(group)}
    return sorted(rows, key=lambda row: turns[id(row)])


@contextmanager
def _client_actors(space: Space, experiments: Sequence[Experiment]) -> Iterator[Any]:
    """The dispatcher of one pool for all trials, if the space asks for it; gone at the end."""
    if space.options.client_actors == "own":
        yield None
        return
    threads = experiments[0].settings.execution.threads or 1
    pool = start_shared_pool(shared_plan(experiments), threads)
    try:
        yield pool
    finally:
        ray.kill(pool)  # and with it the actors it owns

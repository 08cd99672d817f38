"""The driver of a sweep: rows, tree, growth, trials, table. Nothing is trained twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, time
from typing import Any

import numpy as np
import pandas as pd
import ray
from ray.exceptions import RayError

from flray.client.plan import num_local_steps
from flray.config.build import deal
from flray.config.experiment import Experiment, parse_experiment
from flray.execution.cluster import connected
from flray.execution.federation import cohort_size, nobody
from flray.execution.shared_pool import start_shared_pool
from flray.records.environment import environment
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.records.strands import Strands
from flray.sweep.allotment import bundles, cluster_resources, shared_plan
from flray.sweep.folder import (
    RowState,
    best_of,
    check_folder,
    fill_shared_row,
    open_folder,
    read_report,
    table_of,
    write_report,
    write_table,
)
from flray.sweep.growth import Growth, branches, grow, is_grown, said
from flray.sweep.keys import code_version, device_of, digest
from flray.sweep.rows import Row, expand
from flray.sweep.space import Space
from flray.sweep.strands import Weaver, is_trained
from flray.sweep.tracking import Draw, no_figures, track_table, tracked
from flray.sweep.tree import Run, Tree, Trunk, plan, run_path
from flray.sweep.trials import Job, Outcome, outcome_of, run_trials

POLL_S = 0.5
WORST_FIRST = ("failed", "unfinished", "stopped", "done")


@dataclass(frozen=True)
class Progress:
    """How far a sweep is."""

    rows: int
    trunks: int
    trunks_done: int
    trials: int = 0  # distinct runs; 0: not known before all trunks are done
    done: int = 0  # of them
    failed: int = 0
    running: int = 0
    shared: int = 0  # rows without a run of their own
    best: float | None = None  # of the metric, so far


@dataclass(frozen=True)
class Watch:
    """What is told of a sweep while it runs."""

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
    rows = expand(space)
    out = out.absolute()
    code = code_version()
    check_folder(out, space, code, resume)
    first = parse_experiment(rows[0].plain)
    deal(first, first.dataset.build().load())  # or every trial would say that data are missing
    with connected():
        there = cluster_resources()
        tree = plan(rows, code, has_gpu=there.get("GPU", 0.0) > 0)
        asked = {digest(row.plain["execution"]): parse_experiment(row.plain) for row in rows}
        if space.options.client_actors == "shared":
            shared_plan(list(asked.values()))  # or refuse
        for experiment in asked.values():
            bundles(experiment, space.options, there)
        with locked(out), _client_actors(space, list(asked.values())) as pool:
            sweep = _Sweep(space, out, rows, tree, there, deadline, watch, pool)
            open_folder(out, space, code)
            errors = sweep.grow()
            if errors is not None:
                sweep.run(errors)
    seconds = read_report(out)["seconds"] + perf_counter() - begin
    return sweep.report(errors or {}, {"code": dict(code), "seconds": round(seconds, 3)})


@dataclass(frozen=True)
class _Sweep:
    space: Space
    folder: Path
    rows: tuple[Row, ...]
    tree: Tree
    there: Mapping[str, float]  # what the cluster has
    deadline: float
    watch: Watch
    pool: Any  # the dispatcher of shared client actors, or None
    weaver: Weaver = field(default_factory=Weaver)

    def grow(self) -> dict[int, str] | None:
        """Grow every trunk; errors by row, or None if time ran out."""
        errors: dict[int, str] = {}
        growths: list[Growth] = []
        waiting = [trunk for trunk in self.tree.trunks if not is_grown(trunk, self.folder)]
        grown_before = len(self.tree.trunks) - len(waiting)
        running: dict[Any, Trunk] = {}  # Any: ObjectRef
        # A process takes seconds to start, which a single trunk need not wait for.
        is_alone = len(waiting) == 1
        at_a_time = self.space.options.concurrency or len(waiting)
        while waiting or running:
            grown = grown_before + len(growths)
            self.watch.show(Progress(len(self.rows), len(self.tree.trunks), grown))
            while waiting and len(running) < at_a_time:
                trunk = waiting.pop(0)
                if self._needs_no_process(trunk, is_alone):
                    growths.append(self._grown_here(trunk))
                else:
                    running[self._start(trunk)] = trunk
            ended, _ = ray.wait(list(running), timeout=POLL_S) if running else ([], None)
            for ref in ended:
                growths.append(_result(ref, running.pop(ref)))
        for growth in growths:
            errors |= growth.errors
        return errors if all(growth.is_done for growth in growths) else None

    def _needs_no_process(self, trunk: Trunk, is_alone: bool) -> bool:
        """Clients may be actors; what trains here must not hold a GPU that trials will use."""
        experiment = parse_experiment(trunk.plain)
        has_gpu = self.there.get("GPU", 0.0) > 0
        if self.pool is not None:
            return is_alone
        trains_elsewhere = experiment.settings.execution.executor == "ray"
        return trains_elsewhere or (is_alone and device_of(experiment, has_gpu) == "cpu")

    def _grown_here(self, trunk: Trunk) -> Growth:
        return _grow_until(*self._growing(trunk))

    def _start(self, trunk: Trunk) -> Any:  # Any: ObjectRef
        (asked,) = bundles(parse_experiment(trunk.plain), self.space.options, self.there)
        task = ray.remote(_grow_until).options(
            num_cpus=asked["CPU"], num_gpus=asked.get("GPU", 0.0), max_retries=0
        )
        return task.remote(*self._growing(trunk))

    def _growing(self, trunk: Trunk) -> tuple[Trunk, Path, bool, float, Any]:
        """What `_grow_until` takes, here or in a process of its own."""
        shared = self.space.shares_continuations
        return trunk, self.folder, shared, self.deadline, self.pool

    def run(self, errors: Mapping[int, str]) -> None:
        """Bring the distinct runs to their ends."""
        states = self._states(errors)
        runs = self._runs(states)
        open_runs = [
            r for r in runs if outcome_of(r, self.folder).status not in ("done", "stopped")
        ]
        scheduled = not self.space.shares_continuations
        options = self.space.options
        metric = options.metric if scheduled else None
        job = Job(self.folder, metric, self.deadline, self.pool, self.watch.draw)

        def show(running: Sequence[str]) -> None:
            self._weave(states)
            self.watch.show(self._progress(states, running))

        run_trials(open_runs, job, options, show)
        show([])

    def _weave(self, states: Sequence[RowState]) -> None:
        """Put rows together of which all clients are trained by now."""
        for state in states:
            if not state.sources or not state.is_own or state.run is None:
                continue
            directory = RunDirectory(self.folder / run_path(state.run))
            sources = {
                self.folder / run_path(run): np.array(clients, dtype=np.int64)
                for run, clients in state.sources.items()
            }
            if directory.summary() is None and is_trained({directory.path: nobody(), **sources}):
                self.weaver.weave(directory, sources)

    def _mirror(self, states: Sequence[RowState]) -> None:
        """Tell W&B of runs that were put together, if the experiment says so.

        Only when all is trained: an upload takes seconds, for which a trial would have to wait.
        """
        for state in states:
            if state.sources and state.is_own and state.status == "done" and state.run is not None:
                experiment = parse_experiment(dict(state.plain))
                path = self.folder / run_path(state.run)
                group = self.folder.name
                with tracked(experiment, path, draw=self.watch.draw, group=group):
                    pass

    def _progress(self, states: Sequence[RowState], running: Sequence[str]) -> Progress:
        runs = self._runs(states)
        found = Counter(outcome_of(run, self.folder).status for run in runs)
        metric, mode = self.space.options.metric, self.space.options.mode
        summaries = (RunDirectory(self.folder / run.path).summary() or {} for run in runs)
        values = [v for each in summaries if (v := each.get(metric)) is not None]
        trunks = len(self.tree.trunks)
        return Progress(
            rows=len(self.rows),
            trunks=trunks,
            trunks_done=trunks,
            trials=len(runs),
            done=found["done"] + found["stopped"],
            failed=found["failed"],
            running=len(running),
            shared=sum(not state.is_own for state in states),
            best=None if not values else max(values) if mode == "max" else min(values),
        )

    def _runs(self, states: Sequence[RowState]) -> list[Run]:
        own = {s.run: s for s in states if s.run is not None and s.is_own}
        return [Run(key, dict(state.plain)) for key, state in own.items()]

    def _states(self, errors: Mapping[int, str]) -> list[RowState]:
        """Which run each row belongs to, as far as it is known."""
        branched: dict[int, dict[str, Any]] = {}
        wrong = dict(errors)
        for trunk in self.tree.trunks:
            for record in branches(trunk, self.folder):
                branched |= {int(number): each for number, each in record["rows"].items()}
                wrong |= {int(number): text for number, text in record["errors"].items()}
        states, owned = [], set[str]()
        for row in self.rows:
            point = row.merge_point
            state = RowState(
                row.number, row.overrides, row.plain, merge_place=point.place if point else None
            )
            if row.number in self.tree.run_of:
                key = self.tree.run_of[row.number]
                state = replace(state, run=key, is_own=key not in owned)
                owned.add(key)
            elif row.number in branched:
                found = branched[row.number]
                state = replace(
                    state,
                    run=found["run"],
                    is_own=found["own"],
                    overrides=found["overrides"],
                    plain=found["plain"],
                    sources=found["sources"],
                )
            elif row.number in wrong:
                state = replace(state, status="failed", error=wrong[row.number])
            states.append(state)
        return states

    def report(self, errors: Mapping[int, str], known: dict[str, Any]) -> SweepResult:
        """Fill the rows that share, and write table and report."""
        states = [self._ended(state) for state in self._states(errors)]
        for state in states:
            if state.status == "shared":
                fill_shared_row(self.folder, state)
        self._mirror(states)
        frame = table_of(self.folder, states)
        write_table(self.folder, frame)
        counts = Counter(state.status for state in states)
        report = {
            "rows": len(states),
            **{name: counts[name] for name in ("done", "shared", "failed", "stopped")},
            "unfinished": counts["unfinished"],
            **self._counts(states),
            **self._costs(states, frame),
            "metric": self.space.options.metric,
            "mode": self.space.options.mode,
            "best": best_of(states, frame, self.space.options),
            **known,
            "commit": environment()["commit"],
        }
        write_report(self.folder, report)
        tracking = parse_experiment(self.rows[0].plain).settings.tracking
        track_table(tracking, self.folder, "rows", frame, {"space": self.space.plain})
        return SweepResult(self.folder, report, frame)

    def _ended(self, state: RowState) -> RowState:
        if state.run is None:
            return state
        trainers = dict.fromkeys([state.run, *state.sources])
        outcomes = [outcome_of(Run(key, {}), self.folder) for key in trainers]
        # A row is what the worst of those is that train its clients.
        outcome: Outcome = min(outcomes, key=lambda each: WORST_FIRST.index(each.status))
        shared = outcome.status == "done" and not state.is_own
        return replace(state, status="shared" if shared else outcome.status, error=outcome.error)

    def _counts(self, states: Sequence[RowState]) -> dict[str, int]:
        """How much there was of everything that rows share."""
        records = [r for trunk in self.tree.trunks for r in branches(trunk, self.folder)]
        return {
            "trunks": len(self.tree.trunks),
            "observations": len(records),
            "distances": sum(record["distances"] for record in records),
            "trees": sum(record["trees"] for record in records),
            "runs": len({state.run for state in states if state.run is not None}),
            "strands": sum(found["strands"] for each in records for found in each["rows"].values()),
            "strands_trained": sum(record["strands"] for record in records),
        }

    def _costs(self, states: Sequence[RowState], frame: pd.DataFrame) -> dict[str, Any]:
        """Client steps that were trained, and those of every row run on its own."""
        trained = sum(self._steps_of_trunk(trunk) for trunk in self.tree.trunks)
        trained += sum(_steps(self.folder / run.path) for run in self.tree.runs)
        if "client_steps" not in frame:
            return {"client_steps_trained": trained, "client_steps_naive": 0, "ratio": None}
        naive = int(frame["client_steps"].fillna(0).sum())
        ratio = naive / trained if trained else None
        return {"client_steps_trained": trained, "client_steps_naive": naive, "ratio": ratio}

    def _steps_of_trunk(self, trunk: Trunk) -> int:
        """Of the trunk, where it is no row's run, of observations, and of what follows them."""
        is_row = any(run.path == trunk.run for run in self.tree.runs)
        total = 0 if is_row else _steps(self.folder / trunk.run)
        for record in branches(trunk, self.folder):
            n, seen = record["round"], record["client_steps"]
            total += seen
            for found in record["rows"].values():
                total += found["client_steps"]  # of placing who is not clustered
                path = self.folder / run_path(found["run"])
                if found["whole"]:
                    total += _steps(path)
                elif found["own"] and found["sources"]:
                    total += sum(int(a["steps"].sum()) for a in Strands(path).rounds().values())
                elif found["own"]:
                    # Before the first round there is no row: what it cost is in the next.
                    total += _steps(path, after=n) - (0 if n else seen + found["client_steps"])
        return total


def _grow_until(trunk: Trunk, folder: Path, shared: bool, deadline: float, pool: Any) -> Growth:
    return grow(trunk, folder, shared, lambda: time() > deadline, pool)


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


def _result(ref: Any, trunk: Trunk) -> Growth:  # Any: ObjectRef
    try:
        growth: Growth = ray.get(ref)
    except RayError as error:
        text = said(getattr(error, "cause", None) or error)
        return Growth(True, {row.number: text for row in trunk.rows})
    return growth


def _steps(path: Path, after: int = 0) -> int:
    """Client steps in the rounds of a run after one of them."""
    rounds = RunDirectory(path).rounds()
    if "client_steps" not in rounds:
        return 0
    return int(rounds.loc[rounds["round"] > after, "client_steps"].fillna(0).sum())


def describe_space(space: Space) -> str:
    """What a sweep would be, in a sentence; deals the data, but trains nothing."""
    rows = expand(space)
    tree = plan(rows, code_version(), has_gpu=False)
    per_round: dict[str, float] = {}
    steps = 0.0
    for row in rows:
        experiment = parse_experiment(row.plain)
        parts = [row.plain[key] for key in ("dataset", "split", "train", "participation", "seed")]
        key = digest(parts)
        if key not in per_round:
            per_round[key] = _steps_a_round(experiment)
        steps += per_round[key] * experiment.settings.rounds
    branching = sum(len(trunk.rows) for trunk in tree.trunks)
    return (
        f"{len(rows)} rows: {branching} branch from {len(tree.trunks)} trunks, "
        f"{len(tree.run_of)} are {len(tree.runs)} runs of their own; one by one they would take "
        f"about {steps:,.0f} client steps"
    )


def _steps_a_round(experiment: Experiment) -> float:
    """Expected client steps of a cohort drawn from all clients."""
    split = deal(experiment, experiment.dataset.build().load())
    sizes = split.num_train_examples[split.clients]
    num_heard = cohort_size(len(sizes), experiment.settings.participation)
    return num_heard * float(np.mean(num_local_steps(sizes, experiment.settings.train)))

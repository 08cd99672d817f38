"""The driver of a sweep: checks, trials of Ray Tune over a shared cache, table and report.

`run_sweep` is all that other packages call. Every row is a trial (`trial.py`) in a process of Ray
Tune (`tuning.py`); rows report to the driver by files in the sweep's folder alone, so a sweep can
be stopped at any time and resumed from its folder.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter, time
from typing import Any
from uuid import uuid4

import pandas as pd
from ray import tune
from ray.tune.schedulers import TrialScheduler

from flray.config.tracking import NoTracking
from flray.errors import GpuFault, one_line_message
from flray.execution.cluster import connected
from flray.execution.nodes import reachable_nodes
from flray.records.environment import environment
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.server.loop import never
from flray.sweeps.allotment import bundles, total
from flray.sweeps.branching import branches
from flray.sweeps.cache import Cache
from flray.sweeps.describing import check_metric, dealt, require_encoders
from flray.sweeps.folder import (
    check_folder,
    open_folder,
    read_report,
    read_row,
    read_rows,
    run_path,
    write_report,
    write_row,
)
from flray.sweeps.keys import digest, prefix_key, signature_key, version_of
from flray.sweeps.rows import SweepRow, experiment_of, known_and_examples, rounds_to_cluster_after
from flray.sweeps.search import RowSearch, Suggestions
from flray.sweeps.space import OptunaSearch, Space
from flray.sweeps.table import best_of, costs_of, table_of, write_table
from flray.sweeps.trial import TrialContext
from flray.sweeps.tuning import TrialWatch, run_trials, scheduler_of
from flray.tracking.mirrors import Draw, no_figures, track_table, tracked

STOP = "stop.wish"  # a file in the sweep's folder that asks it to stop
NOT_OF_DATA = ("algorithm", "rounds", "evaluate", "stop", "tracking")  # keys of an experiment
# Time that `max_minutes` leaves for the rounds in progress, the table and the report
SHARE_TO_END, MOST_TO_END_S = 0.1, 60.0
STATUSES = ("done", "shared", "failed", "stopped", "unfinished")


@dataclass(frozen=True)
class Progress:
    """The progress of a sweep, in rows, as the files in its folder have it."""

    rows: int  # all rows, with those that are still to be suggested
    done: int = 0  # finished, stopped by a scheduler or shared
    failed: int = 0
    # The last round of each running trial, 0 before its first one, and the rounds of its row
    rounds: Sequence[tuple[int, int]] = ()
    shared: int = 0  # rows whose records were copied from the run of another row
    tracked: tuple[int, int] | None = None  # runs sent to the tracker, and how many there are
    best: float | None = None  # best mean of the metric so far

    @property
    def rows_done(self) -> float:
        """Rows done, with the rounds of running trials as parts of a row.

        >>> Progress(rows=9, done=6, rounds=[(10, 20), (5, 20)]).rows_done
        6.75
        """
        return self.done + sum(last / num for last, num in self.rounds)


@dataclass(frozen=True)
class Watch:
    """What a caller sees of a sweep while it runs, and how it may stop it.

    `show` and `should_stop` are called in the caller's process; `draw` is sent to the trials as
    well, so it must be a function that can be pickled.
    """

    show: Callable[[Progress], None] = lambda _: None  # called about once a second
    draw: Draw = no_figures  # draws the figures of a run for W&B
    should_stop: Callable[[], bool] = never  # asked about once a second


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended, or was stopped; the same content is in its folder."""

    path: Path  # its folder
    report: dict[str, Any]  # Any: JSON; content of sweep.json
    table: pd.DataFrame  # content of rows.parquet


WATCH_NOTHING = Watch()


def run_sweep(
    space: Space,
    out: Path,
    resume: bool = False,
    max_minutes: float | None = None,
    watch: Watch = WATCH_NOTHING,
) -> SweepResult:
    """Run a sweep into the folder `out`.

    Everything that can be refused is refused before the folder is made. A row that fails is
    recorded with its error, and the others go on. Ray is started if it is not running, and stopped
    again. While the sweep runs it holds the lock of the folder.

    Args:
        space: What to run, as `read_space` returns it.
        out: Folder of the sweep, laid out as `folder.py` describes; created if there is none.
        resume: Continue where the sweep in this folder stopped; rows that failed are tried again.
        max_minutes: End within this time: in its last tenth, at most a minute, no row begins,
            running trials end after their current round, and the table is written.
        watch: Functions that are called about once a second.

    Raises:
        ExperimentError: The space, its data, its metric, its resources or the folder do not fit.
    """
    deadline = _time_to_stop(max_minutes)
    begin = perf_counter()
    known, examples = known_and_examples(space)
    experiments = [experiment_of(row.plain) for row in known + examples]
    out, code = out.absolute(), version_of(experiments)
    check_folder(out, space, code, resume)
    check_metric(space, experiments)
    for _ in dealt(experiments):
        pass  # loads each dataset once, so that a missing one is reported once, not by every trial
    require_encoders(experiments)
    with connected():
        nodes = reachable_nodes()
        for experiment in {digest(e.plain["execution"]): e for e in experiments}.values():
            bundles(experiment, space.options, nodes)  # refuses what cannot be placed
        scheduler = scheduler_of(space.options, experiments)
        with locked(out):
            open_folder(out, space, code)
            has_gpu = total(nodes, "GPU") > 0
            root, wish = Path(space.options.cache or out / "cache").absolute(), out / STOP
            wish.unlink(missing_ok=True)
            context = TrialContext(
                folder=out,
                cache=Cache(root, read_report(out)["id"], uuid4().hex, deadline, wish),
                code=dict(code),
                has_gpu=has_gpu,
                wanted=rounds_to_cluster_after(space, experiments),
                signatures=_shared_signatures(space, known, code, has_gpu),
                is_scheduled=space.is_scheduled,
                draw=watch.draw,
            )
            tracking = experiments[0].settings.tracking
            sweep = _Sweep(space, context, watch, known, tracking)
            try:
                sweep.run(scheduler)
            finally:
                wish.unlink(missing_ok=True)
            return sweep.report(perf_counter() - begin)


def _time_to_stop(max_minutes: float | None) -> float:
    """When the rounds of a sweep stop, so that its table is written within so many minutes."""
    if max_minutes is None:
        return float("inf")
    seconds = 60 * max_minutes
    return time() + seconds - min(MOST_TO_END_S, seconds * SHARE_TO_END)


@dataclass(frozen=True)
class _Sweep:
    """A sweep whose folder is open and locked."""

    space: Space
    context: TrialContext
    watch: Watch
    known: tuple[SweepRow, ...]  # before anything runs; suggested rows have higher numbers
    tracking: object  # where the table is shown, too
    # Rows that are done and their summaries, by number: they do not change, and are read once.
    done: dict[int, SweepRow] = field(default_factory=dict)
    summary_of: dict[int, dict[str, Any]] = field(default_factory=dict)  # Any: JSON

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return self.context.folder

    @cached_property
    def suggestions(self) -> Suggestions | None:
        """Optuna's suggestions, after those of earlier starts; None: another search."""
        if not isinstance(self.space.options.search, OptunaSearch):
            return None
        first = len(self.known)
        before = [row for number, row in read_rows(self.folder).items() if number >= first]
        return Suggestions(self.space, self.context.wanted, first, before)

    @property
    def num_left(self) -> int:
        """Rows that Optuna is still to suggest, all seeds counted; 0 for another search."""
        return self.suggestions.num_left if self.suggestions else 0

    def rows(self) -> list[SweepRow]:
        """Every row that is known by now, in its current state, in the order of their numbers."""
        suggested = self.suggestions.rows if self.suggestions else []
        read = read_rows(self.folder, left_out=self.done)
        self.done.update({number: row for number, row in read.items() if row.is_done})
        current = {row.number: row for row in [*self.known, *suggested]} | read | self.done
        return [current[number] for number in sorted(current)]

    def summaries(self, rows: Sequence[SweepRow]) -> dict[int, dict[str, Any]]:  # Any: JSON
        """The summaries of the rows that are done, by number."""
        for n in (row.number for row in rows if row.is_done):
            if n not in self.summary_of:
                self.summary_of[n] = RunDirectory(self.folder / run_path(n)).summary() or {}
        return self.summary_of

    def run(self, scheduler: TrialScheduler | None) -> None:
        """Run every row that is not done or stopped by a scheduler; failures are tried again."""
        rows = self.rows()
        if self.suggestions is not None:
            values = {n: s.get(self.space.options.metric) for n, s in self.summaries(rows).items()}
            self.suggestions.learn({n: value for n, value in values.items() if value is not None})
        waiting = [row for row in rows if not (row.is_done or row.status == "stopped")]
        if (waiting or self.num_left) and not self.context.cache.is_over():
            ordered, is_over = _in_order(waiting, self.context), self.context.cache.is_late
            self._fit(RowSearch(ordered, self.suggestions, is_over), scheduler)
        self._show()

    def _fit(self, search: RowSearch, scheduler: TrialScheduler | None) -> None:
        """Run trials until the search has no more rows, and record how they ended."""
        watch = TrialWatch(self.context, self._show, self.watch.should_stop)
        for result in run_trials(search, self.space.options, scheduler, watch):
            assert result.config is not None
            for row in result.config["rows"]:
                self._record_end(row.number, result)

    def _record_end(self, number: int, result: tune.Result) -> None:
        """Record what the trial could not: that its process died or a scheduler stopped it."""
        row = read_row(self.folder, number)
        if row is None or row.status != "unfinished":
            return
        if result.error is not None:
            cause = getattr(result.error, "cause", None) or result.error
            status = "unfinished" if isinstance(cause, GpuFault) else "failed"
            write_row(self.folder, replace(row, status=status, error=one_line_message(cause)))
        elif self.space.is_scheduled and result.metrics and not result.metrics.get("is_over"):
            write_row(self.folder, replace(row, status="stopped"))

    def _show(
        self, rounds: Sequence[tuple[int, int]] = (), tracked: tuple[int, int] | None = None
    ) -> None:
        """Show the progress, by the rows' files and summaries."""
        rows, options = self.rows(), self.space.options
        counts = Counter(row.status for row in rows)
        best = best_of(rows, self.summaries(rows), options)
        progress = Progress(
            rows=len(rows) + self.num_left,
            done=counts["done"] + counts["shared"] + counts["stopped"],
            failed=counts["failed"],
            rounds=rounds,
            shared=counts["shared"],
            tracked=tracked,
            best=best[options.metric] if best and not best["missing_rows"] else None,
        )
        self.watch.show(progress)

    def report(self, seconds: float) -> SweepResult:
        """Write table and report, and send to the tracker what it does not have yet.

        The cache is emptied if every row is done and it is the sweep's own.
        """
        rows, options, before = self.rows(), self.space.options, read_report(self.folder)
        best = best_of(rows, self.summaries(rows), options)
        frame = table_of(self.folder, rows)
        write_table(self.folder, frame)
        counts = Counter(row.status for row in rows)
        counts["unfinished"] += self.num_left
        report = {
            **before,
            "rows": len(rows) + self.num_left,
            **{name: counts[name] for name in STATUSES},
            **costs_of(self.folder, rows, frame, self.context.cache),
            "metric": options.metric,
            "mode": options.mode,
            "best": best,
            "code": dict(self.context.code),
            "seconds": round(before["seconds"] + seconds, 3),
            "commit": environment()["commit"],
        }
        write_report(self.folder, report)
        self._mirror(rows, best["rows"] if best else [])  # last: it may take long
        if counts["failed"] + counts["unfinished"] == 0 and options.cache is None:
            for entry in self.context.cache.root.glob("*/*/"):  # files keep what they cost
                shutil.rmtree(entry)
        track_table(self.tracking, self.folder, frame, {"space": self.space.plain})
        return SweepResult(self.folder, report, frame)

    def _mirror(self, rows: Sequence[SweepRow], best: Sequence[int]) -> None:
        """Send runs that were put together of groups to the tracker, if there is one.

        Called when everything is trained: a trial would wait seconds for an upload. Figures take
        ten times as long as all the rest, so only the rows of the best configuration have them.
        """
        joined = [row for row in rows if row.groups and row.status == "done"]
        pairs = [(row.number, experiment_of(row.plain)) for row in joined]
        pairs = [pair for pair in pairs if pair[1].settings.tracking != NoTracking()]
        for num_written, (number, experiment) in enumerate(pairs):
            self._show(tracked=(num_written, len(pairs)))
            path, group = self.folder / run_path(number), self.folder.name
            draw = self.watch.draw if number in best else no_figures
            with tracked(experiment, path, draw=draw, group=group):
                pass


def _shared_signatures(
    space: Space, known: Sequence[SweepRow], code: Mapping[str, str], has_gpu: bool
) -> frozenset[str] | None:
    """Keys of the signatures that several rows cluster by.

    None: any may be, since rows are suggested or other sweeps have this cache.
    """
    if isinstance(space.options.search, OptunaSearch) or space.options.cache is not None:
        return None
    pairs = [(experiment_of(row.plain), row.plain) for row in known]
    asked = Counter(
        signature_key(prefix_key(e, code, has_gpu), plain, e.algorithm.build().rounds_before)
        for e, plain in pairs
        if branches(e)
    )
    return frozenset(key for key, number in asked.items() if number > 1)


def _in_order(rows: Sequence[SweepRow], context: TrialContext) -> list[SweepRow]:
    """First a row of each prefix that trains it, so that parallel trials wait less for one.

    Then rows with the same data, one after another: a process has its next row's data and host.
    """
    numbers: dict[str, int] = {}  # of data, in the order of their first rows
    begun: set[str] = set()  # prefixes with a row that trains them
    turns = []
    for row in rows:
        experiment = experiment_of(row.plain)
        prefix = prefix_key(experiment, context.code, context.has_gpu)
        is_first = prefix not in begun and branches(experiment)
        if is_first:
            begun.add(prefix)
        data = digest({k: v for k, v in row.plain.items() if k not in NOT_OF_DATA})
        turns.append((not is_first, numbers.setdefault(data, len(numbers)), row))
    return [row for *_, row in sorted(turns, key=lambda turn: turn[:2])]

"""`flray sweep`: progress while a sweep runs, then what was best, what failed and what it cost."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from flray.cli.arguments import files_and_overrides
from flray.cli.places import default_folder
from flray.columns import ERROR, ROW, STATUS, USES_GROUND_TRUTH
from flray.config.reading import read_mapping
from flray.config.shipped import SPACES, find_file
from flray.errors import ClientFailure, ExperimentError
from flray.records.mirror import Mirror
from flray.reports.benchmark import METHOD, ranking_sheet
from flray.reports.figure_files import figures_of
from flray.reports.sheets import GROUND_TRUTH, GROUND_TRUTH_NOTE, INCOMPLETE
from flray.reports.sweep_tables import top_sheet
from flray.reports.sweeps import left_out_note, read_sweep
from flray.reports.writers import to_rich
from flray.runs.conduct import noticing_sigterm
from flray.sweeps.driver import STATUSES, Progress, SweepResult, Watch, run_sweep
from flray.sweeps.folder import SPACE
from flray.sweeps.space import read_space
from flray.wording import counted

FAILURES_SHOWN = 5
LINE_EVERY_S = 60.0  # longest time without a line where there is no terminal
SHARE_BEFORE_ETA = 0.2  # share of rows done: the first also train what all share


def sweep(
    arguments: Sequence[str],
    out: Path | None,
    resume: bool,
    max_minutes: float | None,
    console: Console,
    mirror: Mirror | None = None,
) -> None:
    """Run a space, show its progress and print what was best, what failed and what it cost.

    Args:
        arguments: One space file, and `key=value`; to resume the sweep in `out`, no file is needed.
        out: The folder of the sweep; None: one below runs/.
        resume: Go on with the sweep in that folder, or with the newest of this name.
        max_minutes: Minutes within which it ends; running trials end their rounds before.
        mirror: Copies the folder to a URL meanwhile.

    Raises:
        ExperimentError: The space is refused, or the file is no space.
        ClientFailure: Every row failed.
        click.Abort: The sweep was interrupted; the way to go on has been printed.
    """
    files, overrides = files_and_overrides(arguments, SPACES)
    if not files and resume and out is not None and (out / SPACE).is_file():
        files = [str(out / SPACE)]  # what the sweep was begun with
    if len(files) != 1:
        raise ExperimentError(
            f"flray sweep takes one space file, got {files or 'none'}; to go on with a sweep, type "
            "flray sweep --out FOLDER --resume"
        )
    path = Path(files[0])
    file = find_file(path, SPACES)
    if file is not None and "algorithm" in read_mapping(file, "the space"):
        raise ExperimentError(f"{path} is an experiment, not a space; type flray run {path}")
    space = read_space(path, overrides)
    folder = out or default_folder(path.stem, resume)
    where = str(folder) if mirror is None else mirror.url
    again = f"flray sweep --out {shlex.quote(where)} --resume"
    console.print(Text.assemble((path.stem, "bold"), f" · {folder}"), soft_wrap=True)
    try:
        with (
            noticing_sigterm(console.print) as is_ending,
            _shown(console, space.options.metric) as show,
        ):

            def follow(progress: Progress) -> None:
                show(progress)
                if mirror is not None:
                    mirror.push_sometimes()

            watch = Watch(follow, figures_of, is_ending)
            result = run_sweep(space, folder, resume, max_minutes, watch)
    except KeyboardInterrupt:
        console.out(f"interrupted; go on with: {again}")
        raise click.Abort from None
    _conclude(result, console, again, str(result.path) if mirror is None else mirror.url)


def progress_line(progress: Progress, metric: str, seconds: float, done_before: float = 0.0) -> str:
    """How far a sweep is, on one line.

    The time left is shown once a fifth of the rows is done, rounds of running trials included: the
    first rows also train what all of them share.

    Args:
        metric: Name of the metric whose best value is shown.
        seconds: Seconds since the sweep, or its resumption, began.
        done_before: `rows_done` of the progress when it began.

    >>> begun = [(10, 20), (5, 20)]
    >>> progress_line(Progress(rows=9, done=6, failed=1, rounds=begun, shared=4), "mae", 54.0)
    '6/9 rows done (4 shared) · 2 running after 5 to 10 of 20 rounds · 1 failed · 0:10 left'
    >>> progress_line(Progress(rows=9, done=9, tracked=(2, 5)), "accuracy_mean", 60.0)
    '9/9 rows done · 2 of 5 runs written for tracking'
    >>> progress_line(Progress(rows=9, done=6), "mae", 60.0, done_before=4)
    '6/9 rows done · 0 running · 1:30 left'
    >>> ending = [(20, 20)]  # the trial of a row that is done already
    >>> progress_line(Progress(rows=9, done=9, rounds=ending), "mae", 60.0)
    '9/9 rows done · 1 running after 20 of 20 rounds'
    """
    shared = f" ({progress.shared} shared)" if progress.shared else ""
    parts = [f"{progress.done}/{progress.rows} rows done{shared}"]
    if progress.tracked is None:
        parts.append(_running(progress.rounds))
    else:
        num_written, num_runs = progress.tracked
        parts.append(f"{num_written} of {counted(num_runs, 'run')} written for tracking")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.best is not None:
        parts.append(f"best {metric} {progress.best:.4f}")
    done = progress.rows_done
    waiting = progress.rows - progress.failed - done
    if done > done_before and done >= SHARE_BEFORE_ETA * progress.rows and waiting > 0:
        left = int(seconds * waiting / (done - done_before))
        parts.append(f"{left // 60}:{left % 60:02d} left")
    return " · ".join(parts)


def _running(rounds: Sequence[tuple[int, int]]) -> str:
    """How many trials run, and after how many of their rounds they are."""
    last, total = [t for t, _ in rounds], [num for _, num in rounds]
    if not any(last):
        return f"{len(rounds)} running"
    fewest = "" if min(last) == max(last) else f"{min(last)} to "
    up_to = "" if min(total) == max(total) else "up to "
    rounds_of_row = f"{up_to}{counted(max(total), 'round')}"
    return f"{len(rounds)} running after {fewest}{max(last)} of {rounds_of_row}"


@contextmanager
def _shown(console: Console, metric: str) -> Iterator[Callable[[Progress], None]]:
    """What to call with progress: a line that changes, or one more where there is no terminal."""
    begin = perf_counter()
    done_before, has_begun = 0.0, False
    last: list[tuple[float, Progress]] = []  # when it was printed, and what

    def line(progress: Progress) -> str:
        nonlocal done_before, has_begun
        if not has_begun:  # rounds of a trial that is resumed were done before
            done_before, has_begun = progress.rows_done, bool(progress.rounds)
        return progress_line(progress, metric, perf_counter() - begin, done_before)

    def add_line(progress: Progress) -> None:
        now = perf_counter()
        if not last or now > last[0][0] + LINE_EVERY_S or _is_news(last[0][1], progress):
            last[:] = [(now, progress)]
            console.out(line(progress))

    if not console.is_terminal:
        yield add_line
        return
    with Live(console=console, transient=True) as live:
        yield lambda progress: live.update(line(progress))


def _is_news(before: Progress, now: Progress) -> bool:
    """True if rows have ended since or the first run; rounds change too often for a line."""
    has_begun = bool(now.rounds) and not before.rounds
    return has_begun or replace(before, rounds=(), best=None) != replace(now, rounds=(), best=None)


def _conclude(result: SweepResult, console: Console, again: str, where: str) -> None:
    """Print counts, costs, the best configuration, failures, and what to type next."""
    report = result.report
    num_rows, unfinished = report["rows"], report["unfinished"]
    parts = [f"{report[name]} {name}" for name in STATUSES if report[name]]
    console.out(f"{counted(num_rows, 'row')}: {', '.join(parts)}")
    trained, naive = report["client_steps_trained"], report["client_steps_naive"]
    if not unfinished and report["ratio"]:
        console.out(
            f"{counted(trained, 'client step')} trained where {naive:,} would have been "
            f"({report['ratio']:.1f} times fewer)"
        )
    best = report["best"]
    if best is not None:
        is_benchmark = METHOD in best["sets"]
        if not is_benchmark:
            _show_best(report, console)
        make = ranking_sheet if is_benchmark else top_sheet
        console.print(to_rich(make(read_sweep(result.path))))
    elif report["done"]:
        console.out(
            f"nothing was chosen: no row has {report['metric']}; to choose by validation set "
            "split.validation=0.1, or name another metric of summary.json"
        )
    _show_failures(result, console)
    if unfinished:
        console.out(f"stopped; go on with: {again}")
    console.out(where)
    console.out(f"a page of it: flray report {shlex.quote(where)}")
    if report["failed"] == num_rows:
        raise ClientFailure(f"all {num_rows} rows failed: {result.table[ERROR].iloc[0]}")


def _show_best(report: Mapping[str, Any], console: Console) -> None:  # Any: JSON
    """Print the best configuration and what its numbers leave out."""
    best, metric = report["best"], report["metric"]
    sets = ", ".join(f"{key}={value}" for key, value in best["sets"].items())
    notes = []
    marks = ""
    if best[USES_GROUND_TRUTH]:
        marks += f" {GROUND_TRUTH}"
        notes.append(GROUND_TRUTH_NOTE)
    if best["missing_rows"]:
        marks += f" {INCOMPLETE}"
        notes.append(
            f"{INCOMPLETE} its rows {best['missing_rows']} failed or did not finish; no "
            "configuration is complete"
        )
    if best["left_out"]:
        notes.append(left_out_note(best["left_out"]))
    text = f"best {metric} {best[metric]:.4f}{marks} (rows {best['rows']}): {sets}"
    for line in (text, *notes):
        console.out(line)


def _show_failures(result: SweepResult, console: Console) -> None:
    """Print the most frequent errors, each with the first row that had it."""
    failed = result.table[result.table[ERROR].notna()]
    messages = Counter(zip(failed[STATUS], failed[ERROR], strict=True))
    for (status, message), count in messages.most_common(FAILURES_SHOWN):
        rows = failed.loc[(failed[STATUS] == status) & (failed[ERROR] == message), ROW].tolist()
        what = "failed" if status == "failed" else "not run, because the GPU failed"
        console.out(f"{count} {what} (row {rows[0]}): {message}", style="red")

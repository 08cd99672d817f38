"""A run on Ray as the terminal sees it: handed to a keeper, watched, stopped, left alone.

Whoever watches reads the run directory, so anybody may come and go.
"""

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

from flray.cli.keeper import LOG, STOP, take_keeper
from flray.config.experiment import Experiment
from flray.errors import ClientFailure, ExperimentError
from flray.records.command import COMMAND
from flray.records.run_directory import RunDirectory
from flray.runs.launch import plan_of

POLL_S = 0.3
FAILED = "failed: "  # how the last line of a keeper's log starts, by exit code
REFUSED = "error: "

RoundRow = dict[str, Any]  # Any: one value a column


class Detached(Exception):
    """The watcher leaves, the run goes on."""


def start_keeper(experiment: Experiment, out: Path, mirror: str | None) -> subprocess.Popen[str]:
    """Hand the experiment to a keeper, which goes on with what the directory holds."""
    request = {
        "experiment": experiment.plain,
        "out": str(out.absolute()),
        "working_folder": str(Path.cwd()),
        "mirror": mirror,
        "plan": asdict(plan_of(experiment, RunDirectory(out))),
        "threads": experiment.settings.execution.threads or 1,
    }
    out.mkdir(parents=True, exist_ok=True)
    process = take_keeper()
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # one that died says so by its exit code
        json.dump(request, pipe)
    return process


def watch(
    out: Path,
    is_running: Callable[[], bool],
    show: Callable[[RoundRow], None],
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> None:
    """Show each round of a run as it is recorded, until nobody runs it any more."""
    directory = RunDirectory(out)
    seen, told = len(directory.rows()), len(directory.plans())
    asked_to_stop = is_begun = False
    while True:
        try:
            running = is_running()
            for plan in directory.plans()[told:]:
                say(f"{'started again: ' if is_begun else ''}{plan or 'in process'}")
                told, is_begun = told + 1, True
            for row in directory.rows(seen):
                seen += 1  # first: an interrupt must not show a row twice
                show(row)
            if not running:
                return
            if should_stop() and not asked_to_stop:
                stop(out)
                asked_to_stop = True
            sleep(POLL_S)
        except KeyboardInterrupt:
            if _asked(say) == "stop":
                stop(out)
                say("stopping after the round in progress")


def _asked(say: Callable[[str], None]) -> str:
    say("Enter: stay · s and Enter: stop the run · Ctrl-C again: detach, the run goes on")
    try:
        return "stop" if input().strip().lower().startswith("s") else "stay"
    except (KeyboardInterrupt, EOFError):
        raise Detached from None


def stop(out: Path) -> None:
    """Ask the keeper of a run to end it after the round in progress."""
    (out / STOP).touch()  # a signal would meet Ray's own handler


def raise_what_the_keeper_said(process: subprocess.Popen[str], out: Path) -> None:
    """Turn the keeper's exit code and the end of its log into the error it stands for."""
    if process.returncode == 0:
        return
    log = out / LOG
    if not log.is_file() and process.stderr is not None:  # it ended before it knew of its log
        process.stderr.seek(0)
        log.write_text(process.stderr.read(), encoding="utf-8")
    last = log.read_text(errors="replace").strip().split("\n")[-1]
    if last.startswith(REFUSED):
        _remove_if_nothing_began(out)
        raise ExperimentError(last.removeprefix(REFUSED))
    if last.startswith(FAILED):
        raise ClientFailure(last.removeprefix(FAILED))
    ended = f"the run ended with exit code {process.returncode}"
    raise ClientFailure(f"{ended}{f' ({last})' if last else ''}; see {log}")


def _remove_if_nothing_began(out: Path) -> None:
    if not RunDirectory(out).holds_run() and {p.name for p in out.glob("*")} <= {LOG, COMMAND}:
        for name in (LOG, COMMAND):
            (out / name).unlink(missing_ok=True)
        out.rmdir()

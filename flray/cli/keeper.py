"""A run that outlives the terminal: a keeper process drives it, the terminal only watches.

The keeper is the Ray driver: it holds a local cluster, where one was started, and the lock of the
run directory. Whoever watches reads the run directory, so anybody may come and go.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

from flray.cli.drawing import draw_figures
from flray.cli.stopping import noticing_sigterm
from flray.config.build import plan_of, run_experiment
from flray.config.experiment import Experiment, parse_experiment
from flray.errors import ClientFailure, ExperimentError
from flray.records.mirror import Mirror
from flray.records.run_directory import COMMAND, RunDirectory
from flray.server.actor import Processes
from flray.server.loop import ignore
from flray.tracking.mirrors import tracked

POLL_S = 0.3
LOG = "server.log"
STOP = "stop.wish"
FAILED = "failed: "  # how the last line of a keeper's log starts, by exit code
REFUSED = "error: "

RoundRow = dict[str, Any]  # Any: one value a column


class Detached(Exception):
    """The watcher leaves, the run goes on."""


def keep(request: dict[str, Any], out: Path, processes: Processes) -> None:
    """Run the experiment of a request, until it is done or told to stop."""
    experiment = parse_experiment(request["experiment"])
    wish = out / STOP
    wish.unlink(missing_ok=True)
    try:
        with (
            noticing_sigterm(print) as is_ending,
            mirrored_rounds(request["mirror"]) as follow,
            tracked(experiment, out, follow, draw_figures) as on_round,
        ):
            run_experiment(
                experiment,
                out,
                request["resume"],
                on_round,
                lambda: is_ending() or wish.exists(),
                processes,
            )
    finally:
        wish.unlink(missing_ok=True)


@contextmanager
def mirrored_rounds(url: str | None) -> Iterator[Callable[[RoundRow], None]]:
    """What to call after each round, so that the URL gets a copy; it has everything in the end."""
    if url is None:
        yield ignore
        return
    mirror = Mirror(url)
    try:
        yield lambda _row: mirror.push_sometimes()
    finally:
        mirror.push()


def start_keeper(
    experiment: Experiment, out: Path, resume: bool, mirror: str | None
) -> subprocess.Popen[str]:
    plan = plan_of(experiment, RunDirectory(out))
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flray", "keep", str(out.absolute())]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with (out / LOG).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C is not for the keeper
            env={**os.environ, "PYTHONPATH": path},
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        request = {
            "experiment": experiment.plain,
            "resume": resume,
            "mirror": mirror,
            "plan": asdict(plan),
        }
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
    log = (out / LOG).read_text(errors="replace").strip() if (out / LOG).is_file() else ""
    last = log.split("\n")[-1]
    if not RunDirectory(out).holds_run() and {p.name for p in out.glob("*")} <= {LOG, COMMAND}:
        for name in (LOG, COMMAND):
            (out / name).unlink(missing_ok=True)
        out.rmdir()  # refused before anything was written
    if last.startswith(REFUSED):
        raise ExperimentError(last.removeprefix(REFUSED))
    if last.startswith(FAILED):
        raise ClientFailure(last.removeprefix(FAILED))
    raise ClientFailure(f"the run ended with exit code {process.returncode}; see {out / LOG}")

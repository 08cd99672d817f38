"""A run on Ray as the terminal sees it: handed to a keeper, watched, stopped, left alone.

Whoever watches reads the run directory only, so several may watch, come and go.
"""

import pickle
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep

from flray.config.experiment import Experiment
from flray.errors import ClientFailure, ExperimentError
from flray.files import is_forbidden
from flray.records.command import COMMAND
from flray.records.lock import check_free
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import build_server, prepare_in
from flray.runs.conduct import ask_to_stop
from flray.runs.keeper import LOG, Request, take_keeper
from flray.server.evaluation import RoundRow
from flray.server.summary import checked_summary

POLL_S = 0.3
FAILED = "failed: "  # how the last line of a keeper's log starts, by exit code
REFUSED = "error: "


class Detached(Exception):
    """The watcher leaves, the run goes on; the message is a line for the user on how to return."""


@dataclass(frozen=True)
class Watcher:
    """A terminal that watches a run: shows its rounds and remarks, and may ask it to stop.

    `flray run` watches the keeper that it has started, `flray attach` the holder of the lock.
    """

    show: Callable[[RoundRow], None]
    say: Callable[[str], None]
    should_stop: Callable[[], bool] = lambda: False
    on_start: Callable[[], None] = lambda: None  # called when a keeper has got its request

    def watch(self, out: Path, is_running: Callable[[], bool]) -> None:
        """Show each round of a run as it is recorded, until nobody runs it any more.

        Rounds that were recorded before are not shown. Ctrl-C asks whether to stay, to stop the run
        or to leave it.

        Args:
            out: The run directory.
            is_running: Asked several times a second; False ends the watch.

        Raises:
            Detached: The user leaves the run alone.
        """
        directory = RunDirectory(out)
        num_rows, num_plans = len(directory.rows()), len(directory.plans())
        is_asked = is_begun = False
        while True:
            try:
                running = is_running()
                for plan in directory.plans()[num_plans:]:
                    self.say(f"{'started again: ' if is_begun else ''}{plan or 'in process'}")
                    num_plans, is_begun = num_plans + 1, True
                for row in directory.rows(num_rows):
                    num_rows += 1  # first: an interrupt must not show a row twice
                    self.show(row)
                if not running:
                    return
                if self.should_stop() and not is_asked:
                    ask_to_stop(out)
                    is_asked = True
                sleep(POLL_S)
            except KeyboardInterrupt:
                if self._chooses_to_stop(out):
                    self._stop(out)

    def _chooses_to_stop(self, out: Path) -> bool:
        """Ask the user; True to stop the run, False to stay."""
        self.say("Enter: stay · s and Enter: stop the run · Ctrl-C again: detach, the run goes on")
        try:
            return input().strip().lower().startswith("s")
        except (KeyboardInterrupt, EOFError):
            attach = f"flray attach {shlex.quote(str(out))}"
            raise Detached(f"detached; the run goes on; watch it with: {attach}") from None

    def _stop(self, out: Path) -> None:
        """Ask the run to stop; says so where the user may only read its folder."""
        try:
            ask_to_stop(out)
        except OSError as error:
            if not is_forbidden(error):
                raise
            who = "it goes on, ask whoever started it"
            self.say(f"cannot stop the run: {out} may not be written ({error.strerror}); {who}")
        else:
            self.say("stopping after the round in progress")


def run_kept(
    experiment: Experiment, out: Path, resume: bool, watcher: Watcher, mirror: str | None = None
) -> RoundRow | None:
    """Run what is left of an experiment on Ray in a keeper; its summary, or None if stopped.

    A keeper that is killed is replaced, a few times.

    Args:
        experiment: An experiment with executor ray.
        out: The run directory.
        resume: Go on where the run in `out` stopped; False: `out` must not hold a run.
        watcher: The terminal that shows the run.
        mirror: A URL that the keeper copies the folder to.

    Raises:
        Detached: The watcher leaves; the run goes on.
        ExperimentError: The run was refused.
        ClientFailure: The run failed, or its keeper did.
    """
    from flray.server.actor import MOST_RESTARTS  # imports Ray

    directory = RunDirectory(out)
    (directory.check_resume if resume else directory.check_start)(experiment.plain)
    check_free(out)
    for restart in range(MOST_RESTARTS + 1):
        process = start_keeper(experiment, out, mirror)
        watcher.on_start()
        watcher.watch(out, lambda: process.poll() is None)  # noqa: B023
        if process.returncode != -signal.SIGKILL or watcher.should_stop():
            break
        if restart < MOST_RESTARTS:
            watcher.say("the keeper was killed: going on from the last checkpoint")
    raise_error_of(process, out)
    return checked_summary(directory)


def start_keeper(experiment: Experiment, out: Path, mirror: str | None) -> subprocess.Popen[bytes]:
    """Deal the data and hand the run to a keeper, which goes on with what the directory holds.

    Returns the process of the keeper as soon as it has its request; it does not end with this one.
    """
    from flray.server.actor import pickled  # imports Ray

    experiment, parts = prepare_in(RunDirectory(out), experiment)
    assert parts.plan is not None  # executor ray has a plan
    is_tracked = experiment.plain["tracking"]["name"] != "none"
    request = Request(
        out=out.absolute(),
        working_folder=Path.cwd(),
        plan=parts.plan,
        threads=parts.payload.settings.threads,
        build=pickled(partial(build_server, experiment, parts)),
        mirror=mirror,
        experiment=dict(experiment.plain) if is_tracked else None,
    )
    out.mkdir(parents=True, exist_ok=True)
    process = take_keeper()
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # its exit code tells if it died
        pickle.dump(request, pipe)
    return process


def raise_error_of(process: subprocess.Popen[bytes], out: Path) -> None:
    """Raise the error of a keeper that failed; does nothing for one that ended well.

    The last line of its log tells a wrong experiment (which leaves no folder) from a failed run.
    """
    if process.returncode == 0:
        return
    log = out / LOG
    if not log.is_file() and process.stderr is not None:  # it ended before it knew of its log
        process.stderr.seek(0)
        log.write_bytes(process.stderr.read())
    last = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
    if last.startswith(REFUSED):
        _remove_if_nothing_began(out)
        raise ExperimentError(last.removeprefix(REFUSED))
    if last.startswith(FAILED):
        raise ClientFailure(last.removeprefix(FAILED))
    ended = f"the run ended with exit code {process.returncode}"
    raise ClientFailure(f"{ended}{f' ({last})' if last else ''}; see {log}")


def _remove_if_nothing_began(out: Path) -> None:
    """Remove the folder of a run that was refused: a log and a command are no run."""
    if not RunDirectory(out).holds_run() and {p.name for p in out.glob("*")} <= {LOG, COMMAND}:
        for name in (LOG, COMMAND):
            (out / name).unlink(missing_ok=True)
        out.rmdir()

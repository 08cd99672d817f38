"""The keeper of a run on Ray: a process that drives it and outlives the terminal.

The keeper is the Ray driver: it holds a local cluster, if one was started, and the lock of the run
directory. It is started before the terminal has imported torch, connects to Ray meanwhile, and
waits for its request on standard input. The terminal deals the data; the keeper passes them on to
the server actor without unpickling them and never imports torch, unless the run is tracked.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from yaml import YAMLError

from flray.config.overrides import override
from flray.config.reading import parse_yaml, read_text
from flray.config.shipped import require_file
from flray.errors import ExperimentError

if TYPE_CHECKING:
    from flray.execution.resources import ActorPlan
    from flray.runs.conduct import OnRound, ShouldStop
    from flray.server.actor import Processes

LOG = "server.log"
COMMAND = [sys.executable, "-P", "-m", "flray", "keep"]  # -P: the current folder is not searched

_waiting: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Request:
    """What a keeper gets from the terminal, pickled: a prepared run and where to record it.

    Data and module are inside `build`, which the keeper does not unpickle.
    """

    out: Path
    working_folder: Path  # current folder of the terminal
    plan: "ActorPlan"
    threads: int  # Threads per client actor
    build: bytes  # the function that builds the server, pickled with its data
    mirror: str | None = None  # URL at which the folder of the command has a copy
    experiment: dict[str, Any] | None = None  # Any: YAML; None: nothing is tracked


def start_early(names: Sequence[str], overrides: Sequence[str]) -> None:
    """Start a keeper if one of these experiments is to run on Ray; `take_keeper` returns it.

    A file that does not exist is refused, before anything takes seconds. A keeper that nobody takes
    ends with this process, which closes its standard input.
    """
    files = [require_file(name) for name in names]
    if any(_is_on_ray(file, overrides) for file in files):
        _waiting.append(_start())


def _is_on_ray(file: Path, overrides: Sequence[str]) -> bool:
    """True if a file names the executor ray; False also for one that cannot be read."""
    try:
        execution = override(parse_yaml(read_text(file)) or {}, overrides).get("execution")
    except (YAMLError, ExperimentError, AttributeError):
        return False  # the command reports it when it reads the file again
    return isinstance(execution, dict) and execution.get("executor") == "ray"


def take_keeper() -> subprocess.Popen[bytes]:
    """A keeper that waits for its request, or a new one; each is returned once.

    The caller pickles a `Request` to its standard input and closes that.
    """
    return _waiting.pop() if _waiting else _start()


def _start() -> subprocess.Popen[bytes]:
    """Start a keeper that finds the same modules as this process."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # What it prints until it knows where its log is; read if it fails before.
    printed = TemporaryFile("w+b")  # noqa: SIM115
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=printed,
        start_new_session=True,  # the terminal's Ctrl-C is not for the keeper
        env={**os.environ, "PYTHONPATH": path},
    )
    process.stderr = printed
    return process


def keep(draw: Callable[[Path], Sequence[Path]]) -> None:
    """Wait for a request on standard input and drive its run, until it is done or stopped.

    Connects to Ray first. Without a request it ends, because nobody needs it. Errors end up in the
    log of the run, where the terminal finds them (`watching.raise_error_of`).

    Args:
        draw: the figures of a run directory, which W&B gets.
    """
    from flray.execution.cluster import connected
    from flray.server.actor import start_processes

    with ExitStack() as connection:
        refused: ExperimentError | None = None
        try:
            connection.enter_context(connected())
        except ExperimentError as error:
            refused = error
        try:  # what the terminal sends that started this process
            request: Request = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            return  # nobody needs this keeper, or the terminal was interrupted
        os.chdir(request.working_folder)
        _write_into(request.out / LOG)
        if refused is not None:
            raise refused
        processes = start_processes(request.plan, request.threads, connection.pop_all())
    try:
        drive(request, processes, draw)
    finally:
        processes.end()


def _write_into(log: Path) -> None:
    """Redirect what this process and its libraries print to the log."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def drive(request: Request, processes: "Processes", draw: Callable[[Path], Sequence[Path]]) -> None:
    """Conduct the run of a request on processes that were started for it.

    SIGTERM ends it after the round in progress. A mirror gets records now and then, and all of them
    in the end.

    Args:
        processes: Server and client actors of the run, which are ended.
        draw: Draws the figures of a run directory for W&B.
    """
    from flray.records.mirror import Mirror
    from flray.runs.conduct import Monitor, conduct, noticing_sigterm
    from flray.server import actor

    def compute(on_round: "OnRound", should_stop: "ShouldStop") -> bool:
        run = actor.Run(request.build, request.out, on_round, should_stop)
        return actor.run_on_actors(run, processes)

    experiment = None
    if request.experiment is not None:
        from flray.config.experiment import parse_experiment

        experiment = parse_experiment(request.experiment)
    mirror = None if request.mirror is None else Mirror(request.mirror)
    copy = (lambda _row: mirror.push_sometimes()) if mirror else (lambda _row: None)
    try:
        with noticing_sigterm(print) as is_ending:
            conduct(compute, request.out, Monitor(copy, is_ending, draw), experiment)
    finally:
        if mirror is not None:
            mirror.push()

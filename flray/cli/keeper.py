"""The keeper of a run on Ray: a process that drives it and outlives the terminal.

The keeper is the Ray driver: it holds a local cluster, where one was started, and the lock of the
run directory. It is started before the terminal has imported torch, connects to Ray meanwhile, and
waits for its request on standard input. Until a round is there it imports nothing heavy itself.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from yaml import YAMLError

from flray.cli.arguments import files_and_overrides
from flray.config.overrides import override
from flray.config.reading import parse_yaml, read_text
from flray.config.shipped import require_file
from flray.errors import ExperimentError

if TYPE_CHECKING:
    from flray.records.run_directory import RunDirectory
    from flray.server.actor import Processes
    from flray.server.evaluation import RoundRow
    from flray.server.loop import Server

LOG = "server.log"
COMMAND = [sys.executable, "-P", "-m", "flray", "keep"]  # -P: the current folder is not searched
STOP = "stop.wish"

Request = dict[str, Any]  # Any: JSON
_waiting: list[subprocess.Popen[str]] = []


def start_early(arguments: Sequence[str]) -> None:
    """Start a keeper if an experiment of `flray run` is to run on Ray; who needs it takes it.

    A file that is not there is refused here, before anything takes seconds.
    """
    names, overrides = files_and_overrides(arguments)
    files = [require_file(name) for name in names]
    if any(_is_on_ray(file, overrides) for file in files):
        _waiting.append(_start())


def _is_on_ray(file: Path, overrides: Sequence[str]) -> bool:
    """True if a file names the executor ray; False if it cannot be read, which is said later."""
    try:
        execution = override(parse_yaml(read_text(file)) or {}, overrides).get("execution")
    except (YAMLError, ExperimentError, AttributeError):
        return False
    return isinstance(execution, dict) and execution.get("executor") == "ray"


def take_keeper() -> subprocess.Popen[str]:
    """A keeper that waits for its request, or a new one."""
    return _waiting.pop() if _waiting else _start()


def dismiss() -> None:
    """Let the keepers end that nobody took."""
    while _waiting:
        pipe = _waiting.pop().stdin
        assert pipe is not None
        pipe.close()


def _start() -> subprocess.Popen[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # What it prints until it is told where its log is; whoever asks why it failed reads it.
    printed = TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=printed,
        text=True,
        start_new_session=True,  # the terminal's Ctrl-C is not for the keeper
        env={**os.environ, "PYTHONPATH": path},
    )
    process.stderr = printed
    return process


def keep() -> None:
    """Run the experiment of the request, until it is done or told to stop."""
    from flray.execution.cluster import connected
    from flray.execution.resources import ActorPlan
    from flray.server.actor import start_processes

    with ExitStack() as connection:
        refused: ExperimentError | None = None
        try:
            connection.enter_context(connected())
        except ExperimentError as error:
            refused = error
        text = sys.stdin.read()
        if not text:
            return  # nobody needs this keeper
        request: Request = json.loads(text)
        os.chdir(request["working_folder"])
        _write_into(Path(request["out"]) / LOG)
        if refused is not None:
            raise refused
        plan, threads = ActorPlan.from_plain(request["plan"]), request["threads"]
        processes = start_processes(plan, threads, connection.pop_all())
    try:
        run(request, processes)
    finally:
        processes.end()


def _write_into(log: Path) -> None:
    """Let what this process prints, and what its libraries print, go to the log."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def run(request: Request, processes: "Processes") -> None:
    """Drive the run of a request on processes that were started for it."""
    from flray.cli.stopping import noticing_sigterm
    from flray.records.lock import locked
    from flray.server import actor

    out = Path(request["out"])
    wish = out / STOP
    wish.unlink(missing_ok=True)
    build = partial(build_server, request["experiment"])
    try:
        with (
            noticing_sigterm(print) as is_ending,
            _followed(request) as on_round,
            locked(out),
        ):
            should_stop = lambda: is_ending() or wish.exists()  # noqa: E731
            actor.run_on_actors(actor.Run(build, out, on_round, should_stop), processes)
    finally:
        wish.unlink(missing_ok=True)


def build_server(plain: Request, directory: "RunDirectory", *others: Any) -> "Server":
    """As `runs.assemble` does, from an experiment as it stands in YAML."""
    from flray.config.experiment import parse_experiment
    from flray.runs import assemble

    return assemble.build_server(parse_experiment(plain), directory, *others)


@contextmanager
def _followed(request: Request) -> "Iterator[Callable[[RoundRow], None]]":
    """What to call after each round; W&B and a URL hear of it from the first on."""
    if request["mirror"] is None and request["experiment"]["tracking"]["name"] == "none":
        yield lambda _row: None  # and nothing heavy is ever imported here
        return
    with ExitStack() as stack:
        followers: list[Callable[[RoundRow], None]] = []

        def on_round(row: "RoundRow") -> None:
            if not followers:
                followers.append(stack.enter_context(_mirrored(request)))
            followers[0](row)

        yield on_round
        if not followers:
            stack.enter_context(_mirrored(request))


@contextmanager
def _mirrored(request: Request) -> "Iterator[Callable[[RoundRow], None]]":
    from flray.cli.drawing import draw_figures
    from flray.config.experiment import parse_experiment
    from flray.tracking.mirrors import tracked

    experiment, out = parse_experiment(request["experiment"]), Path(request["out"])
    with (
        _copied(request["mirror"]) as copy,
        tracked(experiment, out, copy, draw_figures) as on_round,
    ):
        yield on_round


@contextmanager
def _copied(url: str | None) -> "Iterator[Callable[[RoundRow], None]]":
    """What to call after each round, so that the URL gets a copy; it has everything in the end."""
    from flray.records.mirror import Mirror
    from flray.server.loop import ignore

    if url is None:
        yield ignore
        return
    mirror = Mirror(url)
    try:
        yield lambda _row: mirror.push_sometimes()
    finally:
        mirror.push()

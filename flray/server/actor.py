"""The server as a Ray actor: it owns the loop; the driver asks how far it is.

Nothing heavy is imported here, so that all actors can be started before the driver has imported
torch and Lightning itself.
"""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from flray.errors import ClientFailure, ExperimentError, ServerLost
from flray.execution.client_actor import start_client_actor
from flray.execution.cluster import actor_environment, connected
from flray.execution.nodes import wait_for_resources
from flray.execution.resources import ActorPlan
from flray.records.changes import Changes, Marks, changes_since

if TYPE_CHECKING:
    from flray.records.run_directory import RunDirectory
    from flray.server.evaluation import RoundRow
    from flray.server.loop import Server

POLL_S = 0.2
START_TIMEOUT_S = 1800.0  # a machine may have to be started for it
MOST_RESTARTS = 3  # of a run that loses its server

# Where to write, what to do with a round's row, when to stop, and client actors without data yet.
BuildServer = Callable[
    ["RunDirectory", "Callable[[RoundRow], None]", Callable[[], bool], Sequence[Any] | None],
    "Server",
]

_log = logging.getLogger(__name__)


class ServerActor:
    """Runs one experiment in a thread of its own and answers questions in others."""

    def __init__(self) -> None:
        self.rows: list[RoundRow] = []
        self.stopping = False
        self.copy: Path | None = None  # of the run directory, where the driver's is out of reach
        self.seen: Marks = {}

    def load(self) -> None:
        """Import what a server needs."""
        import flray.server.loop  # noqa: F401

    def node(self) -> str:
        """The node it is on."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def take(self, held: Changes) -> None:
        """Work in a folder of this machine, with what the driver's run directory holds."""
        self.copy = Path(mkdtemp(prefix="flray-server-")) / "run"
        held.apply_to(self.copy)
        _, self.seen = changes_since(self.copy, {})

    def changes(self) -> Changes:
        """What has changed in that folder since this was asked last."""
        assert self.copy is not None
        found, self.seen = changes_since(self.copy, self.seen)
        return found

    def leave(self) -> None:
        """Remove that folder."""
        if self.copy is not None:
            shutil.rmtree(self.copy.parent, ignore_errors=True)

    def run(
        self, build: BuildServer, folder: Path, clients: Sequence[Any] | None, working_folder: Path
    ) -> bool:
        from flray.records.run_directory import RunDirectory

        with suppress(OSError):  # files of an experiment may be named relative to it
            os.chdir(working_folder)
        directory = RunDirectory(self.copy or folder)
        server = build(directory, self.rows.append, lambda: self.stopping, clients)
        try:
            return server.run()
        finally:
            server.fed.executor.close()

    def rows_since(self, seen: int) -> "list[RoundRow]":
        return self.rows[seen:]

    def stop(self) -> None:
        """Stop after the round in progress."""
        self.stopping = True


@dataclass(frozen=True)
class Processes:
    """Actors that were started together and import what they need on their own."""

    plan: ActorPlan
    threads: int  # of each client actor
    server: Any  # actor handle
    clients: list[Any]
    connection: ExitStack  # to Ray, which they end with

    def end(self) -> None:
        """Kill them all and leave a cluster that was started for them; more than once is one."""
        self.connection.close()


def start_processes(
    plan: ActorPlan, threads: int, connection: ExitStack | None = None
) -> Processes:
    """Start a server, on whatever node has room, and the client actors.

    Args:
        connection: to Ray, which ends with them; None: a new one.
    """
    with connection or ExitStack() as connection:
        connection.enter_context(connected())
        wait_for_resources(plan)
        server: Any = (
            ray.remote(ServerActor)
            .options(
                **plan.server.options,
                max_concurrency=4,
                runtime_env=actor_environment(threads=1),
                scheduling_strategy="DEFAULT",  # near the driver, where there is room
            )
            .remote()
        )
        clients = [start_client_actor(plan.per_actor, threads) for _ in range(plan.num_actors)]
        connection.callback(_kill, [server, *clients])
        server.load.remote()
        return Processes(plan, threads, server, clients, connection.pop_all())


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        with suppress(RayError, ConnectionError):  # where the whole node is gone
            ray.kill(actor)


@dataclass(frozen=True)
class Run:
    """What the driver knows of a run: how to build its server, and whom to tell of its rounds."""

    build: BuildServer
    folder: Path  # of the run, on the driver's machine
    on_round: "Callable[[RoundRow], None]"
    should_stop: Callable[[], bool]


def run_on_actors(run: Run, processes: Processes) -> bool:
    """Run a server as an actor; True when the run is done.

    A run that loses its server goes on from the last checkpoint with new processes, a few times.
    """
    for restart in range(1, MOST_RESTARTS + 1):
        try:
            return run_in_actor(run, processes)
        except ServerLost as lost:
            told = f"started again, {restart} of at most {MOST_RESTARTS} times"
            _log.warning("%s: %s", lost.args[0], told)
        processes = start_processes(processes.plan, processes.threads)
    return run_in_actor(run, processes)


def run_in_actor(run: Run, processes: Processes) -> bool:
    """Run a server as an actor and end all processes; True when the run is done."""
    server = processes.server
    try:
        is_here = _node_of(server) == ray.get_runtime_context().get_node_id()
        if not is_here:
            held, _ = changes_since(run.folder, {})
            ray.get(server.take.remote(held))
        finished = server.run.remote(run.build, run.folder, processes.clients, Path.cwd())
        _follow(server, finished, run, _nothing if is_here else partial(_fetch, server, run.folder))
        is_done = bool(ray.get(finished))
        ray.get(server.leave.remote())
        return is_done
    except RayTaskError as error:
        if isinstance(error.cause, ExperimentError | ClientFailure):
            raise error.cause from None
        raise
    except (RayActorError, RaySystemError, ConnectionError) as error:
        reason = str(error).strip().split("\n")[-1]
        raise ServerLost(f"the server actor died ({reason}); --resume goes on") from error
    finally:
        processes.end()


def _node_of(server: Any) -> str:
    try:
        found: str = ray.get(server.node.remote(), timeout=START_TIMEOUT_S)
    except GetTimeoutError as error:
        raise ExperimentError(
            f"the server actor was not started within {START_TIMEOUT_S:.0f} s: no node has room "
            "for it; lower execution.server.memory_gb or execution.server.num_cpus"
        ) from error
    return found


def _follow(server: Any, finished: Any, run: Run, fetch: Callable[[], None]) -> None:
    seen = 0
    while True:
        ended, _ = ray.wait([finished], timeout=POLL_S)
        rows: list[dict[str, Any]] = ray.get(server.rows_since.remote(seen))
        if rows or ended:
            fetch()
        for row in rows:
            run.on_round(row)
        seen += len(rows)
        if ended:
            return
        if run.should_stop():
            ray.get(server.stop.remote())


def _nothing() -> None:
    """The server writes into the driver's own folder."""


def _fetch(server: Any, folder: Path) -> None:
    """Copy what the server has written on another machine."""
    changes: Changes = ray.get(server.changes.remote())
    changes.apply_to(folder)

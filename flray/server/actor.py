"""The server as a Ray actor, and the driver that starts it, follows it and starts it again.

Nothing heavy is imported here, so that a driver can start all actors before it has imported torch
and Lightning, or without ever doing so.
"""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
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
MOST_RESTARTS = 3  # restarts of a run whose server is lost

# Builds the server of a run in its directory, over client actors that have no data yet.
BuildServer = Callable[["RunDirectory", Sequence[Any] | None], "Server"]  # Any: actor handles

_log = logging.getLogger(__name__)


def pickled(build: BuildServer) -> bytes:
    """The function with all data that it holds, as a driver sends it to a server actor.

    The driver may keep the bytes and send them again without importing what is in them.
    """
    data: bytes = cloudpickle.dumps(build)  # type: ignore[no-untyped-call]  # ray's own
    return data


class ServerActor:
    """Runs one experiment in a thread of its own and answers questions in others.

    The driver calls `receive`, then `run`, and asks for new rows meanwhile. If the actor is on
    another machine, `take` gives it the records so far and `changes` returns what it has written.
    Everything that the actor knows is also in the run directory, so that a new actor can take its
    place.
    """

    def __init__(self) -> None:
        self.rows: list[RoundRow] = []
        self.stopping = False
        self.copy: Path | None = None  # copy of the run directory on another machine
        self.seen: Marks = {}
        self.build: BuildServer | None = None

    def node(self) -> str:
        """The id of the node it is on; answers as soon as the actor has started."""
        return ray.get_runtime_context().get_node_id()

    def receive(self, build: bytes) -> None:
        """Unpickle the function that builds the server, which imports what the server needs."""
        self.build = cloudpickle.loads(build)

    def take(self, records: Changes) -> None:
        """Work in a folder of this machine, with the records of the driver's run directory.

        Call it before `run`.
        """
        self.copy = Path(mkdtemp(prefix="flray-server-")) / "run"
        records.apply_to(self.copy)
        _, self.seen = changes_since(self.copy, {})

    def changes(self) -> Changes:
        """What has changed in that folder since the last call; the driver applies it to its own."""
        assert self.copy is not None
        changes, self.seen = changes_since(self.copy, self.seen)
        return changes

    def leave(self) -> None:
        """Remove that folder; the driver has fetched all of its changes."""
        if self.copy is not None:
            shutil.rmtree(self.copy.parent, ignore_errors=True)

    def run(self, folder: Path, clients: Sequence[Any] | None, working_folder: Path) -> bool:
        """Run all rounds; True when the run is done, False when it was stopped.

        Args:
            folder: The run directory; not used if `take` has given the actor a copy.
            clients: Handles of client actors without data; None: the server starts what it needs.
            working_folder: Current folder of the driver; files of an experiment may be named
                relative to it. Ignored on a machine that does not have it.
        """
        from flray.records.run_directory import RunDirectory

        with suppress(OSError):
            os.chdir(working_folder)
        assert self.build is not None
        server = self.build(RunDirectory(self.copy or folder), clients)
        try:
            heard = replace(server, on_round=self.rows.append, should_stop=lambda: self.stopping)
            return heard.run()
        finally:
            server.fed.executor.close()

    def rows_since(self, seen: int) -> "list[RoundRow]":
        """The rows of the rounds after the first `seen` that this actor has computed."""
        return self.rows[seen:]

    def stop(self) -> None:
        """Stop after the round in progress; returns at once."""
        self.stopping = True


@dataclass(frozen=True)
class Processes:
    """Actors that were started together and import what they need on their own.

    `run_on_actors` takes them over and ends them.
    """

    plan: ActorPlan
    threads: int  # Threads per client actor
    server: Any  # actor handle
    clients: list[Any]
    connection: ExitStack  # connection to Ray; the actors end with it

    def end(self) -> None:
        """Kill all actors and leave a cluster that was started for them; may be called again."""
        self.connection.close()


def start_processes(
    plan: ActorPlan, threads: int, connection: ExitStack | None = None
) -> Processes:
    """Start a server, on any node with room, and the client actors.

    Returns at once: actors import what they need while the driver goes on.

    Args:
        plan: What server and client actors ask of the cluster.
        threads: Threads per client actor.
        connection: Holds the connection to Ray, which ends with the actors; None: a new one.

    Raises:
        ExperimentError: The cluster does not have the resources.
    """
    with connection or ExitStack() as connection:
        connection.enter_context(connected())
        wait_for_resources(plan)
        actor_class = ray.remote(ServerActor).options(
            **plan.server.options,
            max_concurrency=4,
            runtime_env=actor_environment(threads=1),
            scheduling_strategy="DEFAULT",  # near the driver if there is room
        )
        server: Any = actor_class.remote()
        clients = [start_client_actor(plan.per_actor, threads) for _ in range(plan.num_actors)]
        connection.callback(_kill, [server, *clients])
        return Processes(plan, threads, server, clients, connection.pop_all())


def _kill(actors: Sequence[Any]) -> None:
    """Kill actors, some of which may be lost already."""
    for actor in actors:
        with suppress(RayError, ConnectionError):  # if the whole node is gone
            ray.kill(actor)


@dataclass(frozen=True)
class Run:
    """A run as its driver sees it: how to build its server, and who hears of its rounds.

    `on_round` and `should_stop` are called in the driver's process.
    """

    build: bytes  # a `BuildServer`, pickled
    folder: Path  # run directory on the driver's machine
    on_round: "Callable[[RoundRow], None]"
    should_stop: Callable[[], bool]


def run_on_actors(run: Run, processes: Processes) -> bool:
    """Run a server as an actor; True when the run is done, False when it was stopped.

    Ends the processes. A run that loses its server goes on from the last checkpoint with new
    processes, at most `MOST_RESTARTS` times, and ends in the same bits.

    Raises:
        ExperimentError: The experiment was refused.
        ClientFailure: A client failed.
        ServerLost: The server died too often; --resume goes on.
    """
    for restart in range(1, MOST_RESTARTS + 1):
        try:
            return run_in_actor(run, processes)
        except ServerLost as lost:
            message = "%s: started again, %d of at most %d times"
            _log.warning(message, lost.args[0], restart, MOST_RESTARTS)
        processes = start_processes(processes.plan, processes.threads)
    return run_in_actor(run, processes)


def run_in_actor(run: Run, processes: Processes) -> bool:
    """Run a server as an actor and end all processes; True when the run is done.

    Raises:
        ExperimentError: The experiment was refused.
        ClientFailure: A client failed.
        ServerLost: The process or the node of the server died.
    """
    server = processes.server
    try:
        is_here = _node_of(server) == ray.get_runtime_context().get_node_id()
        if not is_here:
            records, _ = changes_since(run.folder, {})
            ray.get(server.take.remote(records))
        ray.get(server.receive.remote(run.build))
        finished = server.run.remote(run.folder, processes.clients, Path.cwd())
        _follow(server, finished, run, is_here)
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
    """The node of a server actor, once it has started."""
    try:
        node_id: str = ray.get(server.node.remote(), timeout=START_TIMEOUT_S)
    except GetTimeoutError as error:
        raise ExperimentError(
            f"the server actor was not started within {START_TIMEOUT_S:.0f} s: no node has room "
            "for it; lower execution.server.memory_gb or execution.server.num_cpus"
        ) from error
    return node_id


def _follow(server: Any, finished: Any, run: Run, is_here: bool) -> None:
    """Report rounds until the server has finished, and fetch what it writes on another machine."""
    seen = 0
    while True:
        ended, _ = ray.wait([finished], timeout=POLL_S)
        rows: list[dict[str, Any]] = ray.get(server.rows_since.remote(seen))
        if (rows or ended) and not is_here:
            changes: Changes = ray.get(server.changes.remote())
            changes.apply_to(run.folder)
        for row in rows:
            run.on_round(row)
        seen += len(rows)
        if ended:
            return
        if run.should_stop():
            ray.get(server.stop.remote())

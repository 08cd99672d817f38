"""The server as a Ray actor: it owns the loop; the driver asks how far it is.

Nothing heavy is imported here, so that all actors can be started before the driver has imported
torch and Lightning itself.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flray.errors import ClientFailure, ExperimentError, ServerLost
from flray.execution.client_actor import start_client_actors
from flray.execution.cluster import actor_environment
from flray.execution.resources import Actors

if TYPE_CHECKING:
    from flray.server.evaluation import RoundRow
    from flray.server.loop import Server

POLL_S = 0.2

# What to do with a round's row, when to stop, and client actors that have no data yet.
BuildServer = Callable[
    ["Callable[[RoundRow], None]", Callable[[], bool], Sequence[Any] | None], "Server"
]


class ServerActor:
    """Runs one experiment in a thread of its own and answers questions in others."""

    def __init__(self) -> None:
        self.rows: list[RoundRow] = []
        self.stopping = False

    def load(self) -> None:
        """Import what a server needs."""
        import flray.server.loop  # noqa: F401

    def run(self, build: BuildServer, clients: Sequence[Any] | None) -> bool:
        server = build(self.rows.append, lambda: self.stopping, clients)
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

    server: Any  # actor handle
    clients: list[Any] | None  # None: how many there will be follows from the data

    def end(self) -> None:
        for actor in [self.server, *(self.clients or [])]:
            ray.kill(actor)


def start_processes(actors: Actors, threads: int) -> Processes:
    """A server on this node, where the run directory is, and the client actors asked for."""
    clients = start_client_actors(actors, threads)
    here = ray.get_runtime_context().get_node_id()
    server: Any = (
        ray.remote(ServerActor)
        .options(
            num_cpus=0,  # the clients' actors do the work
            max_concurrency=3,
            runtime_env=actor_environment(threads=1),
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote()
    )
    server.load.remote()
    return Processes(server, clients)


def run_in_actor(
    build: BuildServer,
    processes: Processes,
    on_round: "Callable[[RoundRow], None]",
    should_stop: Callable[[], bool],
) -> bool:
    """Run a server as an actor and end all processes; True when the run is done."""
    finished = processes.server.run.remote(build, processes.clients)
    try:
        _follow(processes.server, finished, on_round, should_stop)
        return bool(ray.get(finished))
    except RayTaskError as error:
        if isinstance(error.cause, ExperimentError | ClientFailure):
            raise error.cause from None
        raise
    except (RayActorError, RaySystemError, ConnectionError) as error:
        reason = str(error).strip().split("\n")[-1]
        raise ServerLost(f"the server actor died ({reason}); --resume goes on") from error
    finally:
        with suppress(RayError, ConnectionError):  # where the whole node is gone
            processes.end()


def _follow(
    actor: Any,
    finished: Any,
    on_round: "Callable[[RoundRow], None]",
    should_stop: Callable[[], bool],
) -> None:
    seen = 0
    while True:
        ended, _ = ray.wait([finished], timeout=POLL_S)
        rows: list[dict[str, Any]] = ray.get(actor.rows_since.remote(seen))
        for row in rows:
            on_round(row)
        seen += len(rows)
        if ended:
            return
        if should_stop():
            ray.get(actor.stop.remote())

"""The server as a Ray actor: it owns the loop; the driver asks how far it is."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flray.errors import ClientFailure, ExperimentError, ServerLost
from flray.execution.cluster import actor_environment
from flray.server.evaluation import Row
from flray.server.loop import Server

POLL_S = 0.2

BuildServer = Callable[[Callable[[Row], None], Callable[[], bool]], Server]


class ServerActor:
    """Runs one experiment in a thread of its own and answers questions in others."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.stopping = False

    def run(self, build: BuildServer) -> bool:
        server = build(self.rows.append, lambda: self.stopping)
        try:
            return server.run()
        finally:
            server.fed.executor.close()

    def rows_since(self, seen: int) -> list[Row]:
        return self.rows[seen:]

    def stop(self) -> None:
        """Stop after the round in progress."""
        self.stopping = True


def run_in_actor(
    build: BuildServer, on_round: Callable[[Row], None], should_stop: Callable[[], bool]
) -> bool:
    """Run a server as an actor on this node, where its run directory is; True when it is done."""
    here = ray.get_runtime_context().get_node_id()
    actor: Any = (
        ray.remote(ServerActor)
        .options(
            num_cpus=0,  # the clients' actors do the work
            max_concurrency=3,
            runtime_env=actor_environment(threads=1),
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote()
    )
    finished = actor.run.remote(build)
    try:
        _follow(actor, finished, on_round, should_stop)
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
            ray.kill(actor)


def _follow(
    actor: Any,
    finished: Any,
    on_round: Callable[[Row], None],
    should_stop: Callable[[], bool],
) -> None:
    seen = 0
    while True:
        ended, _ = ray.wait([finished], timeout=POLL_S)
        rows: list[Row] = ray.get(actor.rows_since.remote(seen))
        for row in rows:
            on_round(row)
        seen += len(rows)
        if ended:
            return
        if should_stop():
            ray.get(actor.stop.remote())

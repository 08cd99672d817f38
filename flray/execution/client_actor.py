"""The process of a client actor, which is started before anything heavy is imported.

Importing torch and Lightning is most of the time it takes to start an actor. An actor imports them
on its own as soon as it is there, while the driver and others do the same, and gets its data later.
"""

import os
import pickle
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flray.errors import ExperimentError
from flray.execution.cluster import actor_environment, coming_nodes, free_nodes, whole_nodes
from flray.execution.resources import ActorPlan, Needs, check_resources

if TYPE_CHECKING:
    from flray.client.host import Host
    from flray.execution.ray_pool import Payload
    from flray.models.bank import Params

FREE_TIMEOUT_S = 10.0


class ClientActor:
    """One process that runs the tasks of the clients it is handed."""

    def load(self) -> None:
        """Import what a host needs."""
        import flray.execution.ray_pool  # noqa: F401

    def start(self, payload: "Payload", place: int) -> int:
        """Become the host of this number; returns the process id."""
        from flray.execution.ray_pool import start_numbered_host

        self.host: Host = start_numbered_host(payload, place)
        return os.getpid()

    def run(
        self, task: "Callable[[Host, Params, Any], Any] | bytes", bank: "Params", job: Any
    ) -> Any:  # Any: of the task
        """Run a task, which small ones arrive as pickled."""
        work = pickle.loads(task) if isinstance(task, bytes) else task  # our own
        return work(self.host, bank, job)


def start_client_actor(needs: Needs, threads: int) -> Any:  # Any: an actor handle
    """A process that has begun to import and waits for `start`."""
    options = needs.options
    if get_current_placement_group() is not None:
        del options["memory"]  # which the group has reserved, perhaps for another row of a sweep
    actor: Any = (
        ray.remote(ClientActor)
        .options(**options, runtime_env=actor_environment(threads), scheduling_strategy=strategy())
        .remote()
    )
    actor.load.remote()
    return actor


def strategy() -> Any:
    """Where actors go: over the cluster, or inside the placement group we are in ourselves."""
    group = get_current_placement_group()
    return "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group)


def wait_for_resources(plan: ActorPlan) -> None:
    """Refuse at once what the cluster does not have; wait a little for what others give back."""
    if get_current_placement_group() is not None:
        return  # made for us, and counted as taken
    coming = coming_nodes()
    check_resources(plan, [*whole_nodes(), *coming])
    if coming:
        return  # machines are started when actors ask for them
    deadline = monotonic() + FREE_TIMEOUT_S
    while True:
        try:
            return check_resources(plan, free_nodes())
        except ExperimentError:
            if monotonic() > deadline:
                raise
            sleep(0.1)

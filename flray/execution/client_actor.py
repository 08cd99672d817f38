"""The process of a client actor, which is started before anything heavy is imported.

Importing torch and Lightning is most of the time it takes to start an actor. An actor imports them
on its own as soon as it is there, while the driver and others do the same, and gets its data later.
"""

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flray.errors import CLIENT_ERRORS, keep_line
from flray.execution.cluster import actor_environment
from flray.execution.resources import Needs

if TYPE_CHECKING:
    from flray.client.host import Host, Payload
    from flray.models.bank import Params


class ClientActor:
    """A Ray actor that hosts clients: it wraps the LightningModule of the client it is handed.

    `load`, `start` and `run` are called in this order. An actor keeps nothing of a client between
    two jobs, except for models that a training asks it to keep for questions.
    """

    def load(self) -> None:
        """Import what a host needs, which takes seconds; called as soon as the actor is there."""
        import flray.client.keeping
        import flray.execution.tensors  # noqa: F401

    def start(self, payload: "Payload", number: int) -> None:
        """Become the host of this number; returns when data and module are in place."""
        from flray.client.host import start_host_of_actor
        from flray.execution.tensors import share_tensors_without_copies

        share_tensors_without_copies()
        self.host: Host = start_host_of_actor(payload, number)

    def run(
        self, task: "Callable[[Host, Params, Any], Any] | bytes", bank: "Params", job: Any
    ) -> Any:  # Any: the output of the task
        """Run a task with a bank and a job; a small task arrives pickled."""
        work = pickle.loads(task) if isinstance(task, bytes) else task  # our own
        try:
            return work(self.host, bank, job)
        except CLIENT_ERRORS as error:
            keep_line(error)
            raise


def start_client_actor(needs: Needs, threads: int) -> Any:  # Any: an actor handle
    """An actor that has begun to import and waits for `start`.

    It goes to any node of the cluster, or into the placement group that this process is in. Returns
    at once, even if no node has room yet.

    Args:
        threads: Threads of its process.
    """
    options: dict[str, Any] = {**needs.options, "scheduling_strategy": "SPREAD"}
    group = get_current_placement_group()
    if group is not None:
        del options["memory"]  # reserved by the placement group
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
    options["runtime_env"] = actor_environment(threads)
    actor: Any = ray.remote(ClientActor).options(**options).remote()
    actor.load.remote()
    return actor

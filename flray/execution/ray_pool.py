"""Client actors: Ray actors that wrap the LightningModules of the clients they host.

An actor is a cache: data, module, compiled step. Any actor may run any client, a lost one loses
nothing. Data goes to each node once, a bank once a round; jobs carry indices.
"""

import copy
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError
from ray.util import get_current_placement_group, register_serializer
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flray.client.host import Host, HostSettings, start_host
from flray.data.dataset import Dataset
from flray.data.events import Timeline
from flray.data.pixels import tensor_over
from flray.errors import ExperimentError
from flray.execution.cluster import actor_environment
from flray.execution.executor import Failed, Job, Output
from flray.execution.resources import Plan, check_resources
from flray.models.bank import Params

START_TIMEOUT_S = 300.0
POLL_S = 1.0
FREE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Payload:
    """What an actor needs to host any client; put into the object store once."""

    module: LightningModule
    dataset: Dataset
    timeline: Timeline
    settings: HostSettings


class ClientActor:
    """One process that runs the tasks of the clients it is handed."""

    def __init__(self, payload: Payload) -> None:
        share_tensors_without_copies()
        # Its weights lie in memory that all actors of the node map: engines write into their own.
        module = copy.deepcopy(payload.module)
        self.host: Host = start_host(module, payload.dataset, payload.timeline, payload.settings)

    def ready(self) -> int:
        return os.getpid()

    def run(self, task: Callable[[Host, Params, Any], Any], bank: Params, job: Any) -> Any:
        return task(self.host, bank, job)


@dataclass
class Patience:
    """How long a job may take before its actor counts as hanging, by how long others took.

    A first job of a kind may compile and has nothing to be compared with.
    """

    first_s: float = 3600.0
    least_s: float = 120.0
    factor: float = 10.0  # of the longest job of the kind
    longest_s: dict[str, float] = field(default_factory=dict)  # by kind

    def of(self, kind: str) -> float:
        if kind not in self.longest_s:
            return self.first_s
        return max(self.least_s, self.factor * self.longest_s[kind])

    def learn(self, kind: str, seconds: float) -> None:
        self.longest_s[kind] = max(seconds, self.longest_s.get(kind, 0.0))


@dataclass(frozen=True)
class Running:
    job: int
    place: int  # of the actor
    since: float


@dataclass
class RayPool:
    """An executor over client actors, which are replaced when they die or hang."""

    payload: Any  # ObjectRef of a Payload
    plan: Plan
    settings: HostSettings
    patience: Patience
    retries: int = 1
    actors: list[Any] = field(default_factory=list)  # actor handles
    last_sent: tuple[Params, Any] | None = None  # a bank and its ObjectRef
    starting: dict[int, Any] = field(default_factory=dict)  # ObjectRef of `ready`, by place

    @property
    def clients_per_job(self) -> int | None:
        """One actor per client, literally, takes one client at a time."""
        return 1 if self.plan.actors.count == "per_client" else None

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        sent_task, sent_bank = ray.put(task), self._sent(bank)
        outputs: list[Output | Failed | None] = [None] * len(jobs)
        waiting, idle = deque(range(len(jobs))), deque(self._places_at_work())
        running: dict[Any, Running] = {}  # by ObjectRef
        kind = type(task).__name__
        while waiting or running:
            if self.starting:
                idle.extend(self._just_started(POLL_S if not (idle or running) else 0.0))
            while waiting and idle:
                place, job = idle.popleft(), waiting.popleft()
                ref = self.actors[place].run.remote(sent_task, sent_bank, jobs[job])
                running[ref] = Running(job, place, monotonic())
            if not running:
                continue  # all actors are still to start
            ended, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
            for ref in ended or self._hanging(running, kind):
                now = running.pop(ref)
                outputs[now.job] = self._result(ref, now.place, timeout=None if ended else 0)
                if ended:
                    self.patience.learn(kind, monotonic() - now.since)
                if now.place not in self.starting:
                    idle.append(now.place)
        return [output for output in outputs if output is not None]

    def _places_at_work(self) -> list[int]:
        """Those whose actors have started; one that waits for a machine is handed no job."""
        self._just_started(0.0)
        return [place for place in range(len(self.actors)) if place not in self.starting]

    def _just_started(self, timeout: float) -> list[int]:
        """The places whose actors have started since they were asked for last."""
        places = {ref: place for place, ref in self.starting.items()}
        started, _ = ray.wait(list(places), num_returns=1, timeout=timeout) if places else ([], [])
        for ref in started:
            del self.starting[places[ref]]
        return [places[ref] for ref in started]

    def _hanging(self, running: dict[Any, Running], kind: str) -> list[Any]:
        """Jobs that take far longer than others did: their actors are stopped or stuck."""
        latest = monotonic() - self.patience.of(kind)
        return [ref for ref, each in running.items() if each.since < latest]

    def _sent(self, bank: Params) -> Any:
        """The bank in the object store: what is evaluated is what the next round starts from."""
        if self.last_sent is None or self.last_sent[0] is not bank:
            self.last_sent = bank, ray.put(bank)
        return self.last_sent[1]

    def _result(self, ref: Any, place: int, timeout: float | None) -> Any:
        try:
            return ray.get(ref, timeout=timeout)
        except GetTimeoutError:
            ray.kill(self.actors[place])
            self._replace(place)
            return Failed(TimeoutError("its actor did not answer: it hangs or was stopped"))
        except RayError as error:
            if isinstance(error, ObjectLostError):
                self.last_sent = None  # it may have been the bank: the next attempt sends it again
            elif not isinstance(error, RayTaskError):  # its process died, or memory ran out
                ray.kill(self.actors[place])
                self._replace(place)
            return failure(error)

    def _replace(self, place: int) -> None:
        self.actors[place] = self._start_one()
        self.starting[place] = self.actors[place].ready.remote()

    def start(self) -> None:
        """Start all actors and wait until each is there."""
        self.actors.extend(started(self._start_one, self.plan))

    def _start_one(self) -> Any:
        actor_class = ray.remote(ClientActor).options(
            num_cpus=self.plan.actors.num_cpus,
            num_gpus=self.plan.actors.num_gpus,
            runtime_env=actor_environment(self.settings.threads),
            scheduling_strategy=_strategy(),
        )
        return actor_class.remote(self.payload)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()


def started(start_one: Callable[[], Any], plan: Plan) -> list[Any]:
    """As many actors as planned, each of them ready; or none and an error."""
    actors = [start_one() for _ in range(plan.num_actors)]
    ready: list[Any] = [actor.ready.remote() for actor in actors]  # ObjectRefs
    try:
        ray.get(ready, timeout=START_TIMEOUT_S)
    except GetTimeoutError as error:
        done, _ = ray.wait(ready, num_returns=len(ready), timeout=0)
        for actor in actors:
            ray.kill(actor)
        raise ExperimentError(
            f"only {len(done)} of {plan.num_actors} client actors started within "
            f"{START_TIMEOUT_S:.0f} s ({plan}); lower execution.actors.count"
        ) from error
    return actors


def failure(error: RayError) -> Failed:
    """In the place of an output; what is wrong with the experiment itself is raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ExperimentError):
        raise cause from None
    return Failed(cause or error)


def start_pool(payload: Payload, plan: Plan) -> RayPool:
    """A pool of client actors, each of them ready to work."""
    share_tensors_without_copies()
    pool = RayPool(ray.put(payload), plan, payload.settings, patience=Patience())
    pool.start()
    return pool


def _strategy() -> Any:
    """Where actors go: over the cluster, or inside the placement group we are in ourselves."""
    group = get_current_placement_group()
    return "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group)


def wait_for_resources(plan: Plan) -> None:
    """Refuse at once what the cluster does not have; wait a little for what others give back."""
    if get_current_placement_group() is not None:
        return  # made for us, and counted as taken
    there: Callable[[], dict[str, float]] = ray.cluster_resources
    free: Callable[[], dict[str, float]] = ray.available_resources
    check_resources(plan, there())
    deadline = monotonic() + FREE_TIMEOUT_S
    while True:
        try:
            return check_resources(plan, free())
        except ExperimentError:
            if monotonic() > deadline:
                raise
            sleep(0.1)


def share_tensors_without_copies() -> None:
    """Let Ray move tensors as numpy arrays, which every process of a node maps from one place.

    Received tensors are read-only memory: nothing here works in place on what it received.
    """
    register_serializer(torch.Tensor, serializer=_to_array, deserializer=tensor_over)


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())

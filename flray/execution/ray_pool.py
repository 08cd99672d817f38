"""Client actors: Ray actors that wrap the LightningModules of the clients they host.

An actor is a cache: data, module, compiled step. Any actor may run any client, a lost one loses
nothing. Data goes to each node once, a bank once a round; jobs carry indices.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, sleep
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from ray import cloudpickle
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util import register_serializer

from flray.client.host import Host, HostSettings, start_host
from flray.data.dataset import Dataset
from flray.data.events import Timeline
from flray.data.pixels import tensor_over
from flray.errors import ExperimentError, one_line_message
from flray.execution.client_actor import start_client_actor
from flray.execution.executor import Failed, Job, Output
from flray.execution.resources import TRAININGS_KEPT, ActorPlan
from flray.models.bank import Params

START_TIMEOUT_S = 1800.0  # a machine may have to be started for it
POLL_S = 1.0
MOST_STARTS = 20  # of an actor whose GPU is not ready again yet
MOST_DEATHS = 3  # in a row, of an actor that is killed while it starts

# Bytes that travel inside a call. An object of the store costs a put and a get, some milliseconds.
LARGEST_INLINE_TASK = 1 << 16
LARGEST_INLINE_BANK = 1 << 21  # of a map with a single job


@dataclass(frozen=True)
class Payload:
    """What an actor needs to host any client; put into the object store once."""

    module: LightningModule
    dataset: Dataset
    timeline: Timeline
    settings: HostSettings


def start_numbered_host(payload: Payload, place: int) -> Host:
    """The host of a client actor."""
    share_tensors_without_copies()
    # Its weights lie in memory that all actors of the node map: engines write into their own.
    module = copy.deepcopy(payload.module)
    host = start_host(module, payload.dataset, payload.timeline, payload.settings)
    return replace(host, place=place)


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
    plan: ActorPlan
    settings: HostSettings
    patience: Patience
    trainings_kept: int = TRAININGS_KEPT  # a probe may come between training and mixing
    retries: int = 1
    actors: list[Any] = field(default_factory=list)  # actor handles
    last_sent: tuple[Params, Any] | None = None  # a bank and its ObjectRef
    starting: dict[int, Any] = field(default_factory=dict)  # ObjectRef of `start`, by place
    failed_starts: Counter[int] = field(default_factory=Counter)  # in a row, by place

    @property
    def shares_gpu(self) -> bool:
        """True if a process that dies may take those with it that use the same GPU.

        Under CUDA MPS it does, and none of them can work again before all of them have ended.
        """
        return 0 < self.plan.each.num_gpus < 1

    @property
    def clients_per_job(self) -> int | None:
        """One actor per client, literally, takes one client at a time."""
        return 1 if self.plan.actors.count == "per_client" else None

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        sent_task, sent_bank = _sent_task(task), self._sent(bank, len(jobs))
        outputs: list[Output | Failed | None] = [None] * len(jobs)
        waiting, idle = deque(range(len(jobs))), deque(self._places_at_work())
        running: dict[Any, Running] = {}  # by ObjectRef
        kind = type(task).__name__
        while waiting or running:
            if self.starting:
                idle.extend(self._just_started(0.0))
            for place in list(idle):
                job = _next_for(place, waiting, jobs)
                if job is not None:
                    idle.remove(place)
                    ref = self.actors[place].run.remote(sent_task, sent_bank, jobs[job])
                    running[ref] = Running(job, place, monotonic())
            if not running:  # what waits is for actors that are still to start
                idle.extend(self._just_started(POLL_S))
                continue
            wanted = 1 if waiting else len(running)  # nobody waits for an actor: wait for all
            ended, _ = ray.wait(list(running), num_returns=wanted, timeout=POLL_S)
            found = _all_of(ended)
            over = {ref: running.pop(ref) for ref in ended or self._hanging(running, kind)}
            for ref, now in over.items():
                timeout = None if ended else 0
                outputs[now.job] = (
                    self._result(ref, now.place, timeout) if found is None else found[ref]
                )
                if ended:
                    self.patience.learn(kind, monotonic() - now.since)
                if now.place not in self.starting:
                    idle.append(now.place)
            if any(_is_of_host(outputs[now.job]) for now in over.values()) and self.shares_gpu:
                waiting.extendleft(now.job for now in running.values())
                running.clear()
                idle.clear()
                self._replace_all()
        return [output for output in outputs if output is not None]

    def _places_at_work(self) -> list[int]:
        """Those whose actors have started; one that waits for a machine is handed no job."""
        self._just_started(0.0)
        return [place for place in range(len(self.actors)) if place not in self.starting]

    def _just_started(self, timeout: float) -> list[int]:
        """The places whose actors have started since they were asked for last."""
        places = {ref: place for place, ref in self.starting.items()}
        ended, _ = ray.wait(list(places), num_returns=1, timeout=timeout) if places else ([], [])
        started = [ref for ref in ended if self._is_started(ref, places[ref])]
        for ref in started:
            del self.starting[places[ref]]
        return [places[ref] for ref in started]

    def _is_started(self, ref: Any, place: int) -> bool:
        """False if another has to be started in its place. Other errors meet the job."""
        self.failed_starts[place] += 1
        try:
            if not _is_ready(ref, self.failed_starts[place]):
                sleep(POLL_S)
                ray.kill(self.actors[place])
                self._replace(place)
                return False
        except RayError:
            return True
        self.failed_starts[place] = 0
        return True

    def _hanging(self, running: dict[Any, Running], kind: str) -> list[Any]:
        """Jobs that take far longer than others did: their actors are stopped or stuck."""
        latest = monotonic() - self.patience.of(kind)
        return [ref for ref, each in running.items() if each.since < latest]

    def _sent(self, bank: Params, num_jobs: int) -> Any:
        """The bank in the object store: what is evaluated is what the next round starts from.

        A small one that is not there yet travels with a single job instead.
        """
        is_there = self.last_sent is not None and self.last_sent[0] is bank
        size = sum(leaf.numel() * leaf.element_size() for leaf in bank.values())
        if not bank or (not is_there and num_jobs == 1 and size <= LARGEST_INLINE_BANK):
            return bank
        if self.last_sent is None or not is_there:
            self.last_sent = bank, ray.put(bank)
        return self.last_sent[1]

    def _result(self, ref: Any, place: int, timeout: float | None) -> Any:
        try:
            return ray.get(ref, timeout=timeout)
        except GetTimeoutError:
            ray.kill(self.actors[place])
            self._replace(place)
            told = "its actor did not answer: it hangs or was stopped"
            return Failed(TimeoutError(told), of_host=True)
        except RayError as error:
            if isinstance(error, ObjectLostError):
                self.last_sent = None  # it may have been the bank: the next attempt sends it again
            elif not isinstance(error, RayTaskError) or is_gpu_fault(error):
                # its process died, or memory ran out
                ray.kill(self.actors[place])
                self._replace(place)
            return failure(error)

    def _replace(self, place: int) -> None:
        self.actors[place], self.starting[place] = self._start_one(place)

    def _replace_all(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        for place in range(len(self.actors)):
            self._replace(place)

    def start(self, processes: Sequence[Any] | None) -> None:
        """Give each process its data, or start as many as planned, and wait until all are there."""
        waiting = deque(processes or [])

        def start_one(place: int) -> tuple[Any, Any]:
            return self._start_one(place, waiting.popleft() if waiting else None)

        self.actors.extend(started(start_one, self.plan))

    def _start_one(self, place: int, process: Any = None) -> tuple[Any, Any]:
        """An actor, and the ObjectRef that is there once it can work."""
        actor = process or start_client_actor(self.plan.each, self.settings.threads)
        return actor, actor.start.remote(self.payload, place)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()


def _sent_task(task: Callable[..., Any]) -> Any:
    """Pickled once for all jobs, or in the object store where it carries much."""
    pickled: bytes = cloudpickle.dumps(task)  # type: ignore[no-untyped-call]  # ray's own
    return pickled if len(pickled) <= LARGEST_INLINE_TASK else ray.put(task)


def _all_of(ended: Sequence[Any]) -> dict[Any, Any] | None:
    """The outputs of jobs that have ended, by ObjectRef; None where one of them failed."""
    if not ended:
        return None
    try:
        return dict(zip(ended, ray.get(list(ended)), strict=True))
    except RayError:
        return None


def _next_for(place: int, waiting: deque[int], jobs: Sequence[Job]) -> int | None:
    """Take the first of the waiting jobs that may run at this place; None: there is none."""
    for job in waiting:
        if getattr(jobs[job], "place", place) == place:
            waiting.remove(job)
            return job
    return None


def started(start_one: Callable[[int], tuple[Any, Any]], plan: ActorPlan) -> list[Any]:
    """As many actors as planned, each of them ready; or none and an error.

    An actor that dies while it starts is replaced, a few times.

    Args:
        start_one: gives an actor, and the ObjectRef that is there once it can work.
    """
    actors, starting = map(list, zip(*map(start_one, range(plan.num_actors)), strict=True))
    deadline = monotonic() + START_TIMEOUT_S
    try:
        for place in range(plan.num_actors):
            num_starts = 1
            while not _is_ready(starting[place], num_starts, max(0.0, deadline - monotonic())):
                sleep(POLL_S)
                ray.kill(actors[place])
                actors[place], starting[place] = start_one(place)
                num_starts += 1
    except RayError as error:
        num_ready = len(ray.wait(starting, num_returns=len(starting), timeout=0)[0])
        for actor in actors:
            ray.kill(actor)
        raise _not_started(error, num_ready, plan) from None
    return actors


def _is_ready(ref: Any, num_starts: int, timeout: float | None = None) -> bool:
    """Wait for an actor that was started so many times; False if it is to be started once more.

    Its process was killed, or its GPU is not ready yet; other errors would come again.
    """
    try:
        ray.get(ref, timeout=timeout)
    except (RayActorError, RayTaskError) as error:
        most = MOST_STARTS if is_gpu_fault(error) else MOST_DEATHS
        if num_starts >= most or not is_host_lost(error):
            raise
        return False
    return True


def _not_started(error: RayError, num_ready: int, plan: ActorPlan) -> Exception:
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, ExperimentError) else error
    if isinstance(error, GetTimeoutError):
        reason = f"only {num_ready} of {plan.num_actors} client actors started within "
        reason += f"{START_TIMEOUT_S:.0f} s"
    else:
        reason = f"a client actor died {MOST_DEATHS} times while it started "
        reason += f"({one_line_message(error)})"
    return ExperimentError(f"{reason} ({plan}); lower execution.actors.count")


def failure(error: RayError) -> Failed:
    """In the place of an output; what is wrong with the experiment itself is raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ExperimentError):
        raise cause from None
    return Failed(cause or error, is_host_lost(error))


def is_host_lost(error: RayError) -> bool:
    """True if the process of an actor died, or cannot use its GPU any more."""
    return isinstance(error, RayActorError) or is_gpu_fault(error)


def is_gpu_fault(error: RayError) -> bool:
    """True if CUDA failed in a way that only a new process recovers from."""
    return isinstance(error, RayTaskError) and "CUDA error" in str(error.cause)


def _is_of_host(output: Any) -> bool:
    return isinstance(output, Failed) and output.of_host


def start_pool(
    payload: Payload, plan: ActorPlan, processes: Sequence[Any] | None = None
) -> RayPool:
    """A pool of client actors, each of them ready to work.

    Args:
        processes: client actors that were started before and have no data yet.
    """
    share_tensors_without_copies()
    pool = RayPool(ray.put(payload), plan, payload.settings, patience=Patience())
    pool.start(processes)
    return pool


def share_tensors_without_copies() -> None:
    """Let Ray move tensors as numpy arrays, which every process of a node maps from one place.

    Received tensors are read-only memory: nothing here works in place on what it received.
    """
    register_serializer(torch.Tensor, serializer=_to_array, deserializer=tensor_over)


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())

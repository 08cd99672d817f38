"""A pool of client actors that several experiments share: their jobs may be one block.

A block does not care whose clients it holds. A dispatcher keeps the jobs of all experiments in one
queue; an actor that becomes free is handed what has gathered of one kind, up to a block's slots.
Trained models stay with the actor that trained them, which is asked for sums of them; other results
lie in the object store and go from the actor that computed them to the experiment.
"""

import asyncio
import copy
import hashlib
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic
from typing import Any, TypeVar

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError

from flray.client.host import Host, start_host
from flray.client.keeping import TrainAndKeep
from flray.client.tasks import train_together
from flray.execution.client_actor import wait_for_resources
from flray.execution.cluster import actor_environment
from flray.execution.executor import Failed, Job, Output
from flray.execution.ray_pool import (
    Patience,
    Payload,
    failure,
    is_host_lost,
    share_tensors_without_copies,
    started,
)
from flray.execution.resources import SHARED_HOSTS_KEPT, SHARED_TRAININGS_KEPT, ActorPlan
from flray.models.bank import Params

Key = TypeVar("Key")
Value = TypeVar("Value")

BANKS_KEPT = 8
RESTART_S = 1.0  # between attempts to start an actor


@dataclass(frozen=True)
class Part:
    """A job of one experiment, with what it needs in the object store."""

    task: Any  # ObjectRef
    bank: Any  # ObjectRef
    job: Any
    size: int  # client slots it takes
    place: int | None = None  # of the actor that must run it; None: any


class SharedClientActor:
    """One process that runs clients of any experiment; hosts and models are caches."""

    def __init__(self, place: int) -> None:
        share_tensors_without_copies()
        self.place = place  # among the actors of the pool
        self.hosts: OrderedDict[str, Host] = OrderedDict()
        self.banks: OrderedDict[Any, Params] = OrderedDict()  # by ObjectRef, as they were received

    def ready(self) -> int:
        """The process id, once its GPU can be used, where it has one."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return os.getpid()

    def run(self, name: str, payload: Sequence[Any], parts: Sequence[Part]) -> list[Any]:
        """One output a part, after a None that is there when all of them are."""
        host = self._host(name, payload)
        tasks: list[Any] = ray.get([part.task for part in parts])
        banks = [self._bank(part.bank) for part in parts]
        jobs = [part.job for part in parts]
        whole = list(zip(tasks, banks, jobs, strict=True))
        if len(parts) > 1 and all(isinstance(task, TrainAndKeep) for task in tasks):
            trained = train_together(host, [(task.train, bank, job) for task, bank, job in whole])
            done = zip(tasks, jobs, trained, strict=True)
            return [None, *(task.keep(host, job, result) for task, job, result in done)]
        return [None, *(task(host, bank, job) for task, bank, job in whole)]

    def _host(self, name: str, payload: Sequence[Any]) -> Host:
        def start() -> Host:
            held: Payload = ray.get(payload[0])
            # Its weights lie in memory that all actors of the node map.
            module = copy.deepcopy(held.module)
            host = start_host(module, held.dataset, held.timeline, held.settings)
            return replace(host, place=self.place)

        return _kept(self.hosts, name, start, SHARED_HOSTS_KEPT)

    def _bank(self, ref: Any) -> Params:
        if ref is None:
            return {}

        def receive() -> Params:
            bank: Params = ray.get(ref)
            return bank

        return _kept(self.banks, ref, receive, BANKS_KEPT)


def _kept(cache: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """The entry of the key, made if it is not there; the one longest unused makes room."""
    if key not in cache:
        while len(cache) >= most:
            cache.popitem(last=False)
        cache[key] = make()
    cache.move_to_end(key)
    return cache[key]


@dataclass(frozen=True, eq=False)
class Waiting:
    """A part in the queue."""

    kind: tuple[Any, ...]  # parts of one kind may be computed together
    capacity: int  # how many slots of this kind one actor takes at a time
    host: str
    part: Part
    trains: bool
    answer: "asyncio.Future[Any]" = field(repr=False)  # of an ObjectRef


class Dispatcher:
    """Hands parts to actors as these become free; a Ray actor that computes nothing itself."""

    def __init__(self, plan: ActorPlan, threads: int, patience: Patience) -> None:
        self.plan, self.threads, self.patience = plan, threads, patience
        self.payloads: dict[str, Any] = {}  # ObjectRefs
        self.waiting: deque[Waiting] = deque()
        self.actors: list[Any] = []
        self.idle: deque[int] = deque()  # places in actors
        self.maps = count()  # tells maps apart whose parts stay among themselves
        self.running: set[asyncio.Task[None]] = set()
        self.ended: set[int] = set()  # places of actors that were ended for another's fault
        self.counted: Counter[str] = Counter()

    def start(self) -> None:
        self.actors = started(self._start_one, self.plan)
        self.idle.extend(range(len(self.actors)))

    def _start_one(self, place: int) -> tuple[Any, Any]:
        actor: Any = (
            ray.remote(SharedClientActor)
            .options(
                **self.plan.each.options,
                runtime_env=actor_environment(self.threads),
                scheduling_strategy="SPREAD",
            )
            .remote(place)
        )
        return actor, actor.ready.remote()

    async def knows(self, host: str) -> bool:
        return host in self.payloads

    async def add_host(self, host: str, payload: Payload) -> None:
        if host not in self.payloads:
            self.payloads[host] = ray.put(payload)  # ours: the experiment may end before us

    async def counts(self) -> dict[str, int]:
        """How many training jobs there were, in how many blocks; blocks that were split."""
        return dict(self.counted)

    async def pids(self) -> list[int]:
        """The processes of the actors."""
        return list(await asyncio.gather(*(actor.ready.remote() for actor in self.actors)))

    async def map(
        self, host: str, parts: Sequence[Part], kind: tuple[Any, ...] | None, capacity: int
    ) -> list[Any]:
        """ObjectRefs of the outputs; kind None: parts of this call stay among themselves.

        Parts that only one actor can run, questions about models that it keeps, come first.
        """
        trains = kind is not None
        if kind is None:
            kind, capacity = (next(self.maps),), -(-len(parts) // len(self.actors))
        loop = asyncio.get_running_loop()
        units = [
            Waiting((host, *kind, part.place), capacity, host, part, trains, loop.create_future())
            for part in parts
        ]
        self.waiting.extend(unit for unit in units if unit.part.place is None)
        self.waiting.extendleft(unit for unit in units if unit.part.place is not None)
        self._dispatch()
        return list(await asyncio.gather(*(unit.answer for unit in units)))

    def _dispatch(self) -> None:
        for place in list(self.idle):
            batch = gathered(self.waiting, len(self.idle), place)
            if batch:
                self.idle.remove(place)
                task = asyncio.ensure_future(self._run(place, batch))
                self.running.add(task)  # the loop itself holds on to no task
                task.add_done_callback(self.running.discard)

    async def _run(self, place: int, batch: Sequence[Waiting]) -> None:
        parts = [unit.part for unit in batch]
        host = batch[0].host
        if batch[0].trains:
            self.counted.update(jobs=len(parts), blocks=1)
        is_lost = False
        run = self.actors[place].run.options(num_returns=1 + len(parts))
        done, *outputs = run.remote(host, [self.payloads[host]], parts)
        try:
            await self._answered(f"{host} {batch[0].trains}", done)
        except (RayError, TimeoutError) as error:  # whatever it is: its place becomes idle again
            if isinstance(error, TimeoutError):
                ray.kill(self.actors[place])  # what it was asked for fails with it
                self.counted.update(hanging=1)
            is_lost = isinstance(error, TimeoutError) or is_host_lost(error)
            is_innocent = place in self.ended
            self.ended.discard(place)
            if is_lost and not is_innocent:
                self._end_those_beside(place)
            if is_innocent:
                self.waiting.extendleft(batch)
                batch = []
            elif len(batch) > 1:
                # One of them is to blame, and the others are of experiments it has no part in.
                self.waiting.extendleft(replace(unit, kind=(object(),)) for unit in batch)
                self.counted.update(taken_apart=1)
                batch = []
        for unit, output in zip(batch, outputs, strict=False):
            if not unit.answer.done():
                unit.answer.set_result(output)
        if is_lost:
            self._dispatch()  # others may be idle
            await self._start_again(place)
            return
        self.idle.append(place)
        self._dispatch()

    def _end_those_beside(self, place: int) -> None:
        """Under CUDA MPS a process that dies takes those with it that use the same GPU."""
        if not 0 < self.plan.each.num_gpus < 1:
            return
        ray.kill(self.actors[place])
        for other in range(len(self.actors)):
            if other != place and other not in self.ended:
                ray.kill(self.actors[other])
                if other in self.idle:
                    self.idle.remove(other)
                    task = asyncio.ensure_future(self._start_again(other))
                    self.running.add(task)
                    task.add_done_callback(self.running.discard)
                else:
                    self.ended.add(other)

    async def _start_again(self, place: int) -> None:
        await self._replaced(place)
        self.idle.append(place)
        self._dispatch()

    async def _replaced(self, place: int) -> None:
        """Start another actor; it may have to wait for a machine, and is handed nothing before."""
        while True:
            self.actors[place], ready = self._start_one(place)
            try:
                await ready
            except RayError:
                await asyncio.sleep(RESTART_S)
            else:
                return

    async def _answered(self, kind: str, done: Any) -> None:
        """Wait for a block, but not much longer than others of its kind took."""

        async def ended() -> None:
            await done

        begin = monotonic()
        await asyncio.wait_for(ended(), self.patience.of(kind))
        self.patience.learn(kind, monotonic() - begin)


def gathered(waiting: deque[Waiting], num_idle: int, place: int) -> list[Waiting]:
    """Take what the actor at this place computes next out of the queue: parts of one kind.

    It is the kind of the first part that may run there. Other actors that are idle get their share;
    what is left over keeps its order.
    """
    first = next((unit for unit in waiting if unit.part.place in (None, place)), None)
    if first is None:
        return []
    alike = [unit for unit in waiting if unit.kind == first.kind]
    num_idle = num_idle if first.part.place is None else 1
    chosen: list[Waiting] = []
    free = first.capacity
    for unit in alike[: -(-len(alike) // num_idle)]:
        if unit is first or unit.part.size <= free:
            chosen.append(unit)
            free -= unit.part.size
    taken = set(map(id, chosen))
    rest = [unit for unit in waiting if id(unit) not in taken]
    waiting.clear()
    waiting.extend(rest)
    return chosen


@dataclass
class SharedPool:
    """The executor of one of the experiments that share a pool."""

    dispatcher: Any  # actor handle
    host: str
    num_slots: int
    retries: int = 1
    clients_per_job: int | None = None
    trainings_kept: int = SHARED_TRAININGS_KEPT
    last_sent: tuple[Params, Any] | None = None  # a bank and its ObjectRef

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        if not jobs:
            return []
        if bank and (self.last_sent is None or self.last_sent[0] is not bank):
            self.last_sent = bank, ray.put(bank)
        sent_task = ray.put(task)
        sent_bank = self.last_sent[1] if bank and self.last_sent else None
        parts = [
            Part(sent_task, sent_bank, job, _size(job), getattr(job, "place", None)) for job in jobs
        ]
        kind = _kind(task, jobs[0])
        asked = self.dispatcher.map.remote(self.host, parts, kind, self.num_slots)
        outputs: list[Any] = ray.get(asked)
        return [self._result(output) for output in outputs]

    def _result(self, output: Any) -> Any:
        try:
            return ray.get(output)
        except RayError as error:
            return failure(error)

    def close(self) -> None:
        """The pool is others' too."""


def _size(job: Any) -> int:
    return len(job.clients) if hasattr(job, "clients") else 1


def _kind(task: Any, job: Any) -> tuple[Any, ...] | None:
    """What training jobs must have in common to be one block."""
    if not isinstance(task, TrainAndKeep):
        return None
    train = task.train
    pickled: bytes = cloudpickle.dumps((train.training, train.gradient))  # type: ignore[no-untyped-call]  # ray's own
    memo = tuple((name, leaf.shape[1:]) for name, leaf in job.memo.items())
    shared = tuple((name, leaf.shape) for name, leaf in train.shared.items())
    return hashlib.sha256(pickled).hexdigest(), memo, shared


def start_shared_pool(plan: ActorPlan, threads: int, patience: Patience | None = None) -> Any:
    """A dispatcher with its client actors, each of them ready to work; ends with this process."""
    share_tensors_without_copies()
    wait_for_resources(plan)
    options = {"num_cpus": 0, "runtime_env": actor_environment(threads=1)}
    dispatcher: Any = (
        ray.remote(Dispatcher).options(**options).remote(plan, threads, patience or Patience())
    )
    ray.get(dispatcher.start.remote())
    return dispatcher


def join_shared_pool(dispatcher: Any, host: str, payload: Payload) -> SharedPool:
    """An executor over the pool for an experiment with this payload, which `host` names."""
    share_tensors_without_copies()
    if not ray.get(dispatcher.knows.remote(host)):
        ray.get(dispatcher.add_host.remote(host, payload))
    return SharedPool(dispatcher, host, payload.settings.num_slots)

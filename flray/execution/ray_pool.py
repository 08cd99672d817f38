"""The executor over client actors: Ray actors that wrap the LightningModules of their clients.

An actor is a cache of data, module and compiled step. Any actor may run any client, and one that is
lost loses nothing. Data goes to each node once, a bank once per round; jobs carry indices.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from flray.client.host import Host, Payload
from flray.errors import ExperimentError, is_gpu_fault, one_line_message
from flray.execution.client_actor import start_client_actor
from flray.execution.executor import Failed, Job, Output, ignore
from flray.execution.patience import Patience
from flray.execution.resources import TRAININGS_KEPT, ActorPlan
from flray.execution.tensors import share_tensors_without_copies
from flray.models.bank import Params

START_TIMEOUT_S = 1800.0  # a machine may have to be started for an actor
POLL_S = 1.0
MOST_STARTS = 20  # starts in a row of an actor whose GPU is not ready again yet
MOST_DEATHS = 3  # deaths in a row of an actor that is killed while it starts

# Bytes that travel inside a call. An object of the store costs a put and a get, some milliseconds.
LARGEST_INLINE_TASK = 1 << 16
LARGEST_INLINE_BANK = 1 << 21  # bytes of a bank that is sent along with a single job

Ref = Any  # an ObjectRef
Actor = Any  # an actor handle


@dataclass(frozen=True)
class Running:
    """A job that was handed to an actor and has not ended yet, to find those that hang."""

    job: int  # position among the jobs of a map
    host: int  # number of the actor
    since: float  # when it was handed over, by the monotonic clock


@dataclass
class RayPool:
    """Client actors as an `Executor`.

    A job goes to the first actor that is idle. An actor whose process dies, runs out of memory or
    hangs is replaced, and its job becomes a `Failed`, which is tried again by who asked. Actors
    that share a GPU are replaced together. Nothing is lost with an actor, because it owns nothing.
    """

    payload: Ref  # reference to a Payload
    plan: ActorPlan
    threads: int  # threads per actor
    patience: Patience
    trainings_kept: int = TRAININGS_KEPT  # a probe may come between training and mixing
    retries: int = 1
    on_answer: Callable[[], None] = ignore  # called when jobs have ended
    actors: list[Actor] = field(default_factory=list)  # by number of the host
    starting: dict[int, Ref] = field(default_factory=dict)  # result of `start`, by host number
    failed_starts: Counter[int] = field(default_factory=Counter)  # in a row, by number of the host
    last_sent: tuple[Params, Ref] | None = None  # a bank in the object store

    @property
    def shares_gpu(self) -> bool:
        """True if a process that dies may take those with it that use the same GPU.

        Under CUDA MPS it does, and none of them can work again before all of them have ended.
        """
        return 0 < self.plan.per_actor.num_gpus < 1

    @property
    def clients_per_job(self) -> int | None:
        """1 with `count: per_client`, whose actors take one client at a time; None: blocks."""
        return 1 if self.plan.actors.count == "per_client" else None

    def start(self, actors: Sequence[Actor]) -> None:
        """Make hosts of the actors, and of new ones up to the plan, and wait until all are ready.

        An actor that dies while it starts is replaced, a few times.
        """
        self.actors.extend([*actors, *[None] * self.plan.num_actors][: self.plan.num_actors])
        for host, actor in enumerate(self.actors):
            self._start_host(host, actor)
        deadline = monotonic() + START_TIMEOUT_S
        try:
            while self.starting:
                self._await_starts(POLL_S)
                if self.starting and monotonic() > deadline:
                    raise GetTimeoutError
        except RayError as error:
            num_ready = len(self.actors) - len(self.starting)
            self.close()
            raise _not_started(error, num_ready, self.plan) from None

    def _start_host(self, host: int, actor: Actor | None = None) -> None:
        """Have an actor, by default a new one, become this host; it is ready some time later."""
        self.actors[host] = actor or start_client_actor(self.plan.per_actor, self.threads)
        self.starting[host] = self.actors[host].start.remote(self.payload, host)

    def _replace(self, host: int) -> None:
        ray.kill(self.actors[host])
        self._start_host(host)

    def _replace_all(self) -> None:
        """Start all hosts again, once none of their processes is left."""
        for actor in self.actors:
            ray.kill(actor)
        for host in range(len(self.actors)):
            self._start_host(host)

    def _await_starts(self, timeout: float) -> None:
        """Take note of the actors that have become ready; raises what ended another's start.

        An actor whose process was killed, or whose GPU is not ready yet, is started again.
        """
        hosts = {ref: host for host, ref in self.starting.items()}
        ended, _ = ray.wait(list(hosts), num_returns=1, timeout=timeout) if hosts else ([], [])
        for host in (hosts[ref] for ref in ended):
            ref = self.starting.pop(host)
            self.failed_starts[host] += 1
            try:
                ray.get(ref)
            except (RayActorError, RayTaskError) as error:
                most = MOST_STARTS if is_gpu_fault(error) else MOST_DEATHS
                if self.failed_starts[host] >= most or not is_host_lost(error):
                    raise
                sleep(POLL_S)
                self._replace(host)
            else:
                self.failed_starts[host] = 0

    def map(
        self, task: Callable[[Host, Params, Job], Output], bank: Params, jobs: Sequence[Job]
    ) -> list[Output | Failed]:
        """The outputs of the jobs in their order, see `Executor.map`.

        Jobs are handed out as actors become idle, so which actor runs which job varies; outputs do
        not. Call it from one thread at a time.
        """
        kind, sent = type(task).__name__, (_sent_task(task), self._sent(bank, len(jobs)))
        outputs: dict[int, Output | Failed] = {}
        waiting, running = deque(range(len(jobs))), dict[Ref, Running]()
        while waiting or running:
            for host in self._idle_hosts(running):
                job = _next_for(host, waiting, jobs)
                if job is not None:
                    ref = self.actors[host].run.remote(*sent, jobs[job])
                    running[ref] = Running(job, host, monotonic())
            if not running:  # what waits is for actors that are still to start
                self._note_starts(POLL_S)
                continue
            wanted = 1 if waiting else len(running)  # no job waits for an actor: wait for all
            ended, _ = ray.wait(list(running), num_returns=wanted, timeout=POLL_S)
            finished = {ref: running.pop(ref) for ref in ended or self._hanging(running, kind)}
            for ref, handed in finished.items():
                outputs[handed.job] = self._result(ref, handed.host, timeout=None if ended else 0)
                if ended:
                    self.patience.learn(kind, monotonic() - handed.since)
                    self.on_answer()
            new = (outputs[handed.job] for handed in finished.values())
            if self.shares_gpu and any(isinstance(o, Failed) and o.of_host for o in new):
                waiting.extendleft(handed.job for handed in running.values())
                running.clear()
                self._replace_all()
        return [outputs[k] for k in range(len(jobs))]

    def _idle_hosts(self, running: dict[Ref, Running]) -> list[int]:
        """The hosts that are ready and run no job; an actor that waits for a machine is not."""
        self._note_starts(0.0)
        busy = {handed.host for handed in running.values()} | self.starting.keys()
        return [host for host in range(len(self.actors)) if host not in busy]

    def _note_starts(self, timeout: float) -> None:
        """As `_await_starts`; an actor whose start failed otherwise fails again with its job."""
        with suppress(RayError):
            self._await_starts(timeout)

    def _hanging(self, running: dict[Ref, Running], kind: str) -> list[Ref]:
        """Jobs that take far longer than others did: their actors are stopped or stuck."""
        latest = monotonic() - self.patience.of(kind)
        return [ref for ref, handed in running.items() if handed.since < latest]

    def _sent(self, bank: Params, num_jobs: int) -> Params | Ref:
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

    def _result(self, ref: Ref, host: int, timeout: float | None) -> Any:  # Any: an output
        """The output of a job, or its failure; an actor that was lost or hangs is replaced."""
        try:
            return ray.get(ref, timeout=timeout)
        except GetTimeoutError:
            self._replace(host)
            reason = "its actor did not answer: it hangs or was stopped"
            return Failed(TimeoutError(reason), of_host=True)
        except RayError as error:
            if isinstance(error, ObjectLostError):
                self.last_sent = None  # it may have been the bank: the next attempt sends it again
            elif not isinstance(error, RayTaskError) or is_gpu_fault(error):
                self._replace(host)  # its process died, or memory ran out
            cause = getattr(error, "cause", None)
            if isinstance(cause, ExperimentError):
                raise cause from None
            return Failed(cause or error, is_host_lost(error))

    def close(self) -> None:
        """Kill the actors; may be called again."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()


def start_pool(payload: Payload, plan: ActorPlan, actors: Sequence[Actor] | None = None) -> RayPool:
    """A pool of client actors, each of them ready to work.

    Args:
        payload: Module, data and settings, put into the object store once.
        plan: Number of actors and what each asks for.
        actors: Client actors that were started before and have no data yet; missing ones are
            started here.

    Raises:
        ExperimentError: Actors did not start, or died while they started.
    """
    share_tensors_without_copies()
    pool = RayPool(ray.put(payload), plan, payload.settings.threads, Patience())
    pool.start(actors or [])
    return pool


def _sent_task(task: Callable[..., Any]) -> bytes | Ref:
    """Pickled once for all jobs, or in the object store where it carries much."""
    pickled: bytes = cloudpickle.dumps(task)  # type: ignore[no-untyped-call]  # ray's own
    return pickled if len(pickled) <= LARGEST_INLINE_TASK else ray.put(task)


def _next_for(host: int, waiting: deque[int], jobs: Sequence[Job]) -> int | None:
    """Take the first of the waiting jobs that may run on this host; None: there is none."""
    for job in waiting:
        if getattr(jobs[job], "host", host) == host:
            waiting.remove(job)
            return job
    return None


def _not_started(error: RayError, num_ready: int, plan: ActorPlan) -> Exception:
    """The error to raise if actors did not start, with the plan and what to change."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, ExperimentError) else error
    if isinstance(error, GetTimeoutError):
        reason = f"only {num_ready} of {plan.num_actors} client actors started within "
        reason += f"{START_TIMEOUT_S:.0f} s"
    else:
        reason = f"a client actor died {MOST_DEATHS} times while it started "
        reason += f"({one_line_message(error)})"
    return ExperimentError(f"{reason} ({plan}); lower execution.actors.count")


def is_host_lost(error: RayError) -> bool:
    """True if the process of an actor died, or cannot use its GPU any more."""
    return isinstance(error, RayActorError) or is_gpu_fault(error)

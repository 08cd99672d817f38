"""Actors that share a GPU under CUDA MPS: one that dies takes the others' work with it.

Ray and the GPU are played: after a fault every process that was on the GPU fails, and a new one can
use it only when all of those are gone.
"""

import os
import signal
import subprocess
from dataclasses import dataclass, field
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

import flray
from flray.client.tasks import ClientsJob
from flray.execution import ray_pool
from flray.execution.asking import ask
from flray.execution.executor import Failed
from flray.execution.patience import Patience
from flray.execution.ray_pool import RayPool
from flray.execution.resources import ActorPlan, Actors, Needs

from scenarios import TINY

BROKEN = RayTaskError("run", "traceback", RuntimeError("CUDA error: unspecified launch failure"))


@dataclass(eq=False)
class Process:
    gpu: "Gpu"
    is_broken: bool = False
    run: Any = None

    def __post_init__(self) -> None:
        self.run = SimpleNamespace(remote=lambda _task, _bank, job: self.gpu.submit(self, job))


@dataclass
class Gpu:
    """Plays Ray: a ref is a number, and all that is running ends when somebody waits."""

    kills: dict[int, int]  # by client: how many more times its job kills the process
    faults: frozenset[int] = frozenset()  # clients whose jobs break the GPU, always
    alive: list[Process] = field(default_factory=list)
    running: dict[int, tuple[Process, Any]] = field(default_factory=dict)
    ended: dict[int, Any] = field(default_factory=dict)
    num_refs: int = 0
    num_started: int = 0

    def new_ref(self) -> int:
        self.num_refs += 1
        return self.num_refs

    def start(self) -> tuple[Process, int]:
        ref, process = self.new_ref(), Process(self)
        self.ended[ref] = BROKEN if any(each.is_broken for each in self.alive) else 0
        process.is_broken = bool(self.ended[ref])
        self.alive.append(process)
        self.num_started += 1
        return process, ref

    def submit(self, process: Process, job: Any) -> int:
        ref = self.new_ref()
        self.running[ref] = process, job
        return ref

    def kill(self, process: Process) -> None:
        self.alive = [each for each in self.alive if each is not process]

    def break_all(self) -> None:
        for each in self.alive:
            each.is_broken = True

    def wait(self, refs, num_returns, timeout) -> tuple[list[int], list[int]]:
        mine = {ref: self.running[ref] for ref in refs if ref in self.running}
        for process, job in mine.values():  # first what harms, so that it harms those beside it
            client = int(job.clients[0])
            if self.kills.get(client, 0) or client in self.faults:
                self.break_all()
                if self.kills.get(client, 0):
                    self.kills[client] -= 1
                    self.kill(process)
        for ref, (process, job) in mine.items():
            del self.running[ref]
            if process not in self.alive:
                self.ended[ref] = RayActorError()
            else:
                self.ended[ref] = BROKEN if process.is_broken else 10 * int(job.clients[0])
        return [ref for ref in refs if ref in self.ended], []

    def get(self, refs, timeout=None) -> Any:
        found = [self.ended[ref] for ref in (refs if isinstance(refs, list) else [refs])]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found if isinstance(refs, list) else found[0]


def pool_on(gpu: Gpu, monkeypatch, num_gpus: float) -> RayPool:
    for name in ("wait", "get", "kill"):
        monkeypatch.setattr(ray_pool.ray, name, getattr(gpu, name))
    monkeypatch.setattr(ray_pool.ray, "put", lambda value: value)
    monkeypatch.setattr(ray_pool, "sleep", lambda _seconds: None)
    needs = Needs(num_gpus=num_gpus)
    plan = ActorPlan(3, Actors(count=3), 1, 1, needs, needs)
    pool = RayPool("payload", plan, 1, Patience())

    def start_host(host: int) -> None:
        pool.actors[host], pool.starting[host] = gpu.start()

    monkeypatch.setattr(pool, "_start_host", start_host)
    pool.actors.extend(gpu.start()[0] for _ in range(3))
    return pool


def run(pool: RayPool) -> tuple[dict[int, int], dict[int, Failed]]:
    """Outputs by client, and who is to blame."""
    jobs = [ClientsJob(np.array([i])) for i in range(7)]
    done, guilty = ask(pool, print, {}, jobs)
    return {int(job.clients[0]): output for job, output in done}, guilty


def test_a_killed_process_is_nobodys_fault(monkeypatch) -> None:
    gpu = Gpu(kills={4: 1})
    outputs, guilty = run(pool_on(gpu, monkeypatch, num_gpus=0.25))
    assert outputs == {i: 10 * i for i in range(7)}
    assert not guilty
    assert not any(each.is_broken for each in gpu.alive)
    assert len(gpu.alive) == 3


def test_who_breaks_the_gpu_is_found_beside_those_it_harms(monkeypatch) -> None:
    gpu = Gpu(kills={}, faults=frozenset({1}))
    outputs, guilty = run(pool_on(gpu, monkeypatch, num_gpus=0.25))
    assert outputs == {i: 10 * i for i in range(7) if i != 1}
    assert list(guilty) == [1]


def test_a_gpu_that_never_comes_back_ends_in_failures(monkeypatch) -> None:
    gpu = Gpu(kills={0: 1})
    pool = pool_on(gpu, monkeypatch, num_gpus=0.25)
    gpu.alive.append(Process(gpu, is_broken=True))  # of somebody else, and it stays
    outputs, guilty = run(pool)
    assert len(outputs) < 7
    assert guilty


def test_actors_with_gpus_of_their_own_do_not_disturb_each_other(monkeypatch) -> None:
    gpu = Gpu(kills={4: 1})
    monkeypatch.setattr(gpu, "break_all", lambda: None)
    outputs, guilty = run(pool_on(gpu, monkeypatch, num_gpus=1.0))
    assert outputs == {i: 10 * i for i in range(7)}
    assert not guilty
    assert gpu.num_started == 4  # three, and one in the place of the dead


@pytest.mark.gpu
def test_killed_processes_of_a_real_gpu_lose_nothing(tmp_path) -> None:
    overrides = [
        "rounds=8",
        "model=flhc_cnn",
        "dataset={name: synthetic, num_train: 6000, num_test: 60}",
        "split={name: iid, clients: 12}",
        "participation=1",
        "execution={executor: ray, device: cuda, block: 3, actors: {count: 4, num_gpus: 0.25}}",
    ]

    def kill_one(row) -> None:
        if row["round"] in (2, 4, 6):
            Timer(0.05, kill_a_client_actor, [row["round"]]).start()

    quiet = flray.run(TINY, tmp_path / "quiet", overrides)
    disturbed = flray.run(TINY, tmp_path / "disturbed", overrides, on_round=kill_one)
    assert disturbed.summary["params_sha256"] == quiet.summary["params_sha256"]


def kill_a_client_actor(number: int) -> None:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    lines = [line for line in listed.stdout.splitlines() if "ray::ClientActor" in line]
    os.kill(int(lines[number % len(lines)].split()[0]), signal.SIGKILL)

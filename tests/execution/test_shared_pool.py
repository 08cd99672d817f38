"""A pool that several experiments share: whose clients are in a block changes no bit."""

import asyncio
import math
import os
import signal
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch

import flray
from flray.algorithms.fedavg import FedAvg
from flray.client.host import start_host
from flray.client.keeping import Ask, AskJob, ModelRows, TrainAndKeep, block_number
from flray.client.tasks import Train, TrainJob
from flray.client.training import Training
from flray.config.build import build_server, prepare
from flray.config.experiment import override, parse_experiment
from flray.errors import ExperimentError
from flray.execution import shared_pool
from flray.execution.cluster import connected
from flray.execution.ray_pool import Patience
from flray.execution.shared_pool import (
    Dispatcher,
    Part,
    SharedClientActor,
    Waiting,
    _kind,
    gathered,
    join_shared_pool,
    start_shared_pool,
)
from flray.models.bank import params_of, stack
from flray.records.run_directory import RunDirectory

from scenarios import TINY

HARD = ["dataset.size=28", "train.momentum=0.9", "model.dropout=0.5", "execution.block=12"]
ACTORS = "execution={executor: ray, actors: {count: %d, num_cpus: 0.1}}"


def waiting(kinds: str, capacity: int, size: int = 1) -> deque[Waiting]:
    """A queue of parts; a letter is a kind."""
    return deque(
        Waiting((kind,), capacity, "host", Part(None, None, place, size), True, SimpleNamespace())
        for place, kind in enumerate(kinds)
    )


@pytest.mark.parametrize(
    ("kinds", "capacity", "size", "num_idle", "taken", "left"),
    [
        ("aabca", 5, 1, 1, [0, 1, 4], "bc"),
        ("aabca", 5, 2, 1, [0, 1], "bca"),  # a third part of two would need a sixth slot
        ("aabca", 5, 1, 2, [0, 1], "bca"),  # another idle actor gets its share
        ("aab", 3, 7, 1, [0], "ab"),  # larger than a block: alone
    ],
)
def test_an_actor_takes_what_is_alike_in_order(
    kinds, capacity, size, num_idle, taken, left
) -> None:
    queue = waiting(kinds, capacity, size)
    assert [unit.part.job for unit in gathered(queue, num_idle, place=0)] == taken
    assert "".join(unit.kind[0] for unit in queue) == left


def test_questions_go_to_the_actor_that_keeps_the_models() -> None:
    """Actor 1 has models that are asked about; actor 0 takes the next training instead."""
    queue = waiting("ab", capacity=5)
    asked = Part(None, None, 2, 1, place=1)
    queue.appendleft(Waiting(("ask", 1), 5, "host", asked, False, SimpleNamespace()))
    assert [unit.part.job for unit in gathered(queue, 2, place=0)] == [0]
    assert [unit.part.job for unit in gathered(queue, 1, place=1)] == [2]
    assert [unit.part.job for unit in gathered(queue, 1, place=1)] == [1]
    assert gathered(queue, 1, place=1) == []


def test_models_of_jobs_trained_together_are_kept_apart(monkeypatch) -> None:
    """Two experiments train clients 0 and 1 in one block; each asks for its own client's model."""
    monkeypatch.setattr(shared_pool.ray, "get", lambda found: found)
    payload = prepare(parse_experiment(override(TINY, ["execution.block=4"]))).payload
    host = start_host(payload.module, payload.dataset, payload.timeline, payload.settings)
    actor = SharedClientActor(place=3)
    actor.hosts["name"] = replace(host, place=3)
    bank = stack([params_of(payload.module)])
    trained, others = (
        TrainAndKeep(Train(Training(lr=lr), FedAvg().gradient, 1), most=2) for lr in (0.1, 0.1)
    )
    jobs = [TrainJob(np.array([i]), np.array([0])) for i in (0, 1)]
    actor.banks["bank"] = bank
    parts = [Part(task, "bank", job, 1) for task, job in zip((trained, others), jobs, strict=True)]
    done, *kept = actor.run("name", ["payload"], parts)
    assert done is None
    assert [block.place for block in kept] == [3, 3]
    questions = [
        AskJob(task.call, block_number(job), ModelRows(np.array([0]), list(bank)), 3)
        for task, job in zip((trained, others), jobs, strict=True)
    ]
    _, *answers = actor.run("name", ["payload"], [Part(Ask(), None, q, 1, 3) for q in questions])
    for task, job, answer in zip((trained, others), jobs, answers, strict=True):
        alone = task.train(host, bank, job)
        assert all(torch.equal(answer[k], alone.params[k]) for k in bank)
    assert not torch.equal(*(next(iter(answer.values())) for answer in answers))
    crossed = AskJob(trained.call, block_number(jobs[1]), questions[0].question, 3)
    with pytest.raises(LookupError, match="does not have the models"):
        actor.run("name", ["payload"], [Part(Ask(), None, crossed, 1, 3)])


def kind_of(training: Training = Training(), c: torch.Tensor | None = None, name: str = "c"):  # noqa: B008
    """Of a job of client 2, with c shared."""
    shared = {} if c is None else {name: c}
    task = TrainAndKeep(Train(training, FedAvg().gradient, 1, shared=shared), most=2)
    return _kind(task, TrainJob(np.array([2]), np.array([0])))


def test_jobs_are_alike_whatever_the_values_they_share() -> None:
    assert kind_of(c=torch.zeros(3)) == kind_of(c=torch.ones(3))
    kinds = [
        kind_of(),
        kind_of(Training().paired()),
        kind_of(c=torch.zeros(3)),
        kind_of(c=torch.zeros(4)),
        kind_of(c=torch.zeros(3), name="d"),
    ]
    assert len(set(kinds)) == len(kinds)


@pytest.fixture(scope="module")
def cluster():
    with connected():
        yield


@contextmanager
def started(num_actors: int, patience: Patience | None = None):
    """The dispatcher of a pool."""
    experiment = parse_experiment(override(TINY, [ACTORS % num_actors]))
    dispatcher = start_shared_pool(prepare(experiment).plan, 1, patience)
    yield dispatcher
    ray.kill(dispatcher)


def run_together(pool, overrides: list[list[str]], folder: Path, on_round=lambda _: None):
    """Each list of overrides is an experiment; all of them at once, in threads of this process."""

    servers = []
    for place, given in enumerate(overrides):  # one by one: torch's seeds are the process's
        experiment = parse_experiment(override(TINY, [ACTORS % 1, *given]))
        directory = RunDirectory(folder / str(place))
        servers.append(build_server(experiment, directory, on_round, lambda: False, pool=pool))
    with ThreadPoolExecutor(len(servers)) as threads:
        assert all(threads.map(lambda server: server.run(), servers))
    return [server.directory.summary() for server in servers]


def alone(overrides: list[str], folder: Path) -> str:
    return flray.run(TINY, folder, overrides).summary["params_sha256"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_experiments_together_have_the_bits_they_have_alone(tmp_path) -> None:
    """Ragged clients, momentum, dropout, another gradient, other rounds, another seed and split.

    Three are of one kind: while one is computed, the other two wait and become one block.
    """
    slow = [*HARD, "train.epochs=5"]
    together = [
        [*slow, "algorithm=local"],
        [*slow, "algorithm=fedavg"],
        [*slow, "algorithm={name: flhc, rounds_before: 2}", "rounds=5"],
        [*slow, "algorithm={name: fedprox, mu: 0.5}", "seed=1"],
    ]
    with started(1) as pool:
        found = run_together(pool, together, tmp_path / "pool")
        counts = ray.get(pool.counts.remote())
    for place, overrides in enumerate(together):
        assert found[place]["params_sha256"] == alone(overrides, tmp_path / f"inline_{place}")
    assert len({summary["params_sha256"] for summary in found}) == len(together)
    assert counts["blocks"] < counts["jobs"], "nothing was computed together"


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_costs_no_experiment_anything(tmp_path) -> None:
    pids: list[int] = []

    def kill_one(row) -> None:
        if row["round"] == 2 and pids:
            os.kill(pids.pop(), signal.SIGKILL)

    together = [[*HARD, "train.epochs=10"], [*HARD, "train.epochs=10", "algorithm=local"]]
    with started(2) as pool:
        pids.extend(ray.get(pool.pids.remote()))
        found = run_together(pool, together, tmp_path / "pool", kill_one)
    assert not pids, "both were killed"
    for place, overrides in enumerate(together):
        assert found[place]["params_sha256"] == alone(overrides, tmp_path / f"inline_{place}")


def test_a_block_is_awaited_as_long_as_others_took() -> None:
    async def ask(dispatcher: Dispatcher) -> None:
        never, done = (asyncio.get_running_loop().create_future() for _ in range(2))
        with pytest.raises(TimeoutError):
            await dispatcher._answered("a", never)
        done.set_result(None)
        await dispatcher._answered("a", done)

    dispatcher = Dispatcher(None, 1, Patience(first_s=0.1, least_s=7.0))
    asyncio.run(ask(dispatcher))
    assert (dispatcher.patience.of("a"), dispatcher.patience.of("b")) == (7.0, 0.1)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_stopped_actor_costs_no_experiment_anything(tmp_path) -> None:
    """It neither answers nor dies: it is ended, and its blocks are computed by another."""
    pids: list[int] = []

    def stop_one(row) -> None:
        if row["round"] == 2 and pids:
            os.kill(pids.pop(), signal.SIGSTOP)

    together = [[*HARD, "rounds=6"], [*HARD, "rounds=6", "algorithm=local"]]
    with started(2, Patience(least_s=10.0)) as pool:
        pids.extend(ray.get(pool.pids.remote())[:1])
        found = run_together(pool, together, tmp_path / "pool", stop_one)
        counts = ray.get(pool.counts.remote())
    assert counts["hanging"] == 1
    for place, overrides in enumerate(together):
        assert found[place]["params_sha256"] == alone(overrides, tmp_path / f"inline_{place}")


SENSITIVE = '''
from flray.models.mlp200 import Mlp200


class Sensitive(Mlp200):
    """Cannot stand weights that are not finite."""

    def example_losses(self, batch):
        if not bool(self.layers[1].weight.isfinite().all()):
            raise ArithmeticError("such weights cannot be trained")
        return super().example_losses(batch)
'''


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_who_shares_a_block_with_a_failing_job_is_not_blamed(tmp_path, monkeypatch) -> None:
    """Jobs of six callers, every other with weights that fail: the rest have their own results."""
    (tmp_path / "sensitive_of_tests.py").write_text(SENSITIVE)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["model={name: 'sensitive_of_tests:Sensitive', hidden: 16}", "execution.engine=loop"]
    parts = prepare(parse_experiment(override(TINY, [ACTORS % 1, *own, "execution.block=6"])))
    good = stack([params_of(parts.payload.module)])
    bad = {name: leaf * math.inf for name, leaf in good.items()}
    training = Training(lr=0.1, epochs=30)
    jobs = [TrainJob(np.array([i]), np.array([0])) for i in (2, 4)]
    task = TrainAndKeep(Train(training, FedAvg().gradient, 1), most=64)

    def ask(place: int) -> list:
        executor = join_shared_pool(pool, parts.host, parts.payload)
        return executor.map(task, bad if place % 2 else good, jobs)

    with started(1) as pool, ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(6)))
        counts = ray.get(pool.counts.remote())
    payload = parts.payload
    host = start_host(payload.module, payload.dataset, payload.timeline, payload.settings)
    expected = [task(host, good, job) for job in jobs]
    for place, outputs in enumerate(answers):
        for output, alone in zip(outputs, expected, strict=True):
            if place % 2:
                assert "such weights cannot be trained" in output.reason
            else:
                assert (output.loss == alone.loss).all()
                assert all((output.largest[k] == alone.largest[k]).all() for k in good)
    assert counts["taken_apart"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_pool_that_does_not_fit_is_refused() -> None:
    experiment = parse_experiment(
        override(TINY, ["execution={executor: ray, actors: {count: 64}}"])
    )
    with pytest.raises(ExperimentError, match=r"64 x 1 = 64 CPU, the cluster has"):
        start_shared_pool(prepare(experiment).plan, threads=1)

"""Training tasks: what reaches the gradient, and jobs of several experiments in one block."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flray.client.tasks import ClientsJob, Train
from flray.data.events import make_timeline
from flray.engines.training import Gradient, Training
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import Params, build_seeded, params_of, stack

from scenarios import (
    RAGGED,
    host_over,
    largest_difference,
    largest_gap,
    noise_dataset,
    ragged_split,
)

pytestmark = pytest.mark.slow

TRAINING = Training(lr=0.05, momentum=0.9, epochs=2, batch_size=4)


class Corrected:
    """A direction that reads the client's own memo and what all share, as SCAFFOLD does."""

    def __call__(self, grad, w, batch, w0, memo):
        g = grad(w, batch)
        return {name: g[name] - memo[f"c_i/{name}"] + memo[f"c/{name}"] for name in g}


def host_on(device: str, engine: str, dtype: torch.dtype = torch.float32):
    module = build_seeded(lambda: MODELS["mlp200"]((1, 8, 8), 10, hidden=20, dropout=0.5), 0)
    dataset = noise_dataset(sum(RAGGED), (1, 8, 8))
    return host_over(module, dataset, ragged_split(), engine, dtype, device=device, seed=3)


def corrections(like: Params, num: int, seed: int) -> tuple[Params, Params]:
    """c_i of so many clients, leaves (num, ...), and the c they share, leaves (...)."""
    draw = torch.Generator().manual_seed(seed)
    noise = lambda shape: torch.randn(shape, generator=draw, dtype=torch.float64) / 10  # noqa: E731
    own = {f"c_i/{name}": noise((num, *leaf.shape[1:])).to(leaf) for name, leaf in like.items()}
    return own, {f"c/{name}": noise(leaf.shape[1:]).to(leaf) for name, leaf in like.items()}


def jobs_of(gradient: Gradient, with_memo: bool, dtype: torch.dtype = torch.float32):
    """Three jobs in different rounds, from different models; 1, 2 and 3 of the ragged clients.

    Models, memo and what is shared are on the CPU, as they come from the server.
    """
    models = [
        build_seeded(lambda: MODELS["mlp200"]((1, 8, 8), 10, hidden=20), s).to(dtype)
        for s in range(3)
    ]
    for t, (clients, rows) in enumerate((([3], [0]), ([0, 2], [1, 0]), ([1, 2, 3], [0, 0, 1]))):
        bank = stack([params_of(models[t]), params_of(models[t - 1])])
        memo, shared = corrections(bank, len(clients), t) if with_memo else ({}, {})
        job = ClientsJob(np.array(clients), np.array(rows), memo)
        yield Train(TRAINING, gradient, t + 1, shared=shared), bank, job


def test_engines_agree_on_memo_and_what_is_shared() -> None:
    """c - c_i is added to every gradient: as if each client's memo were c_i - c."""
    hosts = [host_on("cpu", name, torch.float64) for name in ("loop", "vectorized", "lightning")]
    for task, bank, job in jobs_of(Corrected(), True, torch.float64):
        loop, *others = (task(host, bank, job) for host in hosts)
        assert max(largest_difference(loop, other) for other in others) < 1e-10
        merged = {f"c_i/{n}": job.memo[f"c_i/{n}"] - task.shared[f"c/{n}"] for n in bank}
        zero = {name: torch.zeros_like(leaf) for name, leaf in task.shared.items()}
        same = replace(task, shared=zero)(hosts[0], bank, replace(job, memo=merged))
        assert largest_gap(loop.params, same.params) < 1e-10
        without = replace(task, shared=zero)(hosts[0], bank, job)
        assert largest_gap(loop.params, without.params) > 1e-3


def block_on(device: str, task: Train, bank: Params, job: ClientsJob):
    """The block of a host that has nothing but its data's place and who holds what."""
    timeline = make_timeline(ragged_split(), ())
    examples = SimpleNamespace(device=torch.device(device))
    return task.block(SimpleNamespace(examples=examples, timeline=timeline, seed=3), bank, job)


def test_what_a_block_uses_moves_to_the_device_of_its_data() -> None:
    task, bank, job = list(jobs_of(Corrected(), True))[2]
    block = block_on("meta", task, bank, job)
    assert {leaf.device.type for leaf in (block.w0 | block.memo).values()} == {"meta"}
    assert {len(leaf) for leaf in (block.w0 | block.memo).values()} == {3}
    assert set(block.memo) == set(job.memo) | set(task.shared)


def test_what_is_shared_is_not_copied_for_each_client() -> None:
    task, bank, job = list(jobs_of(Corrected(), True))[2]
    block = block_on("cpu", task, bank, job)
    for name, leaf in task.shared.items():
        assert block.memo[name].data_ptr() == leaf.data_ptr()
        assert all(torch.equal(row, leaf) for row in block.memo[name])


def test_a_name_is_of_memo_or_shared() -> None:
    task, bank, job = list(jobs_of(Corrected(), True))[1]
    clashing = replace(task, shared={**task.shared, "c_i/layers.1.bias": torch.zeros(20)})
    with pytest.raises(ExperimentError, match=r"both have 'c_i/layers\.1\.bias'"):
        block_on("cpu", clashing, bank, job)

"""The same results on a CUDA device, where steps are recorded as graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.client.tasks import ClientsJob, Train
from flray.engines import vectorized
from flray.engines.loop import Loop
from flray.engines.training import Training
from flray.engines.vectorized import Vectorized
from flray.models import MODELS
from flray.models.bank import build_seeded, params_of, stack

from scenarios import (
    RAGGED,
    host_over,
    largest_difference,
    largest_gap,
    models_at,
    noise_dataset,
    ragged_case,
    ragged_split,
    same_bits,
    some_clients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TRAININGS = {
    "sgd": Training(lr=0.05, weight_decay=0.01, epochs=2, batch_size=4),
    "momentum": Training(lr=0.05, momentum=0.9, weight_decay=0.01, epochs=2, batch_size=4),
    "adam": Training(optimizer="adam", lr=0.001, epochs=2, batch_size=4),
}
GRADIENTS = {"fedavg": FedAvg().gradient, "fedprox": FedProx(mu=0.5).gradient}
SLOTS = 6


def setup(model, dtype, device, training, augment="none", dropout=0.5):
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    fields = {"mlp200": {"dropout": dropout}}.get(model, {})
    build = lambda: MODELS[model]((1, 28, 28), 10, **fields)  # noqa: E731
    module = build_seeded(build, 0)
    case = ragged_case(module, training, dtype, (1, 28, 28), augment=augment, device=device)
    return module, *case


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("model", ["mlp200", "lenet5"])
def test_graphs_of_several_steps_are_the_loop_on_a_cpu(model, gradient, monkeypatch) -> None:
    """50 steps of clients that finish together: two graphs of 20 steps and ten of one."""
    training, hook = replace(TRAININGS["momentum"], epochs=5), GRADIENTS[gradient]

    def largest_clients(block):
        return some_clients(block, [3, 3])

    module, examples, block = setup(model, torch.float64, "cpu", training)
    reference = Loop(module, examples).train(largest_clients(block), training, hook)
    module, examples, block = setup(model, torch.float64, "cuda", training)
    engine = Vectorized(module, examples, SLOTS)
    found = engine.train(largest_clients(block), training, hook)
    assert largest_difference(reference, found) < 1e-10
    (step,) = engine.graphs.values()
    assert step.several is not None
    monkeypatch.setattr(step, "several", None)
    singly = engine.train(largest_clients(block), training, hook)
    assert same_bits(singly.params, found.params)


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("optimizer", TRAININGS)
@pytest.mark.parametrize("model", ["mlp200", "lenet5", "flhc_cnn"])
def test_graphed_steps_are_the_loop_on_a_cpu(model, optimizer, gradient, augment) -> None:
    training, hook = TRAININGS[optimizer], GRADIENTS[gradient]
    module, examples, block = setup(model, torch.float64, "cpu", training, augment)
    reference = Loop(module, examples).train(block, training, hook)
    module, examples, block = setup(model, torch.float64, "cuda", training, augment)
    engine = Vectorized(module, examples, SLOTS)
    for _ in range(2):  # the second time the recorded graph is used again
        found = engine.train(block, training, hook)
        assert largest_difference(reference, found) < 1e-10
    looped = Loop(module, examples).train(block, training, hook)
    assert largest_gap(reference.params, looped.params) < 1e-10


def test_steps_of_large_convolutions_are_not_written_out(monkeypatch) -> None:
    training, hook = TRAININGS["momentum"], GRADIENTS["fedprox"]
    module, examples, block = setup("lenet5", torch.float64, "cuda", training)
    written = Vectorized(module, examples, SLOTS)
    found = written.train(block, training, hook)
    monkeypatch.setattr(vectorized, "PATCHES_ON_GPU", 0)
    differentiated = Vectorized(module, examples, SLOTS)
    again = differentiated.train(block, training, hook)
    steps = [step for engine in (written, differentiated) for step in engine.graphs.values()]
    assert [step.written is not None for step in steps] == [True, False]
    assert largest_gap(found.params, again.params) < 1e-10


@pytest.mark.parametrize("model", ["mlp200", "lenet5", "flhc_cnn"])
def test_bits_do_not_depend_on_slot_neighbours_or_repetition(model) -> None:
    training, hook = TRAININGS["momentum"], GRADIENTS["fedprox"]
    module, examples, block = setup(model, torch.float32, "cuda", training)
    engine = Vectorized(module, examples, SLOTS)
    together = engine.train(block, training, hook)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2], [1, 3]):
        again = engine.train(some_clients(block, order), training, hook)
        assert same_bits(again.params, models_at(together.params, order)), order


def test_longer_plans_record_anew() -> None:
    training, hook = TRAININGS["momentum"], GRADIENTS["fedavg"]
    module, examples, block = setup("mlp200", torch.float64, "cuda", training)
    engine = Vectorized(module, examples, SLOTS)
    first = engine.train(some_clients(block, [0, 1]), training, hook)
    whole = engine.train(block, training, hook)
    assert same_bits(first.params, models_at(whole.params, [0, 1]))


class CorrectedMaml:
    """Reads all that a hook can read: both batches, the client's memo and what is shared."""

    def __call__(self, grad, w, batch, w0, memo):
        g = grad(w, batch)
        ahead = grad({name: w[name] - 0.1 * g[name] for name in g}, batch.second)
        return {name: ahead[name] - memo[f"c_i/{name}"] + memo[f"c/{name}"] for name in g}


@pytest.mark.parametrize("optimizer", TRAININGS)
def test_a_task_takes_its_params_memo_and_pairs_to_the_device(optimizer) -> None:
    """A bank, memo and shared leaves on the CPU, as they come from a server; of 1, 3, 9 and 40
    samples, so the first client takes no steps."""
    build = lambda: MODELS["mlp200"]((1, 28, 28), 10, hidden=20, dropout=0.5)  # noqa: E731
    bank = stack([params_of(build_seeded(build, seed).to(torch.float64)) for seed in range(3)])
    draw = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64) / 10  # noqa: E731
    memo = {f"c_i/{name}": noise(4, *leaf.shape[1:]) for name, leaf in bank.items()}
    shared = {f"c/{name}": noise(*leaf.shape[1:]) for name, leaf in bank.items()}
    job = ClientsJob(np.arange(4), np.array([2, 0, 2, 1]), memo)
    task = Train(TRAININGS[optimizer].paired(), CorrectedMaml(), t=1, shared=shared)

    def trained_on(device: str, engine: str, job: ClientsJob):
        dataset = noise_dataset(sum(RAGGED), (1, 28, 28), "crop_flip")
        settings = {"device": device, "block": SLOTS, "seed": 3}
        module = build_seeded(build, 0)
        host = host_over(module, dataset, ragged_split(), engine, torch.float64, **settings)
        return [task(host, bank, job) for _ in range(2)][1]  # the recorded graph used again

    reference = trained_on("cpu", "loop", job)
    for engine in ("vectorized", "loop"):
        assert largest_difference(reference, trained_on("cuda", engine, job)) < 1e-10
    (single, *_) = job.alone()
    unmoved = trained_on("cuda", "vectorized", single)  # a whole block without steps
    assert largest_gap({name: leaf[2:] for name, leaf in bank.items()}, unmoved.params) == 0


def test_a_run_on_the_gpu_resumes_and_agrees_with_the_cpu(tiny_run, tmp_path) -> None:
    common = ["execution.precision=float64", "algorithm=local"]
    cpu = tiny_run(*common, "execution.device=cpu")
    gpu = tiny_run(*common, "execution.device=cuda")
    part = tiny_run(*common, "execution.device=cuda", out=tmp_path / "p", should_stop=lambda: True)
    assert part.summary is None
    rest = tiny_run(*common, "execution.device=cuda", out=tmp_path / "p", resume=True)
    assert rest.summary["params_sha256"] == gpu.summary["params_sha256"]
    assert np.abs(cpu.clients["loss"] - gpu.clients["loss"]).max() < 1e-10


@pytest.mark.parametrize("model", ["mlp200", "flhc_cnn"])
def test_tf32_is_rounded_float32_and_leaves_torch_as_it_was(model, tiny_run) -> None:
    common = ["execution.device=cuda", f"model={model}", "dataset.size=28"]
    exact, rounded = (
        tiny_run(*common, f"execution.precision={precision}") for precision in ("float32", "tf32")
    )
    assert exact.summary["params_sha256"] != rounded.summary["params_sha256"]
    # Later rounds carry rounding further: what they compute depends on it step by step.
    first = [run.clients.query("round == 1")["loss"] for run in (exact, rounded)]
    assert 0 < np.abs(first[0] - first[1]).max() < 1e-2
    again = tiny_run(*common, "execution.precision=float32")
    assert again.summary["params_sha256"] == exact.summary["params_sha256"]

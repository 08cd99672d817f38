"""Weights of examples, and leaves beside the module's, in every engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.engines.engine import Block
from flray.engines.lightning import Lightning
from flray.engines.loop import Loop
from flray.engines.losses import BatchLoss, step_batch
from flray.engines.plan import IndexPlan, plan_clients
from flray.engines.training import LocalBatch, Training
from flray.engines.vectorized import Vectorized
from flray.errors import ExperimentError
from flray.models.bank import build_seeded
from flray.models.mlp200 import Mlp200

from scenarios import RAGGED, largest_difference, largest_gap, ragged_case, ragged_split, same_bits

SPLIT = ragged_split()
TRAINING = Training(lr=0.05, momentum=0.9, weight_decay=0.01, epochs=2, batch_size=4)
HOOKS = {"fedavg": FedAvg().gradient, "fedprox": FedProx(mu=0.5).gradient}


class Unwritten(Mlp200):
    """Its loss is no chain of known layers, so it is differentiated by vmap."""

    def example_losses(self, batch):
        return super().example_losses(batch) * batch[0].flatten(1).mean(1).cos()


by_model_and_hook = pytest.mark.parametrize(
    ("model", "hook"),
    [
        (Mlp200, "fedprox"),
        (Unwritten, "fedavg"),
        pytest.param(Mlp200, "fedavg", marks=pytest.mark.long),
        pytest.param(Unwritten, "fedprox", marks=pytest.mark.long),
    ],
)


def make(model: type[LightningModule], dtype: torch.dtype) -> tuple[list, Block]:
    """The engines, and all clients of RAGGED."""
    module = build_seeded(lambda: model((1, 8, 8), 10, hidden=12, dropout=0.3), 0)
    examples, block = ragged_case(module, TRAINING, dtype, augment="crop_flip")
    stacked = Vectorized(module, examples, num_slots=6)
    assert (stacked.written is None) == (model is Unwritten)
    return [Loop(module, examples), stacked, Lightning(module, examples)], block


def weighted(block: Block, weights: list[np.ndarray]) -> Block:
    positions = plan_clients([np.arange(n) for n in RAGGED], TRAINING, 7, 0, np.arange(len(RAGGED)))
    plans = tuple(map(IndexPlan.weighted, positions, SPLIT.train, weights))
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(plans, block.plans, strict=True))
    return replace(block, plans=plans)


def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(0, 2, n) for n in RAGGED]


@by_model_and_hook
def test_weights_of_one_change_no_bit(model, hook) -> None:
    engines, block = make(model, torch.float32)
    ones = weighted(block, [np.ones(n) for n in RAGGED])
    for engine in engines:
        plain, same = (engine.train(b, TRAINING, HOOKS[hook]) for b in (block, ones))
        assert same_bits(plain.params, same.params)
        assert plain.loss.tolist() == same.loss.tolist()


@by_model_and_hook
def test_engines_agree_on_weighted_examples(model, hook) -> None:
    engines, block = make(model, torch.float64)
    loop, *others = (e.train(weighted(block, drawn()), TRAINING, HOOKS[hook]) for e in engines)
    assert max(largest_difference(loop, other) for other in others) < 1e-10
    assert largest_gap(loop.params, engines[0].train(block, TRAINING, HOOKS[hook]).params) > 1e-3


def test_the_loss_is_divided_by_the_size_of_the_batch_not_by_the_sum_of_weights() -> None:
    (loop, *_), block = make(Mlp200, torch.float64)
    plan = weighted(block, drawn()).plans[2]
    batch = step_batch(plan, 0, loop.module, loop.examples)
    w = {name: leaf[2] for name, leaf in block.w0.items()}
    losses = [
        float(BatchLoss(loop.module).at(w, replace(batch, weight=one_hot)))
        for one_hot in torch.eye(4, dtype=torch.float64)
    ]
    whole = float(BatchLoss(loop.module).at(w, batch))
    assert whole == pytest.approx(float((batch.weight * torch.tensor(losses)).sum()))
    assert plan.weight[0, 0].tolist() == batch.weight.tolist()


def test_a_module_without_example_losses_takes_no_weights() -> None:
    class Whole(LightningModule):
        def training_step(self, batch, batch_idx):
            return batch[0].mean()

    (loop, *_), block = make(Mlp200, torch.float64)
    batch = step_batch(weighted(block, drawn()).plans[2], 0, loop.module, loop.examples)
    with pytest.raises(ExperimentError, match="Whole must define example_losses"):
        BatchLoss(Whole())(batch)


@pytest.mark.parametrize(("returned", "name"), [(None, "NoneType"), ({"los": 1.0}, "dict")])
def test_a_training_step_without_a_loss_is_named(returned, name) -> None:
    class Lossless(LightningModule):
        def training_step(self, batch, batch_idx):
            return returned

    batch = LocalBatch(torch.ones(2, 3), torch.tensor([0, 1]), None, {})
    with pytest.raises(TypeError, match=f"Lossless.training_step must return a loss.* got {name}"):
        BatchLoss(Lossless())(batch)


@pytest.mark.parametrize(
    ("method", "error"), [("training_step", TypeError), ("example_losses", ExperimentError)]
)
def test_a_loss_of_another_shape_is_refused(method, error) -> None:
    class Mine(LightningModule):
        def training_step(self, batch, batch_idx): ...

    setattr(Mine, method, lambda *_: torch.ones(3))
    batch = LocalBatch(torch.ones(2, 3), torch.tensor([0, 1]), None, {})
    message = rf"Mine.{method} must return .*, got the shape \(3,\); "
    with pytest.raises(error, match=message):
        BatchLoss(Mine())(batch)


def test_a_loss_that_no_parameter_decides_is_refused() -> None:
    class Detached(LightningModule):
        def training_step(self, batch, batch_idx):
            return (batch[0] * self.weight).detach().mean()

    module = Detached()
    module.weight = torch.nn.Parameter(torch.ones(()))
    batch = LocalBatch(torch.ones(2, 3), torch.tensor([0, 1]), None, {})
    with pytest.raises(ExperimentError, match="the loss of Detached depends on none of its param"):
        BatchLoss(module).gradient_at({"weight": torch.ones(())}, batch)


class Twin:
    """Trains a second model beside the first, with a step size that is trained too."""

    def __call__(self, grad, w, batch, w0, memo):
        first = {name: leaf for name, leaf in w.items() if "/" not in name and name != "scale"}
        second = {name: w[f"twin/{name}"] for name in first}
        g, h = grad(first, batch), grad(second, batch)
        return (
            g
            | {f"twin/{name}": w["scale"] * h[name] for name in h}
            | {"scale": 0.1 * (w["scale"] - w0["scale"]) - 0.01}
        )


@pytest.mark.parametrize("model", [Mlp200, Unwritten])
def test_engines_agree_on_leaves_beside_the_modules(model) -> None:
    engines, block = make(model, torch.float64)
    twins = {f"twin/{name}": 1.1 * leaf for name, leaf in block.w0.items()}
    scale = torch.linspace(0.5, 1, len(RAGGED), dtype=torch.float64)[:, None]
    both = replace(block, w0=block.w0 | twins | {"scale": scale})
    loop, *others = (engine.train(both, TRAINING, Twin()) for engine in engines)
    assert max(largest_gap(loop.params, other.params) for other in others) < 1e-10
    plain = engines[0].train(block, TRAINING, HOOKS["fedavg"])
    assert largest_gap(plain.params, loop.params) == 0  # the first model trains as it would alone
    assert all(float((loop.params[n] - leaf).abs().max()) > 1e-3 for n, leaf in both.w0.items())
    only = engines[1].train(both, TRAINING.only({"scale"}), Twin())
    moved = {n for n, leaf in only.params.items() if not torch.equal(leaf, both.w0[n])}
    assert moved == {"scale"}

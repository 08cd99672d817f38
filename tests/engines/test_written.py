"""Written-out modules: what is recognised, and that every optimiser and hook agrees with `loop`."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.algorithms.scaffold import Scaffold
from flray.client.footprint import layer_values
from flray.client.host import choose_engine, default_threads
from flray.engines import vectorized
from flray.engines.engine import Block
from flray.engines.loop import Loop
from flray.engines.stacked_layers import sum_of_products
from flray.engines.stacked_step import Step
from flray.engines.tracing import is_written_out, write_out, write_out_forward
from flray.engines.training import Training
from flray.engines.vectorized import Vectorized
from flray.engines.written import Targets
from flray.models import MODELS
from flray.models.bank import build_seeded
from flray.models.classifier import Classifier
from flray.models.dropout import KeyedDropout, dropout_keys
from flray.models.mlp import Mlp
from flray.models.predictor import Batch

from scenarios import (
    Residuals,
    largest_difference,
    largest_gap,
    least_move,
    models_at,
    ragged_case,
    same_bits,
    some_clients,
)

pytestmark = pytest.mark.slow

SHAPE = (2, 9, 8)
STEPS = {"epochs": 2, "batch_size": 4}


class Functional(Classifier):
    """Layers without a Sequential, odd shapes, dropout of images, a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, (3, 2), padding=(1, 0))
        self.drop = KeyedDropout(0.3)
        self.second = nn.Conv2d(3, 4, 3, padding="same", bias=False)
        self.last = nn.Linear(4 * 2 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.drop(self.first(x))), 2)  # (3, 4, 3)
        x = F.max_pool2d(self.second(x), (2, 1))
        logits: Tensor = self.last(torch.relu(x).flatten(1))
        return logits


class Scaled(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwoLosses(Functional):
    def other_losses(self, batch: Batch) -> Tensor:
        return 3 * self.example_losses(batch)


def case(module: LightningModule, training: Training, dtype: torch.dtype = torch.float64) -> Any:
    return ragged_case(module, training, dtype, SHAPE, augment="crop_flip")


def with_controls(block: Block) -> Block:
    generator = torch.Generator().manual_seed(0)
    memo = {
        f"{kind}/{name}": torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) / 100
        for kind in ("c_i", "c")
        for name, leaf in block.w0.items()
    }
    return Block(block.plans, block.w0, memo)


class OtherLoss:
    """A hook that asks for another loss of the module, which is not written out."""

    def __call__(self, grad, w, batch, w0, memo):
        return grad(w, replace(batch, loss="other_losses"))


class Clipped:
    """A hook that mixes the elements of a leaf: right only if it sees one client at a time."""

    def __call__(self, grad, w, batch, w0, memo):
        return {name: g / (1 + g.norm()) for name, g in grad(w, batch).items()}


HOOKS = {
    "fedavg": FedAvg().gradient,
    "fedprox": FedProx(mu=0.5).gradient,
    "scaffold": Scaffold().gradient,
    "clipped": Clipped(),
    "other_loss": OtherLoss(),
}
TRAININGS = {
    "sgd": Training(lr=0.1, **STEPS),
    "weight_decay": Training(lr=0.1, weight_decay=0.05, **STEPS),
    "momentum": Training(lr=0.05, momentum=0.9, weight_decay=0.01, **STEPS),
    "adam": Training(optimizer="adam", lr=0.001, **STEPS),
    "module": Training(optimizer="module", **STEPS),
    "some leaves by sgd": Training(lr=0.05, momentum=0.9, **STEPS).only({"last.weight"}),
    "some leaves": Training(lr=0.05, momentum=0.9, weight_decay=0.01, **STEPS).only(
        {"last.weight", "last.bias"}
    ),
}


PAIRS = [
    pytest.param(optimizer, hook, marks=[pytest.mark.long] * ((i + k) % 2))
    for i, optimizer in enumerate(TRAININGS)
    for k, hook in enumerate(HOOKS)
]


@pytest.mark.parametrize(("optimizer", "hook"), PAIRS)
def test_written_out_is_loop(optimizer, hook) -> None:
    """Ragged clients in tiles with dummies, crops, dropout, odd kernels."""
    training = TRAININGS[optimizer]
    module = build_seeded(TwoLosses, 0)
    examples, block = case(module, training)
    block = with_controls(block) if hook == "scaffold" else block
    engine = Vectorized(module, examples, num_slots=6)
    assert engine.written is not None
    assert engine.tile == 6
    engine.tile = 3  # two tiles, the second with two dummies
    expected = Loop(module, examples).train(block, training, HOOKS[hook])
    assert least_move(block.w0, expected.params) > 1e-3
    assert largest_difference(expected, engine.train(block, training, HOOKS[hook])) < 1e-10


@pytest.mark.parametrize(
    ("room", "size", "is_written"), [(9, 6, True), (2.5, 2, True), (0.5, 6, False)]
)
def test_a_gpu_trains_as_many_as_it_has_room_for_the_patches_of(
    room, size, is_written, monkeypatch
) -> None:
    """On a CPU, without its tiles: six slots, two at a time, or differentiated without patches."""
    training, hook = TRAININGS["momentum"], HOOKS["fedprox"]
    module = build_seeded(TwoLosses, 0)
    examples, block = case(module, training)
    engine = Vectorized(module, examples, num_slots=6, form="patches")
    engine.in_tiles = False
    values = engine.written.patch_values(dict(module.named_parameters()), examples.images.shape[1:])
    of_client = values * training.batch_size * examples.mean.element_size()
    monkeypatch.setattr(vectorized, "PATCHES_ON_GPU", int(room * of_client))
    stacked, found = engine._stacked_and_size(training)
    assert (found, stacked.written is not None) == (size, is_written)
    expected = Loop(module, examples).train(block, training, hook)
    assert largest_difference(expected, engine.train(block, training, hook)) < 1e-10


class Dense(Classifier):
    """Dropout before the first linear layer, between two and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            KeyedDropout(0.2),
            nn.Linear(2 * 9 * 8, 7),
            KeyedDropout(0.5),
            nn.ReLU(),
            nn.Linear(7, 10),
            KeyedDropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits

    def other_losses(self, batch: Batch) -> Tensor:
        return 3 * self.example_losses(batch)


class Spare(Dense):
    """With a layer that its loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 2)


@pytest.mark.parametrize("optimizer", TRAININGS)
@pytest.mark.parametrize("hook", ["fedavg", "fedprox"])
def test_leaves_of_no_layer_decay_as_in_loop(optimizer, hook) -> None:
    training = TRAININGS[optimizer]
    module = build_seeded(Spare, 0)
    examples, block = case(module, training)
    engine = Vectorized(module, examples, num_slots=6)
    assert engine.written is not None
    found = engine.train(block, training, HOOKS[hook])
    expected = Loop(module, examples).train(block, training, HOOKS[hook])
    assert largest_gap(expected.params, found.params) < 1e-10
    is_moved = not torch.equal(expected.params["spare.weight"], block.w0["spare.weight"])
    assert is_moved == (training.weight_decay > 0 and training.moves("spare.weight"))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("hook", ["fedavg", "fedprox"])
@pytest.mark.parametrize("model", [Dense, TwoLosses])
def test_steps_one_by_one_are_steps_in_groups(model, optimizer, hook, monkeypatch) -> None:
    """As CUDA graphs take them; without a hook a GPU draws dropout for a group of steps at once."""
    training = TRAININGS[optimizer]
    module = build_seeded(model, 0)
    examples, block = case(module, training, torch.float32)
    engine = Vectorized(module, examples, num_slots=6)
    in_groups = engine.train(block, training, HOOKS[hook])
    advance = Step.advance

    def advance_singly(step, num_steps) -> None:
        for _ in range(num_steps):
            advance(step, 1)

    def drawn(step, keys, batch_size):
        return step.written.drawn(dropout_keys(module, keys), step.w, batch_size)

    monkeypatch.setattr(Step, "advance", advance_singly)
    if hook == "fedavg":
        monkeypatch.setattr(Step, "_layer_keys", drawn)
    singly = engine.train(block, training, HOOKS[hook])
    assert largest_gap(block.w0, singly.params) > 1e-3
    assert largest_difference(in_groups, singly) == 0


@pytest.mark.parametrize("form", ["patches", "direct"])
@pytest.mark.parametrize("name", ["lenet5", "mlp200"])
def test_an_input_that_models_share_gives_the_outputs_of_copies(name, form) -> None:
    shape = (3, 16, 16)
    modules = [build_seeded(lambda: MODELS[name](shape, 10), n).eval() for n in range(3)]
    written = write_out_forward(modules[0], form)
    assert written is not None
    leaves = [dict(module.named_parameters()) for module in modules]
    w = {leaf: torch.stack([model[leaf].detach() for model in leaves]) for leaf in leaves[0]}
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    before, shared = x.clone(), written.outputs(w, x.expand(3, *x.shape))
    assert torch.equal(shared, written.outputs(w, x.repeat(3, 1, 1, 1, 1)))
    assert torch.equal(x, before)
    for module, outputs in zip(modules, shared, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(outputs, module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "kept", "passing"),
    [
        # (2, 9, 8) -> 3 channels of 9 x 7, kernel 3 x 2; pooled to 4 x 3; then 3 x 3
        (Functional, 9 * 7 * 6 * 2 + 4 * 3 * 9 * 3, 4 * 3 * 9 * 4),
        # (2, 9, 8) -> 4 channels of 9 x 8; 2 x 3 to 6 of 8 x 6; 3 x 3 there; 2 x 3 to 4 of 9 x 8
        (
            lambda: Residuals(SHAPE),
            9 * 8 * 9 * 2 + 8 * 6 * 6 * 4 + 8 * 6 * 9 * 6 + 9 * 8 * 6 * 6,
            8 * 6 * 9 * 6,
        ),
    ],
    ids=["functional", "residuals"],
)
def test_patches_of_an_image_are_counted(build, kept, passing) -> None:
    """By hand: those of all inputs, and of the gradient that has most."""
    module = build_seeded(build, 0)
    written = write_out(module)
    assert written is not None
    found = written.patch_values(dict(module.named_parameters()), SHAPE)
    assert found == kept + passing


@pytest.mark.parametrize("form", ["patches", pytest.param("direct", marks=pytest.mark.long)])
def test_gradients_of_resnet9_are_those_of_autograd(form) -> None:
    module = build_seeded(lambda: MODELS["resnet9"]((3, 8, 8), 7), 0).double()
    written = write_out(module, form)
    assert written is not None
    generator = torch.Generator().manual_seed(0)
    w = {
        name: p.detach() + torch.randn(2, *p.shape, generator=generator, dtype=p.dtype) / 50
        for name, p in module.named_parameters()
    }
    x = torch.randn(2, 3, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(7, (2, 3), generator=generator)
    targets = Targets.of(y, torch.ones(2, 3, dtype=torch.bool), 7, x.dtype)
    gradients, losses = written.gradients(targets, w, {}, x)
    for k, loss in enumerate(losses):
        module.load_state_dict({name: leaf[k] for name, leaf in w.items()})
        expected = module.example_losses((x[k], y[k])).mean()
        leaves = torch.autograd.grad(expected, list(module.parameters()))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        assert all(leaf.abs().max() > 1e-3 for leaf in leaves)
        for name, leaf in zip(w, leaves, strict=True):
            torch.testing.assert_close(gradients[name][k], leaf, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parts", [2, 8, 32])
def test_a_sum_in_parts_is_the_sum(parts) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, dy = (
        torch.randn(3, 64, width, generator=generator, dtype=torch.float64) for width in (5, 4)
    )
    found = sum_of_products(inputs, dy, parts)
    torch.testing.assert_close(found, torch.einsum("knp,knq->kpq", inputs, dy))


@pytest.mark.parametrize("hook", ["fedavg", "clipped"])
def test_threads_tiles_and_slots_change_no_bit(hook) -> None:
    training = TRAININGS["sgd"]
    module = build_seeded(Functional, 0)
    examples, block = case(module, training, torch.float32)
    engine = Vectorized(module, examples, num_slots=6)
    engine.tile = 2
    alone = engine.train(block, training, HOOKS[hook])
    engine.threads = 3
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2], [1, 3, 0]):
        result = engine.train(some_clients(block, order), training, HOOKS[hook])
        assert same_bits(result.params, models_at(alone.params, order)), order
        assert np.array_equal(result.loss, alone.loss[order])


def test_an_error_in_a_thread_is_raised() -> None:
    class Broken:
        def __call__(self, grad, w, batch, w0, memo):
            raise ArithmeticError("a client's own error")

    module = build_seeded(Functional, 0)
    examples, block = case(module, TRAININGS["sgd"])
    engine = Vectorized(module, examples, num_slots=6, threads=2)
    engine.tile = 2
    with pytest.raises(ArithmeticError, match="a client's own error"):
        engine.train(block, TRAININGS["sgd"], Broken())


@pytest.mark.parametrize("name", ["mlp200", "lenet5", "flhc_cnn", "leaf_cnn", "resnet9"])
def test_the_classifiers_of_the_papers_are_written_out(name) -> None:
    assert is_written_out(MODELS[name]((1, 28, 28), 10))


def with_hook() -> LightningModule:
    module = Functional()
    module.first.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    return module


def with_frozen() -> LightningModule:
    module = Functional()
    module.first.weight.requires_grad_(False)
    return module


def with_strides() -> LightningModule:
    module = Functional()
    module.first = nn.Conv2d(2, 3, (3, 2), stride=2)
    return module


class Smoothed(Functional):
    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels, reduction="none", label_smoothing=0.1)


class Shared(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, 144)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x.flatten(1)))


class Deciding(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


class Around(Classifier):
    """A sum of 4 x 9 x 8 images and a function of them."""

    def __init__(self, change, *after: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.change, self.again = change, nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Sequential(nn.Flatten(), *after, nn.Linear(288, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        logits: Tensor = self.last(self.sum(x, self.change(x)))
        return logits

    def sum(self, x: Tensor, change: Tensor) -> Tensor:
        return x + change


class Doubled(Around):
    def sum(self, x: Tensor, change: Tensor) -> Tensor:
        return torch.add(x, change, alpha=2)


class Aliased(Around):
    """A second sum with an x that is another tensor by then, which traces do not show."""

    def sum(self, x: Tensor, change: Tensor) -> Tensor:
        same = x
        x += change
        return self.again(x) + same


class Projected(Around):
    def sum(self, x: Tensor, change: Tensor) -> Tensor:
        return self.again(x) + change


def convolution(outputs: int = 4, kernel: int | tuple[int, int] = 3) -> nn.Conv2d:
    return nn.Conv2d(4, outputs, kernel, padding=1 if kernel == 3 else 0)


def with_norm_twice() -> LightningModule:
    norm = nn.GroupNorm(2, 4)
    return Around(nn.Sequential(norm, convolution(), norm))


def with_tied_weights() -> LightningModule:
    module = Around(nn.Sequential(convolution(), convolution()))
    module.change[1].weight = module.change[0].weight
    return module


SUMS = {
    "kept": lambda: Around(convolution()),
    "x is overwritten": lambda: Around(nn.Sequential(nn.ReLU(), convolution())),
    "x twice": lambda: Around(nn.Identity()),
    "one pixel": lambda: Around(nn.MaxPool2d((9, 8))),
    "one pixel by a kernel": lambda: Around(convolution(kernel=(9, 8))),
    "one channel": lambda: Around(convolution(outputs=1)),
    "factor": lambda: Doubled(convolution()),
    "aliased": lambda: Aliased(convolution()),
    "projected": lambda: Projected(convolution()),
    "norm twice": with_norm_twice,
    "tied weights": with_tied_weights,
    "norm of vectors": lambda: Around(convolution(), nn.GroupNorm(2, 288)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_not_residual_connections_are_left_to_vmap(name) -> None:
    module = SUMS[name]()
    assert module(torch.zeros(3, *SHAPE)).shape == (3, 10)
    assert (write_out(module) is None) == (name != "kept")


@pytest.mark.parametrize(
    "build", [Scaled, Smoothed, Shared, Deciding, with_hook, with_frozen, with_strides]
)
def test_what_is_not_such_a_chain_is_left_to_vmap(build) -> None:
    assert write_out(build()) is None


class Halved(Mlp):
    """A predictor with a loss of its own."""

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().losses(output, targets) / 2


def test_predictors_of_classes_are_written_out() -> None:
    training = Training(lr=0.1, epochs=2, batch_size=4)
    module = build_seeded(lambda: Mlp(SHAPE, 10, hidden=(7,)), 0).double()
    examples, block = case(module, training)
    engine = Vectorized(module, examples, num_slots=6)
    assert engine.written is not None
    found = engine.train(block, training, FedAvg().gradient).params
    expected = Loop(module, examples).train(block, training, FedAvg().gradient).params
    assert largest_gap(block.w0, expected) > 1e-3
    assert largest_gap(found, expected) < 1e-12


@pytest.mark.parametrize("kind", ["numbers", "several", "own loss"])
def test_other_targets_and_losses_of_predictors_are_left_to_vmap(kind) -> None:
    module = (Halved if kind == "own loss" else Mlp)(SHAPE, 10)
    examples, _ = case(module, Training(), torch.float32)
    labels = {"numbers": examples.labels.float(), "several": examples.labels[:, None]}
    examples = replace(examples, labels=labels.get(kind, examples.labels))
    assert Vectorized(module, examples, num_slots=6).written is None


def test_threads_by_default_are_used_where_they_change_no_bit(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    written, other = Functional(), Scaled()
    assert default_threads("auto", written, "cpu") == 3
    assert default_threads("loop", written, "cpu") == 1
    assert default_threads("auto", other, "cpu") == 1
    assert default_threads("auto", written, "cuda") == 1
    large = MODELS["leaf_cnn"]((1, 28, 28), 10)
    assert choose_engine("auto", large, "cpu") == "vectorized"


def test_modules_are_traced_in_several_threads() -> None:
    def traced(_: int) -> tuple[bool, int]:
        module = MODELS["mlp200"]((1, 28, 28), 10)
        return is_written_out(module), layer_values(module, (1, 28, 28))[-1]

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(traced, range(60))) == {(True, 10)}

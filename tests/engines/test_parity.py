"""The engines agree: on ragged clients, with everything that could tell them apart."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.engines import stacked_plan
from flray.engines.engine import Block
from flray.engines.lightning import Lightning
from flray.engines.loop import Loop
from flray.engines.losses import BatchLoss, step_batch
from flray.engines.stacked_plan import Handover, Seats, lanes_of, slots_for
from flray.engines.training import Training
from flray.engines.vectorized import Vectorized
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import build_seeded
from flray.models.dropout import KeyedDropout
from flray.models.mlp200 import Mlp200

from scenarios import (
    Residuals,
    largest_difference,
    largest_gap,
    least_move,
    models_at,
    pairwise,
    ragged_case,
    same_bits,
    some_clients,
)

pytestmark = pytest.mark.slow

SLOTS = 6  # two dummies beside the four clients
FIVE_STEPS = {"epochs": 2, "batch_size": 4}  # 2 epochs of at most 10 batches: 2 to 20 steps

OPTIMIZERS = {
    "sgd": Training(lr=0.1, **FIVE_STEPS),
    "momentum": Training(lr=0.05, momentum=0.9, **FIVE_STEPS),
    "weight_decay": Training(lr=0.1, weight_decay=0.01, momentum=0.5, **FIVE_STEPS),
    "adam": Training(optimizer="adam", lr=0.001, weight_decay=0.01, **FIVE_STEPS),
    "module": Training(optimizer="module", **FIVE_STEPS),
}
GRADIENTS = {"fedavg": FedAvg().gradient, "fedprox": FedProx(mu=0.5).gradient}


class SquaredError(LightningModule):
    """A loss other than cross-entropy, two parameter groups, an optimiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 16)
        self.drop = KeyedDropout(0.3)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.tanh(self.hidden(x.flatten(1)))))

    def example_losses(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return (self(x) - torch.eye(10, dtype=x.dtype)[y]).square().sum(1)

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        return self.example_losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": self.hidden.parameters(), "lr": 0.01},
            {"params": self.out.parameters(), "lr": 0.02, "momentum": 0.8},
        ]
        return torch.optim.SGD(groups, lr=0.1)


@dataclass(frozen=True)
class Case:
    module: Any
    examples: Any
    block: Block


def make(model: str, dtype: torch.dtype, training: Training, augment: str = "none") -> Case:
    shape = (1, 8, 8) if model in ("squared_error", "residuals") else (1, 28, 28)
    build = {
        "mlp200": lambda: MODELS["mlp200"](shape, 10, hidden=20, dropout=0.5),
        "lenet5": lambda: MODELS["lenet5"](shape, 10),
        "flhc_cnn": lambda: MODELS["flhc_cnn"](shape, 10),
        "squared_error": SquaredError,
        "residuals": lambda: Residuals(shape),
    }[model]
    module = build_seeded(build, 0)
    return Case(module, *ragged_case(module, training, dtype, shape, augment=augment))


@pytest.mark.parametrize(
    ("model", "optimizer", "gradient", "augment", "dtype"),
    pairwise(
        ["mlp200", "lenet5", "squared_error", "residuals"],
        OPTIMIZERS,
        GRADIENTS,
        ["none", "crop_flip"],
        [torch.float64, torch.float32],
    ),
)
def test_vectorized_is_loop(model, optimizer, gradient, augment, dtype) -> None:
    training = OPTIMIZERS[optimizer]
    case = make(model, dtype, training, augment)
    a = Loop(case.module, case.examples).train(case.block, training, GRADIENTS[gradient])
    b = Vectorized(case.module, case.examples, SLOTS).train(
        case.block, training, GRADIENTS[gradient]
    )
    assert max(plan.num_steps for plan in case.block.plans) == 20
    assert least_move(case.block.w0, a.params) > 1e-3
    assert largest_difference(a, b) < (1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.long
def test_parity_of_the_large_cnn() -> None:
    training = OPTIMIZERS["momentum"]
    case = make("flhc_cnn", torch.float64, training)
    a = Loop(case.module, case.examples).train(case.block, training, GRADIENTS["fedprox"])
    b = Vectorized(case.module, case.examples, 4).train(case.block, training, GRADIENTS["fedprox"])
    assert largest_difference(a, b) < 1e-10


@pytest.mark.parametrize(
    "how", [("momentum", "fedavg"), ("sgd", "fedprox"), ("weight_decay", "fedavg")]
)
def test_parity_would_fail_if_finished_clients_were_not_frozen(how, monkeypatch) -> None:
    training, gradient = OPTIMIZERS[how[0]], GRADIENTS[how[1]]
    case = make("mlp200", torch.float64, training)
    reference = Loop(case.module, case.examples).train(case.block, training, gradient)

    def all_at_the_end(lanes, ends, device) -> tuple[Handover, ...]:
        clients = [client for lane in lanes for client in lane]
        done = Seats.of(clients, range(len(clients)), device)
        return (Handover(max(end[-1] for end in ends) - 1, done, None),)

    monkeypatch.setattr(stacked_plan, "_handovers", all_at_the_end)
    thawed = Vectorized(case.module, case.examples, SLOTS).train(case.block, training, gradient)
    assert largest_gap(reference.params, thawed.params) > 1e-4


@pytest.mark.parametrize(
    ("model", "optimizer", "num_slots"),
    [
        ("mlp200", "momentum", 2),
        ("squared_error", "weight_decay", 3),
        ("squared_error", "adam", 2),
        pytest.param("mlp200", "weight_decay", 1, marks=pytest.mark.long),
        pytest.param("mlp200", "adam", 3, marks=pytest.mark.long),
        pytest.param("squared_error", "momentum", 1, marks=pytest.mark.long),
    ],
)
def test_clients_that_wait_for_a_slot_are_trained_to_the_same_bits(
    model, optimizer, num_slots
) -> None:
    training, gradient = OPTIMIZERS[optimizer], GRADIENTS["fedprox"]
    case = make(model, torch.float64, training)
    expected = Loop(case.module, case.examples).train(case.block, training, gradient)
    engine = Vectorized(case.module, case.examples, num_slots)
    together = engine.train(case.block, training, gradient)
    assert largest_difference(expected, together) < 1e-10
    for k in range(4):
        alone = engine.train(some_clients(case.block, [k]), training, gradient)
        assert same_bits(alone.params, models_at(together.params, [k]))


def test_slots_are_fewer_where_clients_differ_much_in_steps() -> None:
    assert slots_for(np.array([59, 60, 60]), 10) == 10  # all alike
    assert slots_for(np.arange(50, 100), 10) == 10  # nothing to gain: nobody could be second
    assert slots_for(np.array([0, 1]), 1) == 1
    skewed = np.array([10] * 90 + [1000] * 10)
    assert slots_for(skewed, 100) < 50
    lanes = lanes_of(skewed, slots_for(skewed, 100))
    assert sorted(k for lane in lanes for k in lane) == list(range(100))
    assert max(skewed[lane].sum() for lane in lanes) < 1.1 * 1000


def test_what_was_received_is_not_changed() -> None:
    training = OPTIMIZERS["momentum"]
    case = make("mlp200", torch.float32, training)
    before = {name: leaf.clone() for name, leaf in case.block.w0.items()}
    for engine in (Loop(case.module, case.examples), Vectorized(case.module, case.examples, SLOTS)):
        engine.train(case.block, training, GRADIENTS["fedavg"])
        assert largest_gap(before, case.block.w0) == 0


class FirstOrderMaml:
    """As first-order Per-FedAvg: the gradient of the second batch after a step on the first."""

    def __call__(self, grad, w, batch, w0, memo):
        g = grad(w, batch)
        return grad({name: w[name] - 0.1 * g[name] for name in g}, batch.second)


class SecondBatchFirst:
    """Asks at another point and on the second batch first, at w and on the first batch last."""

    def __call__(self, grad, w, batch, w0, memo):
        ahead = grad({name: 0.9 * w[name] for name in w}, batch.second)
        there = grad(w, batch.second)
        here = grad(w, batch)
        return {name: here[name] + 0.5 * there[name] + 0.2 * ahead[name] for name in w}


def engines(case: Case) -> list[Any]:
    return [
        Loop(case.module, case.examples),
        Vectorized(case.module, case.examples, SLOTS),
        Lightning(case.module, case.examples),
    ]


@pytest.mark.parametrize(
    ("model", "optimizer", "gradient", "augment"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case[0] == "lenet5"))
        for case in pairwise(
            ["mlp200", "lenet5"],
            ["momentum", "adam"],
            [FirstOrderMaml(), SecondBatchFirst()],
            ["none", "crop_flip"],
        )
    ],
)
def test_engines_agree_on_steps_of_two_batches(model, optimizer, gradient, augment) -> None:
    """RAGGED is 1, 3, 9 and 40 samples: no step, a batch in halves, an odd batch left out."""
    training = OPTIMIZERS[optimizer].paired()
    case = make(model, torch.float64, training, augment)
    assert [plan.num_steps for plan in case.block.plans] == [0, 2, 2, 10]
    loop, *others = (engine.train(case.block, training, gradient) for engine in engines(case))
    w0 = case.block.w0
    assert same_bits(models_at(loop.params, [0]), models_at(w0, [0]))
    assert least_move(models_at(w0, [1, 2, 3]), models_at(loop.params, [1, 2, 3])) > 1e-3
    assert loop.loss[0] == 0
    assert (loop.loss[1:] > 0).all()
    assert max(largest_difference(loop, other) for other in others) < 1e-10


def first_loss(case: Case, k: int) -> float:
    """Of client k, the loss of the second batch at 0.9 w0: the first that SecondBatchFirst asks."""
    w = {name: 0.9 * leaf[k] for name, leaf in case.block.w0.items()}
    plan = case.block.plans[k]
    batch = step_batch(plan, 0, case.module, case.examples).second
    return float(BatchLoss(case.module).gradient_at(w, batch)[1])


def test_the_loss_of_a_step_is_that_of_its_first_gradient() -> None:
    training = Training(lr=0.1, batch_size=4, epochs=1).paired()
    case = make("mlp200", torch.float64, training)
    expected = first_loss(case, 2)  # nine samples: one step
    for engine in engines(case):
        result = engine.train(some_clients(case.block, [2]), training, SecondBatchFirst())
        assert result.loss == pytest.approx([expected], abs=1e-10)


def test_the_second_batch_has_a_key_of_its_own() -> None:
    """Dropout and crops of the two batches differ, even of the same examples."""
    training = OPTIMIZERS["sgd"].paired()
    case = make("mlp200", torch.float64, training, "crop_flip")
    plan = case.block.plans[3]
    ids = plan.ids.copy()
    ids[:, 1] = ids[:, 0]
    batch = step_batch(replace(plan, ids=ids), 0, case.module, case.examples)
    assert batch.second is not None
    assert torch.equal(batch.y, batch.second.y)
    assert not torch.equal(batch.x, batch.second.x)
    assert batch.keys != batch.second.keys
    single = make("mlp200", torch.float64, OPTIMIZERS["sgd"]).block.plans[3]
    assert step_batch(single, 0, case.module, case.examples).second is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_clients_without_steps_keep_their_models(dtype) -> None:
    """Alone, where a whole block takes no steps, and beside others."""
    training = OPTIMIZERS["momentum"].paired()
    case = make("mlp200", dtype, training)
    for engine, order in product(engines(case), ([0], [0, 0], [3, 0])):
        result = engine.train(some_clients(case.block, order), training, FirstOrderMaml())
        assert same_bits(models_at(result.params, [-1]), models_at(case.block.w0, [0]))
        assert result.loss[-1] == 0
        assert (result.loss[0] > 0) == (order[0] == 3)


@pytest.mark.parametrize(
    ("model", "training", "gradient", "augment"),
    [
        ("mlp200", OPTIMIZERS["momentum"], GRADIENTS["fedprox"], "none"),
        ("lenet5", OPTIMIZERS["momentum"], GRADIENTS["fedprox"], "none"),
        ("residuals", OPTIMIZERS["momentum"], GRADIENTS["fedprox"], "none"),
        ("mlp200", OPTIMIZERS["momentum"].paired(), FirstOrderMaml(), "crop_flip"),
    ],
    ids=["mlp200", "lenet5", "residuals", "paired"],
)
def test_bits_do_not_depend_on_slot_or_neighbours(model, training, gradient, augment) -> None:
    case = make(model, torch.float32, training, augment)
    engine = Vectorized(case.module, case.examples, SLOTS)
    together = engine.train(case.block, training, gradient)
    for order in ([3, 1, 0, 2], [2], [1, 3]):
        again = engine.train(some_clients(case.block, order), training, gradient)
        assert same_bits(again.params, models_at(together.params, order)), order


def still(case: Case, leaves: set[str], params: dict[str, torch.Tensor]) -> bool:
    """True if all leaves but these have the bits they started from, and each of these moved."""
    return all(
        torch.equal(leaf, case.block.w0[name]) != (name in leaves) for name, leaf in params.items()
    )


@pytest.mark.parametrize(
    ("model", "optimizer", "gradient"),
    pairwise(["mlp200", "squared_error"], ["weight_decay", "adam", "module"], GRADIENTS),
)
def test_only_some_leaves_are_trained(model, optimizer, gradient) -> None:
    """Written out, by vmap and one by one, as by a module whose other parameters are frozen."""
    whole = OPTIMIZERS[optimizer]
    case = make(model, torch.float64, whole)
    leaves = (
        {"out.weight", "out.bias"} if model == "squared_error" else set(list(case.block.w0)[2:])
    )
    results = [e.train(case.block, whole.only(leaves), GRADIENTS[gradient]) for e in engines(case)]
    assert all(still(case, leaves, result.params) for result in results)
    for name, parameter in case.module.named_parameters():
        parameter.requires_grad_(name in leaves)
    frozen = Loop(case.module, case.examples).train(case.block, whole, GRADIENTS[gradient])
    assert max(largest_gap(frozen.params, result.params) for result in results) < 1e-10


class WithBatchNorm(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> Any:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self(x), y)}


class WithTorchDropout(SquaredError):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)


class WithLbfgs(SquaredError):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def test_loop_trains_batch_norm_and_its_statistics_travel() -> None:
    training = Training(lr=0.1, batch_size=4)
    module = build_seeded(WithBatchNorm, 0)
    examples, block = ragged_case(module, training, sizes=(8, 8))
    result = Loop(module, examples).train(block, training, GRADIENTS["fedavg"])
    assert "layers.2.running_mean" in result.params
    assert float(result.params["layers.2.running_mean"].abs().max()) > 0
    assert "layers.2.num_batches_tracked" not in result.params
    head = Loop(module, examples).train(
        block, training.only({"layers.3.weight"}), GRADIENTS["fedavg"]
    )
    moved = {n for n, leaf in head.params.items() if not torch.equal(leaf, block.w0[n])}
    assert moved == {"layers.3.weight"}


def test_torch_dropout_on_loop_depends_on_the_client_only() -> None:
    training = Training(lr=0.1, batch_size=4)
    module = build_seeded(WithTorchDropout, 0)
    examples, block = ragged_case(module, training)
    together = Loop(module, examples).train(block, training, GRADIENTS["fedavg"])
    torch.rand(3)
    alone = Loop(module, examples).train(some_clients(block, [3]), training, GRADIENTS["fedavg"])
    assert same_bits(alone.params, models_at(together.params, [3]))


@pytest.mark.parametrize("engine", [Loop, Lightning])
def test_buffers_that_do_not_travel_are_those_of_the_module_for_each_client(engine) -> None:
    class Counting(SquaredError):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("share", torch.ones(()), persistent=False)

        def training_step(
            self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
        ) -> torch.Tensor:
            self.steps += 1
            self.share = self.share / 2
            loss = super().example_losses(batch).mean() * self.share
            self.log("steps", self.steps)
            return loss

        example_losses = property()  # so that the engines ask for training_step

    training = Training(lr=0.1, batch_size=4)
    module = build_seeded(Counting, 0)
    examples, block = ragged_case(module, training)
    together = engine(module, examples).train(block, training, GRADIENTS["fedavg"])
    alone = engine(module, examples).train(some_clients(block, [3]), training, GRADIENTS["fedavg"])
    assert same_bits(alone.params, models_at(together.params, [3]))
    assert int(module.steps) == 0


@pytest.mark.parametrize(
    ("build", "reason"),
    [(WithBatchNorm, "example_losses"), (WithTorchDropout, "'drop'.*KeyedDropout")],
)
def test_vectorized_refuses_by_name(build, reason) -> None:
    module = build()
    examples, _ = ragged_case(module, Training(), sizes=(4,))
    with pytest.raises(ExperimentError, match=f"{build.__name__}.*{reason}.*engine=loop"):
        Vectorized(module, examples, 2)


def test_vectorized_refuses_batch_norm_statistics() -> None:
    class Both(WithBatchNorm):
        def example_losses(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y, reduction="none")

    module = Both()
    examples, _ = ragged_case(module, Training(), sizes=(4,))
    with pytest.raises(ExperimentError, match=r"layers\.2.*BatchNorm1d"):
        Vectorized(module, examples, 2)


def train_stacked(module, **settings) -> None:
    """Train two clients of four examples by FedAvg on `vectorized`."""
    training = Training(batch_size=4, **settings)
    examples, block = ragged_case(module, training, sizes=(4, 4))
    Vectorized(module, examples, 2).train(block, training, GRADIENTS["fedavg"])


def test_vectorized_refuses_an_optimizer_that_is_not_elementwise() -> None:
    with pytest.raises(ExperimentError, match=r"LBFGS.*engine=loop"):
        train_stacked(WithLbfgs(), optimizer="module")


def test_vectorized_refuses_a_loss_that_reads_values_back() -> None:
    class ReadsBack(SquaredError):
        def example_losses(self, batch):
            return super().example_losses(batch) * (2.0 if float(batch[0].sum()) > 0 else 1.0)

    with pytest.raises(ExperimentError, match=r"ReadsBack.*vmap.*engine=loop"):
        train_stacked(ReadsBack())


@pytest.mark.parametrize("base", [SquaredError, Mlp200])
def test_vectorized_refuses_a_loss_that_writes_to_a_buffer(base) -> None:
    """On `loop` the buffer travels; a module that is written out has none."""

    class Counting(base):
        def __init__(self) -> None:
            super().__init__(*(((1, 8, 8), 10) if base is Mlp200 else ()))
            self.register_buffer("seen", torch.zeros(()))

        def example_losses(self, batch):
            self.seen += 1.0
            return super().example_losses(batch)

    with pytest.raises(ExperimentError, match=r"Counting.*in-place.*engine=loop"):
        train_stacked(Counting())


def test_vectorized_refuses_a_layer_that_torch_cannot_stack() -> None:
    class Spectral(SquaredError):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.utils.parametrizations.spectral_norm(self.hidden)

    with pytest.raises(ExperimentError, match=r"Spectral.*engine=loop"):
        train_stacked(Spectral())


def test_frozen_parameters_stay_as_they_are() -> None:
    training = Training(lr=0.1, batch_size=4)
    module = build_seeded(SquaredError, 0)
    module.hidden.weight.requires_grad_(False)
    examples, block = ragged_case(module, training)
    for engine, how in product(
        (Loop(module, examples), Vectorized(module, examples, SLOTS)),
        (training, OPTIMIZERS["module"]),
    ):
        result = engine.train(block, how, GRADIENTS["fedprox"])
        assert torch.equal(result.params["hidden.weight"], block.w0["hidden.weight"])
        assert not torch.equal(result.params["out.weight"], block.w0["out.weight"])


class FrozenWeight(SquaredError):
    def __init__(self) -> None:
        super().__init__()
        self.hidden.weight.requires_grad_(False)


class RandomFeatures(SquaredError):
    """Features by a matrix that is drawn and not trained, and differs between initial models."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1) @ self.features)


@pytest.mark.parametrize("build", [FrozenWeight, RandomFeatures])
def test_each_client_has_its_own_leaves_that_are_not_trained(build) -> None:
    training = Training(lr=0.1, batch_size=4)
    module = build_seeded(build, 0)
    examples, block = ragged_case(module, training, torch.float64)
    w0 = {
        n: leaf * torch.arange(1, 5).view(4, *[1] * (leaf.dim() - 1))
        for n, leaf in block.w0.items()
    }
    block = replace(block, w0=w0)
    a, b = (
        engine.train(block, training, GRADIENTS["fedprox"]).params
        for engine in (Loop(module, examples), Vectorized(module, examples, SLOTS))
    )
    assert largest_gap(a, w0) > 1e-3
    assert largest_gap(a, b) < 1e-10


def test_a_weight_that_two_layers_share_is_trained_as_one() -> None:
    class Tied(SquaredError):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.again = nn.Linear(64, 64), nn.Linear(64, 64)
            self.again.weight, self.out = self.hidden.weight, nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.again(torch.tanh(self.hidden(x.flatten(1)))))

    training = OPTIMIZERS["sgd"]
    module = build_seeded(Tied, 0)
    examples, block = ragged_case(module, training, torch.float64)
    assert "hidden.weight" in block.w0  # under one name, so that a server optimiser moves it
    assert "again.weight" not in block.w0
    a, b = (
        engine.train(block, training, GRADIENTS["fedprox"])
        for engine in (Loop(module, examples), Vectorized(module, examples, SLOTS))
    )
    assert largest_gap({"hidden": a.params["hidden.weight"]}, {"hidden": block.w0["hidden.weight"]})
    assert largest_gap(a.params, b.params) < 1e-10

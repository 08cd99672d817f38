"""The two forms of a convolution: both are the loop's, and the kind of device alone selects one."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flray.algorithms.fedprox import FedProx
from flray.engines.convolutions import DirectConvolution, form_of
from flray.engines.loop import Loop
from flray.engines.tracing import write_out_forward
from flray.engines.training import Training, plain_gradient
from flray.engines.vectorized import Vectorized
from flray.models.bank import build_seeded
from flray.models.classifier import Classifier

from scenarios import Residuals, largest_gap, models_at, ragged_case, same_bits, some_clients

SHAPE = (2, 9, 8)
STEPS = {"lr": 0.05, "epochs": 2, "batch_size": 4}
TRAININGS = {
    "sgd": Training(**STEPS),
    "momentum": Training(momentum=0.9, **STEPS),
    "weight_decay": Training(weight_decay=0.01, **STEPS),
    "last": Training(**STEPS).only({"last.weight", "last.bias"}),
}
HOOKS = {"plain": plain_gradient, "fedprox": FedProx(mu=0.5).gradient}


class TwoConvolutions(Classifier):
    """3 and 4 output channels, odd kernels, padding on one side only, a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, (3, 2), padding=(1, 0))
        self.second = nn.Conv2d(3, 4, 3, padding="same", bias=False)
        self.last = nn.Linear(4 * 2 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        logits: Tensor = self.last(F.relu(F.max_pool2d(self.second(x), (2, 1))).flatten(1))
        return logits


def case(dtype: torch.dtype, training: Training, build=TwoConvolutions):
    module = build_seeded(build, 0)
    return module, *ragged_case(module, training, dtype, SHAPE)


@pytest.mark.parametrize("optimizer", TRAININGS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("build", "form"),
    [
        (TwoConvolutions, "direct"),
        (lambda: Residuals(SHAPE), "direct"),
        pytest.param(lambda: Residuals(SHAPE), "patches", marks=pytest.mark.long),
    ],
    ids=["two convolutions", "residuals", "residuals by patches"],
)
def test_forms_are_the_loop(build, form, optimizer, hook) -> None:
    training = TRAININGS[optimizer]
    module, examples, block = case(torch.float64, training, build)
    engine = Vectorized(module, examples, num_slots=6, form=form)
    assert engine.written is not None
    kinds = list(engine.written.weights.values())
    assert (DirectConvolution in kinds) == (form == "direct")
    found = engine.train(block, training, HOOKS[hook]).params
    expected = Loop(module, examples).train(block, training, HOOKS[hook]).params
    assert largest_gap(block.w0, expected) > 1e-3
    assert largest_gap(found, expected) < 1e-10


def test_slots_tiles_and_threads_change_no_bit_of_direct_convolutions() -> None:
    training = TRAININGS["sgd"]
    module, examples, block = case(torch.float32, training)
    engine = Vectorized(module, examples, num_slots=6, form="direct")
    expected = engine.train(block, training, plain_gradient).params
    engine.threads = 2
    for tile, order in ((1, [2, 0]), (2, [3, 1, 0, 2]), (3, [1])):
        engine.tile = tile
        params = engine.train(some_clients(block, order), training, plain_gradient).params
        assert same_bits(params, models_at(expected, order))


def test_forms_agree_to_rounding() -> None:
    module, examples, block = case(torch.float32, TRAININGS["sgd"])
    forms = [Vectorized(module, examples, 6, form=form) for form in ("direct", "patches")]
    trained = [engine.train(block, TRAININGS["sgd"], plain_gradient).params for engine in forms]
    assert all(0 < largest_gap(a, b) < 1e-6 for a, b in pairwise(trained))


def test_a_gpu_never_takes_the_form_of_a_cpu() -> None:
    forms = {form_of("cuda", machine=m) for m in ("x86_64", "aarch64", "arm64")}
    assert len(forms) == 1
    assert "direct" not in forms


@pytest.mark.parametrize("build", [TwoConvolutions, lambda: Residuals(SHAPE)])
@pytest.mark.parametrize("form", ["direct", "patches"])
def test_outputs_of_both_forms_are_the_modules(form, build) -> None:
    module, examples, block = case(torch.float64, TRAININGS["sgd"], build)
    written = write_out_forward(module, form)
    assert written is not None
    x = examples.images[:6].double()
    found = written.outputs(block.w0, x.expand(len(block.plans), *x.shape))
    expected = module.eval()(x)
    assert torch.allclose(found[0], expected, rtol=0, atol=1e-12)

"""Convolution, ReLU and pool as one kernel: what the three layers compute, to rounding.

The kernels need a GPU. With Triton installed, `TRITON_INTERPRET=1 pytest -m gpu` on this file
computes them on a CPU.
"""

import os

import pytest
import torch
from torch import Tensor, nn

from flray.algorithms.fedprox import FedProx
from flray.engines import convolutions
from flray.engines.convolutions import WIDEST, form_of
from flray.engines.loop import Loop
from flray.engines.stacked_layers import Convolution, Flatten, Layer, MaxPool, Relu
from flray.engines.tracing import write_out
from flray.engines.training import Training, plain_gradient
from flray.engines.vectorized import Vectorized
from flray.models.bank import build_seeded
from flray.models.classifier import Classifier

from scenarios import Residuals, ragged_case

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

# images (batch, rows, columns, channels), output channels, kernel, padding, pool, ReLU, bias
SHAPES = {
    "ragged, pooled": ((3, 9, 8, 2), 3, (3, 2), (1, 0), (2, 2), True, True),
    "neither ReLU nor pool nor bias": ((3, 9, 8, 2), 3, (3, 2), (1, 0), (1, 1), False, False),
    "one channel": ((2, 7, 7, 1), 20, (5, 5), (2, 2), (2, 2), True, True),
    "32 channels": ((2, 6, 6, 32), 64, (3, 3), (1, 1), (2, 2), True, True),
    "uneven pool without ReLU": ((2, 6, 6, 32), 70, (3, 3), (1, 1), (2, 1), False, True),
    "more channels than a tile": ((1, 5, 5, 64), 96, (3, 3), (0, 0), (1, 1), True, True),
}


class Collected(dict[str, Tensor]):
    """A sink that keeps gradients as layers give them."""

    def product(self, name: str, matrix: Tensor, inputs: Tensor, dy: Tensor) -> None:
        self[name] = torch.bmm(inputs.transpose(1, 2), dy)

    def vector(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        self[name] = gradient


def computed(chain: list[Layer], leaf: Tensor, bias: Tensor, x: Tensor, dy: Tensor | None = None):
    """Outputs and gradients of x, weight and bias of a chain that begins with a convolution."""
    first = chain[0]
    assert isinstance(first, Convolution)
    w = {"weight": first.leaf(first.matrix(leaf).contiguous(), leaf), "bias": bias}
    y, saved, sink = x.clone(), [], Collected()
    for layer in chain:
        y, needed = layer.forward(w, {}, y)
        saved.append(needed)
    dy = (
        torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y) if dy is None else dy
    )
    for layer, needed in zip(reversed(chain), reversed(saved), strict=True):
        dy = layer.backward(w, needed, dy, sink, needs_dx=True)
    gradients = {"x": dy, **sink, "weight": first.leaf(sink["weight"], leaf)}
    return {"y": y, **gradients}


def layers_of(kernel, padding, pool, relu, bias) -> list[Layer]:
    chain: list[Layer] = [Convolution("weight", "bias" if bias else None, kernel, padding)]
    chain += [Relu()] if relu else []
    return chain if pool == (1, 1) else [*chain, MaxPool(pool)]


def tensors(num_clients: int, images, outputs: int, kernel) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaf = 0.2 * torch.randn(num_clients, outputs, images[-1], *kernel, generator=generator)
    bias = torch.randn(num_clients, outputs, generator=generator)
    x = torch.randn(num_clients, *images, generator=generator)
    return leaf.to(DEVICE), bias.to(DEVICE), x.to(DEVICE)


@pytest.fixture
def fused():
    return pytest.importorskip("flray.engines.fused", reason="Triton is not installed").fused


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_one_kernel_computes_what_the_layers_do(fused, shape) -> None:
    images, outputs, kernel, *options = SHAPES[shape]
    chain = layers_of(kernel, *options)
    joined = fused(chain)
    assert len(joined) == 1
    given = tensors(3, images, outputs, kernel)
    found = computed(joined, *given)
    expected = computed(chain, *(tensor.double() for tensor in given))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        gap = (found[name].double() - values).abs().max() / values.abs().max()
        assert gap < 2e-6, name


@pytest.mark.gpu
def test_bits_of_a_client_do_not_depend_on_its_neighbours(fused) -> None:
    images, outputs, kernel, *options = SHAPES["ragged, pooled"]
    joined = fused(layers_of(kernel, *options))
    leaf, bias, x = tensors(5, images, outputs, kernel)
    all_clients = computed(joined, leaf, bias, x)
    dy = torch.randn(all_clients["y"].shape, generator=torch.Generator().manual_seed(1)).to(x)
    alone = computed(joined, leaf[3:4], bias[3:4], x[3:4], dy[3:4])
    assert all(torch.equal(values[0], all_clients[name][3]) for name, values in alone.items())


@pytest.mark.gpu
def test_a_client_that_diverged_stays_visible(fused) -> None:
    images, outputs, kernel, *options = SHAPES["ragged, pooled"]
    leaf, bias, x = tensors(2, images, outputs, kernel)
    leaf[0] = torch.nan
    y = computed(fused(layers_of(kernel, *options)), leaf, bias, x)["y"]
    assert y[0].isnan().all()
    assert not y[1].isnan().any()


@pytest.mark.gpu
def test_what_does_not_fit_into_a_kernel_stays_a_layer(fused) -> None:
    convolution = Convolution("weight", "bias", (3, 3), (0, 0))
    kinds = [type(layer) for layer in fused([convolution, MaxPool((3, 3)), Relu(), Flatten()])]
    assert kinds[1:] == [MaxPool, Relu, Flatten]
    twice = fused([convolution, MaxPool((2, 2)), Relu(), MaxPool((2, 2))])
    assert [type(layer) for layer in twice[1:]] == [MaxPool]
    assert twice[0].relu
    assert twice[0].output_size((9, 8)) == [3, 3]


class Pooled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(2, 8, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 4, (2, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 2, 10)),
        )


class Mixed(Residuals):
    """One convolution that is fused between group norm and residual connections, and one wide."""

    def __init__(self) -> None:
        super().__init__((2, 9, 8))
        self.first = nn.Sequential(
            *(nn.Conv2d(2, WIDEST + 1, 1), nn.ReLU(), nn.Conv2d(WIDEST + 1, 4, 3, padding=1)),
            *(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)),
        )


def test_convolutions_that_cannot_be_fused_become_patches(fused) -> None:
    assert fused
    written = write_out(Mixed(), "fused")
    assert written is not None
    kinds = {name: kind.__name__ for name, kind in written.weights.items()}
    fused_ones = {name for name, kind in kinds.items() if kind == "FusedConvolution"}
    assert fused_ones == {"first.0.weight", "inner.weight", "narrow.weight"}
    assert kinds["first.2.weight"] == "Convolution"  # too wide
    assert kinds["wide.weight"] == kinds["first.4.weight"] == "Convolution"  # before group norm


@pytest.mark.gpu
@pytest.mark.parametrize(("build", "gap"), [(Pooled, 1e-5), (Mixed, 3e-5)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("hook", [plain_gradient, FedProx(mu=0.5).gradient])
def test_training_with_fused_layers_is_the_loop(
    fused, build, gap, momentum, hook, monkeypatch
) -> None:
    if DEVICE == "cpu":
        pytest.skip("the interpreter is too slow to train")
    assert fused
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    training = Training(lr=0.05, epochs=2, batch_size=4, momentum=momentum)
    module = build_seeded(build, 0)
    examples, block = ragged_case(module, training, shape=(2, 9, 8), device=DEVICE)
    found = Vectorized(module, examples, 6, form="fused").train(block, training, hook).params
    expected = Loop(module, examples).train(block, training, hook).params
    for name, leaf in expected.items():
        assert (leaf - block.w0[name]).abs().max() > 1e-3
        assert (found[name] - leaf).abs().max() < gap


def test_a_gpu_without_a_compiler_takes_patches(monkeypatch) -> None:
    monkeypatch.setattr(convolutions, "compiles_kernels", lambda: False)
    assert form_of("cuda") == "patches"
    monkeypatch.setattr(convolutions, "compiles_kernels", lambda: True)
    assert form_of("cuda") == "fused"
    assert form_of("cuda", torch.float64) == "patches"
    assert write_out(Pooled()) is not None

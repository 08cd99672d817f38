"""Hooks that are marked affine: the mark is true, and steps that use it are those of `loop`."""

import inspect
from dataclasses import replace

import pytest
import torch

from flray.algorithms import ALGORITHMS
from flray.algorithms.fedprox import FedProx
from flray.algorithms.scaffold import Scaffold
from flray.engines.affine import factors, is_affine, offsets
from flray.engines.loop import Loop
from flray.engines.stacked_step import Step
from flray.engines.training import Training, plain_gradient
from flray.engines.vectorized import Vectorized
from flray.models.bank import build_seeded
from flray.models.mlp200 import Mlp200

from scenarios import RAGGED, block_of, noise_dataset, place, ragged_split

TRAINING = Training(lr=0.1, epochs=2, batch_size=4)
MARKED = [
    getattr(algorithm(), name)
    for algorithm in ALGORITHMS.values()
    for name, member in inspect.getmembers(algorithm, is_affine)
]
PREFIXES = ("c", "c_i", "u", "anchor", "global")


def stacked_leaves(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 4, 2), "bias": (3, 4)}
    draw = {"generator": generator, "dtype": torch.float64}
    return {name: torch.randn(shape, **draw) for name, shape in shapes.items()}


@pytest.mark.parametrize("hook", MARKED, ids=lambda hook: hook.__qualname__)
def test_a_marked_hook_is_affine(hook) -> None:
    w, w0, g = (stacked_leaves(seed) for seed in range(3))
    memo = {
        f"{prefix}/{name}": leaf
        for seed, prefix in enumerate(PREFIXES)
        for name, leaf in stacked_leaves(10 + seed).items()
    }
    expected = hook(lambda *_: g, w, None, w0, memo)
    a = factors(hook, w, memo)
    u = offsets(hook, a, w0, memo)
    for name, leaf in expected.items():
        term = a[name] * (w[name] - u[name]) if a[name] else u[name]
        torch.testing.assert_close(g[name] + term, leaf)
        assert (leaf - g[name]).abs().max() > 1e-3


def test_six_methods_have_a_marked_hook() -> None:
    names = {hook.__qualname__.partition(".")[0] for hook in MARKED}
    assert names == {"Ditto", "FedAmp", "FedProx", "FedSoft", "PFedMe", "Scaffold"}


def case(dtype: torch.dtype):
    module = build_seeded(lambda: Mlp200((1, 8, 8), 10), 0).to(dtype)
    split = ragged_split()
    examples = place(noise_dataset(sum(RAGGED), (1, 8, 8)), split, dtype)
    block = block_of(split, module, TRAINING)
    generator = torch.Generator().manual_seed(1)
    memo = {
        f"{kind}/{name}": torch.randn(leaf.shape, generator=generator).to(dtype) / 100
        for kind in ("c", "c_i")
        for name, leaf in block.w0.items()
    }
    return module, examples, replace(block, memo=memo)


@pytest.mark.parametrize("hook", [FedProx(mu=1.0).gradient, Scaffold().gradient], ids=["mu", "c"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_float32_steps_are_as_close_to_float64_as_the_loop(hook, momentum, monkeypatch) -> None:
    training = replace(TRAINING, momentum=momentum)
    monkeypatch.setattr(Step, "_move_by_hook", None)  # not called: layers move themselves
    module, examples, block = case(torch.float64)
    expected = Loop(module, examples).train(block, training, hook).params
    module, examples, block = case(torch.float32)
    by_loop = Loop(module, examples).train(block, training, hook).params
    found = Vectorized(module, examples, num_slots=6).train(block, training, hook).params
    for name, leaf in expected.items():
        assert (leaf - block.w0[name]).abs().max() > 1e-3
        gap = (by_loop[name] - leaf).abs().max()
        assert (found[name] - leaf).abs().max() <= 2 * gap + 1e-8


def test_a_term_of_zero_changes_no_bit() -> None:
    module, examples, block = case(torch.float32)
    engine = Vectorized(module, examples, num_slots=6)
    plain = engine.train(block, TRAINING, plain_gradient).params
    for hook in (FedProx(mu=0.0).gradient, Scaffold().gradient):
        zeros = {name: torch.zeros_like(leaf) for name, leaf in block.memo.items()}
        found = engine.train(replace(block, memo=zeros), TRAINING, hook).params
        assert all(torch.equal(found[name], leaf) for name, leaf in plain.items())

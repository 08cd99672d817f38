"""Hooks that are marked: the marks are true, and steps that use them are those of `loop`."""

import inspect
from dataclasses import replace

import pytest
import torch

from flray.algorithms import ALGORITHMS
from flray.algorithms.apfl import Apfl
from flray.algorithms.fedala import FedAla
from flray.algorithms.fedprox import FedProx
from flray.algorithms.per_fedavg import PerFedAvg
from flray.algorithms.pfedme import PFedMe
from flray.algorithms.repa import Repa
from flray.algorithms.scaffold import Scaffold
from flray.algorithms.wd import Wd
from flray.engines import stacked_step
from flray.engines.affine import factors, is_affine, is_stacked, offsets
from flray.engines.engine import Block
from flray.engines.loop import Loop
from flray.engines.stacked_step import Step
from flray.engines.training import Training, plain_gradient
from flray.engines.vectorized import Vectorized
from flray.models.bank import build_seeded
from flray.models.mlp200 import Mlp200

from scenarios import ragged_case, same_bits

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
    a = factors(hook, w, w, memo)
    u = offsets(hook, a, w0, memo)
    for name, leaf in expected.items():
        term = a[name] * (w[name] - u[name]) if a[name] else u[name]
        torch.testing.assert_close(g[name] + term, leaf)
        assert (leaf - g[name]).abs().max() > 1e-3


def test_eight_methods_have_an_affine_hook() -> None:
    names = {type(hook.__self__).__name__ for hook in MARKED}
    assert names == {"Ditto", "FedAmp", "FedProx", "FedSoft", "PFedMe", "Repa", "Scaffold", "Wd"}


def case(dtype: torch.dtype, training: Training = TRAINING):
    module = build_seeded(lambda: Mlp200((1, 8, 8), 10), 0)
    examples, block = ragged_case(module, training, dtype)
    generator = torch.Generator().manual_seed(1)
    memo = {
        f"{kind}/{name}": torch.randn(leaf.shape, generator=generator).to(dtype) / 100
        for kind in ("c", "c_i")
        for name, leaf in block.w0.items()
    }
    return module, examples, replace(block, memo=memo)


@pytest.mark.parametrize(
    "hook",
    [FedProx(mu=1.0).gradient, Scaffold().gradient, Repa(mu=1.0).gradient, Wd(mu=1.0).gradient],
    ids=["mu", "c", "repa", "wd"],
)
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
        assert same_bits(engine.train(replace(block, memo=zeros), TRAINING, hook).params, plain)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_offsets_in_one_slot_for_all_clients_change_no_bit(momentum) -> None:
    training = replace(TRAINING, momentum=momentum)
    module, examples, block = case(torch.float32)
    num, first = len(block.plans), {name: leaf[:1] for name, leaf in block.w0.items()}
    shared, own = (
        replace(block, w0={name: more(leaf) for name, leaf in first.items()}, memo={})
        for more in (lambda w: w.expand(num, *w.shape[1:]), lambda w: w.repeat_interleave(num, 0))
    )
    engine = Vectorized(module, examples, num_slots=2)  # clients take slots in turn
    of_shared, of_own = (
        engine.train(each, training, FedProx(mu=1.0).gradient).params for each in (shared, own)
    )
    assert same_bits(of_shared, of_own)
    assert all((leaf - own.w0[name]).abs().max() > 1e-3 for name, leaf in of_own.items())


def with_leaves(block: Block, hook) -> Block:
    """The block with the leaves of model and memo that APFL and FedALA have beside the module's."""
    draw = torch.Generator().manual_seed(2)
    drawn = {
        name: leaf + torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype) / 10
        for name, leaf in block.w0.items()
    }
    if isinstance(hook.__self__, Apfl):
        num, dtype = len(block.plans), drawn["layers.1.bias"].dtype
        alpha = torch.linspace(0.2, 0.8, num, dtype=dtype)[:, None]
        w0 = block.w0 | {f"v/{name}": leaf for name, leaf in drawn.items()} | {"alpha": alpha}
        numbers = {"lr": TRAINING.lr, "decay": TRAINING.weight_decay}
        memo = {name: torch.full((num,), number, dtype=dtype) for name, number in numbers.items()}
        return replace(block, w0=w0, memo=memo)
    if isinstance(hook.__self__, FedAla):
        top = [name for name in block.w0 if name.startswith("layers.4")]
        weights = {f"W/{name}": torch.full_like(drawn[name], 0.5) for name in top}
        return replace(
            block, w0=block.w0 | weights, memo={f"v/{name}": drawn[name] for name in top}
        )
    return block


STEPS = {  # hooks and trainings in which layers do not move themselves
    "apfl": (Apfl().gradient, TRAINING),
    "fedala": (
        FedAla(weight_lr=0.1).weight_gradient,
        TRAINING.only(["W/layers.4.weight", "W/layers.4.bias"]),
    ),
    "pfedme": (PFedMe(lam=2.0).gradient, replace(TRAINING, momentum=0.5)),
    "fo": (PerFedAvg(alpha=0.1).gradient, TRAINING.paired()),
    "hf": (PerFedAvg(alpha=0.1, order="hessian_free").gradient, TRAINING.paired()),
    "decay": (FedProx(mu=1.0).gradient, replace(TRAINING, weight_decay=0.1)),
    "adam": (Scaffold().gradient, replace(TRAINING, optimizer="adam", lr=0.001)),
}


@pytest.mark.parametrize(("hook", "training"), STEPS.values(), ids=STEPS)
def test_a_stacked_hook_is_that_of_each_client(hook, training, monkeypatch) -> None:
    module, examples, block = case(torch.float64, training)
    block = with_leaves(block, hook)
    engine = Vectorized(module, examples, num_slots=6)

    def unmarked(grad, w, batch, w0, memo):
        return hook(grad, w, batch, w0, memo)

    expected = Loop(module, examples).train(block, training, hook)
    by_client = engine.train(block, training, unmarked)
    monkeypatch.setattr(stacked_step, "vmap", None)  # not called
    found = engine.train(block, training, hook)
    for name, leaf in expected.params.items():
        is_moved = bool((leaf - block.w0[name]).abs().max() > 1e-6)
        assert is_moved == training.moves(name)
        torch.testing.assert_close(found.params[name], leaf, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.params[name], by_client.params[name], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.loss, expected.loss)


def test_these_hooks_are_stacked_and_not_affine() -> None:
    hooks = {
        f"{type.__name__}.{name}"
        for type in ALGORITHMS.values()
        for name, member in inspect.getmembers(type, is_stacked)
        if not is_affine(member)
    }
    assert hooks == {
        "Apfl.gradient",
        "FedAla.weight_gradient",
        "PFedMe.gradient",
        "PerFedAvg.gradient",
    }


def test_what_clients_share_is_offset_once() -> None:
    hook, w0 = FedProx(mu=0.5).gradient, torch.tensor([[3.0, 4.0]])
    shared = offsets(hook, {"w": 0.5}, {"w": w0.expand(5, 2)}, {})["w"]
    assert shared.stride(0) == 0
    assert torch.equal(shared, w0.expand(5, 2))
    own = offsets(hook, {"w": 0.5}, {"w": w0.repeat(5, 1)}, {})["w"]
    assert own.stride(0) == 2
    assert torch.equal(own, shared)

"""`execution.compile`: the same step through torch's compiler, or a clear refusal."""

import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from flray.algorithms.fedprox import FedProx
from flray.client.engine import Block
from flray.client.loop import Loop
from flray.client.training import Training
from flray.client.vectorized import Vectorized, check_compiler
from flray.errors import ExperimentError
from flray.execution.settings import Execution
from flray.models import MODELS
from flray.models.bank import build_seeded

from scenarios import RAGGED, block_of, noise_dataset, place, ragged_split

SHAPE = (1, 8, 8)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_steps_are_the_loop_and_their_bits_do_not_depend_on_neighbours() -> None:
    training = Training(lr=0.1, momentum=0.9, batch_size=4)
    module = build_seeded(lambda: MODELS["mlp200"](SHAPE, 10, hidden=8, dropout=0.5), 0)
    split = ragged_split()
    examples = place(noise_dataset(sum(RAGGED), SHAPE), split, torch.float32)
    block = block_of(split, module, training)
    hook = FedProx(mu=0.5).gradient
    expected = Loop(module, examples).train(block, training, hook)
    engine = Vectorized(module, examples, 6, compile=True)
    assert engine.written is None
    found = engine.train(block, training, hook)
    for name, leaf in found.params.items():
        assert float((expected.params[name][3] - block.w0[name][3]).abs().max()) > 1e-3
        torch.testing.assert_close(leaf, expected.params[name], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(found.loss, expected.loss, atol=1e-5)
    order = [3, 1]
    some = Block(
        tuple(block.plans[k] for k in order), {n: w[order] for n, w in block.w0.items()}, {}
    )
    again = engine.train(some, training, hook)
    for name, leaf in again.params.items():
        assert torch.equal(leaf, found.params[name][order]), name


def test_without_a_back_end_the_compiler_is_refused(monkeypatch) -> None:
    plain = MODELS["mlp200"]((1, 8, 8), 10)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExperimentError, match=r"no no-such-compiler.*execution\.compile=false"):
        check_compiler("cpu", plain)
    monkeypatch.setattr("flray.client.vectorized.find_spec", lambda _: None)
    with pytest.raises(ExperimentError, match=r"Triton.*execution\.compile=false"):
        check_compiler("cuda", plain)
    with pytest.raises(ExperimentError, match="cannot translate dropout on a GPU"):
        check_compiler("cuda", MODELS["mlp200"]((1, 8, 8), 10, dropout=0.5))
    assert find_spec("torch") is not None  # only the engine's own name was replaced


def test_only_the_vectorized_engine_is_compiled() -> None:
    with pytest.raises(ValueError, match="compile is for engine vectorized, got engine loop"):
        Execution(engine="loop", compile=True)
    assert Execution(engine="auto", compile=True).compile

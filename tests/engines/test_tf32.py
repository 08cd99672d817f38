"""TF32 while an engine trains, and at no other time; a CPU refuses it."""

from dataclasses import replace

import pytest
import torch

from flray.engines.engine import InTf32
from flray.engines.training import Training, plain_gradient
from flray.errors import ExperimentError
from flray.execution.resources import Actors
from flray.execution.settings import Execution
from flray.models.mlp200 import Mlp200

from scenarios import RAGGED, block_of, host_over, noise_dataset, ragged_split


def settings_of_torch() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


class Witness:
    """An engine that records torch's settings, and then fails if it is asked to."""

    def train(self, block, training, gradient):
        self.seen = settings_of_torch()
        if gradient is None:
            raise ArithmeticError("a client's own error")
        return block


@pytest.mark.parametrize("gradient", [plain_gradient, None])
def test_torch_rounds_products_only_while_the_engine_trains(gradient) -> None:
    before, witness = settings_of_torch(), Witness()
    assert before[0] == "highest"
    try:
        InTf32(witness).train("block", Training(), gradient)
    except ArithmeticError:
        assert gradient is None
    assert witness.seen == ("high", True)
    assert settings_of_torch() == before


@pytest.mark.parametrize("tf32", [False, True])
def test_a_host_trains_in_tf32_if_it_is_asked_to(tf32) -> None:
    split, training = ragged_split(), Training(lr=0.1, batch_size=4)
    dataset = noise_dataset(sum(RAGGED), (1, 8, 8))
    host = host_over(Mlp200((1, 8, 8), 10), dataset, split, "auto", tf32=tf32)
    assert isinstance(host.engine, InTf32) == tf32
    result = host.engine.train(block_of(split, host.module, training), training, plain_gradient)
    assert len(result.loss) == len(RAGGED)


@pytest.mark.parametrize(
    "execution",
    [
        Execution(device="cpu", precision="tf32"),
        Execution(executor="ray", precision="tf32"),
        Execution(executor="ray", device="cpu", actors=Actors(num_gpus=0.5), precision="tf32"),
    ],
)
def test_a_cpu_refuses_tf32(execution) -> None:
    assert replace(execution, precision="float32").resolve_device() == "cpu"
    with pytest.raises(ExperimentError, match=r"precision is tf32 but clients train on a CPU"):
        execution.resolve_device()


def test_models_of_tf32_are_float32() -> None:
    execution = Execution(executor="ray", actors=Actors(num_gpus=0.1), precision="tf32")
    assert execution.resolve_device() == "cuda"
    assert execution.dtype == torch.float32

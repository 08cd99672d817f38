"""Jobs of several experiments in one block: each has the bits it would have alone."""

import numpy as np
import pytest
import torch

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.client.host import HostSettings, start_host
from flray.client.tasks import Train, TrainJob, train_together
from flray.client.training import Gradient, Training
from flray.data.events import make_timeline
from flray.models import MODELS
from flray.models.bank import build_seeded, params_of, stack

from scenarios import RAGGED, noise_dataset, ragged_split

TRAINING = Training(lr=0.05, momentum=0.9, epochs=2, batch_size=4)


class Pulled:
    """A direction that reads the client's own memo, as SCAFFOLD does: g + c."""

    def __call__(self, grad, w, batch, w0, memo):
        gradient = grad(w, batch)
        return {name: gradient[name] + memo[name] for name in gradient}


def host_on(device: str, engine: str):
    settings = HostSettings(engine, device, torch.float32, num_slots=6, threads=1, seed=3)
    module = build_seeded(lambda: MODELS["mlp200"]((1, 8, 8), 10, hidden=20, dropout=0.5), 0)
    dataset = noise_dataset(sum(RAGGED), (1, 8, 8))
    return start_host(module, dataset, make_timeline(ragged_split(), ()), settings)


def jobs_of(host, gradient: Gradient, with_memo: bool):
    """Three jobs in different rounds, from different models; 1, 2 and 3 of the ragged clients."""
    models = [build_seeded(lambda: MODELS["mlp200"]((1, 8, 8), 10, hidden=20), s) for s in range(3)]
    device = host.examples.device
    for t, (clients, rows) in enumerate((([3], [0]), ([0, 2], [1, 0]), ([1, 2, 3], [0, 0, 1]))):
        two = [params_of(models[t]), params_of(models[t - 1])]
        bank = {name: leaf.to(device) for name, leaf in stack(two).items()}
        generator = torch.Generator().manual_seed(t)
        memo = {
            name: torch.randn(len(clients), *leaf.shape[1:], generator=generator).to(device) / 100
            for name, leaf in bank.items()
            if with_memo
        }
        job = TrainJob(np.array(clients), np.array(rows), memo)
        yield Train(TRAINING, gradient, t + 1), bank, job


def assert_together_is_alone(device: str, engine: str, gradient: Gradient, memo: bool) -> None:
    host = host_on(device, engine)
    parts = list(jobs_of(host, gradient, memo))
    together = train_together(host, parts)
    assert [len(each.loss) for each in together] == [1, 2, 3]
    for (task, bank, job), found in zip(parts, together, strict=True):
        alone = task(host, bank, job)
        assert (alone.loss == found.loss).all()
        for name, leaf in alone.params.items():
            assert torch.equal(leaf, found.params[name]), name
            assert not torch.equal(leaf, bank[name][torch.from_numpy(job.rows)])


CASES = [(FedAvg().gradient, False), (FedProx(mu=0.5).gradient, False), (Pulled(), True)]


@pytest.mark.parametrize("engine", ["vectorized", "loop"])
@pytest.mark.parametrize(("gradient", "memo"), CASES, ids=["fedavg", "fedprox", "memo"])
def test_jobs_together_have_the_bits_they_have_alone(engine, gradient, memo) -> None:
    assert_together_is_alone("cpu", engine, gradient, memo)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("gradient", "memo"), CASES, ids=["fedavg", "fedprox", "memo"])
def test_on_a_gpu_too(gradient, memo) -> None:
    assert_together_is_alone("cuda", "vectorized", gradient, memo)

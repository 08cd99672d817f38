"""FedNova: updates divided by the steps behind them."""

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fednova import FedNova, effective_steps
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, nobody
from flray.models.bank import buffers_of, params_of
from flray.models.mixing import Aggregation

from linear import START, linear_federation, local_sgd, run_rounds, vector
from scenarios import sha

# All examples of a client are equal, so its batches are too, in any order: 1 and 3 steps an epoch.
CLIENTS = [[(1, 2)] * 2, [(2, 1)] * 6]
EQUAL = "split={name: iid, clients: 6, samples_per_client: 50}"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("weights", "p"), [("samples", [0.25, 0.75]), ("uniform", [0.5, 0.5])])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_two_rounds_by_hand(momentum, weights, p, server_lr) -> None:
    """w' = w - server_lr (sum p_i a_i) sum p_i (w - w_i) / a_i; a_i is how far tau steps along a
    constant gradient of 1 go."""
    training = Training(lr=0.1, momentum=momentum, epochs=2, batch_size=2)
    tau = [2, 6]
    velocities = [np.cumsum(momentum ** np.arange(steps)) for steps in tau]
    a = np.array([velocity.sum() for velocity in velocities])
    w = START
    for _ in range(2):
        trained = [local_sgd(w, CLIENTS[i], tau[i], 0.1, momentum) for i in range(2)]
        d = [(w - trained[i]) / a[i] for i in range(2)]
        w = w - server_lr * (p[0] * a[0] + p[1] * a[1]) * (p[0] * d[0] + p[1] * d[1])
    aggregation = Aggregation(weights=weights, server_lr=server_lr)
    fed = linear_federation(CLIENTS, training, aggregation)
    found, other = (run_rounds(method, fed, 2)[-1] for method in (FedNova(), FedAvg()))
    np.testing.assert_allclose(vector(found.bank), w, rtol=1e-12)
    assert np.abs(vector(other.bank) - w).max() > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_are_the_way_along_a_constant_gradient(momentum) -> None:
    for tau in (1, 2, 7):
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
        for _ in range(tau):
            weight.grad = torch.ones(1)
            optimizer.step()
        assert effective_steps(np.array([tau]), momentum) == pytest.approx(-weight.item())


@pytest.mark.parametrize("equal", [EQUAL, "train.batch_size=1000"])
def test_equal_steps_are_fedavg_by_hash(tiny_run, known_run, equal) -> None:
    """Equal clients, or ragged ones whose examples all fit in a batch."""
    common = ["train.momentum=0", "participation=1", "execution.precision=float64", "seed=1"]
    nova = [*common, "algorithm=fednova"]
    assert sha(tiny_run(*nova, equal)) == sha(tiny_run(*common, equal))
    assert sha(known_run(*nova)) != sha(known_run(*common))


def test_equal_steps_with_momentum_are_fedavg(tiny_run) -> None:
    equal = [EQUAL, "train.momentum=0.9", "execution.precision=float64"]
    nova, fedavg = (tiny_run(*equal, f"algorithm={name}") for name in ("fednova", "fedavg"))
    np.testing.assert_allclose(nova.clients["loss"], fedavg.clients["loss"], rtol=1e-10)


@pytest.mark.parametrize("optimizer", ["adam", "module"])
def test_other_optimisers_are_refused(tiny_run, optimizer) -> None:
    with pytest.raises(ExperimentError, match=rf"fednova .*train\.optimizer={optimizer}"):
        tiny_run("algorithm=fednova", f"train={{optimizer: {optimizer}}}")


def test_stale_clients_are_refused(tiny_run) -> None:
    with pytest.raises(ExperimentError, match=r"aggregate\.unheard=ignore, got stale"):
        tiny_run("algorithm=fednova", "aggregate.unheard=stale")


class Normalised(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.layer = nn.Linear(2, 1)


def test_buffers_are_what_no_gradient_reaches() -> None:
    module = Normalised()
    assert buffers_of(module) == {"norm.running_mean", "norm.running_var"}
    assert set(params_of(module)) - buffers_of(module) == {n for n, _ in module.named_parameters()}


def test_statistics_are_averaged_as_in_fedavg() -> None:
    """The offset stands in for a buffer: its mean, while the slope is normalised."""
    training = Training(lr=0.1, epochs=2, batch_size=2)
    fed = linear_federation(CLIENTS, training, buffers=frozenset(["offset.weight"]))
    plain = linear_federation(CLIENTS, training)
    mixed, nova, fedavg = (
        vector(run_rounds(method, federation, 1)[-1].bank)
        for method, federation in ((FedNova(), fed), (FedNova(), plain), (FedAvg(), plain))
    )
    assert mixed.tolist() == [nova[0], fedavg[1]]
    assert np.abs(nova - fedavg).min() > 1e-3


def test_a_client_without_steps_is_left_out() -> None:
    training = Training(lr=0.1, batch_size=2)
    uniform = Aggregation(weights="uniform")
    three = linear_federation([*CLIENTS, []], training, uniform)
    two = linear_federation(CLIENTS, training, uniform)
    with_it, without = (vector(run_rounds(FedNova(), fed, 1)[-1].bank) for fed in (three, two))
    np.testing.assert_array_equal(with_it, without)
    assert np.abs(with_it - START).max() > 1e-3


def test_a_round_in_which_nobody_is_heard_changes_nothing() -> None:
    fed = linear_federation([*CLIENTS, []], Training())
    before = FedNova().init(fed).state
    for clients in (nobody(), np.array([2])):
        after = FedNova().round(before, Cohort(1, clients), fed).state
        assert after.bank.sha256() == before.bank.sha256()

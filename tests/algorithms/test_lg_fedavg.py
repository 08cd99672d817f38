"""LG-FedAvg: first layers of one's own, last layers of all."""

import numpy as np
import pytest
import torch

from flray.algorithms.lg_fedavg import LgFedAvg
from flray.data.dataset import Ids
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import last_layers, params_of
from flray.models.lenet5 import LeNet5
from flray.models.resnet9 import ResNet9

from linear import START, linear_federation, local_sgd, run_rounds, vector
from scenarios import sha, state_of, tiny_federation

CLIENTS = [[(1, 2)] * 2, [(2, 1)] * 6]
LG = "algorithm={name: lg_fedavg, global_layers: 1}"


def test_two_rounds_by_hand() -> None:
    """The slope is each client's own, the offset the mean with weights 2/8 and 6/8."""
    training = Training(lr=0.1, epochs=2, batch_size=10)
    models = [START, START]
    for _ in range(2):
        models = [local_sgd(models[i], CLIENTS[i], 2, 0.1) for i in range(2)]
        offset = 0.25 * models[0][1] + 0.75 * models[1][1]
        models = [np.array([own[0], offset]) for own in models]
    fed = linear_federation(CLIENTS, training)
    method = LgFedAvg(global_layers=1)
    state = run_rounds(method, fed, 2)[-1]
    bank = method.deploy(state, fed.clients, fed)
    for i in range(2):
        np.testing.assert_allclose(vector(bank, i), models[i], rtol=1e-12)
    assert abs(models[0][0] - models[1][0]) > 0.1


@pytest.mark.parametrize("aggregate", ["{}", "{unheard: stale}", "{server_lr: 0.5}"])
def test_sharing_all_layers_is_fedavg(tiny_run, known_run, aggregate) -> None:
    how = f"aggregate={aggregate}"
    all_layers, fedavg = tiny_run(how, "algorithm=lg_fedavg"), known_run(how)
    assert sha(all_layers) == sha(fedavg)
    assert all_layers.summary["bytes_up"] == fedavg.summary["bytes_up"]


def test_sharing_no_layer_is_local(tiny_run, known_run) -> None:
    none, local = tiny_run(LG, "algorithm.global_layers=0"), known_run("algorithm=local")
    assert sha(none) == sha(local)
    assert none.summary["bytes_up"] == none.summary["bytes_down"] == 0


def test_the_last_two_layers_of_lenet5_are_its_last_two_linear_layers() -> None:
    """FLIS, Table III: 120*84 + 84 and 84*10 + 10 of 62,006 parameters."""
    params = params_of(LeNet5((3, 32, 32), 10))
    names = last_layers(list(params), 2)
    assert sum(params[name].numel() for name in names) == 120 * 84 + 84 + 84 * 10 + 10 == 11_014
    assert sum(leaf.numel() for leaf in params.values()) == 62_006


def test_bytes_are_counted_for_the_global_layers_alone(tiny_run) -> None:
    result = tiny_run(
        "dataset={name: synthetic, num_train: 60, num_test: 60, size: 28}",
        "split={name: iid, clients: 4}",
        "model=lenet5",
        "algorithm=lg_fedavg",
        "rounds=2",
    )
    sent = 2 * 2 * 11_014 * 4  # rounds, clients, float32
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == sent


def test_the_last_two_layers_of_resnet9_are_a_group_norm_and_a_linear_layer() -> None:
    """The last four entries of its state, which FLIS's authors share."""
    names = list(params_of(ResNet9((3, 32, 32), 10)))
    assert last_layers(names, 2) == set(names[-4:])


def test_buffers_of_a_layer_are_where_its_parameters_are() -> None:
    norm = ["norm.weight", "norm.running_mean"]
    assert last_layers([*norm, "head.weight"], 1) == {"head.weight"}
    assert last_layers([*norm, "head.weight"], 2) == {*norm, "head.weight"}


@pytest.mark.parametrize("model", ["lenet5", "flhc_cnn", "resnet9", "mlp200"])
def test_leaves_come_in_the_order_in_which_layers_run(model) -> None:
    module = MODELS[model](image_shape=(3, 32, 32), num_classes=10)
    layers = list(dict.fromkeys(leaf.rpartition(".")[0] for leaf in params_of(module)))
    ran: list[str] = []
    for name in layers:
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    module(torch.zeros(2, 3, 32, 32))
    assert len(ran) > 1
    assert ran == layers


def test_more_layers_than_there_are_is_an_error(tiny_run) -> None:
    message = r"the last 3 layers were asked for, but this model has 2: layers\.1, layers\.4"
    with pytest.raises(ExperimentError, match=message):
        tiny_run(LG, "algorithm.global_layers=3")
    with pytest.raises(ExperimentError, match="global_layers must be >= 0, got -1"):
        tiny_run(LG, "algorithm.global_layers=-1")


def first_layer(bank, client: int) -> torch.Tensor:
    return bank.row(int(bank.owner[client]))["layers.1.weight"]


def test_holdout_clients_and_newcomers_have_the_initial_first_layers(tiny_run) -> None:
    """Client 0 comes in round 4, the last; a third of the others are sampled in a round."""
    events = [
        {"round": 1, "kind": "leave", "clients": [0]},
        {"round": 4, "kind": "join", "clients": [0]},
    ]
    overrides = [LG, "split.holdout=1", f"events={events}", "seed=1"]
    result = tiny_run(*overrides)
    fed = tiny_federation(*overrides)
    state = state_of(result)
    bank = LgFedAvg(1).deploy(state, np.arange(6), fed)
    (holdout,) = fed.holdout
    trained: Ids = state.private.clients
    assert holdout not in trained
    assert 3 <= len(trained) <= 5
    last = {bank.row(int(u))["layers.4.weight"].numpy().tobytes() for u in bank.owner}
    assert len(last) == 1  # everybody has the global last layer
    for i in range(6):
        is_initial = torch.equal(first_layer(bank, i), fed.initial["layers.1.weight"][0])
        assert is_initial == (i not in trained)


def test_a_dropped_client_keeps_its_layers(tiny_run, fails_in_training) -> None:
    """Client 3 trains in round 1 and fails in round 2: its rows are those of round 1."""
    common = [LG, "participation=1", "on_client_failure=drop"]
    once = state_of(tiny_run(*common, "rounds=1"))
    fails_in_training(3, t=2)
    result = tiny_run(*common, "rounds=2")
    assert result.summary["clients_dropped"] == 1
    twice = state_of(result)
    kept, moved = (
        [torch.equal(one, two) for one, two in zip(
            once.private.of_clients(np.array([i])).values(),
            twice.private.of_clients(np.array([i])).values(),
            strict=True,
        )]
        for i in (3, 4)
    )  # fmt: skip
    assert all(kept)
    assert not any(moved)

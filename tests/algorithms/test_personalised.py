"""Identities of personalised methods, by the hash of every client's params."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flray import load
from flray.algorithms.apfl import Apfl
from flray.algorithms.fedala import FedAla
from flray.algorithms.fedbn import FedBn
from flray.algorithms.local import Local
from flray.algorithms.pfedme import PFedMe
from flray.engines.training import Training
from flray.errors import ExperimentError

from linear import START, gradient, linear_federation, run_rounds, vector
from scenarios import sha, state_of

FULL = "participation=1"


def test_fedper_without_private_layers_is_fedavg(tiny_run, known_run) -> None:
    assert sha(tiny_run("algorithm={name: fedper, private_layers: 0}")) == sha(known_run())
    assert sha(tiny_run("algorithm={name: fedper, private_layers: 1}")) != sha(known_run())


def test_fedper_with_all_layers_private_is_local_and_sends_nothing(tiny_run) -> None:
    fedper = tiny_run("algorithm={name: fedper, private_layers: 2}")
    assert sha(fedper) == sha(tiny_run("algorithm=local"))
    assert fedper.summary["bytes_up"] == fedper.summary["bytes_down"] == 0


def test_fedbn_of_a_model_without_batch_norm_is_fedavg(tiny_run, known_run) -> None:
    assert sha(tiny_run("algorithm=fedbn")) == sha(known_run())


def test_ditto_without_pull_is_local(tiny_run) -> None:
    local = sha(tiny_run("algorithm=local", FULL))
    assert sha(tiny_run("algorithm={name: ditto, lam: 0}", FULL)) == local
    assert sha(tiny_run("algorithm={name: ditto, lam: 1}", FULL)) != local


@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_dittos_global_model_is_fedavgs(tiny_run, lam) -> None:
    """Clients that never train, here a holdout client, use the global model."""
    holdout = "split.holdout=1"
    ditto = tiny_run(f"algorithm={{name: ditto, lam: {lam}}}", holdout)
    fedavg = tiny_run(holdout)
    assert ditto.summary["holdout_accuracy_mean"] == fedavg.summary["holdout_accuracy_mean"]
    assert ditto.summary["holdout_loss_mean"] == fedavg.summary["holdout_loss_mean"]
    assert ditto.summary["bytes_up"] == fedavg.summary["bytes_up"]


def test_pfedme_with_one_inner_step_of_the_inverse_of_lambda_is_fedavg(tiny_run) -> None:
    """w - η λ (w - θ) with θ = w - g / λ is w - η g; λ = 4 changes no bit."""
    holdout = "split.holdout=1"
    pfedme = tiny_run("algorithm={name: pfedme, lam: 4, inner_steps: 1, inner_lr: 0.25}", holdout)
    fedavg = tiny_run(holdout)
    assert pfedme.summary["holdout_loss_mean"] == fedavg.summary["holdout_loss_mean"]


def test_pfedme_without_lambda_never_moves_the_global_model(tiny_run) -> None:
    """A mean of equal models is that model but for the rounding of its sum."""
    holdout = "split.holdout=1"
    still = [
        tiny_run("algorithm={name: pfedme, lam: 0}", holdout, f"rounds={t}").summary[
            "holdout_loss_mean"
        ]
        for t in (1, 3)
    ]
    assert still[0] == pytest.approx(still[1], rel=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_personal_models_of_pfedme_are_plain_steps(optimizer) -> None:
    """One client and one batch: θ = w - η_p grad f(w), whatever optimiser w has moved with."""
    own = [(1, 2), (2, 5)]
    fed = linear_federation([own], Training(optimizer=optimizer, lr=0.1))
    state = run_rounds(PFedMe(inner_lr=0.02), fed, 1)[-1]
    w = vector(state.bank)
    assert np.abs(w - START).min() > 1e-3
    theta = PFedMe().deploy(state, np.arange(1), fed)
    np.testing.assert_allclose(vector(theta), w - 0.02 * gradient(w, own))


def test_fedamp_without_pull_is_local(tiny_run) -> None:
    assert sha(tiny_run("algorithm={name: fedamp, lam: 0}")) == sha(tiny_run("algorithm=local"))
    assert sha(tiny_run("algorithm={name: fedamp, lam: 1}")) != sha(tiny_run("algorithm=local"))


def test_fedbabu_without_frozen_layers_is_fedavg(tiny_run, known_run) -> None:
    assert sha(tiny_run("algorithm={name: fedbabu, frozen_layers: 0}")) == sha(known_run())


def test_fedbabu_keeps_the_bits_of_the_head(tiny_run) -> None:
    decay = ["train.momentum=0.9", "train.weight_decay=0.1"]
    first, last = (
        load(tiny_run("algorithm=fedbabu", f"rounds={t}", *decay).path).model(0) for t in (1, 3)
    )
    before, after = first.state_dict(), last.state_dict()
    body, *_, weight, bias = before
    assert before[weight].equal(after[weight])
    assert before[bias].equal(after[bias])
    assert not before[body].equal(after[body])


def test_fedrep_without_epochs_of_the_head_is_fedbabu(tiny_run) -> None:
    fedrep = tiny_run("algorithm={name: fedrep, head_epochs: 0, body_epochs: 1}", "train.epochs=1")
    assert sha(fedrep) == sha(tiny_run("algorithm=fedbabu", "train.epochs=1"))


@pytest.mark.parametrize("name", ["fedbabu", "fedrep"])
def test_a_model_that_is_all_head_has_nothing_to_average(tiny_run, name) -> None:
    with pytest.raises(ExperimentError, match="_layers must leave a layer"):
        tiny_run("model={name: linear}", f"algorithm={name}")


def test_fedrep_without_epochs_of_the_body_sends_nothing(tiny_run) -> None:
    fedrep = tiny_run("algorithm={name: fedrep, head_epochs: 1, body_epochs: 0}")
    assert fedrep.summary["bytes_up"] == 0


def test_fedbn_keeps_every_leaf_of_layers_that_own_a_buffer() -> None:
    initial = dict.fromkeys(["conv.weight", "down.1.weight", "down.1.running_mean", "head.bias"])
    fed = SimpleNamespace(initial=initial, buffers=frozenset(["down.1.running_mean"]))
    assert FedBn().private_leaves(fed) == {"down.1.weight", "down.1.running_mean"}


def test_fedbn_shares_the_parameters_beside_a_buffer_of_the_model_itself() -> None:
    initial = dict.fromkeys(["scale", "offset", "head.bias"])
    fed = SimpleNamespace(initial=initial, buffers=frozenset(["offset"]))
    assert FedBn().private_leaves(fed) == {"offset"}


def test_fedbn_sends_all_but_batch_norm_in_every_engine(tiny_run) -> None:
    """LeNet-5 on 16 x 16 pixels, two batch norms of 6 and 16 channels: each has weight, bias, mean
    and variance, which stay with the client."""
    model = ["model={name: lenet5, norm: batch}", "participation=1", "rounds=2"]
    model += ["dataset={name: synthetic, num_train: 120, num_test: 60, size: 16}"]
    loop, lightning = (
        tiny_run("algorithm=fedbn", *model, f"execution.engine={engine}")
        for engine in ("loop", "lightning")
    )
    assert sha(loop) == sha(lightning)
    state = state_of(loop)
    layers = {name.rpartition(".")[0] for name in state.private.default}
    assert layers == {"layers.1", "layers.5"}
    assert len(state.private.default) == 2 * 4
    means = state.private.of_clients(np.arange(6))["layers.1.running_mean"]  # (6, 6)
    assert len(torch.unique(means, dim=0)) == 6
    num_sent = sum(leaf.numel() for leaf in state.shared.params.values())
    assert num_sent == 6 * 26 + 16 * 151 + 120 * 17 + 84 * 121 + 10 * 85
    assert loop.summary["bytes_up"] == 2 * 6 * 4 * num_sent


def test_apfl_with_fixed_weights_is_fedavg_or_local(tiny_run, known_run) -> None:
    apfl = [
        sha(tiny_run(f"algorithm={{name: apfl, alpha: {alpha}, adaptive: false}}"))
        for alpha in (0, 1, 0.5)
    ]
    assert apfl[:2] == [sha(known_run()), sha(known_run("algorithm=local"))]
    assert apfl[2] not in apfl[:2]


def test_apfls_global_model_is_fedavgs(tiny_run, known_run) -> None:
    run = tiny_run("algorithm=apfl")
    state = state_of(run)
    assert state.shared.sha256() == sha(known_run())
    assert run.summary["bytes_up"] == known_run().summary["bytes_up"]
    alpha = state.private.of_clients(state.private.clients)["alpha"]
    assert (alpha != 0.5).all()


PAIRS = [[(0, 1), (1, 3), (2, 5)], [(1, 9), (3, 2)]]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_apfl_on_a_quadratic_by_hand(decay) -> None:
    """Steps on all examples at once; a large step size drives α of a client to its bound.

    Weight decay pulls both models to 0, and not the weight between them.
    """
    training = Training(lr=0.1, epochs=3, batch_size=5, weight_decay=decay)
    fed = linear_federation(PAIRS, training)
    first, second = run_rounds(Apfl(alpha=0.5), fed, 2)[1:]
    weights = np.array([3, 2]) / 5
    w_global, v, alpha = START, [START, START], [0.5, 0.5]
    for state in (first, second):
        w_k = []
        for i, own in enumerate(PAIRS):
            w = w_global
            for _ in range(3):
                mixed = alpha[i] * v[i] + (1 - alpha[i]) * w
                g, h = gradient(w, own), gradient(mixed, own)
                slope = (v[i] - w) @ h
                g, h = g + decay * w, alpha[i] * h + decay * v[i]
                w, v[i] = w - 0.1 * g, v[i] - 0.1 * h
                alpha[i] = float(np.clip(alpha[i] - 0.1 * slope, 0, 1))
            w_k.append(w)
        w_global = weights @ np.stack(w_k)
        np.testing.assert_allclose(vector(state.shared), w_global)
        private = state.private.of_clients(np.arange(2))
        np.testing.assert_allclose(private["alpha"][:, 0], alpha, atol=1e-12)
        np.testing.assert_allclose(private["v/slope.weight"].flatten(), [own[0] for own in v])
        deployed = Apfl().deploy(state, np.arange(2), fed)
        for i in range(2):
            mixed = alpha[i] * v[i] + (1 - alpha[i]) * w_global
            np.testing.assert_allclose(vector(deployed, i), mixed)
    assert len({0.0, 1.0} & set(alpha)) > 0  # the cut is reached


def test_apfl_needs_sgd(tiny_run) -> None:
    with pytest.raises(ExperimentError, match=r"train\.optimizer to sgd, got adam"):
        tiny_run("algorithm=apfl", "train={optimizer: adam}")


@pytest.mark.parametrize("options", ["top_layers: 0", "weight_lr: 0, top_layers: 2"])
def test_fedala_without_weights_is_fedavg(tiny_run, known_run, options) -> None:
    """With W = 1 clients start from the global model, to the last bit."""
    fedala = tiny_run(f"algorithm={{name: fedala, {options}}}")
    assert sha(fedala) == sha(known_run())
    assert sha(known_run("algorithm={name: fedala, top_layers: 2}")) != sha(known_run())


def test_fedala_that_takes_nothing_of_the_global_model_is_local() -> None:
    fed = linear_federation(PAIRS, Training(lr=0.1, epochs=2, batch_size=2))
    method, clients = FedAla(top_layers=2, weight_lr=0), np.arange(2)
    state = method.init(fed).state
    zeros = {name: torch.zeros_like(leaf) for name, leaf in state.weights.default.items()}
    state = replace(state, weights=replace(state.weights, default=zeros))
    for t in (1, 2, 3):
        state = method.round(state, method.cohort(state, t, fed), fed).state
    local = Local().deploy(run_rounds(Local(), fed, 3)[-1], clients, fed)
    mine = method.deploy(state, clients, fed)
    for name, leaf in local.of_clients(clients).items():
        assert torch.equal(leaf, mine.of_clients(clients)[name])


def test_fedala_learns_its_weights_by_hand() -> None:
    """Of the last layer, the offset: one pass a round once they were learned, on all data."""
    fed = linear_federation(PAIRS, Training(lr=0.1, epochs=1, batch_size=5))
    method = FedAla(weight_lr=0.05, share=1.0)
    states = run_rounds(method, fed, 3)
    learned = states[2].weights.of_clients(np.arange(2))["W/offset.weight"].flatten().tolist()
    w, v = vector(states[2].bank), states[2].models.of_clients(np.arange(2))["offset.weight"]
    for i, own in enumerate(PAIRS):
        offset = float(v[i])
        start = np.array([w[0], offset + (w[1] - offset) * learned[i]])
        expected = np.clip(learned[i] - 0.05 * gradient(start, own)[1] * (w[1] - offset), 0, 1)
        now = float(states[3].weights.of_clients(np.array([i]))["W/offset.weight"])
        assert now == pytest.approx(expected, abs=1e-12)
        assert 0 <= now <= 1
    assert min(learned) < 1


def test_fedala_learns_on_a_share_of_the_data() -> None:
    fed = linear_federation([[(x, x) for x in range(10)]] * 2, Training(batch_size=5))
    weights = FedAla(share=0.5)._drawn(1, fed)
    assert sorted(weights.tolist()) == [0.0] * 5 + [2.0] * 5

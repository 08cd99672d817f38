"""Identities of personalised methods, by the hash of every client's params."""

from types import SimpleNamespace

import pytest

from flray import load
from flray.algorithms.fedbn import FedBn


def sha(result) -> str:
    return result.summary["params_sha256"]


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
    holdout = "split.holdout=1"
    still = [
        tiny_run("algorithm={name: pfedme, lam: 0}", holdout, f"rounds={t}").summary[
            "holdout_loss_mean"
        ]
        for t in (1, 3)
    ]
    assert still[0] == still[1]


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


def test_fedrep_without_epochs_of_the_body_sends_nothing(tiny_run) -> None:
    fedrep = tiny_run("algorithm={name: fedrep, head_epochs: 1, body_epochs: 0}")
    assert fedrep.summary["bytes_up"] == 0


def test_fedbn_keeps_every_leaf_of_layers_that_own_a_buffer() -> None:
    initial = dict.fromkeys(["conv.weight", "down.1.weight", "down.1.running_mean", "head.bias"])
    fed = SimpleNamespace(initial=initial, buffers=frozenset(["down.1.running_mean"]))
    assert FedBn().private_leaves(fed) == {"down.1.weight", "down.1.running_mean"}

"""Predictions of clients' models on the server's public examples."""

import numpy as np
import pytest
import torch

from flray.client.tasks import Predict
from flray.engines.training import plain_gradient
from flray.errors import ClientFailure, ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import load_params

from scenarios import fail_jobs, tiny_federation


def federation(*overrides: str) -> Federation:
    return tiny_federation("split.server=30", *overrides)


def train_some(fed: Federation) -> Trained:
    return fed.train(fed.initial_bank(), Cohort(1, np.array([0, 2, 5])), plain_gradient)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_predictions_are_those_of_each_model_in_evaluation_mode(kind) -> None:
    fed = federation("model.dropout=0.5")
    trained, host = train_some(fed), fed.executor.host
    found = fed.predict(trained.params, Cohort(1, trained.clients), kind)
    assert found.clients.tolist() == [0, 2, 5]
    assert found.values.shape == (3, 30, 10)
    x, _ = host.examples.batch(torch.from_numpy(host.timeline.at(1).server))
    for k in range(3):
        load_params(host.module, {name: leaf[k] for name, leaf in trained.params.items()})
        with torch.no_grad():
            probabilities = host.module.eval()(x).softmax(1)
        if kind == "soft":
            assert torch.allclose(found.values[k], probabilities)
        else:
            assert torch.equal(found.values[k].argmax(1), probabilities.argmax(1))
            assert torch.equal(found.values[k].sum(1), torch.ones(30))
    assert not torch.equal(found.values[0], found.values[1])


def test_predictions_do_not_depend_on_blocks_and_send_nothing() -> None:
    found = []
    for size in (1, 4):
        fed = federation(f"execution.block={size}")
        trained = train_some(federation())
        found.append(fed.predict(trained.params, Cohort(1, trained.clients), "soft").values)
        assert not any(name.startswith("bytes") for name in fed.meter.counts)
        assert fed.meter.seconds["predict"] > 0
    assert torch.equal(*found)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_client_whose_model_fails_is_left_out(size, monkeypatch) -> None:
    fail_jobs(monkeypatch, lambda task, job: isinstance(task, Predict) and 2 in job.clients)
    fed = federation("on_client_failure=drop", f"execution.block={size}")
    trained = train_some(fed)
    found = fed.predict(trained.params, Cohort(1, trained.clients), "hard")
    assert found.clients.tolist() == [0, 5]
    assert fed.meter.counts["clients_dropped"] == 1
    others = {name: leaf[[0, 2]] for name, leaf in trained.params.items()}
    again = fed.predict(others, Cohort(1, np.array([0, 5])), "hard")
    assert torch.equal(again.values, found.values)
    with pytest.raises(ClientFailure, match="client 2 failed: ArithmeticError: broken by the test"):
        federation().predict(trained.params, Cohort(1, trained.clients), "hard")


def test_without_public_examples_there_is_nothing_to_predict() -> None:
    fed = federation("split.server=0")
    with pytest.raises(ExperimentError, match=r"set split\.server, 2500 in FLIS"):
        fed.predict(fed.initial, Cohort(1, np.array([0])), "hard")


def test_a_model_without_class_scores_is_refused() -> None:
    fed = federation("model=conv_ae")
    with pytest.raises(ExperimentError, match="a row of class scores"):
        fed.predict(fed.initial, Cohort(1, np.array([0])), "hard")


def test_test_examples_need_permission() -> None:
    fed = federation()
    with pytest.raises(ExperimentError, match="reads the test data of clients; say `uses_ground"):
        fed.judge(fed.initial_bank(), Cohort(1, fed.clients), "test")
    allowed = federation("uses_ground_truth=true")
    found = allowed.judge(allowed.initial_bank(), Cohort(1, allowed.clients), "test")
    assert np.isfinite(found.loss).all()
    assert allowed.meter.counts["ground_truth_reads"] == 1

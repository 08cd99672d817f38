"""Mixtures of models: their scores, their hashes and how far they move."""

import numpy as np
import pytest
import torch

from flray.client import scoring
from flray.client.scoring import ScoreJob, score_models
from flray.client.tasks import ClientsJob, ExampleLosses
from flray.data.owned import Rows
from flray.errors import ExperimentError
from flray.models.bank import (
    MixtureBank,
    ModelBank,
    build_seeded,
    params_of,
    stack,
)
from flray.models.conv_ae import ConvAe
from flray.models.mlp import Linear
from flray.models.mlp200 import Mlp200

from scenarios import RAGGED, host_over, noise_dataset, ragged_split

SHARES = (0.3, 0.7)  # neither is a float32


def two_models(build) -> tuple:
    models = [build_seeded(build, seed) for seed in (0, 1)]
    dataset = noise_dataset(sum(RAGGED), (1, 8, 8))
    bank = stack([{n: leaf.double() for n, leaf in params_of(m).items()} for m in models])
    return host_over(models[0], dataset, ragged_split(), "vectorized", torch.float64), bank


def test_a_mixture_is_scored_by_the_mean_of_probabilities(monkeypatch) -> None:
    host, bank = two_models(lambda: Mlp200((1, 8, 8), 10, hidden=5))
    ids = np.arange(sum(RAGGED))
    jobs = [ScoreJob(0, ids), ScoreJob(1, ids, SHARES), ScoreJob(1, ids), ScoreJob(1, ids, (0, 1))]
    first, mixture, second, pure = score_models(host, bank, jobs)
    assert pure.loss.tolist() == pytest.approx(second.loss.tolist(), rel=1e-12)
    likelihood = 0.3 * np.exp(-first.loss) + 0.7 * np.exp(-second.loss)
    np.testing.assert_allclose(mixture.loss, -np.log(likelihood), rtol=1e-12)
    assert np.abs(mixture.loss - (0.3 * first.loss + 0.7 * second.loss)).max() > 1e-3
    one = [ScoreJob(1, ids[k : k + 1], SHARES) for k in (0, len(ids) - 1)]
    pair = score_models(host, bank, one)  # whatever it is scored with, and one by one
    assert [p.loss[0] for p in pair] == [mixture.loss[0], mixture.loss[-1]]
    monkeypatch.setattr(scoring, "_stacked_outputs", lambda _: None)
    np.testing.assert_allclose(score_models(host, bank, jobs[1:2])[0].loss, mixture.loss, rtol=1e-9)
    alone = score_models(host, bank, [ScoreJob(1, ids)])[0]
    np.testing.assert_allclose(second.loss, alone.loss, rtol=1e-12)  # loaded after a mixture


def test_a_mixture_predicts_the_mean_of_numbers() -> None:
    """Two models that predict 1 and 5, weighted 3 to 7: 3.8, and the error of 7 is 3.2."""
    rows = Rows(np.zeros((4, 3)), np.full(4, 7.0), np.zeros(4, int)).dataset("mine")
    split = ragged_split((4,), rows.labels)
    host = host_over(Linear((3,), 1), rows, split, dtype=torch.float64)
    bank = {n: leaf.new_zeros(2, *leaf.shape) for n, leaf in params_of(host.module).items()}
    bank["layers.1.bias"] = torch.tensor([[1.0], [5.0]]).double()
    (mixture,) = score_models(host, bank, [ScoreJob(0, np.arange(4), SHARES)])
    np.testing.assert_allclose(mixture.loss, 3.2**2, rtol=1e-14)


def test_losses_of_examples_are_those_of_scores() -> None:
    host, bank = two_models(lambda: Mlp200((1, 8, 8), 10, hidden=5))
    split = host.timeline.at(1)
    answers = ExampleLosses(1)(host, bank, ClientsJob(np.array([1, 3])))
    assert [answer.loss.shape for answer in answers] == [(3, 2), (40, 2)]
    own = score_models(host, bank, [ScoreJob(1, split.train[3])])[0].loss
    assert answers[1].loss[:, 1].tolist() == pytest.approx(own.tolist(), rel=1e-12)
    assert answers[1].labels.tolist() == split.labels[split.train[3]].tolist()


def test_models_without_class_scores_have_no_mixture() -> None:
    host, bank = two_models(lambda: ConvAe((1, 8, 8)))
    with pytest.raises(ExperimentError, match="row of class scores"):
        score_models(host, bank, [ScoreJob(0, np.arange(4), SHARES)])


def test_a_mixture_of_one_model_has_its_hash() -> None:
    params = {"w": torch.tensor([[1.0], [5.0]])}
    plain = ModelBank(params, np.array([0, 1]))
    assert MixtureBank.of(params, np.eye(2)).sha256() == plain.sha256()
    mixed = MixtureBank.of(params, np.array([[1.0, 0.0], [0.25, 0.75]]))
    other = MixtureBank.of(params, np.array([[1.0, 0.0], [0.3, 0.7]]))
    assert len({plain.sha256(), mixed.sha256(), other.sha256()}) == 3

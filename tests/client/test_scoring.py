"""Stacked evaluation: the scores of one model after another, whoever is evaluated beside it."""

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule

from flray.client import scoring
from flray.client.scoring import MOST_PIECES, PIECE, ScoreJob, score_models, score_shared
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import build_seeded, load_params, params_of, stack

from scenarios import host_over, noise_dataset, ragged_split

pytestmark = pytest.mark.slow

SIZES = (1, 0, PIECE, 7, PIECE + 1, PIECE * MOST_PIECES + 3, 30, 2)
MODELS_OF = {"mlp200": {"hidden": 20, "dropout": 0.5}, "lenet5": {}, "conv_ae": None}


def host_of(name, threads=1, device="cpu"):
    shape = (1, 28, 28)
    fields = MODELS_OF[name]
    build = (
        (lambda: MODELS[name](shape))
        if fields is None
        else lambda: MODELS[name](shape, 10, **fields)
    )
    split = ragged_split((1, sum(SIZES)))
    dataset = noise_dataset(sum(SIZES) + 1, shape)
    settings = {"block": 5, "threads": threads, "device": device}
    host = host_over(build_seeded(build, 0), dataset, split, "vectorized", **settings)
    models = [params_of(build_seeded(build, n)) for n in range(4)]
    return host, stack([{k: v.clone() for k, v in model.items()} for model in models])


def jobs_of(num_models=4):
    ends = np.cumsum(SIZES)
    return [
        ScoreJob(k % num_models, np.arange(end - size, end))
        for k, (size, end) in enumerate(zip(SIZES, ends, strict=True))
    ]


class Mine(LightningModule):
    def training_step(self, batch, batch_idx): ...


def mine(shape):
    """A module without losses, whose `forward` is still to be set, and a host of it."""
    module = Mine()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    dataset = noise_dataset(6, shape)
    assert dataset.labels[:5].any()
    return module, host_over(module, dataset, ragged_split((1, 5)))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x[:, 0, 0, :1], r"returned the shape \(5, 1\) for targets of the shape \(5,\)"),
        (lambda x: x[:, 0, 0, 0], r"returned the shape \(5,\) for targets"),
        (lambda x: x[:, 0, 0, :, None], r"returned the shape \(5, 4, 1\) for targets"),
        (lambda x: x[:, 0, :1], r"returned the shape \(5, 1, 4\) for targets"),
        (lambda x: x[:, 0, 0, :, None, None], r"returned the shape \(5, 4, 1, 1\) for targets"),
        (lambda x: (x[:, 0, 0], x), "must return a tensor of predictions, got tuple"),
    ],
    ids=["column", "number", "axis after", "axis before", "two axes", "tuple"],
)
def test_predictions_that_are_no_class_scores_are_refused(forward, message) -> None:
    module, host = mine((1, 4, 4))
    bank, jobs = stack([params_of(module)]), [ScoreJob(0, np.arange(5))]
    module.forward = lambda x: x[:, 0, 0]
    assert score_models(host, bank, jobs)[0].correct.shape == (5,)
    module.forward = forward
    with pytest.raises(ExperimentError, match=rf"^Mine.forward {message}"):
        score_models(host, bank, jobs)


def test_an_autoencoder_of_rows_is_not_taken_for_a_classifier() -> None:
    module, host = mine((1, 1, 4))
    module.forward = lambda x: x
    (scores,) = score_models(host, stack([params_of(module)]), [ScoreJob(0, np.arange(5))])
    assert scores.correct.tolist() == [False] * 5


@pytest.mark.parametrize("name", MODELS_OF)
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 2])
def test_stacked_scores_are_those_of_one_by_one(name, threads, monkeypatch) -> None:
    host, bank = host_of(name, threads)
    jobs = jobs_of()
    stacked = score_models(host, bank, jobs)
    passes = []
    monkeypatch.setattr(scoring, "MOST_PIECES", 0)
    forward = host.module.forward
    monkeypatch.setattr(host.module, "forward", lambda x: passes.append(len(x)) or forward(x))
    alone = score_models(host, bank, jobs)
    assert sum(passes) == sum(SIZES)  # nothing was stacked
    assert len({float(each.loss[:1].sum()) for each in alone}) > 4  # models and examples differ
    for one, many in zip(alone, stacked, strict=True):
        assert np.array_equal(one.correct, many.correct)
        np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mlp200", {1: 4, 100: 100, 128: 128, 129: 68, 512: 128}), ("lenet5", {1: 4, 100: 28})],
)
def test_examples_are_cut_into_equal_pieces(name, sizes) -> None:
    """100 in one piece of 100, or with at most 32 in four of 25, which 4 does not divide."""
    host, _ = host_of(name)
    assert {num: scoring._piece_size(host, num) for num in sizes} == sizes


def test_scores_do_not_depend_on_what_is_scored_beside_them() -> None:
    host, bank = host_of("lenet5")
    jobs = jobs_of()
    together = score_models(host, bank, jobs)
    for order in ([3], [6, 4, 3], [7, 6, 5, 4, 3, 2, 1, 0]):
        again = score_models(host, bank, [jobs[k] for k in order])
        for k, found in zip(order, again, strict=True):
            assert np.array_equal(found.loss, together[k].loss), k
            assert np.array_equal(found.correct, together[k].correct)


def sets_of_examples():
    return [job.examples for job in jobs_of()]


@pytest.mark.parametrize("name", MODELS_OF)
def test_shared_models_are_scored_as_on_each_set_alone(name, monkeypatch) -> None:
    """Against the module's own forward, with each model loaded for each set of examples."""
    monkeypatch.setattr(scoring, "_models_in_a_pass", lambda _: 3)  # of four models
    host, bank = host_of(name)
    sets = sets_of_examples()
    correct, losses = score_shared(host, bank, sets)
    assert correct.shape == losses.shape == (4, sum(SIZES))
    assert np.abs(np.diff(losses, axis=0)).max() > 1e-3  # models differ
    ends = np.cumsum(SIZES)[:-1]
    for u in range(4):
        load_params(host.module, {leaf: values[u] for leaf, values in bank.items()})
        of_sets = zip(sets, np.split(correct[u], ends), np.split(losses[u], ends), strict=True)
        for ids, right, found in of_sets:
            x, y = host.examples.batch(torch.from_numpy(ids))
            with torch.no_grad():
                output = host.module.eval()(x)
                expected = host.module.example_losses((x, y))
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
            if name != "conv_ae":
                assert np.array_equal(right, (output.argmax(1) == y).numpy())


@pytest.mark.parametrize("name", ["mlp200", "lenet5"])
def test_scores_of_shared_models_do_not_depend_on_other_sets(name) -> None:
    host, bank = host_of(name)
    sets, ends = sets_of_examples(), np.cumsum(SIZES)[:-1]
    together = np.split(score_shared(host, bank, sets)[1], ends, axis=1)
    in_threads = score_shared(host_of(name, threads=2)[0], bank, sets)[1]
    assert np.array_equal(np.concatenate(together, axis=1), in_threads)
    for order in ([0], [1], [5], [6, 4, 3], [7, 6, 5, 4, 3, 2, 1, 0]):
        again = score_shared(host, bank, [sets[k] for k in order])[1]
        assert np.array_equal(again, np.concatenate([together[k] for k in order], axis=1)), order


def test_many_small_sets_share_a_pass_and_their_images(monkeypatch) -> None:
    """128 examples of 64 sets and 4 models are one batch; one example more is another."""
    host, bank = host_of("mlp200")
    sizes = []
    batch = type(host.examples).batch
    monkeypatch.setattr(
        type(host.examples), "batch", lambda self, ids: sizes.append(len(ids)) or batch(self, ids)
    )
    sets = list(np.arange(128).reshape(64, 2))
    score_shared(host, bank, sets)
    assert sizes == [128]
    score_shared(host, bank, [*sets, np.array([200])])
    assert sizes == [128] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["mlp200", "lenet5"])
def test_on_a_gpu_large_sets_of_linear_layers_are_stacked_too(name) -> None:
    on_cpu, bank = host_of(name)
    host, _ = host_of(name, device="cuda")
    jobs, there = jobs_of(), {leaf: values.cuda() for leaf, values in bank.items()}
    sizes = [scoring._piece_size(host, len(job.examples)) for job in jobs]
    assert max(sizes) == (scoring.EVALUATION_BATCH if name == "mlp200" else PIECE)
    found = score_models(host, there, jobs)
    for expected, mine in zip(score_models(on_cpu, bank, jobs), found, strict=True):
        np.testing.assert_allclose(mine.loss, expected.loss, rtol=1e-4, atol=1e-5)
    for order in ([5], [5, 4], [7, 6, 5, 4, 3, 2, 1, 0]):
        again = score_models(host, there, [jobs[k] for k in order])
        for k, mine in zip(order, again, strict=True):
            assert np.array_equal(mine.loss, found[k].loss)

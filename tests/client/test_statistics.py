"""REPA's statistics against numpy, scipy and scikit-learn, and what a client reads for them."""

from typing import get_args

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.decomposition import PCA

from flray.client.embedding import encode
from flray.client.host import Host
from flray.client.statistics import DescribeLatents, Statistic, describe
from flray.client.tasks import ClientsJob
from flray.data.events import make_timeline
from flray.models.bank import params_of, stack
from flray.models.lenet5 import LeNet5
from flray.models.mlp200 import Mlp200
from flray.models.repa_net import RepaNet

from scenarios import noise_dataset, place, ragged_split

LATENTS = np.random.default_rng(0).gamma(2.0, size=(50, 4)) * [1, 2, 3, 4]
UPPER, ABOVE = np.triu_indices(4), np.triu_indices(4, 1)
EXPECTED = {
    "mean": LATENTS.mean(0),
    "std": LATENTS.std(0),
    "quantiles": np.quantile(LATENTS, [0.25, 0.5, 0.75], axis=0).ravel(),
    "skewness": stats.skew(LATENTS),
    "kurtosis": stats.kurtosis(LATENTS),
    "covariance": np.cov(LATENTS.T, ddof=0)[UPPER],
    "correlation": np.corrcoef(LATENTS.T)[ABOVE],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_statistic_is_that_of_numpy_and_scipy(name) -> None:
    np.testing.assert_allclose(describe(LATENTS, (name,)), EXPECTED[name], rtol=1e-12)


def test_components_are_principal_of_length_one_and_their_largest_entry_is_positive() -> None:
    found = describe(LATENTS, ("components",)).reshape(3, 4)
    expected = PCA(3).fit(LATENTS).components_
    np.testing.assert_allclose(np.abs((found * expected).sum(1)), 1, rtol=1e-10)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-12)
    assert (found.max(1) == np.abs(found).max(1)).all()


def test_a_mix_is_its_statistics_one_after_the_other() -> None:
    mix = ("quantiles", "mean", "correlation")
    np.testing.assert_array_equal(
        describe(LATENTS, mix), np.concatenate([describe(LATENTS, (name,)) for name in mix])
    )


@pytest.mark.parametrize("name", get_args(Statistic))
def test_constant_features_and_a_single_example_have_finite_statistics(name) -> None:
    constant = LATENTS.copy()
    constant[:, 1] = 0.1  # whose standard deviation is rounding, not zero
    assert np.isfinite(describe(constant, (name,))).all()
    alone = describe(LATENTS[:1], (name,))
    assert np.isfinite(alone).all()
    assert alone.shape == describe(LATENTS, (name,)).shape
    if name not in ("mean", "quantiles"):
        assert not alone.any()


def host_of(module, split) -> Host:
    dataset = noise_dataset(60, (1, 28, 28))
    examples = place(dataset, split, torch.float32)
    return Host(module, examples, make_timeline(split, ()), engine=None, seed=0)


@pytest.mark.parametrize(
    ("model", "last"), [(Mlp200, "layers.4"), (LeNet5, None), (RepaNet, "classifier.head")]
)
def test_latents_of_a_classifier_are_what_its_last_layer_reads(model, last) -> None:
    keywords = {"encoder": "clf"} if model is RepaNet else {}
    module = model((1, 28, 28), 10, **keywords)
    host = host_of(module, ragged_split())
    ids = torch.arange(7)
    latents = torch.from_numpy(encode(module, host.examples, ids))
    layers = {name: m for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
    head = layers[last] if last else list(layers.values())[-1]
    with torch.no_grad():
        expected = module(host.examples.batch(ids)[0])
        torch.testing.assert_close(head(latents), expected)
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("holdout", ["all", "validation"])
def test_clients_describe_training_images_and_holdout_clients_all_or_validation(holdout) -> None:
    """The split has equal parts of clients 0 and 1; only 3 is held out. Labels do not matter."""
    split = ragged_split()
    part = split.train
    swapped = split.__class__(
        split.image_ids,
        split.labels,
        part,
        (part[2], part[2], part[2], part[1]),
        part,
        holdout=np.array([3]),
    )
    module = Mlp200((1, 28, 28), 10)
    host = host_of(module, swapped)
    rows = dict.fromkeys(range(4), 0)
    task = DescribeLatents(("mean", "std"), 1, rows, holdout=holdout)
    bank = stack([params_of(module)])
    described = task(host, bank, ClientsJob(np.arange(4)))
    held = {"all": np.r_[part[1], part[3]], "validation": part[1]}
    seen = [part[0], part[1], part[2], held[holdout]]
    for vector, ids in zip(described, seen, strict=True):
        latents = encode(module, host.examples, torch.from_numpy(ids)).astype(np.float64)
        np.testing.assert_allclose(vector, np.r_[latents.mean(0), latents.std(0)], rtol=1e-6)
    none_left = swapped.__class__(
        split.image_ids, split.labels, part, (part[0][:0],) * 4, part, holdout=np.array([3])
    )
    fallback = task(host_of(module, none_left), bank, ClientsJob(np.array([3])))[0]
    other = task(host_of(module, split), bank, ClientsJob(np.array([3])))[0]
    np.testing.assert_array_equal(fallback, other)

import warnings

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from flray.clustering.embeds import Pca, Standardise, SvdDirections, Umap
from flray.clustering.points import Points


def points_of(values, sizes=None):
    sizes = [1] * len(values) if sizes is None else sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return Points(np.arange(len(sizes)) + 3, torch.as_tensor(values), owner)


def blobs(num_each, centres, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate([c + rng.normal(size=(num_each, 6)) for c in centres])


def test_umap_keeps_clients_and_separates_blobs(monkeypatch):
    """Twelve clients with three points each, in order: 18 points near 0, 18 near 100."""
    points = points_of(blobs(18, [0.0, 100.0]), sizes=[3] * 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        embedded = Umap()(points, seed=5)
    assert np.array_equal(embedded.clients, points.clients)
    assert np.array_equal(embedded.owner, points.owner)
    assert embedded.values.dtype == torch.float64
    y = embedded.array()
    assert y.shape == (36, 2)
    means = y[:18].mean(0), y[18:].mean(0)
    radius = max(np.linalg.norm(y[:18] - means[0], axis=1).max(), 1e-3)
    assert np.linalg.norm(means[0] - means[1]) > 3 * radius
    # 5 points have 4 neighbours at most, and 15 are the default.
    few = points_of(blobs(5, [0.0]))
    asked = []
    import umap

    class Seen(umap.UMAP):
        def fit_transform(self, X):
            asked.append((self.n_neighbors, self.random_state, self.min_dist))
            return super().fit_transform(X)

    monkeypatch.setattr(umap, "UMAP", Seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert np.isfinite(Umap(seed=None, min_dist=0.2)(few, seed=7).array()).all()
    assert asked == [(4, 7, 0.2)]


@pytest.mark.parametrize("num_points", [1, 2, 3])
def test_umap_of_next_to_no_points_is_pca_which_keeps_their_distances(num_points):
    values = np.random.default_rng(0).normal(size=(num_points, 5))
    y = Umap()(points_of(values), seed=0).array()
    assert len(y) == num_points
    np.testing.assert_allclose(pdist(y), pdist(values), rtol=1e-9)


def test_pca_is_the_projection_on_the_leading_eigenvectors():
    x = np.random.default_rng(1).normal(size=(20, 4)) * [1.0, 5.0, 2.0, 0.1]
    y = Pca(2)(points_of(x), seed=0).array()
    centred = x - x.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    expected = centred @ vectors[:, ::-1][:, :2]
    np.testing.assert_allclose(np.abs(y), np.abs(expected), atol=1e-9)


def test_pca_takes_no_more_components_than_there_are(recwarn):
    rng = np.random.default_rng(2)
    assert Pca(9)(points_of(rng.normal(size=(20, 4))), seed=0).array().shape == (20, 4)
    assert Pca(9)(points_of(rng.normal(size=(3, 4))), seed=0).array().shape == (3, 3)
    assert Pca(2)(points_of(np.ones((3, 4))), seed=0).array().tolist() == [[0.0, 0.0]] * 3
    assert Pca(2)(points_of(np.ones((1, 4))), seed=0).array().tolist() == [[0.0]]
    assert len(recwarn) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_standardised_features_have_mean_zero_and_variance_one(dtype):
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(9, 3)) * [1, 50, 1e-3] + 7).to(dtype)
    before = x.clone()
    y = Standardise()(points_of(x, sizes=[4, 3, 2]), seed=0)
    assert torch.equal(x, before)
    assert y.owner.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    np.testing.assert_allclose(y.array().mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(y.array().var(0), 1, rtol=1e-9)
    np.testing.assert_allclose(np.corrcoef(y.array()[:, 1], x[:, 1].double())[0, 1], 1)


def test_a_constant_feature_becomes_exactly_zero():
    # The mean of nine times 0.1 is not 0.1.
    x = np.column_stack([np.full(9, 0.1), np.arange(9.0) ** 2])
    y = Standardise()(points_of(x), seed=0).array()
    assert np.all(y[:, 0] == 0)
    assert np.all(y[:, 1].astype(bool))


@pytest.mark.parametrize("embed", [Umap(), Pca(), Standardise()])
def test_a_client_that_sent_nonsense_is_named(embed):
    values = np.ones((6, 2))
    values[4, 1] = np.nan
    with pytest.raises(ValueError, match=r"client 5 .* in 1 of 4"):
        embed(points_of(values, sizes=[2, 2, 2]), seed=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Umap(n_components=0), "n_components must be >= 1, got 0"),
        (lambda: Umap(n_neighbors=1), "n_neighbors must be >= 2, got 1"),
        (lambda: Umap(min_dist=-0.1), "min_dist must lie between 0 and 1, got -0.1"),
        (lambda: Umap(min_dist=1.5), "min_dist must lie between 0 and 1, got 1.5"),
        (lambda: Pca(0), "n_components must be >= 1, got 0"),
    ],
)
def test_bad_fields_are_named_with_their_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("known", [[[1.0, 0], [2, 0], [3, 0]], [[1.0, 0], [2, 0]]])
def test_a_direction_that_no_point_has_gives_newcomers_nothing(known):
    """Three points of two features and two points of two: both lie on one line."""
    points = Points.vectors(np.arange(len(known)), torch.tensor(known).double())
    new = Points.vectors(np.arange(1), torch.tensor([[0.0, 1.0]]).double())
    assert SvdDirections(2).transform(points, new, 0).array().tolist() == [[0, 0]]

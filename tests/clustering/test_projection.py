"""Evidence of clusterings whose points are too large to keep."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from flray.clustering import gram, pipeline, projection
from flray.clustering.distances import L2
from flray.clustering.pipeline import LARGEST_KEPT, Clustering
from flray.clustering.points import Partition, Points
from flray.records.clusterings import ClusteringRecord
from flray.reports.geometry import plane, principal_plane


def recorded(points: Points) -> ClusteringRecord:
    """What a run records of a clustering of these points."""
    m = points.num_clients
    distance = L2()(Points.vectors(points.clients, points.means()))
    found = Clustering(points.clients, points, distance, None, Partition(np.zeros(m, np.int64)))
    return ClusteringRecord(**found.evidence())


def groups(num_clients: int, num_dimensions: int) -> Points:
    """Four clients each near one of some far centres, as updates of float32."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(-(-num_clients // 4), num_dimensions)).repeat(4, axis=0)
    values = 5 * centres[:num_clients] + rng.normal(size=(num_clients, num_dimensions))
    return Points.vectors(np.arange(num_clients), torch.from_numpy(values).float())


def assert_same_picture(found: ClusteringRecord, points: Points) -> None:
    expected, share = principal_plane(points.array())
    flat, owner, how = plane(found)
    turned = flat * np.sign((flat * expected).sum(0))  # axes have no sign
    np.testing.assert_allclose(turned, expected, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_array_equal(owner, points.owner)
    assert f"({100 * share:.0f} % of the variance)" in how
    assert f"first two principal components of {points.values.shape[1]:,}" in how


def test_large_points_are_kept_as_coordinates_with_the_same_distances() -> None:
    """20 updates of an MLP with 200 hidden units: 20 x 159,010 numbers become 20 x 19."""
    points = groups(20, 159_010)
    assert points.values.numel() > LARGEST_KEPT
    found = recorded(points)
    assert found.points.shape == (20, 19)
    assert (int(found.projected_from), float(found.variance_kept)) == (159_010, 1.0)
    np.testing.assert_allclose(pdist(found.points), pdist(points.array()), rtol=1e-9)
    assert_same_picture(found, points)
    assert plane(found)[2].endswith("drawn from coordinates with the same distances")


def test_small_points_are_kept_as_they_are() -> None:
    points = groups(8, 3)
    found = recorded(points)
    np.testing.assert_array_equal(found.points, points.array())
    assert found.projected_from is None
    assert found.variance_kept is None


@pytest.mark.parametrize("num_dimensions", [30, 500])
def test_of_very_many_points_the_leading_components_are_kept(monkeypatch, num_dimensions) -> None:
    """40 points and room for 400 numbers: 10 components, whose share of the variance is recorded.

    Fewer dimensions than points, and more.
    """
    monkeypatch.setattr(pipeline, "LARGEST_KEPT", 400)
    points = groups(40, num_dimensions)
    found = recorded(points)
    assert found.points.shape == (40, 10)
    variance = np.linalg.svd(points.array() - points.array().mean(0), compute_uv=False) ** 2
    assert float(found.variance_kept) == pytest.approx(variance[:10].sum() / variance.sum())
    assert 0.5 < float(found.variance_kept) < 0.9999
    assert_same_picture(found, points)
    assert plane(found)[2].endswith("drawn from the leading 10 components")


def test_a_tiny_chunk_gives_what_the_whole_gives(monkeypatch) -> None:
    for points in (groups(12, 101), groups(101, 12)):
        whole = points.principal
        with monkeypatch.context() as patch:
            for module in (projection, gram):
                patch.setattr(module, "chunk_length", lambda _: 7)
            patch.setattr(gram, "TILE_ROWS", 5)
            sliced = Points(points.clients, points.values, points.owner).principal
        assert whole.shape == (len(points.values), min(points.values.shape) - (len(whole) == 12))
        np.testing.assert_allclose(pdist(sliced), pdist(whole), rtol=1e-9)


@pytest.mark.parametrize("num_clients", [1, 2, 3])
def test_few_clients_are_drawn_too(monkeypatch, num_clients) -> None:
    monkeypatch.setattr(pipeline, "LARGEST_KEPT", 10)
    points = groups(num_clients, 50)
    assert_same_picture(recorded(points), points)


def test_points_are_projected_once(monkeypatch) -> None:
    """The rows of a sweep cluster the same points many times."""
    monkeypatch.setattr(pipeline, "LARGEST_KEPT", 10)
    points = groups(4, 50)
    first = recorded(points)
    monkeypatch.setattr("flray.clustering.points.by_gram", pytest.fail)
    np.testing.assert_array_equal(recorded(points).points, first.points)

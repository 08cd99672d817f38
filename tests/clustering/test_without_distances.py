"""Partitions that take points: what they equal, and that nothing of size clients² is built."""

import re

import numpy as np
import pytest
import torch
import yaml
from scipy.cluster.hierarchy import linkage
from sklearn.metrics import adjusted_rand_score

import flray
from flray.clustering import checks, pipeline
from flray.clustering.distances import L2, Cosine, Disagreement
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.neighbours import Neighbours
from flray.clustering.partitions import KMeans
from flray.clustering.pipeline import Pipeline
from flray.clustering.points import Points
from flray.clustering.related import Related
from flray.clustering.relations import Threshold
from flray.clustering.two_level import (
    TwoLevel,
    member_distances,
    squared_spread,
    weighted_tree,
)
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ExperimentError
from flray.records.clusterings import read_clusterings
from flray.reports.clustering_figures import clustering_figures
from flray.reports.page import write_page

from scenarios import TINY, run_experiment

LINKAGES = ("single", "complete", "average", "ward")


def related(values: np.ndarray, measure=None) -> Related:
    points = Points.vectors(np.arange(len(values)), torch.from_numpy(values))
    return Related(points, None, None, np.random.default_rng(0), None, measure=measure or L2())


def groups(num: int, spread: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """(num, 5) points around four centres, and the centre of each."""
    rng = np.random.default_rng(0)
    kind = rng.integers(4, size=num)
    return np.eye(4, 5)[kind] * 5 + rng.normal(size=(num, 5)) * spread, kind


class TestTwoLevel:
    @pytest.mark.parametrize("name", LINKAGES)
    def test_with_a_group_per_client_is_hierarchical(self, name) -> None:
        values = np.random.default_rng(1).normal(size=(40, 3))
        some = related(values)
        D = L2()(some.points)
        exact = Related(some.points, D, None, some.rng, None)
        tree = linkage(values, name)
        np.testing.assert_allclose(weighted_tree(D, np.ones(40, int), name), tree, atol=1e-9)
        for cut in ({"number": 5}, {"threshold": float(tree[-4, 2]) + 1e-6}, {"number": "auto"}):
            labels = TwoLevel(groups=40, linkage=name, **cut)(some).labels
            assert (labels == Hierarchical(name, **cut)(exact).labels).all()

    @pytest.mark.parametrize("name", LINKAGES)
    def test_with_a_group_per_client_ties_are_those_of_hierarchical(self, name) -> None:
        values = np.random.default_rng(3).integers(0, 3, (12, 2)).astype(float)
        some = related(values)
        exact = Related(some.points, L2()(some.points), None, some.rng, None)
        for number in range(1, 12):
            labels = TwoLevel(linkage=name, number=number)(some).labels
            assert (labels == Hierarchical(name, number=number)(exact).labels).all()

    def test_fewer_groups_with_clients_than_clusters_are_refused(self) -> None:
        values = np.array([[0.0], [0], [0], [5], [5]])
        with pytest.raises(
            ValueError, match=r"two_level .* 3 clusters: clients are in 2 of 4 groups"
        ):
            TwoLevel(groups=4, number=3)(related(values))

    @pytest.mark.parametrize("name", LINKAGES)
    def test_groups_count_by_their_members(self, name) -> None:
        """Clients that coincide merge at height 0; the merges above are those of the groups."""
        centres = np.random.default_rng(2).normal(size=(9, 3))
        sizes = np.array([1, 5, 2, 7, 1, 3, 3, 4, 2])
        points = Points.vectors(np.arange(9), torch.from_numpy(centres))
        found = weighted_tree(L2()(points), sizes, name)
        whole = linkage(np.repeat(centres, sizes, axis=0), name)
        np.testing.assert_allclose(found[:, 2], whole[-8:, 2], atol=1e-9)
        np.testing.assert_allclose(found[:, 3], whole[-8:, 3])

    def test_average_linkage_goes_by_the_distances_of_members(self) -> None:
        """A wide cluster and two near ones, as 500 coordinates make it: means are no distances."""
        rng = np.random.default_rng(3)
        kind = np.repeat(np.arange(3), 60)
        spread = np.array([3.0, 0.2, 0.2])[kind, None]
        values = np.eye(3, 500)[kind] * 12 + rng.normal(size=(180, 500)) * spread
        some = related(values)
        exact = Related(some.points, L2()(some.points), None, some.rng, None)
        expected = Hierarchical("average", threshold=80.0)(exact).labels
        assert len(np.unique(expected)) == 2  # the wide cluster, and the two others
        found = TwoLevel(groups=20, linkage="average", threshold=80.0)(some).labels
        assert adjusted_rand_score(found, expected) == 1

    def test_distances_of_members_are_those_of_all_pairs(self) -> None:
        values, kind = groups(60)
        points = related(values).points
        centres = Points.vectors(np.arange(4), points.cluster_means(kind))
        found = member_distances(L2()(centres), squared_spread(points, centres, kind))
        squares = np.square(L2()(points))
        for a, b in ((0, 1), (2, 3)):
            pairs = squares[np.ix_(kind == a, kind == b)]
            assert found[a, b] == pytest.approx(np.sqrt(pairs.mean()))

    def test_finds_clusters_by_threshold_and_number(self) -> None:
        values, kind = groups(300)
        for cut in ({"number": 4}, {"number": "auto"}, {"threshold": 20.0}):
            labels = TwoLevel(groups=30, **cut)(related(values)).labels
            assert adjusted_rand_score(labels, kind) == 1

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "exactly one of threshold and number"),
            ({"groups": 3, "number": 4}, "number must be at most groups, 3, got 4"),
            ({"groups": 0, "number": 1}, "groups must be >= 1"),
        ],
    )
    def test_refuses(self, fields, message) -> None:
        with pytest.raises(ValueError, match=message):
            TwoLevel(**fields)

    def test_ward_needs_l2(self) -> None:
        with pytest.raises(ValueError, match="ward"):
            Pipeline(distance=Cosine(), partition=TwoLevel(number=2))


class TestNeighbours:
    def test_find_clusters_and_their_number(self) -> None:
        values, kind = groups(200, spread=0.8)
        partition = Neighbours(nearest=12, resolution=0.2)
        labels = partition(related(values)).labels
        assert adjusted_rand_score(labels, kind) == 1
        assert (partition(related(values)).labels == labels).all()

    def test_take_the_distance_of_the_pipeline(self) -> None:
        """By cosine lengths do not matter: two directions, each with near and far points."""
        direction = np.array([[1.0, 0.0], [0.0, 1.0]])[np.arange(40) % 2]
        values = direction * np.random.default_rng(0).uniform(0.1, 100, (40, 1)) + 1e-6
        labels = Neighbours(nearest=19)(related(values, Cosine())).labels
        assert (labels == np.arange(40) % 2).all()

    def test_refuse_other_distances(self) -> None:
        with pytest.raises(ValueError, match="needs distance l1, l2 or cosine, got Disagreement"):
            Pipeline(distance=Disagreement(), partition=Neighbours())

    def test_refuse_no_resolution(self) -> None:
        with pytest.raises(ValueError, match="resolution must be > 0, got 0"):
            Neighbours(resolution=0)


def test_kmeans_in_batches_finds_clusters() -> None:
    values, kind = groups(300)
    labels = KMeans(4, batch=64)(related(values)).labels
    assert adjusted_rand_score(labels, kind) == 1
    with pytest.raises(ValueError, match="batch must be >= 1 or null, got 0"):
        KMeans(4, batch=0)


TAKES_POINTS = [
    {"name": "two_level", "groups": 4, "number": 2},
    {"name": "neighbours", "nearest": 3},
    {"name": "kmeans", "number": 2},
    {"name": "random", "number": 2},
]


@pytest.mark.parametrize("partition", TAKES_POINTS, ids=lambda p: p["name"])
def test_many_clients_are_clustered_without_distances(partition, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "LARGEST_D", 5)  # of six clients
    exact = L2.__call__

    def of_few(stage: L2, points: Points) -> np.ndarray:
        """Distances of centres, but not of all clients."""
        assert points.num_clients <= 5
        return exact(stage, points)

    monkeypatch.setattr(L2, "__call__", of_few)
    clustering = {"partition": partition}
    plain = override(TINY, ["rounds=1"]) | {
        "algorithm": {"name": "flhc", "rounds_before": 1, "clustering": clustering}
    }
    run_experiment(parse_experiment(plain), tmp_path)
    (record,) = read_clusterings(tmp_path).values()
    assert record.D is None
    assert len(record.labels) == 6
    assert list(clustering_figures(record)) == ["embedding"]
    if partition["name"] == "kmeans":
        page = write_page([tmp_path], None).read_text()
        assert "Clients in the plane" in page
        assert "Distances between clients" not in page
        with pytest.raises(ExperimentError, match=r"decided without D.* it has: embedding"):
            flray.load(tmp_path).figure("distance")


def test_a_relation_needs_distances() -> None:
    many = pipeline.LARGEST_D + 1
    assert not Pipeline(partition=KMeans(2)).needs_distances(many)
    assert Pipeline(partition=KMeans(2)).needs_distances(many - 1)
    assert Pipeline(relate=Threshold(), partition=KMeans(2)).needs_distances(many)
    assert Pipeline().needs_distances(many)


def test_distances_that_do_not_fit_are_refused_before_the_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checks, "COPIES_OF_D", 10**12)
    plain = override(TINY, ["rounds=1", "algorithm=flhc"])
    with pytest.raises(ExperimentError, match="distances between 6 clients need") as refusal:
        run_experiment(parse_experiment(plain), tmp_path)
    assert not (tmp_path / "rounds.parquet").exists()
    advice = re.findall(r"(?:clustering|partition): \{.*?\}(?=, or|$)", str(refusal.value))
    assert len(advice) == 3
    monkeypatch.setattr(pipeline, "LARGEST_D", 5)
    for lines in advice:
        stages = yaml.safe_load(f"{{{lines}}}")
        stages = stages.get("clustering", stages)
        clustered = plain | {"algorithm": {"name": "flhc", "clustering": stages}}
        parse_experiment(clustered).algorithm.build().clustering.require_room(6)

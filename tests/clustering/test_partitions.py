import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cdist

from flray.clustering.hierarchical import Hierarchical
from flray.clustering.partitions import Components, Hdbscan, KMeans, LabelCounts, Random, Rows
from flray.clustering.points import Points, by_smallest_member
from flray.clustering.related import Related


def no_ground_truth():
    raise AssertionError("this partition must not read the ground truth")


def related(values, relation=None, seed=0, label_counts=no_ground_truth):
    values = np.asarray(values, dtype=float)
    points = Points.vectors(np.arange(len(values)), torch.from_numpy(values))
    rng = np.random.default_rng(seed)
    return Related(points, cdist(values, values), relation, rng, label_counts)


def relating(relation):
    relation = np.asarray(relation, dtype=float)
    return related(np.zeros((len(relation), 1)), relation)


def blobs(sizes=(5, 7, 6), seed=0):
    """Clusters equally far from each other, shuffled; (values, the planted labels)."""
    rng = np.random.default_rng(seed)
    planted = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    values = 100.0 * np.eye(len(sizes))[planted] + rng.normal(size=(len(planted), len(sizes)))
    return values, by_smallest_member(planted)


relations = st.integers(1, 8).flatmap(
    lambda m: arrays(np.bool_, (m, m)).map(lambda r: r & r.T | np.eye(len(r), dtype=bool))
)


@given(relation=relations)
@settings(max_examples=60)
def test_components_are_who_can_be_reached(relation):
    reach = relation.copy()
    for _ in relation:
        reach = reach @ reach  # of booleans: or of ands
    expected = by_smallest_member(reach.argmax(1))
    assert Components()(relating(relation)).labels.tolist() == expected.tolist()


def test_a_chain_is_one_component_and_weak_strengths_connect():
    chain = np.eye(4)
    chain[0, 2] = chain[2, 0] = 1e-9
    chain[2, 3] = chain[3, 2] = 0.5
    assert Components()(relating(chain)).labels.tolist() == [0, 1, 0, 0]


@given(relation=relations)
@settings(max_examples=60)
def test_rows_are_the_clients_with_the_same_neighbours(relation):
    labels = Rows()(relating(relation)).labels
    for i, j in np.ndindex(relation.shape):
        assert (labels[i] == labels[j]) == np.array_equal(relation[i], relation[j])
    assert labels.tolist() == by_smallest_member(labels).tolist()


@pytest.mark.parametrize(("partition", "who"), [(Components(), "components"), (Rows(), "rows")])
def test_a_relation_is_asked_for_where_there_is_none(partition, who):
    with pytest.raises(ValueError, match=f"{who} needs a relation .* got relate: none"):
        partition(related(np.zeros((3, 1))))


def test_kmeans_is_seeded_by_the_run_alone():
    values = np.random.default_rng(0).normal(size=(40, 2))
    runs = [KMeans(8, n_init=1)(related(values, seed=s)).labels.tolist() for s in (0, 0, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert any(run != runs[0] for run in runs[2:])


def test_kmeans_needs_vectors():
    points = Points(np.arange(2), torch.zeros(3, 1), np.array([0, 0, 1]))
    sets = Related(points, np.zeros((2, 2)), None, np.random.default_rng(0), no_ground_truth)
    with pytest.raises(ValueError, match="kmeans needs one vector a client, got 3 points of 2"):
        KMeans(2)(sets)


def test_hdbscan_finds_clusters_and_leaves_noise_alone():
    """Two clusters of 8, and two outliers far from everything and from each other."""
    values, planted = blobs((8, 8))
    values = np.concatenate([values, [[1e4, 0.0], [-1e4, 0.0]]])
    those = related(values)
    before = those.distance.copy()
    assert Hdbscan()(those).labels.tolist() == [*planted.tolist(), 2, 3]
    assert np.array_equal(those.distance, before)


@pytest.mark.parametrize("num_clients", [1, 2, 3, 4])
def test_hdbscan_of_fewer_clients_than_a_cluster_needs(num_clients):
    values = np.random.default_rng(0).normal(size=(num_clients, 2))
    labels = Hdbscan()(related(values)).labels
    assert labels.tolist() == list(range(num_clients))


def test_hdbscan_clusters_may_be_smaller_when_asked():
    values, planted = blobs((3, 4, 3))
    assert Hdbscan(min_cluster_size=3)(related(values)).labels.tolist() == planted.tolist()
    assert Hdbscan()(related(values)).labels.tolist() != planted.tolist()


@given(num_clients=st.integers(1, 20), data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_random_clusters_are_exactly_as_many_and_of_equal_size(num_clients, data, seed):
    number = data.draw(st.integers(1, num_clients))
    labels = Random(number)(related(np.zeros((num_clients, 1)), seed=seed)).labels
    sizes = np.bincount(labels)
    assert len(sizes) == number
    assert sizes.max() - sizes.min() <= 1


def test_random_clusters_follow_the_seed():
    runs = [Random(3)(related(np.zeros((9, 1)), seed=s)).labels.tolist() for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != [0, 1, 2] * 3


def test_label_counts_groups_clients_by_the_set_of_their_labels():
    counts = np.array([[5, 0, 1], [0, 2, 0], [1, 0, 9], [0, 0, 3], [0, 7, 0], [0, 0, 0]])
    those = related(np.zeros((6, 1)), label_counts=lambda: counts)
    assert LabelCounts()(those).labels.tolist() == [0, 1, 0, 2, 1, 3]


@pytest.mark.parametrize("partition", [Hierarchical(number=4), KMeans(4), Random(4)])
def test_more_clusters_than_clients_are_refused(partition):
    with pytest.raises(ValueError, match="number must be at most the number of clients, 3, got 4"):
        partition(related(np.arange(3)[:, None]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KMeans(0), "number must be >= 1, got 0"),
        (lambda: KMeans(2, n_init=0), "n_init must be >= 1, got 0"),
        (lambda: Hdbscan(min_cluster_size=1), "min_cluster_size must be >= 2, got 1"),
        (lambda: Random(0), "number must be >= 1, got 0"),
    ],
)
def test_bad_fields_are_named_with_their_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()

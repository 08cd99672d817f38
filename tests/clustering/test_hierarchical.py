import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist, squareform
from sklearn.metrics import adjusted_rand_score

from flray.clustering.hierarchical import Hierarchical
from flray.clustering.points import Points, by_smallest_member
from flray.clustering.related import Related
from flray.clustering.relations import Threshold
from flray.config.binding import bind_component
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ExperimentError

from scenarios import TINY

LINKAGES = ["single", "complete", "average", "ward"]


def related(values=None, distance=None, relation=None):
    if distance is None:
        distance = cdist(values, values)
    if values is None:
        values = np.zeros((len(distance), 1))
    points = Points.vectors(np.arange(len(distance)), torch.from_numpy(values))
    return Related(points, distance, relation, np.random.default_rng(0), lambda: np.zeros((0, 0)))


def blobs(sizes=(5, 4, 6), seed=0):
    """Clusters equally far from each other, shuffled; (values, the planted labels)."""
    rng = np.random.default_rng(seed)
    planted = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    values = 100.0 * np.eye(len(sizes))[planted] + rng.normal(size=(len(planted), len(sizes)))
    return values, by_smallest_member(planted)


def equidistant(num):
    return 1.0 - np.eye(num)


@pytest.mark.parametrize("method", LINKAGES)
def test_a_threshold_cuts_as_scipy_does(method):
    values = np.random.default_rng(0).normal(size=(25, 3))
    those = related(values)
    tree = linkage(squareform(those.distance, checks=False), method)
    heights = tree[:, 2]
    thresholds = np.r_[0.0, heights, heights * (1 + 1e-9), heights * (1 - 1e-9), np.inf]
    counts = set()
    for threshold in thresholds:
        found = Hierarchical(method, threshold=float(threshold))(those)
        expected = fcluster(tree, threshold, "distance")
        assert found.labels.tolist() == by_smallest_member(expected).tolist()
        np.testing.assert_array_equal(found.linkage, tree)
        counts.add(len(set(expected)))
    assert counts == set(range(1, 26))


@pytest.mark.parametrize("method", LINKAGES)
def test_number_is_exact_where_all_distances_are_equal(method):
    those = related(distance=equidistant(6))
    by_height = fcluster(linkage(squareform(those.distance), method), 3, "maxclust")
    if method != "ward":
        assert len(set(by_height)) != 3  # what makes this test worth having
    for number in range(1, 7):
        labels = Hierarchical(method, number=number)(those).labels
        assert sorted(set(labels)) == list(range(number))


@given(
    values=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12),
    method=st.sampled_from(LINKAGES),
)
@settings(max_examples=60)
def test_numbers_nest_and_thresholds_agree_with_scipy_on_ties(values, method):
    those = related(np.array(values, dtype=float))
    tree = Hierarchical(method, number=1).tree(those)
    coarser = None
    for number in range(1, len(values) + 1):
        labels = Hierarchical(method, number=number).cut(tree, those)
        assert len(set(labels)) == number
        if coarser is not None:
            assert len(set(zip(labels, coarser, strict=True))) == number
        coarser = labels
    for threshold in tree[:, 2]:
        labels = Hierarchical(method, threshold=float(threshold)).cut(tree, those)
        expected = by_smallest_member(fcluster(tree, threshold, "distance"))
        assert labels.tolist() == expected.tolist()


def test_on_relation_is_ward_over_the_rows_of_the_binary_matrix():
    """FLT with HC: rows of A as feature vectors, ward, euclidean, cut into C clusters."""
    values, planted = blobs()
    values[planted == 1] += 3.0
    relation = Threshold(gamma=2.0)(cdist(values, values))
    those = related(values, relation=relation)
    tree = linkage(relation, method="ward", metric="euclidean")
    for number in (2, 3, 5):
        found = Hierarchical("ward", number=number, on="relation")(those)
        np.testing.assert_allclose(found.linkage[:, 2], tree[:, 2], atol=1e-12)  # with ties
        expected = by_smallest_member(fcluster(tree, number, "maxclust"))
        assert expected.max() == number - 1
        assert found.labels.tolist() == expected.tolist()
    assert not np.array_equal(tree, Hierarchical("ward", number=3).tree(those))


@pytest.mark.parametrize("on", ["distance", "relation"])
@pytest.mark.parametrize("number", [2, 4, 10])
def test_clients_that_nothing_tells_apart_are_not_joined_in_their_order(on, number):
    """No relation and equal distances: clusters must not follow groups of successive clients."""
    those = related(np.eye(40), relation=np.eye(40))
    rule = Hierarchical("average", number=number, on=on)
    labels = rule(those).labels
    assert len(set(labels)) == number
    assert adjusted_rand_score(np.repeat(range(4), 10), labels) < 0.1
    np.testing.assert_array_equal(labels, rule(those).labels)


@pytest.mark.parametrize("method", LINKAGES)
def test_equal_merges_in_another_order_leave_the_rest_of_a_tree_as_it_is(method):
    those = related(np.array([[0.0], [1], [10], [11], [25], [26], [60]]))  # three merges at 1
    tree, scipys = Hierarchical(method, number=2).tree(those), linkage(those.points.values, method)
    np.testing.assert_allclose(tree[:, 2:], scipys[:, 2:])
    for number in (2, 3, 4):
        labels = Hierarchical(method, number=number).cut(tree, those)
        expected = by_smallest_member(fcluster(scipys, number, "maxclust"))
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("method", LINKAGES)
@pytest.mark.parametrize("rule", ["gap", "silhouette"])
def test_auto_finds_well_separated_clusters(method, rule):
    for sizes in [(5, 4, 6), (3, 8), (2, 3, 4, 5, 6)]:
        values, planted = blobs(sizes)
        found = Hierarchical(method, number="auto", choose_by=rule)(related(values))
        assert found.labels.tolist() == planted.tolist()


def test_gap_and_silhouette_can_differ():
    """On a line at 0, 1, 2.2 | 10, 11, 12.2 | 40, merges at 1 1 1.2 1.2 7.8 27.8 (single).

    The largest gap is 20, below two clusters. Silhouette: two clusters leave 0..12 loose, with
    s = 1 - b/a of about 1 - 6/35 for six clients; three are tighter, about 1 - 1.4/10: more.
    """
    line = np.array([0, 1, 2.2, 10, 11, 12.2, 40])[:, None]
    gap = Hierarchical("single", number="auto")(related(line)).labels
    silhouette = Hierarchical("single", number="auto", choose_by="silhouette")(related(line)).labels
    assert gap.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert silhouette.tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("rule", ["gap", "silhouette"])
def test_auto_without_structure_is_one_cluster(rule):
    auto = Hierarchical("average", number="auto", choose_by=rule)
    for distance in (np.zeros((1, 1)), equidistant(2), np.zeros((5, 5)), equidistant(5)):
        assert auto(related(distance=distance)).labels.tolist() == [0] * len(distance)


def test_equal_gaps_give_the_fewest_clusters():
    """Points at 0, 1, 3, 6: merges at 1, 2, 3, both gaps 1."""
    line = np.array([0.0, 1.0, 3.0, 6.0])[:, None]
    labels = Hierarchical("single", number="auto")(related(line)).labels
    assert labels.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("settings", [{"threshold": 1.0}, {"number": 1}, {"number": "auto"}])
@pytest.mark.parametrize("on", ["distance", "relation"])
def test_one_client_is_one_cluster(settings, on):
    found = Hierarchical(**settings, on=on)(
        related(distance=np.zeros((1, 1)), relation=np.ones((1, 1)))
    )
    assert found.labels.tolist() == [0]
    assert found.linkage.shape == (0, 4)


def test_on_relation_needs_a_relation():
    with pytest.raises(ValueError, match="got relate: none; choose threshold or kernel"):
        Hierarchical(number=2, on="relation")(related(distance=equidistant(3)))


PARTITION = "algorithm.clustering.partition"
FILE = {"name": "hierarchical", "threshold": 2.0}


@pytest.mark.parametrize(
    ("in_the_file", "typed", "expected"),
    [
        (None, ["number=auto"], (None, "auto")),  # instead of FL+HC's 3.0
        (None, ["number=4", "threshold=null"], (None, 4)),
        (None, ["number=null"], (3.0, None)),
        (FILE, ["number=4"], (None, 4)),
        ({"number": 4}, [], (None, 4)),
        ({"number": 4}, ["threshold=1.5"], (1.5, None)),
        ({"number": 4}, ["threshold=null"], (None, 4)),
    ],
)
def test_naming_threshold_or_number_unsets_the_other(in_the_file, typed, expected):
    clustering = {} if in_the_file is None else {"partition": in_the_file}
    plain = {**TINY, "algorithm": {"name": "flhc", "clustering": clustering}}
    parsed = parse_experiment(override(plain, [f"{PARTITION}.{each}" for each in typed]))
    partition = parsed.algorithm.build().clustering.partition
    assert (partition.threshold, partition.number) == expected
    kept = parsed.plain["algorithm"]["clustering"]["partition"]
    assert (kept["threshold"], kept["number"]) == expected
    assert parse_experiment(parsed.plain).plain == parsed.plain


def test_naming_both_at_once_is_refused():
    typed = [f"{PARTITION}.number=4", f"{PARTITION}.threshold=2.0"]
    plain = override({**TINY, "algorithm": "flhc"}, typed)
    with pytest.raises(ExperimentError, match="exactly one of threshold and number"):
        parse_experiment(plain).algorithm.build()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of threshold and number, got threshold None and number None"),
        ({"threshold": 1.0, "number": 2}, "exactly one .* got threshold 1.0 and number 2"),
        ({"threshold": -1.0}, "threshold must be >= 0 or null, got -1.0"),
        ({"threshold": np.nan}, "threshold must be a finite number, got nan"),
        ({"number": 0}, "number must be >= 1 or auto, got 0"),
        ({"number": -3}, "number must be >= 1 or auto, got -3"),
        ({"number": 2, "linkage": "wards"}, "linkage must be one of .*ward, got 'wards'"),
        ({"number": "auto", "choose_by": "elbow"}, "choose_by must be one of .* got 'elbow'"),
        ({"number": 2, "on": "rows"}, "on must be one of .* got 'rows'"),
    ],
)
def test_bad_fields_are_named_with_their_value(fields, message):
    given = {"name": "hierarchical", **fields}
    with pytest.raises(ExperimentError, match=message):
        bind_component("partition", {"hierarchical": Hierarchical}, given, "partition").build()


@pytest.mark.parametrize(("threshold", "distance"), [(0.3, 1 - 0.7), (0.8, 0.8)])
def test_a_merge_at_the_threshold_happens_whatever_the_last_digits(threshold, distance) -> None:
    """1 - 0.7 is above 0.3, and the mean of four distances of 0.8 may be above 0.8."""
    D = distance * (1 - np.eye(5))
    assert Hierarchical("average", threshold=threshold)(related(distance=D)).labels.max() == 0
    below = Hierarchical("average", threshold=threshold - 1e-9)
    assert below(related(distance=D)).labels.tolist() == [0, 1, 2, 3, 4]

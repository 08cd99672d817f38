import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cdist

from flray.clustering import checks, distances, gram, set_distances
from flray.clustering.distances import L1, L2, Cosine
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Pipeline
from flray.clustering.points import Points
from flray.clustering.set_distances import Matching, MinPair, Wasserstein
from flray.errors import ExperimentError

from scenarios import line_federation

OF_VECTORS = [(L1(), "cityblock"), (L2(), "euclidean"), (Cosine(), "cosine")]
OF_SETS = [MinPair(), Matching(), Wasserstein()]
EVERY = [d for d, _ in OF_VECTORS] + OF_SETS


def name(value):
    return value if isinstance(value, str) else type(value).__name__


def vectors(values):
    return Points.vectors(np.arange(10, 10 + len(values)), torch.as_tensor(values))


def ragged(rng, sizes=(2, 3, 1, 3, 2, 4)):
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return Points(np.arange(len(sizes)), torch.from_numpy(rng.normal(size=(len(owner), 3))), owner)


def reordered(points, order):
    """The same clients in another order."""
    rows = [np.flatnonzero(points.owner == c) for c in order]
    owner = np.repeat(np.arange(len(order)), [len(r) for r in rows])
    return Points(points.clients, points.values[np.concatenate(rows)], owner)


def exact(values, metric):
    """Distances in 80-bit arithmetic, from differences, so that nothing cancels."""
    x = np.asarray(values, np.longdouble)
    if metric == "cosine":
        x = x / np.sqrt((x * x).sum(1, keepdims=True))
    difference = x[:, None] - x[None]
    if metric == "cityblock":
        return np.abs(difference).sum(2)
    squared = (difference**2).sum(2)
    return squared / 2 if metric == "cosine" else np.sqrt(squared)


def assert_laws(D):
    assert D.dtype == np.float64
    assert np.array_equal(D, D.T)
    assert np.all(D.diagonal() == 0)
    assert np.all(D >= 0)


@pytest.mark.parametrize(
    ("distance", "kind"),
    [(d, "vectors") for d in EVERY] + [(d, "ragged sets") for d in OF_SETS],
    ids=name,
)
def test_distances_are_symmetric_zero_on_the_diagonal_and_follow_the_clients(distance, kind):
    rng = np.random.default_rng(0)
    points = vectors(rng.normal(size=(7, 40))) if kind == "vectors" else ragged(rng)
    D = distance(points)
    assert_laws(D)
    assert np.all(D[~np.eye(len(D), dtype=bool)] > 0)
    order = rng.permutation(len(D))
    assert not np.allclose(D, D[np.ix_(order, order)])
    np.testing.assert_allclose(distance(reordered(points, order)), D[np.ix_(order, order)], 1e-12)


@pytest.mark.parametrize("distance", EVERY, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_duplicates_are_at_exactly_zero(distance, dtype):
    values = np.random.default_rng(1).normal(0.1, size=(9, 1000))
    values[[3, 8]] = values[0]
    D = distance(vectors(torch.from_numpy(values).to(dtype)))
    assert D[0, 3] == D[0, 8] == D[3, 8] == 0
    assert np.sum(D == 0) == 9 + 6


@pytest.mark.parametrize("distance", OF_SETS, ids=name)
def test_a_set_in_another_order_is_a_duplicate(distance):
    values = np.random.default_rng(1).normal(size=(3, 5, 4))
    values[2] = values[0, [3, 1, 4, 0, 2]]
    D = distance(
        Points(np.arange(3), torch.from_numpy(values.reshape(15, 4)), np.repeat(range(3), 5))
    )
    assert D[0, 2] == 0
    assert D[0, 1] == pytest.approx(D[1, 2], rel=1e-12)
    assert D[0, 1] > 0


@pytest.mark.parametrize("distance", EVERY, ids=name)
def test_one_client_is_at_zero_from_itself(distance):
    assert distance(vectors(np.ones((1, 4)))).tolist() == [[0.0]]


@pytest.mark.parametrize(("distance", "metric"), OF_VECTORS, ids=name)
def test_distances_are_those_of_scipy(distance, metric):
    values = np.random.default_rng(2).normal(size=(30, 200))
    D = distance(vectors(values))
    np.testing.assert_allclose(D, cdist(values, values, metric), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("distance", "metric"), OF_VECTORS, ids=name)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("spread", [1e-6, 1e-2, 1.0])
def test_small_distances_survive_cancellation(distance, metric, offset, spread):
    """Three tight clusters, all far from the origin."""
    rng = np.random.default_rng(3)
    centre = offset + rng.normal(size=(3, 1, 50))
    values = (centre + spread * rng.normal(size=(3, 4, 50))).reshape(12, 50)
    expected = exact(values, metric)
    # What rounding the unit vectors to float64 leaves of an angle.
    atol = 1e-22 if metric == "cosine" else 0.0
    np.testing.assert_allclose(distance(vectors(values)), expected, rtol=1e-9, atol=atol)


def test_an_offset_common_to_all_clients_costs_no_second_pass(monkeypatch):
    recomputed = []
    by_difference = distances._by_difference

    def counted(values, norm, first, second):
        recomputed.append(len(first))
        return by_difference(values, norm, first, second)

    monkeypatch.setattr(distances, "_by_difference", counted)
    values = np.random.default_rng(4).normal(size=(10, 50))
    L2()(vectors(values + 1e6))
    L2()(vectors(np.concatenate([values, values[:1]])))
    L2()(vectors(np.concatenate([values, values[[0] * 20], values[1:2]])))
    assert recomputed == [0, 1, 2]


@pytest.mark.parametrize("distance", [L2(), Cosine()], ids=name)
def test_vectors_that_differ_in_one_element_are_not_equal(distance):
    values = np.random.default_rng(5).normal(size=(3, 2 * distances.FEW_ELEMENTS))[[0, 0, 0, 1, 2]]
    values[2, 1] += 1e-3  # an element that is not looked at first
    D = distance(vectors(values))
    assert D[0, 1] == 0
    assert D[0, 2] == D[1, 2] > 0


@pytest.mark.parametrize(("distance", "metric"), OF_VECTORS, ids=name)
@given(
    values=st.tuples(st.integers(1, 7), st.integers(1, 5)).flatmap(
        lambda shape: arrays(np.int64, shape, elements=st.integers(-3, 3))
    )
)
@settings(max_examples=60)
def test_distances_of_small_integers(distance, metric, values):
    """Full of duplicates, opposites, multiples and zeros; |x|_2² and x y are exact."""
    D = distance(vectors(values.astype(np.float32)))
    assert_laws(D)
    if metric != "cosine":
        np.testing.assert_allclose(D, cdist(values, values, metric), rtol=1e-12)
        return
    product, squared = values @ values.T, (values**2).sum(1)
    for i, j in np.ndindex(D.shape):
        if squared[i] == 0 or squared[j] == 0:
            assert D[i, j] == (squared[i] != squared[j])
        elif product[i, j] > 0 and product[i, j] ** 2 == squared[i] * squared[j]:
            assert D[i, j] == 0  # one direction
        else:
            cosine = product[i, j] / np.sqrt(squared[i] * squared[j])
            assert D[i, j] == pytest.approx(1 - cosine, rel=1e-12)
            assert D[i, j] <= 2


def test_cosine_sees_directions_only():
    x = np.random.default_rng(8).normal(size=(20, 1000))
    D = Cosine()(vectors(np.concatenate([x, 3 * x, x / 7, -x])))
    for i in range(20):
        assert D[i, i + 20] == D[i, i + 40] == D[i + 20, i + 40] == 0
        assert D[i, i + 60] == pytest.approx(2, rel=1e-12)
    assert D.max() == 2
    assert np.sum(D == 0) == 80 + 20 * 6


@pytest.mark.parametrize("distance", EVERY, ids=name)
def test_a_tiny_chunk_gives_what_the_whole_gives(distance, monkeypatch):
    rng = np.random.default_rng(5)
    of_sets = distance in OF_SETS
    points = ragged(rng, (2, 3) * 8) if of_sets else vectors(rng.normal(size=(16, 101)))
    points.values[-1] = points.values[0] + 1e-9  # this pair goes the exact way, where there is one
    whole = distance(points)
    lengths = []

    def counted(bytes_each):
        lengths.append(max(1, 400 // bytes_each))
        return lengths[-1]

    for module in (checks, distances, gram, set_distances):
        monkeypatch.setattr(module, "chunk_length", counted)
    monkeypatch.setattr(gram, "TILE_ROWS", 5)
    same = Points(points.clients, points.values, points.owner)  # which has computed nothing yet
    np.testing.assert_allclose(distance(same), whole, rtol=1e-12, atol=1e-24)
    assert len(lengths) > 1
    assert min(lengths) < 4


def test_the_number_of_cores_changes_no_bit(monkeypatch):
    values = torch.from_numpy(np.random.default_rng(7).normal(size=(600, 40)))
    found = {}
    for cores in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", cores)
        found[cores] = L2()(vectors(values))
    assert found["1"].tobytes() == found["2"].tobytes() == found["5"].tobytes()
    np.testing.assert_allclose(found["1"], cdist(values, values), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("distance", EVERY, ids=name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
def test_a_client_that_sent_nonsense_is_named(distance, bad):
    values = np.ones((4, 3))
    values[2, 1] = bad
    with pytest.raises(ValueError, match=r"client 12 .* in 1 of 3"):
        distance(vectors(values))


@pytest.mark.parametrize("distance", EVERY, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_numbers_have_finite_distances(distance, dtype):
    largest = min(checks.LARGEST, torch.finfo(dtype).max)
    values = torch.tensor([[largest, -1], [-largest, 1], [largest, 1]], dtype=dtype)
    D = distance(vectors(values))
    assert np.isfinite(D).all()
    assert D[0, 1] > 1


@pytest.mark.parametrize(("distance", "_"), OF_VECTORS, ids=name)
def test_vectors_are_asked_for_where_sets_came(distance, _):
    with pytest.raises(ValueError, match=f"{type(distance).__name__.lower()} needs one vector"):
        distance(ragged(np.random.default_rng(0)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("distance", EVERY, ids=name)
def test_distances_on_a_gpu_are_those_of_the_cpu(distance):
    values = torch.from_numpy(np.random.default_rng(7).normal(size=(40, 3000))).float()
    values[5] = values[9]
    on_gpu = distance(vectors(values.cuda()))
    assert_laws(on_gpu)
    assert on_gpu[5, 9] == 0
    np.testing.assert_allclose(on_gpu, distance(vectors(values)), rtol=1e-11)


class Table:
    """A distance stage that returns what it is given."""

    euclidean = False

    def __init__(self, values) -> None:
        self.values = np.array(values, dtype=np.float64)

    def __call__(self, points: Points) -> np.ndarray:
        return self.values


TRIANGLE = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
WRONG = {
    "of pairs": (TRIANGLE[:2], r"must be \(3, 3\), a row for each client, got the shape \(2, 3\)"),
    "condensed": ([1.0, 2.0, 3.0], r"got the shape \(3,\)"),
    "one way": (np.triu(TRIANGLE), "got 1.0 from client 10 to 20 and 0.0 back"),
    "NaN": (np.where(TRIANGLE == 3, np.nan, TRIANGLE), "got nan from client 20 to 30"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_distance_that_is_none_is_refused_by_its_name(values, message) -> None:
    partition = Hierarchical("average", number=2)
    points = Points.vectors(np.array([10, 20, 30]), torch.zeros(3, 1))
    fed = line_federation([(1, 0)] * 3, [1] * 3, [1] * 3, [[0.0, 0.0]], 0.1)
    with pytest.raises(ExperimentError, match=f"after round 2: distance Table .*{message}"):
        Pipeline(distance=Table(values), partition=partition).decide(points, fed, 2)
    rounded = TRIANGLE + np.triu(np.full((3, 3), 1e-9), 1)  # another order of summation
    found = Pipeline(distance=Table(rounded), partition=partition).decide(points, fed, 2)
    assert found.labels.tolist() == [0, 0, 1]


def test_rows_are_compared_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(checks, "ROWS_AT_ONCE", 2)
    points = Points.vectors(np.array([10, 20, 30]), torch.zeros(3, 1))
    checks.require_distances(TRIANGLE, points, points)
    with pytest.raises(ValueError, match=r"got 1.0 from client 10 to 20 and 0.0 back"):
        checks.require_distances(np.triu(TRIANGLE), points, points)

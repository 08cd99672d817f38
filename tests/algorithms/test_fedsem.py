"""FedSEM: two rounds by hand, its identities, what it finds, and who comes later."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from sklearn.cluster import KMeans

from flray.algorithms import fedsem
from flray.algorithms.fedsem import FedSem, FedSemState, coordinates, lloyd
from flray.client.tasks import Train
from flray.clustering.points import by_smallest_member
from flray.execution.federation import Federation
from flray.models.mixing import Aggregation
from flray.records.clusterings import read_clusterings

from scenarios import clusters_of_permuted_clients, fail_jobs, line_federation, with_members

X = np.array([(1, 0), (0, 1), (1, 0), (0, 1), (1, 0)])
Y, SIZES, LR = np.array([9, 0, 8, 1, 1]), np.array([1, 2, 3, 1, 2]), 0.25


def line() -> Federation:
    return line_federation(list(map(tuple, X)), Y.tolist(), SIZES.tolist(), [[4.0, 4.0]], LR)


def rounds(algorithm: FedSem, fed: Federation, number: int) -> list[FedSemState]:
    """The state before the first round and after each."""
    states = [algorithm.init(fed).state]
    for t in range(1, number + 1):
        now = replace(fed, t=t)
        states.append(algorithm.round(states[-1], algorithm.cohort(states[-1], t, now), now).state)
    return states


def models_of(state: FedSemState) -> np.ndarray:
    return state.bank.of_clients(np.arange(len(state.labels)))["w"].numpy()


def trained_by_hand(w: np.ndarray) -> np.ndarray:
    """One step of each client from its own row of w: the gradient of (w x - y)^2."""
    return w - LR * 2 * ((w * X).sum(1) - Y)[:, None] * X


def centres_of(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.array([points[labels == k].mean(0) for k in range(2)])


def nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return ((points[:, None] - centres) ** 2).sum(2).argmin(1)


def spread(points: np.ndarray, labels: np.ndarray) -> float:
    return ((points - centres_of(points, labels)[labels]) ** 2).sum()


def test_two_rounds_by_hand() -> None:
    """Round 1 has the best of all partitions in two, round 2 Lloyd's steps from its centres."""
    w = trained_by_hand(np.full((5, 2), 4.0))
    partitions = [np.array([0, *p]) for p in itertools.product((0, 1), repeat=4) if any(p)]
    labels = min(partitions, key=lambda p: spread(w, p))
    states = rounds(FedSem(number=2), line(), 2)
    for t in (1, 2):
        if t == 2:
            centres, w = centres_of(w, labels), trained_by_hand(mixed)  # noqa: F821  # of round 1
            for _ in range(10):
                labels = nearest(w, centres)
                centres = centres_of(w, labels)
        mixed = np.array(
            [np.average(w[labels == k], 0, SIZES[labels == k]) for k in labels]  # each client's
        )
        assert by_smallest_member(states[t].labels).tolist() == by_smallest_member(labels).tolist()
        np.testing.assert_allclose(models_of(states[t]), mixed, rtol=1e-12)
    assert len(set(labels)) == 2


def test_clients_that_were_not_heard_are_clustered_by_their_last_models() -> None:
    """Of two clients one is heard in a round; the other stands where it last was, or at w0."""
    fed = line_federation([(1, 0)] * 2, [9, 0], [1, 1], [[4.0, 0.0]], LR)
    fed = replace(fed, participation=0.5)
    first = rounds(FedSem(number=2), fed, 1)[-1]
    heard, other = first.models.clients[0], 1 - first.models.clients[0]
    assert first.labels[0] != first.labels[1]
    own = 4.0 - 2 * LR * (4.0 - [9, 0][heard])
    assert models_of(first)[heard, 0] == pytest.approx(own)
    assert models_of(first)[other, 0] == 4.0  # its cluster heard nobody
    centres = sorted(first.centres[:, 0].tolist())
    assert centres == pytest.approx(sorted([own, 4.0]))


def of_clusters(state: FedSemState) -> list[float]:
    """The first weight of the clusters that have members, in ascending order."""
    return sorted(set(models_of(state)[:, 0].tolist()))


def heard_in(fed: Federation, t: int) -> int:
    return int(FedSem().cohort(None, t, fed).clients[0])


@pytest.mark.parametrize(("mean_of", "unheard"), [("members", 0), ("heard", 0), ("heard", 1)])
def test_the_mean_of_a_cluster_by_hand(mean_of, unheard) -> None:
    """One cluster of two clients with targets 8 and 0 and three and one examples, one of whom is
    heard: a step from w goes to (w + target) / 2, and w0 is 4. The other one has w0 at first."""
    fed = line_federation([(1, 0)] * 2, [8, 0], [3, 1], [[4.0, 0.0]], LR)
    aggregation = Aggregation(unheard="stale" if unheard else "ignore")
    fed = replace(fed, participation=0.5, aggregation=aggregation)
    target, n, last, w = [8, 0], np.array([3, 1]), np.array([4.0, 4.0]), 4.0
    states = rounds(FedSem(number=1, mean_of=mean_of), fed, 4)
    for t in range(1, 5):
        i = heard_in(fed, t)
        last[i] = (w + target[i]) / 2
        before = w
        w = float(np.average(last, weights=n)) if mean_of == "members" else last[i]
        if unheard:
            w = float(np.average([last[i], before], weights=[n[i], n[1 - i]]))
        assert of_clusters(states[t]) == pytest.approx([w], rel=1e-12)
    assert {heard_in(fed, t) for t in range(1, 5)} == {0, 1}


def test_members_and_those_heard_are_the_same_where_everybody_is_heard(tiny_run) -> None:
    members, heard = (
        tiny_run(f"algorithm={{name: fedsem, number: 2, mean_of: {by}}}", "participation=1")
        for by in ("members", "heard")
    )
    assert members.summary["params_sha256"] == heard.summary["params_sha256"]


@pytest.mark.parametrize("unheard", ["ignore", "stale"])
def test_one_cluster_is_fedavg(tiny_run, known_run, unheard) -> None:
    aggregate = f"aggregate.unheard={unheard}"
    one = tiny_run("algorithm={name: fedsem, number: 1, mean_of: heard}", aggregate)
    fedavg = known_run(aggregate)
    for key in ("params_sha256", "bytes_up", "bytes_down", "client_steps", "clusters"):
        assert one.summary[key] == fedavg.summary[key]
    assert read_clusterings(one.path) == {}


@pytest.mark.parametrize("seed", range(6))
def test_later_rounds_of_kmeans_are_those_of_scikit_learn(seed) -> None:
    """From random centres, of which the last is nobody's nearest: it takes the farthest point."""
    rng = np.random.default_rng(seed)
    groups = rng.normal(size=(4, 30)) * 3
    points = groups[rng.integers(4, size=25)] + rng.normal(size=(25, 30))
    centres = np.concatenate([points[:3] + 0.1, np.full((1, 30), 50.0)])
    labels, found = lloyd(torch.from_numpy(points), torch.from_numpy(centres))
    kmeans = KMeans(4, init=centres, n_init=1, tol=0).fit(points)
    assert len(np.unique(labels)) == 4
    assert kmeans.n_iter_ > 1
    assert np.array_equal(labels, kmeans.labels_)
    np.testing.assert_allclose(found.numpy(), kmeans.cluster_centers_, atol=1e-12)


def test_fewer_models_than_clusters_are_fewer_clusters() -> None:
    """Two clients, of which equal ones have equal models, for five clusters."""
    fed = line_federation([(1, 0)] * 6, [9, 0] * 3, [1] * 6, [[4.0, 0.0]], LR)
    last = rounds(FedSem(number=5), fed, 3)[-1]
    assert by_smallest_member(last.labels).tolist() == [0, 1] * 3
    alone = line_federation([(1, 0)] * 2, [9, 0], [1, 1], [[4.0, 0.0]], LR)
    assert len(set(rounds(FedSem(number=5), alone, 3)[-1].labels)) == 2


def present(fed: Federation, members: list[list[int]]) -> list[FedSemState]:
    """The states after rounds in which only these clients are there."""
    algorithm = FedSem(number=3)
    states = [algorithm.init(fed).state]
    for t, clients in enumerate(members, start=1):
        now = with_members(fed, clients, t)
        outcome = algorithm.round(states[-1], algorithm.cohort(states[-1], t, now), now)
        states.append(outcome.state)
    return states[1:]


class TestFewerClientsThanClusters:
    """Targets 9, 5 and 0 for two clients each, which go to (w + target) / 2 from their model."""

    FED = line_federation([(1, 0)] * 6, [9, 5, 0] * 2, [1] * 6, [[4.0, 0.0]], LR)

    def test_clusters_of_clients_that_are_away_stay_where_they_are(self) -> None:
        first, alone, back = present(self.FED, [[*range(6)], [2, 5], [*range(6)]])
        away = [first.labels[i] for i in (0, 1)]
        assert len({*away, first.labels[2]}) == 3
        assert torch.equal(alone.centres[away], first.centres[away])
        assert torch.equal(alone.bank.params["w"][away], first.bank.params["w"][away])
        assert alone.labels.tolist() == back.labels.tolist() == first.labels.tolist()

    @pytest.mark.parametrize("first", [[0], [0, 1], [0, 3]])
    def test_clusters_that_nobody_had_are_made_once_there_are_clients_for_them(self, first) -> None:
        early, later = present(self.FED, [first, [*range(6)]])
        assert len(set(early.labels[first])) == len({i % 3 for i in first})
        assert len(set(later.labels)) == 3
        assert len(later.centres) == 3


def test_a_clustering_is_recorded_where_the_partition_changes(monkeypatch) -> None:
    fed, algorithm = line(), FedSem(number=2)
    states = rounds(algorithm, fed, 3)
    for t in (1, 2, 3):
        before = states[t - 1]
        outcome = algorithm.round(before, algorithm.cohort(before, t, fed), replace(fed, t=t))
        changed = not np.array_equal(states[t].labels, before.labels)
        assert len(outcome.clusterings) == changed
    assert not np.array_equal(states[1].labels, states[0].labels)
    monkeypatch.setattr(fedsem, "MOST_RECORDED", 4)
    assert algorithm.round(states[0], algorithm.cohort(states[0], 1, fed), fed).clusterings == ()


def test_the_last_layer_alone_may_be_compared(tiny_run) -> None:
    result = tiny_run("algorithm={name: fedsem, number: 2, space: last_layer}", "participation=1")
    whole = tiny_run("algorithm={name: fedsem, number: 2}", "participation=1")
    points = [read_clusterings(r.path)[1].points for r in (result, whole)]
    assert points[0].shape[1] == 16 * 10 + 10  # the last layer of mlp200 with 16 hidden units
    assert points[1].shape[1] > points[0].shape[1]


class TestHoldout:
    def test_they_are_placed_once_and_change_nothing(self) -> None:
        """Client 0 wants 9 as client 2 wants 8; it trains once from the model before round 1."""
        others = np.arange(1, 5)
        without = rounds(FedSem(number=3), with_members(line(), others.tolist()), 3)
        fed = with_members(line(), others.tolist(), holdout=[0])
        states = rounds(FedSem(number=3), fed, 3)
        assert [int(s.labels[0]) for s in states[:1]] == [-1]
        assert all(s.labels[0] == states[1].labels[2] for s in states[1:])
        for one, other in zip(states, without, strict=True):
            assert one.bank.digests(others) == other.bank.digests(others)
        assert fed.meter.counts["bytes_up_signature"] == 2 * 8  # one model of two float64

    def test_one_that_fails_is_asked_again(self, monkeypatch) -> None:
        failures = []

        def fails(task, _job) -> bool:
            is_first = isinstance(task, Train) and task.is_probe and task.t == 1
            failures.extend([task] * is_first)
            return is_first

        fail_jobs(monkeypatch, fails)
        fed = with_members(line(), range(1, 5), holdout=[0])
        states = rounds(FedSem(number=3), replace(fed, on_client_failure="drop"), 2)
        assert failures
        assert states[1].labels[0] == -1
        assert states[2].labels[0] == states[2].labels[2]


def test_nobody_there_changes_nothing() -> None:
    fed = line()
    state = rounds(FedSem(number=2), fed, 1)[-1]
    empty = with_members(fed, [], t=2)
    algorithm = FedSem(number=2)
    after = algorithm.round(state, algorithm.cohort(state, 2, empty), empty).state
    assert torch.equal(after.bank.params["w"], state.bank.params["w"])
    assert after.labels.tolist() == state.labels.tolist()


SWAPPED = [
    "dataset={name: digits, size: 8}",
    "split={name: label_swap, clients: 20, groups: 4}",
    "model=mlp200",
    "train={lr: 0.1, epochs: 3}",
    "participation=1",
    "algorithm={name: fedsem, number: 4}",
]


def test_it_finds_swapped_labels(tiny_run) -> None:
    """After 8 rounds seeds 0 to 3 all had ARI 1.0."""
    result = tiny_run(*SWAPPED, "rounds=6", "evaluate.every=6")
    assert result.summary["ari"] >= 0.95
    assert result.summary["clusters"] == 4


def test_permuted_clients_are_clustered_alike(tiny_run) -> None:
    common = [*SWAPPED, "rounds=3", "evaluate.every=3"]
    assert clusters_of_permuted_clients(tiny_run, *common) > 1


@pytest.mark.parametrize("num_moved", [0, 1, 12, 30])
def test_coordinates_keep_the_distances_of_points(num_moved) -> None:
    """30 models of 20 numbers, of which some moved: no more dimensions than these."""
    generator = torch.Generator().manual_seed(num_moved)
    points = torch.zeros(30, 20)
    points[torch.randperm(30, generator=generator)[:num_moved]] = torch.randn(
        num_moved, 20, generator=generator
    )
    found = coordinates(points)
    assert found.shape[1] == (num_moved if 0 < num_moved < 20 else 20)
    assert np.allclose(pdist(found), pdist(points.numpy()), rtol=0, atol=1e-6)


def test_the_first_clusters_are_those_of_k_means_on_whole_models() -> None:
    """Three groups of updates in 500 dimensions, seven clients that have not trained."""
    generator = torch.Generator().manual_seed(0)
    origin = torch.randn(1, 500, generator=generator)
    models = origin.repeat(40, 1)
    groups = 3 * torch.randn(3, 500, generator=generator)
    models[7:] += groups[torch.arange(33) % 3] + torch.randn(33, 500, generator=generator)
    labels, centres = FedSem(number=4)._first_clusters(models, origin, seed=5)
    expected = KMeans(4, n_init=FedSem().first_starts, random_state=5).fit(models.numpy())
    assert np.array_equal(labels, expected.labels_)
    assert np.allclose(centres.numpy(), expected.cluster_centers_, rtol=0, atol=1e-5)


@pytest.mark.parametrize("field", ["number", "first_starts"])
def test_bad_numbers(field) -> None:
    with pytest.raises(ValueError, match=f"{field} must be >= 1, got 0"):
        FedSem(**{field: 0})

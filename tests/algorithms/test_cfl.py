"""CFL: splits by hand, its identities, what it finds, and who comes later."""

from dataclasses import replace

import numpy as np
import pytest

from flray.algorithms.cfl import Cfl, CflState
from flray.client.tasks import Train
from flray.clustering.points import by_smallest_member
from flray.data.dataset import Ids
from flray.execution.federation import Federation
from flray.records.clusterings import read_clusterings

from scenarios import fail_jobs, line_federation, with_members

pytestmark = pytest.mark.slow

# Four groups on a line, which two levels of splits tell apart; their members and weights differ.
Y = np.array([0, 6, 3, 9, 0, 6, 3, 9])
SIZES = np.array([1, 2, 1, 2, 1, 3, 1, 2])
LR = 0.25
SPLITTING = Cfl(mean_norm=0.1, max_norm=0.5, rounds_before=1, min_members=2)


def line(participation: float = 1.0, order: Ids | None = None) -> Federation:
    order = np.arange(8) if order is None else order
    y, sizes = Y[order].tolist(), SIZES[order].tolist()
    fed = line_federation([(1, 0)] * 8, y, sizes, [[4.0, 0.0]], LR)
    return replace(fed, participation=participation)


def rounds(
    algorithm: Cfl, fed: Federation, number: int, state: CflState | None = None, first: int = 1
) -> list:
    """The outcomes of some rounds."""
    outcomes = [algorithm.init(fed)] if state is None else []
    for t in range(first, first + number):
        before = outcomes[-1].state if outcomes else state
        now = replace(fed, t=t)
        outcomes.append(algorithm.round(before, algorithm.cohort(before, t, now), now))
    return outcomes


def by_hand(number: int) -> list[tuple[list[int], np.ndarray]]:
    """(partition, w of each client) after each round: the step is Δ = -2 lr (w - y), a cluster is
    split by its sign where |mean Δ| < 0.1 and max |Δ| > 0.5, its model moves by its own mean Δ."""
    labels, w, found = np.zeros(8, int), np.full(8, 4.0), []
    for t in range(1, number + 1):
        delta = -2 * LR * (w - Y)
        for c in np.unique(labels):
            own = labels == c
            mean = np.average(delta[own], weights=SIZES[own])
            if t > 1 and abs(mean) < 0.1 and abs(delta[own]).max() > 0.5 and own.sum() >= 2:
                labels[own & (delta > 0)] = labels.max() + 1
        for c in np.unique(labels):
            own = labels == c
            w[own] += np.average(delta[own], weights=SIZES[own])
        found.append((by_smallest_member(labels).tolist(), w.copy()))
    return found


def test_nested_splits_by_hand() -> None:
    """All labels are those of client ids: a second split of a part does not touch the other."""
    expected = by_hand(12)
    assert [len(set(labels)) for labels, _ in expected][::11] == [1, 4]
    assert 2 in [len(set(labels)) for labels, _ in expected]  # two levels
    for (labels, w), outcome in zip(expected, rounds(SPLITTING, line(), 12)[1:], strict=True):
        state = outcome.state
        assert by_smallest_member(state.labels).tolist() == labels
        models = state.bank.of_clients(np.arange(8))["w"].numpy()
        np.testing.assert_allclose(models[:, 0], w, rtol=1e-12)
    assert by_smallest_member(state.labels).tolist() == by_smallest_member(Y).tolist()


def test_other_names_for_the_clients_rename_the_clusters_and_change_nothing_else() -> None:
    order = np.array([5, 0, 7, 2, 4, 1, 6, 3])  # client i is called order^-1(i)
    plain, renamed = (rounds(SPLITTING, line(order=each), 12)[-1].state for each in (None, order))
    assert (
        by_smallest_member(plain.labels[order]).tolist()
        == by_smallest_member(renamed.labels).tolist()
    )
    models = [s.bank.of_clients(np.arange(8))["w"].numpy() for s in (plain, renamed)]
    np.testing.assert_allclose(models[0][order], models[1], rtol=1e-12)


def test_each_split_is_a_clustering_of_that_clusters_clients() -> None:
    outcomes = rounds(SPLITTING, line(), 12)
    found = [each for outcome in outcomes for each in outcome.clusterings]
    assert len(found) == 3
    assert found[0].clients.tolist() == list(range(8))
    assert sorted(each.clients.tolist() for each in found[1:]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for each in found:
        assert each.distance.shape == (len(each.clients),) * 2
        assert each.partition.linkage is not None
        assert len(np.unique(each.labels)) == 2


@pytest.mark.parametrize(
    "held", [{"rounds_before": 12}, {"mean_norm": 0.0}, {"max_norm": 99.0}, {"min_members": 9}]
)
def test_every_condition_can_keep_a_cluster_together(held) -> None:
    last = rounds(replace(SPLITTING, **held), line(), 12)[-1].state
    assert last.labels.tolist() == [0] * 8
    assert last.forks == ()


class TestWhoWasNotThere:
    """Client 7 (y = 9) and client 2 (y = 3) come down the tree of splits, two levels."""

    def split_without(self, *clients: int) -> CflState:
        fed = with_members(line(), np.setdiff1d(np.arange(8), clients).tolist())
        return rounds(SPLITTING, fed, 12)[-1].state

    def test_holdout_clients_are_placed_and_change_nothing(self) -> None:
        there = np.array([0, 1, 3, 4, 5, 6])
        fed = with_members(line(), there.tolist(), holdout=[2, 7])
        with_them = rounds(SPLITTING, fed, 12)[-1].state
        without = self.split_without(2, 7)
        assert without.labels[[2, 7]].tolist() == [-1, -1]
        assert with_them.labels[[2, 7]].tolist() == with_them.labels[[6, 3]].tolist()
        assert with_them.bank.digests(there) == without.bank.digests(there)
        assert with_them.bank.owner[2] == with_them.bank.owner[6]

    def test_newcomers_are_placed_and_train_from_the_next_round(self) -> None:
        state = self.split_without(2, 7)
        fed = line()
        assert SPLITTING.cohort(state, 13, fed).clients.tolist() == [0, 1, 3, 4, 5, 6]
        joined = rounds(SPLITTING, fed, 1, state, first=13)[-1].state
        assert joined.labels[[2, 7]].tolist() == joined.labels[[6, 3]].tolist()
        assert SPLITTING.cohort(joined, 14, fed).clients.tolist() == list(range(8))

    def test_one_that_fails_on_its_way_is_asked_again(self, monkeypatch) -> None:
        state = self.split_without(7)
        fed = replace(line(), on_client_failure="drop")
        with monkeypatch.context() as patch:
            fail_jobs(patch, lambda task, _: isinstance(task, Train) and task.is_probe)
            failed = rounds(SPLITTING, fed, 1, state, first=13)[-1].state
        assert failed.labels[7] == -1
        assert failed.bank.digests(np.array([7])) == state.bank.digests(np.array([7]))
        again = rounds(SPLITTING, fed, 1, failed, first=14)[-1].state
        assert again.labels[7] == again.labels[3]


def test_with_sampling_last_updates_decide_and_everybody_is_placed() -> None:
    """Half of each cluster is heard in a round; who never was is placed when its cluster splits."""
    eager = replace(SPLITTING, mean_norm=1.0)
    outcomes = rounds(eager, line(participation=0.5), 20)
    first = next(k for k, outcome in enumerate(outcomes) if outcome.clusterings)
    seen = outcomes[first].state.updates.clients
    assert outcomes[first].clusterings[0].clients.tolist() == seen.tolist()
    last = outcomes[-1].state
    assert (last.labels >= 0).all()
    pairs = np.equal.outer(last.labels, last.labels)
    assert not pairs[np.ix_(Y < 5, Y > 5)].any()  # halves are never mixed


def test_with_everybody_heard_no_update_is_kept() -> None:
    assert len(rounds(SPLITTING, line(), 3)[-1].state.updates.clients) == 0


NEVER = ["algorithm=cfl", "algorithm.rounds_before=0", "algorithm.mean_norm=0"]


@pytest.mark.parametrize("unheard", ["ignore", "stale"])
def test_a_cluster_that_is_never_split_is_fedavg(tiny_run, known_run, unheard) -> None:
    aggregate = f"aggregate.unheard={unheard}"
    cfl, fedavg = tiny_run(*NEVER, aggregate), known_run(aggregate)
    for key in ("params_sha256", "bytes_up", "bytes_down", "client_steps"):
        assert cfl.summary[key] == fedavg.summary[key]


SWAPPED = [
    "dataset=digits",
    "split={name: label_swap, clients: 20, groups: 4}",
    "model=mlp200",
    "train={lr: 0.1, epochs: 3}",
    "participation=1",
    # The paper's 0.4 and 1.6 belong to its own model and training: here no update is above 1.6 in
    # any round. Of seeds 0 to 4, 0 to 3 found the groups (ARI 1.0); in 4 one group was split once
    # more (0.90).
    "algorithm={name: cfl, rounds_before: 5, mean_norm: 0.5, max_norm: 1.0}",
]


def test_it_finds_swapped_labels_in_two_levels(tiny_run) -> None:
    result = tiny_run(*SWAPPED, "rounds=8", "evaluate.every=8")
    assert result.summary["ari"] >= 0.95
    assert result.summary["clusters"] == 4
    found = read_clusterings(result.path)
    assert len(found[6].clients) == 20
    assert len(found[7].clients) == 10


@pytest.mark.parametrize(
    ("field", "value"), [("mean_norm", -1.0), ("rounds_before", -1), ("min_members", 1)]
)
def test_bad_fields(field, value) -> None:
    with pytest.raises(ValueError, match=f"{field} must be >= "):
        Cfl(**{field: value})

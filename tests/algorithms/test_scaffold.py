"""SCAFFOLD: control variates."""

import numpy as np
import pytest
import torch

from flray.algorithms import scaffold
from flray.algorithms.fedavg import FedAvg
from flray.algorithms.scaffold import Scaffold, ScaffoldState
from flray.data.dataset import Ids
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import Params
from flray.models.mixing import Aggregation

from linear import START, gradient, linear_federation, optimum, run_rounds, vector
from scenarios import sha, state_of, with_members

# All examples of a client are equal, so its batches are too, in any order: 1 and 3 steps an epoch.
CLIENTS = [[(1, 2)] * 2, [(2, 1)] * 6]


def flat(params: Params) -> np.ndarray:
    """(2,) slope and offset, or (K, 2) of K clients."""
    slope, offset = params["slope.weight"], params["offset.weight"]
    return torch.stack([slope, offset], dim=-1).numpy().reshape(-1, 2).squeeze()


def by_hand(cohorts: list[list[int]], p: list[float], momentum: float, present=None):
    """x, c and c_i after rounds with these cohorts, Algorithm 1 line by line in numpy.

    present: the clients of each round; by default both.
    """
    lr, tau = 0.1, [2, 6]
    x, c, c_i = START, np.zeros(2), np.zeros((2, 2))
    for cohort, members in zip(cohorts, present or [[0, 1]] * len(cohorts), strict=True):
        if present:
            c = c_i[members].mean(0)
        trained, after = {}, c_i.copy()
        for i in cohort:
            y, velocity, way = x, np.zeros(2), 0.0
            for step in range(1, tau[i] + 1):
                velocity = momentum * velocity + gradient(y, CLIENTS[i]) - c_i[i] + c
                y = y - lr * velocity
                way += lr * sum(momentum**s for s in range(step))
            trained[i] = y
            after[i] = c_i[i] - c + (x - y) / way
        total = sum(p[i] for i in cohort)
        x = sum(p[i] / total * trained[i] for i in cohort)
        c = c + (after - c_i).sum(0) / len(members)
        c_i = after
    return x, c, c_i


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("weights", "p"), [("samples", [0.25, 0.75]), ("uniform", [0.5, 0.5])])
def test_two_rounds_by_hand(momentum, weights, p) -> None:
    training = Training(lr=0.1, momentum=momentum, epochs=2, batch_size=2)
    fed = linear_federation(CLIENTS, training, Aggregation(weights=weights))
    state = run_rounds(Scaffold(), fed, 2)[-1]
    x, c, c_i = by_hand([[0, 1], [0, 1]], p, momentum)
    np.testing.assert_allclose(vector(state.bank), x, rtol=1e-12)
    np.testing.assert_allclose(flat(state.c), c, rtol=1e-11)
    np.testing.assert_allclose(flat(state.c_i.of_clients(fed.clients)), c_i, rtol=1e-11)
    fedavg = run_rounds(FedAvg(), fed, 2)[-1]
    assert np.abs(vector(fedavg.bank) - x).max() > 1e-3


def test_a_part_of_the_clients_moves_the_servers_control_variate_by_its_share() -> None:
    """1/N and not 1/|S|: client 0 alone, then client 1 alone."""
    fed = linear_federation(CLIENTS, Training(lr=0.1, epochs=2, batch_size=2))
    state = Scaffold().init(fed).state
    for t, i in ((1, 0), (2, 1), (3, 0)):
        state = Scaffold().round(state, Cohort(t, np.array([i])), fed).state
    x, c, c_i = by_hand([[0], [1], [0]], [1, 1], 0.0)
    np.testing.assert_allclose(vector(state.bank), x, rtol=1e-12)
    np.testing.assert_allclose(flat(state.c), c, rtol=1e-11)
    np.testing.assert_allclose(flat(state.c_i.of_clients(fed.clients)), c_i, rtol=1e-11)


def rounds_among(fed: Federation, state: ScaffoldState, present: list[list[int]]) -> ScaffoldState:
    """The state after a round for each of the lists of clients that are there in it."""
    for t, members in enumerate(present, start=1):
        now = with_members(fed, members, t)
        state = Scaffold().round(state, Scaffold().cohort(state, t, now), now).state
    return state


PRESENT = {
    "leave": [[0, 1], [0, 1], [1]],
    "leave and join again": [[0, 1], [1], [1], [0, 1]],
    "join": [[0], [0, 1], [0, 1]],
    "take turns": [[0], [1], [0]],
}


@pytest.mark.parametrize("present", PRESENT.values(), ids=PRESENT.keys())
def test_the_servers_control_variate_is_the_mean_over_those_present(present) -> None:
    fed = linear_federation(CLIENTS, Training(lr=0.1, epochs=2, batch_size=2))
    first = with_members(fed, present[0])
    state = rounds_among(fed, Scaffold().init(first).state, present)
    x, c, c_i = by_hand(present, [0.25, 0.75], 0.0, present)
    np.testing.assert_allclose(vector(state.bank), x, rtol=1e-12)
    np.testing.assert_allclose(flat(state.c), c, rtol=1e-11)
    np.testing.assert_allclose(flat(state.c_i.of_clients(fed.clients)), c_i, rtol=1e-11)


def test_the_mean_does_not_depend_on_how_many_rows_are_copied_at_a_time(monkeypatch) -> None:
    fed = linear_federation([[(1, 2)], [(2, 1)], [(3, 1)]], Training(lr=0.1))
    present = [[0, 1, 2], [0, 2]]
    whole = rounds_among(fed, Scaffold().init(fed).state, present)
    monkeypatch.setattr(scaffold, "ROWS_AT_ONCE", 1)
    parts = rounds_among(fed, Scaffold().init(fed).state, present)
    np.testing.assert_allclose(flat(parts.c), flat(whole.c), rtol=1e-12)


@pytest.mark.long
def test_it_reaches_the_optimum_of_those_present() -> None:
    """Client 1 alone has the line through (1, 1) and (3, 2): slope 1/2, offset 1/2."""
    clients = [[(0, 0), (1, 3)], [(1, 1), (3, 2)]]
    fed = linear_federation(clients, Training(lr=0.2, epochs=5, batch_size=2))
    joint = rounds_among(fed, Scaffold().init(fed).state, [[0, 1]] * 40)
    alone = rounds_among(fed, joint, [[1]] * 40)
    again = rounds_among(fed, alone, [[0, 1]] * 40)
    np.testing.assert_allclose(vector(alone.bank), [0.5, 0.5], atol=1e-3)
    for state in (joint, again):
        np.testing.assert_allclose(vector(state.bank), optimum(clients), atol=1e-3)


@pytest.mark.slow
def test_it_reaches_the_joint_optimum_where_fedavg_stops_short() -> None:
    """Two clients with other optima and other curvature, five steps on all their data a round."""
    clients = [[(0, 0), (1, 3)], [(1, 1), (3, 2)]]
    fed = linear_federation(clients, Training(lr=0.2, epochs=5, batch_size=2))
    own, fedavg = (
        [vector(state.bank) for state in run_rounds(method, fed, 50)]
        for method in (Scaffold(), FedAvg())
    )
    best = optimum(clients)
    np.testing.assert_allclose(own[-1], best, atol=1e-8)
    np.testing.assert_allclose(fedavg[-1], fedavg[-10], atol=1e-4)  # it has stopped
    assert np.abs(fedavg[-1] - best).max() > 0.1


def test_the_first_round_is_that_of_fedavg(tiny_run, known_run) -> None:
    """c and c_i are zero; later they are not."""
    assert sha(tiny_run("algorithm=scaffold", "rounds=1")) == sha(known_run("rounds=1"))
    assert sha(tiny_run("algorithm=scaffold", "rounds=2")) != sha(known_run("rounds=2"))


def assert_is_mean(state: ScaffoldState, clients: Ids) -> None:
    """c is the mean of c_i over the clients that may train, and not zero."""
    rows = state.c_i.of_clients(clients)
    for name, leaf in state.c.items():
        np.testing.assert_allclose(leaf, rows[name].mean(0), rtol=1e-9, atol=1e-15)
    assert max(float(leaf.abs().max()) for leaf in state.c.values()) > 1e-3


def test_the_servers_control_variate_is_the_mean_over_all_clients(tiny_run) -> None:
    """As in public code that takes Δc after c_i was overwritten, c would stay zero."""
    common = ["algorithm=scaffold", "execution.precision=float64"]
    state = state_of(tiny_run(*common))
    assert_is_mean(state, np.arange(6))
    with_holdout = state_of(tiny_run(*common, "split.holdout=2", "participation=1"))
    (heard,) = (with_holdout.c_i.clients,)
    assert len(heard) == 4
    assert_is_mean(with_holdout, heard)
    events = "events=[{round: 2, kind: leave, clients: [0]}, {round: 2, kind: join, clients: [5]}]"
    assert_is_mean(state_of(tiny_run(*common, events, "rounds=3")), np.arange(1, 6))


def test_a_dropped_client_keeps_its_control_variate(tiny_run, fails_in_training) -> None:
    common = ["algorithm=scaffold", "participation=1", "on_client_failure=drop"]
    common += ["execution.precision=float64"]
    once = state_of(tiny_run(*common, "rounds=1"))
    fails_in_training(3, t=2)
    result = tiny_run(*common, "rounds=2")
    assert result.summary["clients_dropped"] == 1
    twice = state_of(result)
    for i, is_kept in ((3, True), (4, False)):
        before, after = (state.c_i.of_clients(np.array([i])) for state in (once, twice))
        assert [torch.equal(before[name], after[name]) for name in before] == [is_kept] * 4
    assert_is_mean(twice, np.arange(6))


def test_a_client_without_steps_keeps_its_control_variate() -> None:
    fed = linear_federation([*CLIENTS, []], Training(lr=0.1, epochs=2, batch_size=2))
    state = run_rounds(Scaffold(), fed, 2)[-1]
    assert state.c_i.clients.tolist() == [0, 1]
    assert all(bool(leaf.isfinite().all()) for leaf in state.c.values())


def test_twice_a_model_travels_each_way(tiny_run, known_run) -> None:
    own, fedavg = tiny_run("algorithm=scaffold").summary, known_run().summary
    assert own["bytes_up"] == 2 * fedavg["bytes_up"]
    assert own["bytes_down"] == 2 * fedavg["bytes_down"]


def test_statistics_have_no_control_variate() -> None:
    fed = linear_federation(CLIENTS, Training(), buffers=frozenset(["offset.weight"]))
    assert list(Scaffold().init(fed).state.c) == ["slope.weight"]


@pytest.mark.parametrize("optimizer", ["adam", "module"])
def test_other_optimisers_are_refused(tiny_run, optimizer) -> None:
    with pytest.raises(ExperimentError, match=rf"scaffold .*train\.optimizer={optimizer}"):
        tiny_run("algorithm=scaffold", f"train={{optimizer: {optimizer}}}")

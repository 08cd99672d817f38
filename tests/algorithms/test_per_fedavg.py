"""Per-FedAvg: steps of two batches."""

import numpy as np
import pytest

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.per_fedavg import PerFedAvg
from flray.engines.plan import plan_clients
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.models.mixing import Aggregation

from linear import START, gradient, linear_federation, run_rounds, vector
from scenarios import tiny_federation

CLIENTS = [[(1, 2), (3, 0)], [(2, 1), (0, 4), (1, 1), (2, 5)]]
TRAINING = Training(lr=0.05, epochs=2, batch_size=1)


def pairs_of(client: int, t: int) -> list[list[tuple[int, int]]]:
    """The two examples of each step, in the order that the client's plan has for the round."""
    ids = np.arange(len(CLIENTS[client]))
    (plan,) = plan_clients([ids], TRAINING.paired(), 0, t, np.array([client]))
    return [[CLIENTS[client][place] for place in step] for step in plan.ids[:, :, 0]]


def hessian(own: tuple[int, int]) -> np.ndarray:
    """Of half the squared error, which does not depend on the model: [[x², x], [x, 1]]."""
    return np.outer([own[0], 1], [own[0], 1]).astype(float)


def by_hand(alpha: float, momentum: float, is_second_order: bool) -> np.ndarray:
    w = START
    for t in (1, 2):
        trained = []
        for i in range(2):
            own, velocity = w, np.zeros(2)
            for first, second in pairs_of(i, t):
                inner = own - alpha * gradient(own, [first])
                direction = gradient(inner, [second])
                if is_second_order:
                    direction = direction - alpha * hessian(first) @ direction
                velocity = momentum * velocity + direction
                own = own - 0.05 * velocity
            trained.append(own)
        w = (2 * trained[0] + 4 * trained[1]) / 6
    return w


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_two_rounds_by_hand(order, momentum) -> None:
    """Only outer steps have momentum."""
    training = Training(lr=0.05, epochs=2, batch_size=1, momentum=momentum)
    fed = linear_federation(CLIENTS, training)
    found = run_rounds(PerFedAvg(alpha=0.1, order=order), fed, 2)[-1]
    expected, other = (by_hand(0.1, momentum, order == o) for o in ("hessian_free", "first"))
    np.testing.assert_allclose(vector(found.bank), expected, rtol=1e-9)
    assert np.abs(expected - other).max() > 1e-3
    assert fed.meter.counts["client_steps"] == 2 * 2 * (1 + 2)  # rounds, epochs, pairs


class OnSecond(PerFedAvg):
    """FedAvg that trains on the second batch of each step."""

    def gradient(self, grad, w, batch, w0, memo):
        return grad(w, batch.second)


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_zero_alpha_is_fedavg_on_the_second_batches(order) -> None:
    fed = tiny_federation()
    zero, second, some, fedavg = (
        run_rounds(method, fed, 2)[-1].bank.sha256()
        for method in (PerFedAvg(alpha=0.0, order=order), OnSecond(), PerFedAvg(), FedAvg())
    )
    assert zero == second
    assert len({zero, some, fedavg}) == 3


@pytest.mark.parametrize("aggregation", [Aggregation(), Aggregation(weights="uniform")])
def test_a_client_with_one_example_is_left_out_and_counted(aggregation) -> None:
    three = linear_federation([*CLIENTS, [(1, 1)]], TRAINING, aggregation)
    two = linear_federation(CLIENTS, TRAINING, aggregation)
    with_it, without = (vector(run_rounds(PerFedAvg(), fed, 2)[-1].bank) for fed in (three, two))
    np.testing.assert_array_equal(with_it, without)
    assert three.meter.counts["clients_skipped"] == 2  # once a round
    assert two.meter.counts["clients_skipped"] == 0


def test_skipped_clients_are_a_column_of_rounds(tiny_run) -> None:
    result = tiny_run(
        "algorithm=per_fedavg",
        "split={name: iid, clients: 5, samples_per_client: 1}",
        "participation=1",
        "rounds=2",
    )
    assert result.rounds["clients_skipped"].tolist() == [5, 5]
    assert "clients_skipped" not in result.summary
    assert result.summary["bytes_up"] == 0
    assert len(set(result.rounds["accuracy_mean"])) == 1  # the model stays


@pytest.mark.parametrize(("key", "value"), [("alpha", -0.1), ("delta", 0.0)])
def test_steps_that_make_no_sense_are_refused(tiny_run, key, value) -> None:
    with pytest.raises(ExperimentError, match=rf"{key} must be >=? 0, got {value}"):
        tiny_run(f"algorithm={{name: per_fedavg, {key}: {value}}}")


def test_a_dropped_client_is_left_out(tiny_run, fails_in_training) -> None:
    common = ["algorithm=per_fedavg", "participation=1", "rounds=2"]
    whole = tiny_run(*common).summary
    fails_in_training(3, t=2)
    result = tiny_run(*common, "on_client_failure=drop").summary
    assert result["clients_dropped"] == 1
    assert result["params_sha256"] != whole["params_sha256"]

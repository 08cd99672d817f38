"""Soft clusters: FedEM, FedRC and FedSoft."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from sklearn.metrics import adjusted_rand_score

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedem import FedEm, responsibilities
from flray.algorithms.fedprox import FedProx
from flray.algorithms.fedrc import FedRc, label_shares
from flray.algorithms.fedsoft import FedSoft
from flray.algorithms.local import Local
from flray.client.tasks import ExampleLosses, Train
from flray.data.dataset import Dataset, Normalization
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.execution.federation import Federation
from flray.models.bank import MixtureBank, build_seeded, params_of
from flray.models.mixing import Aggregation
from flray.models.mlp200 import Mlp200

from linear import START, gradient, linear_federation, run_rounds, vector
from scenarios import (
    fail_jobs,
    federation_over,
    host_over,
    ragged_split,
    sha,
    some_long,
    state_of,
)

# Two lines, y = 2 x and y = 9 - x; the last client has examples of both.
CLIENTS = [
    [(0, 0), (1, 2), (2, 4), (3, 6)],
    [(1, 8), (2, 7), (3, 6)],
    [(0, 0), (4, 8), (1, 8), (2, 7), (4, 5)],
]
STARTS = [START, np.array([-0.5, 7.0]), np.array([0.1, 0.2])]


def federation(epochs: int = 1, lr: float = 0.02, **keywords):
    def draw(n: int) -> dict[str, torch.Tensor]:
        slope, offset = torch.from_numpy(STARTS[n]).reshape(2, 1, 1)
        return {"slope.weight": slope, "offset.weight": offset}

    training = Training(lr=lr, epochs=epochs, batch_size=10)
    return linear_federation(CLIENTS, training, draw=draw, **keywords)


def log_likelihoods(bank, own) -> np.ndarray:
    """(n, K) minus half the squared errors of all models of the bank."""
    x, y = np.array(own, dtype=float).T
    slope, offset = (bank.params[f"{n}.weight"].numpy().reshape(-1) for n in ("slope", "offset"))
    return -0.5 * (slope * x[:, None] + offset - y[:, None]) ** 2


def log_likelihood(state) -> float:
    shares = np.where(state.shares.any(1, keepdims=True), state.shares, 1 / 2)
    return sum(
        float(np.log((pi * np.exp(log_likelihoods(state.bank, own))).sum(1)).sum())
        for pi, own in zip(shares, CLIENTS, strict=True)
    )


@pytest.mark.parametrize("name", ["fedem", "fedrc"])
def test_one_component_is_fedavg(tiny_run, known_run, name) -> None:
    one = tiny_run(f"algorithm={{name: {name}, number: 1}}")
    assert sha(one) == sha(known_run())
    assert one.summary["bytes_up"] == known_run().summary["bytes_up"]
    assert one.rounds["train_loss"].equals(known_run().rounds["train_loss"])


def test_fedrc_with_constant_label_shares_is_fedem(tiny_run) -> None:
    fedem = sha(tiny_run("algorithm=fedem"))
    assert sha(tiny_run("algorithm={name: fedrc, label_prior: false}")) == fedem
    assert sha(tiny_run("algorithm=fedrc")) != fedem


def test_the_likelihood_of_fedem_never_falls() -> None:
    """One step on all data moves each component along the gradient of EM's lower bound."""
    states = run_rounds(FedEm(number=2), federation(lr=0.1), 30)
    values = [log_likelihood(state) for state in states]
    assert (np.diff(values) >= -1e-9).all()
    assert values[-1] > values[0] + 10
    assert states[-1].shares[:2].max(1).min() > 0.95  # pure clients
    assert 0.1 < states[-1].shares[2, 0] < 0.9  # the mixed one


def test_a_round_of_fedem_by_hand() -> None:
    fed = federation()
    before, after = run_rounds(FedEm(number=2), fed, 1)
    q = [responsibilities(np.full(2, 0.5), log_likelihoods(before.bank, own)) for own in CLIENTS]
    np.testing.assert_allclose(after.shares, [own.mean(0) for own in q])
    num = sum(map(len, CLIENTS))
    for k in range(2):
        g = np.zeros(2)
        for own, q_i in zip(CLIENTS, q, strict=True):
            for (x, y), weight in zip(own, q_i[:, k], strict=True):
                g += weight * gradient(STARTS[k], [(x, y)]) / num
        row = replace(after.bank, owner=np.full(3, k))
        np.testing.assert_allclose(vector(row), STARTS[k] - 0.02 * g)


def test_responsibilities() -> None:
    prior = np.array([0.2, 0.8])
    equal = responsibilities(prior, np.full((3, 2), -7.0))
    np.testing.assert_allclose(equal, np.tile(prior, (3, 1)))  # equal models: q = π
    never = responsibilities(np.array([0.0, 1.0]), np.array([[0.0, -50.0]]))
    assert never.tolist() == [[0.0, 1.0]]  # 0 is absorbing
    assert responsibilities(prior, np.empty((0, 2))).shape == (0, 2)


def test_newcomers_of_fedem_find_their_weights_and_change_nothing() -> None:
    fed = federation()
    state = run_rounds(FedEm(number=2), fed, 20)[-1]
    unknown = replace(state, shares=state.shares * np.array([[1.0], [0.0], [1.0]]))
    bank = FedEm(number=2).deploy(unknown, np.arange(3), fed)
    assert isinstance(bank, MixtureBank)
    assert bank.owner.tolist() == state.shares.argmax(1).tolist()
    np.testing.assert_allclose(bank.shares.sum(1), 1)
    assert FedEm(number=2).partition(unknown).tolist()[1] == -1
    assert bank.params is state.bank.params


def test_label_shares_of_fedrc_sum_to_one_and_divide_the_likelihood() -> None:
    fed = federation()
    method = FedRc(number=2)
    _, first, second = run_rounds(method, fed, 2)
    shares = label_shares(first.label_sums)
    np.testing.assert_allclose(shares.sum(0), 1)
    q = responsibilities(
        first.shares[0],
        log_likelihoods(first.bank, CLIENTS[0])
        - np.log(np.maximum(shares, 1e-8)[[y for _, y in CLIENTS[0]]]),
    )
    np.testing.assert_allclose(second.shares[0], q.mean(0))
    counts = np.zeros(shares.shape[0])
    np.add.at(counts, [y for _, y in CLIENTS[0]], 1)
    np.testing.assert_allclose(first.label_sums[0].sum(1), counts)  # what the server learns


def crossed_federation() -> tuple[Federation, np.ndarray]:
    """16 clients with classes 0-4 or 5-9, half of each of which label class c as c + 5 mod 10.

    Returns the federation and whether each client labels so.
    """
    rng, num, per = np.random.default_rng(0), 16, 40
    centres = rng.normal(size=(10, 16))
    swapped, upper = np.arange(num) % 2, (np.arange(num) // 2) % 2
    classes = np.concatenate([rng.integers(0, 5, per) + 5 * upper[i] for i in range(num)])
    x = centres[classes] + 0.5 * rng.normal(size=(num * per, 16))
    images = np.clip(128 + 32 * x, 0, 255).astype(np.uint8).reshape(-1, 1, 4, 4)
    labels = (classes + 5 * np.repeat(swapped, per)) % 10
    split, scale = ragged_split([per] * num, labels), Normalization((0.5,), (0.125,))
    dataset = Dataset("crossed", images, labels, len(labels), 10, scale)

    def draw(n: int) -> LightningModule:
        return build_seeded(lambda: Mlp200((1, 4, 4), 10, hidden=32), n)

    host = host_over(draw(0), dataset, split, "vectorized")
    fed = federation_over(host, Training(lr=0.3), draw=lambda n: params_of(draw(n)))
    return fed, swapped


def test_fedrc_tells_concepts_from_labels_where_fedem_does_not() -> None:
    fed, swapped = crossed_federation()
    fedrc, fedem = (
        adjusted_rand_score(swapped, method.partition(run_rounds(method, fed, 22)[-1]))
        for method in (FedRc(number=2), FedEm(number=2))
    )
    assert fedrc == 1
    assert fedem < 0.3


def test_fedsoft_without_pull_is_local(tiny_run) -> None:
    everybody = "participation=1"
    local = sha(tiny_run("algorithm=local", everybody))
    assert sha(tiny_run("algorithm={name: fedsoft, lam: 0}", everybody)) == local
    assert sha(tiny_run("algorithm={name: fedsoft, lam: 1}", everybody)) != local


def test_the_first_round_of_fedsoft_with_one_centre_is_fedproxs(tiny_run) -> None:
    """Later rounds start from clients' own models. The holdout client uses the centre."""
    common = ["split.holdout=1", "participation=1", "rounds=1"]
    fedsoft = tiny_run("algorithm={name: fedsoft, number: 1, lam: 0.5}", *common)
    fedprox = tiny_run("algorithm={name: fedprox, mu: 0.5}", *common)
    assert fedsoft.summary["holdout_loss_mean"] == fedprox.summary["holdout_loss_mean"]


def test_a_step_of_fedsoft_is_fedproxs_from_the_mean_of_centres() -> None:
    fed, method = federation(epochs=3), FedSoft(number=2, lam=0.7)
    before, after = run_rounds(method, fed, 1)
    u = before.shares
    centres = np.stack(STARTS[:2])
    np.testing.assert_allclose(u.sum(1), 1)
    for i, own in enumerate(CLIENTS):
        best = np.argmax(log_likelihoods(before.bank, own), axis=1)
        shares = np.maximum(np.bincount(best, minlength=2) / len(own), 1e-4)
        np.testing.assert_allclose(u[i], shares / shares.sum())
        w = START
        for _ in range(3):
            pull = sum(u[i, k] * (w - centres[k]) for k in range(2))
            w = w - 0.02 * (gradient(w, own) + 0.7 * pull)
        np.testing.assert_allclose(vector(method.deploy(after, np.arange(3), fed), i), w)
    w_i = np.stack([vector(method.deploy(after, np.arange(3), fed), i) for i in range(3)])
    for k in range(2):  # everybody takes part: θ_k = Σ_i v_ik w_i
        v = u[:, k] * [len(own) for own in CLIENTS]
        row = replace(after.bank, owner=np.full(3, k))
        np.testing.assert_allclose(vector(row), v @ w_i / v.sum())
    one = {"w": torch.tensor([3.0])}
    soft = FedSoft(lam=0.7).gradient(lambda w, _: w, one, None, one, {"anchor/w": torch.ones(1)})
    prox = FedProx(mu=0.7).gradient(lambda w, _: w, one, None, {"w": torch.ones(1)}, {})
    assert torch.equal(soft["w"], prox["w"])


def test_a_centre_that_draws_one_client_becomes_its_model() -> None:
    fed, method = federation(), FedSoft(number=2, selected=1)
    before, after = run_rounds(method, fed, 1)
    cohort = method.cohort(before, 1, fed)
    assert 1 <= len(cohort.clients) <= 2
    own = after.models.of_clients(cohort.clients)["slope.weight"]
    centres = after.bank.params["slope.weight"]
    assert all(any(torch.equal(centre, w) for w in own) for centre in centres)


def test_mean_of_several_drawn_clients_is_plain() -> None:
    fed, method = federation(), FedSoft(number=1, selected=2)
    before, after = run_rounds(method, fed, 1)
    drawn = method.cohort(before, 1, fed).clients
    own = after.models.of_clients(drawn)["slope.weight"]
    assert len(drawn) == 2
    np.testing.assert_allclose(after.bank.params["slope.weight"][0], own.mean(0))


def test_a_client_that_fails_counts_with_its_own_last_model(fails_in_training) -> None:
    """With `unheard: stale`, θ_k = Σ_i v_ik w_i where w_1 is what client 1 trained in round 1."""
    fails_in_training(1, t=2)
    stale = {"aggregation": Aggregation(unheard="stale"), "on_client_failure": "drop"}
    fed, method = federation(**stale), FedSoft(number=2, every=5)
    _, first, second = run_rounds(method, fed, 2)
    own = np.arange(3)
    models = [method.deploy(state, own, fed) for state in (first, second)]
    w = np.stack([vector(models[1], i) for i in own])
    np.testing.assert_array_equal(w[1], vector(models[0], 1))
    assert not np.allclose(w[0], vector(models[0], 0))
    for k in range(2):
        v = first.shares[:, k] * [len(pairs) for pairs in CLIENTS]
        row = replace(second.bank, owner=np.full(3, k))
        np.testing.assert_allclose(vector(row), v @ w / v.sum())


def test_centres_stay_where_nobody_answers(monkeypatch) -> None:
    fail_jobs(monkeypatch, lambda task, _: isinstance(task, Train))
    stale = {"aggregation": Aggregation(unheard="stale"), "on_client_failure": "drop"}
    before, after = run_rounds(FedSoft(number=2), federation(**stale), 1)
    assert all(torch.equal(leaf, after.bank.params[n]) for n, leaf in before.bank.params.items())


@pytest.mark.parametrize("method", [FedEm(number=2), FedRc(number=2), FedSoft()])
def test_a_model_without_example_losses_is_refused(method) -> None:
    with pytest.raises(ExperimentError, match="example_losses"):
        method.require(federation(has_example_losses=False))


SOFT = ["apfl", "fedala", "fedem", "fedrc", "fedsoft"]


@pytest.mark.parametrize("name", some_long(SOFT, ["fedem", "fedsoft"]))
def test_a_client_that_fails_to_train_is_dropped(name, tiny_run, fails_in_training) -> None:
    fails_in_training(2, t=2)
    drop = [f"algorithm={name}", "participation=1", "on_client_failure=drop"]
    result = tiny_run(*drop, "rounds=3")
    dropped = result.rounds["clients_dropped"].fillna(0).tolist()
    assert dropped[1] > 0
    assert dropped[0] == dropped[2] == 0
    assert np.isfinite(result.summary["loss_mean"])


@pytest.mark.parametrize("name", ["fedem", "fedrc", "fedsoft"])
def test_a_client_whose_losses_are_never_heard_takes_no_part(name, tiny_run, monkeypatch) -> None:
    fail_jobs(monkeypatch, lambda task, job: isinstance(task, ExampleLosses) and 2 in job.clients)
    drop = [f"algorithm={name}", "participation=1", "on_client_failure=drop"]
    result = tiny_run(*drop, "rounds=2")
    state = state_of(result)
    assert state.shares.any(1).tolist() == [i != 2 for i in range(6)]
    assert np.isfinite(result.summary["loss_mean"])


def test_fedavg_and_local_run_on_these_clients() -> None:
    """The laws above compare what moves."""
    for method in (FedAvg(), Local()):
        state = run_rounds(method, federation(), 1)[-1]
        assert not np.allclose(vector(method.deploy(state, np.arange(3), federation())), START)

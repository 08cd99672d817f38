"""Optimisers of the server: numbers by hand, and laws of every method that averages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.feddrift import FedDrift, with_new_models
from flray.algorithms.fedem import FedEm
from flray.algorithms.flexcfl import FlexCfl
from flray.algorithms.flhc import Flhc, FlhcState, UpdateClustering
from flray.algorithms.recluster import Recluster
from flray.clustering.hierarchical import Hierarchical
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.models.bank import ModelBank
from flray.models.mixing import Aggregation, ClientModels, HeldModels, Relation
from flray.models.server_optimizers import FedAdam, FedAvgM, FedYogi, ServerStep

from linear import START, gradient, linear_federation, vector
from scenarios import sha, some_long, tiny_experiment

CLIENTS = [[(1, 2), (2, 3)], [(3, 1), (1, 0)]]  # of equal size


def trajectory(aggregation: Aggregation, rounds: int = 4) -> list[np.ndarray]:
    """w after each round of FedAvg in which clients take one step with the rate 0.1."""
    fed = linear_federation(CLIENTS, Training(lr=0.1, batch_size=2), aggregation)
    state, path = FedAvg().init(fed).state, []
    for t in range(1, rounds + 1):
        state = FedAvg().round(state, FedAvg().cohort(state, t, fed), fed).state
        path.append(vector(state.bank))
    return path


def delta(w: np.ndarray) -> np.ndarray:
    """Mean of the clients' models minus w: a step against the mean gradient."""
    return -0.1 * np.mean([gradient(w, own) for own in CLIENTS], axis=0)


def test_fedavgm_is_hsu_2019_by_hand() -> None:
    w, v = START, np.zeros(2)
    for found in trajectory(Aggregation(server_lr=0.7, optimizer=FedAvgM(0.8))):
        v = 0.8 * v + delta(w)
        w = w + 0.7 * v
        assert found == pytest.approx(w, rel=1e-10)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_adam_and_yogi_are_algorithm_2_by_hand(kind) -> None:
    """Without bias correction, from m = 0 and v = tau²."""
    beta1, beta2, tau, eta = 0.8, 0.7, 0.05, 0.3
    w, m, v = START, np.zeros(2), np.full(2, tau**2)
    for found in trajectory(Aggregation(server_lr=eta, optimizer=kind(beta1, beta2, tau))):
        d = delta(w)
        m = beta1 * m + (1 - beta1) * d
        if kind is FedAdam:
            v = beta2 * v + (1 - beta2) * d**2
        else:
            v = v - (1 - beta2) * d**2 * np.sign(v - d**2)
        w = w + eta * m / (np.sqrt(v) + tau)
        assert found == pytest.approx(w, rel=1e-10)


def test_a_row_that_hears_nobody_keeps_model_and_moments() -> None:
    """Row 0: v = 3, w = 4; then v = 1.5 + 0, w = 5.5. Row 1 is heard in the first round alone."""
    bank = ModelBank({"w": torch.tensor([[1.0], [2.0]])}, np.array([0, 1]))
    fed = linear_federation(CLIENTS, Training(), Aggregation(optimizer=FedAvgM(0.5)))
    alone = Relation.of_clusters(np.arange(2))
    for models in ([[4.0], [8.0]], [[4.0]]):
        heard = ClientModels(np.arange(len(models)), HeldModels({"w": torch.tensor(models)}))
        bank = fed.mix(alone, heard, bank)
    assert bank.params["w"].flatten().tolist() == [5.5, 8.0]
    assert bank.moments["v/w"].flatten().tolist() == [1.5, 6.0]


def test_a_new_cluster_starts_with_the_moments_of_its_model() -> None:
    joint = ModelBank({"w": torch.tensor([[1.0]])}, np.zeros(3, np.int64))
    joint = replace(joint, moments={"v/w": torch.tensor([[7.0]])})
    split = joint.split(np.array([0, 1, 0]))
    assert split.moments["v/w"].tolist() == [[7.0], [7.0]]
    assert split.joined(np.array([1]), np.zeros(3, np.int64), np.array([0])).moments[
        "v/w"
    ].tolist() == [[7.0]]


ONE_CLUSTER = UpdateClustering(partition=Hierarchical(threshold=np.inf))
TWO_CLUSTERS = UpdateClustering(partition=Hierarchical(number=2))
AGAIN = Recluster(when="every", every=1)


@pytest.mark.parametrize(
    "method",
    [
        FedEm(number=1),
        FedDrift(delta=np.inf, every=1),
        Flhc(rounds_before=1, clustering=ONE_CLUSTER, recluster=AGAIN),
        Flhc(rounds_before=1, clustering=ONE_CLUSTER, recluster=replace(AGAIN, then="merge")),
        Flhc(rounds_before=1, clustering=TWO_CLUSTERS, shared_layers=1),
        Flhc(rounds_before=1, clustering=TWO_CLUSTERS, shared_layers=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_moments_last_where_one_model_is_everybodys(method) -> None:
    """Each is FedAvg, whose path is that of Hsu 2019, in the layers that are shared."""
    aggregation = Aggregation(server_lr=0.7, optimizer=FedAvgM(0.8))
    fed = linear_federation(CLIENTS, Training(lr=0.1, batch_size=2), aggregation)
    state = method.init(fed).state
    for t in range(1, 5):
        now = fed.during(t)
        state = method.round(state, method.cohort(state, t, now), now).state
        if getattr(method, "shared_layers", 2) == 2 or t == 1:
            assert vector(state.bank) == pytest.approx(trajectory(aggregation, t)[-1], rel=1e-10)
    assert set(state.bank.moments) == {"v/slope.weight", "v/offset.weight"}
    if getattr(method, "shared_layers", 0) == 1:
        assert len(state.bank.moments["v/slope.weight"].unique()) == 1
        assert len(state.bank.moments["v/offset.weight"].unique()) == 2


def test_a_merged_model_has_the_mean_of_moments() -> None:
    bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, np.array([0, 1]))
    bank = replace(bank, moments={"v/w": torch.tensor([[2.0], [4.0]])})
    one = bank.combined(np.array([[0.25, 0.75]]), np.zeros(2, np.int64))
    assert one.params["w"].tolist() == [[4.0]]
    assert one.moments["v/w"].tolist() == [[3.5]]


def test_a_model_that_is_born_has_the_first_moments() -> None:
    """FedAdam starts from m = 0 and v = tau², whatever the moments of the other models are."""
    fed = linear_federation(CLIENTS, Training(), Aggregation(optimizer=FedAdam(tau=0.5)))
    moments = {
        f"{letter}/{n}": 7 * torch.ones_like(w) for n, w in fed.initial.items() for letter in "mv"
    }
    bank = with_new_models(replace(fed.initial_bank(), moments=moments), 2, fed)
    assert bank.params["slope.weight"].flatten().tolist() == [START[0]] * 3
    assert bank.moments["m/slope.weight"].flatten().tolist() == [7.0, 0.0, 0.0]
    assert bank.moments["v/slope.weight"].flatten().tolist() == [7.0, 0.25, 0.25]


def test_groups_that_attract_each_other_keep_their_moments() -> None:
    bank = ModelBank({"w": torch.tensor([[3.0], [4.0]])}, np.array([0, 1]))
    bank = replace(bank, moments={"v/w": torch.tensor([[2.0], [4.0]])})
    near = FlexCfl(eta_g=1.0)._attracted(FlhcState(bank, np.array([0, 1])))
    # (3 + 4/4) / (1 + 1/4), (4 + 3/3) / (1 + 1/3)
    assert near.bank.params["w"].flatten().tolist() == pytest.approx([3.2, 3.75])
    assert near.bank.moments["v/w"].flatten().tolist() == [2.0, 4.0]


def test_statistics_of_batch_norm_become_their_means() -> None:
    bank = ModelBank({"w": torch.ones(1, 1), "mean": torch.ones(1, 1)}, np.zeros(1, np.int64))
    means = {name: torch.full((1, 1), 3.0) for name in bank.params}
    moved = ServerStep(FedAdam(), 0.1, frozenset({"mean"}))(means, bank, [(0, True)])
    assert moved.params["mean"].item() == 3.0 != moved.params["w"].item()
    assert set(moved.moments) == {"m/w", "v/w"}


AVERAGING = {
    "fedavg": [],
    "fednova": [],
    "scaffold": [],
    "fedbabu": [],
    "fedper": [],
    "fedsem": [],
    "per_fedavg": [],
    "ifca": ["algorithm={name: ifca, rounds_before: 1, own: last_layer}"],
    "cfl": ["algorithm={name: cfl, rounds_before: 1, mean_norm: 9, max_norm: 0}"],
    "flhc": ["algorithm={name: flhc, rounds_before: 1}"],
    "flis_dc": ["split.server=30", "algorithm.beta=0.2"],
}


# The others average as one of these.
@pytest.mark.parametrize("name", some_long(AVERAGING, ["scaffold", "fedbabu", "ifca", "flhc"]))
def test_fedavgm_without_momentum_is_the_method_itself(name, tiny_run, known_run) -> None:
    given = [f"algorithm={name}", *AVERAGING[name], "rounds=3"]
    optimizer = "aggregate.optimizer={name: fedavgm, momentum: 0}"
    assert sha(tiny_run(*given, optimizer)) == sha(known_run(*given))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("flhc", "fedyogi"),
        pytest.param("ifca", "fedadam", marks=pytest.mark.long),
        pytest.param("fedbabu", "fedavgm", marks=pytest.mark.long),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits(name, optimizer, tiny_run, tmp_path) -> None:
    given = [f"algorithm={name}", *AVERAGING[name], "rounds=3", "aggregate.server_lr=0.1"]
    given += [f"aggregate.optimizer={optimizer}"]
    rounds = iter(range(3))
    out = tmp_path / "stopped"
    tiny_run(*given, out=out, should_stop=lambda: next(rounds) == 1)
    whole = tiny_run(*given)
    assert sha(tiny_run(*given, out=out, resume=True)) == sha(whole)
    assert sha(whole) != sha(tiny_run(*given, "aggregate.optimizer=none"))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("{name: fedavgm, momentum: 1}", r"momentum must be in \[0, 1\), got 1"),
        ("{name: fedadam, beta2: -1}", r"beta2 must be in \[0, 1\), got -1"),
        ("{name: fedyogi, tau: 0}", "tau must be > 0, got 0"),
        ("{name: fedadam, momentum: 0.9}", "unknown key 'aggregate.optimizer.momentum'"),
        ("adam", "unknown optimizer 'adam'"),
    ],
)
def test_bad_optimisers_are_refused(optimizer, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny_experiment(f"aggregate.optimizer={optimizer}")

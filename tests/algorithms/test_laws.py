"""Identities between methods, by the hash of every client's params."""

import re

import numpy as np
import pytest

from flray.algorithms import ALGORITHMS

from scenarios import sha


def test_fedprox_with_zero_mu_is_fedavg(tiny_run, known_run) -> None:
    fedavg = sha(known_run())
    assert sha(tiny_run("algorithm=fedprox", "algorithm.mu=0")) == fedavg
    assert sha(tiny_run("algorithm=fedprox", "algorithm.mu=0.1")) != fedavg


def test_same_seed_same_bits_other_seed_other_bits(tiny_run, known_run) -> None:
    assert sha(tiny_run()) == sha(known_run()) != sha(tiny_run("seed=1"))


def test_fedavg_of_one_client_is_local_training(tiny_run) -> None:
    alone = ["split={name: iid, clients: 1}", "participation=1"]
    assert sha(tiny_run(*alone)) == sha(tiny_run(*alone, "algorithm=local"))


def test_local_with_everybody_heard_has_a_model_each(tiny_run) -> None:
    result = tiny_run("algorithm=local", "participation=1", "rounds=2")
    assert result.summary["clusters"] == 6
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 0


def test_local_trains_the_sampled_only(tiny_run) -> None:
    """3 of 6 clients a round: after one round three have a model of their own, three share w0."""
    assert tiny_run("algorithm=local", "rounds=1").summary["clusters"] == 4


@pytest.mark.parametrize("rounds", [1, 3])
def test_stale_at_rho_with_equal_sizes_is_fedavg_with_server_step_rho(tiny_run, rounds) -> None:
    """w' = (1/M) (sum of heard w_k + sum of unheard w) = w + rho mean(w_k - w)."""
    equal = ["split={name: iid, clients: 6, validation: 0}", "participation=0.5"]
    equal += [f"rounds={rounds}", "execution.precision=float64"]
    stale = tiny_run(*equal, "aggregate.unheard=stale")
    stepped = tiny_run(*equal, "aggregate.server_lr=0.5")
    plain = tiny_run(*equal)
    gap = np.abs(_test_losses(stale) - _test_losses(stepped)).max()
    assert gap < 1e-12
    assert np.abs(_test_losses(stale) - _test_losses(plain)).max() > 1e-3


def _test_losses(result) -> np.ndarray:
    return result.clients.query("part == 'test'")["loss"].to_numpy()


def test_uniform_weights_differ_on_ragged_clients(tiny_run, known_run) -> None:
    assert sha(tiny_run("aggregate.weights=uniform")) != sha(known_run())
    equal = "split={name: iid, clients: 6, samples_per_client: 50}"
    assert sha(tiny_run(equal, "aggregate.weights=uniform")) == sha(tiny_run(equal))


METHODS = ["fedavg", "fedprox", "local", "fednova", "ifca", "cfl", "fedsem"]
METHODS += ["{name: lg_fedavg, global_layers: 1}"]
METHODS += [
    f"{{name: {name}, rounds_before: 1, clustering: {{partition: {{name: kmeans, number: 2}}}}}}"
    for name in ("repa", "wd")
]
METHODS += ["{name: flis_dc, beta: 0.2}", "flis_hc"]
METHODS += ["{name: flexcfl, clustering: {embed: {number: 2}, partition: {number: 2}}}"]
METHODS += ["{name: feddrift, every: 1, delta: 0.01}"]
METHODS += ["scaffold", "per_fedavg", "{name: per_fedavg, alpha: 0.1, order: hessian_free}"]
METHODS += ["apfl", "fedala", "fedem", "fedrc", "fedsoft"]
AS_FEDAVG = ["local", "ifca", "fedsem", METHODS[9], "flis_hc", METHODS[12], METHODS[13]]
METHODS += ["ditto", "{name: fedrep, head_epochs: 1}", "fedbabu", "pfedme", "fedbn"]
CENTRES = "clustering: {signature: {name: pca_centres, components: 16, k: 2}%s}"
AS_FEDAVG += [
    "fedper",
    "fedamp",
    "pacfl",
    "{name: clove, number: 2}",
    "{name: ifca, start: clients}",
]
AS_FEDAVG += ["{name: fedclust, clustering: {partition: {threshold: 0.5}}}"]
AS_FEDAVG += ["{name: cfl_gp, rounds_before: 1, clustering: {partition: {number: 2}}}"]
AS_FEDAVG += ["{name: flhc, rounds_before: 1}", f"{{name: flt, {CENTRES % ', embed: none'}}}"]
AS_FEDAVG += [f"{{name: pca_km_hc, {CENTRES % ''}}}"]
METHODS += [each for each in AS_FEDAVG if each not in METHODS]


# The others train as FedAvg does, or with the hook of one that is compared. Lightning trains a
# client for all of them alike.
SAME_HOOK = {"cfl", "fedbabu", "fedrc", METHODS[10]}
QUICK = {
    "vectorized": {*METHODS} - {*AS_FEDAVG} - SAME_HOOK,
    "lightning": {"scaffold", "per_fedavg"},
}
ENGINES = [
    pytest.param(engine, each, marks=[pytest.mark.long] * (each not in quick))
    for engine, quick in QUICK.items()
    for each in METHODS
]


def test_engines_are_compared_on_every_method() -> None:
    assert {re.findall(r"\w+", each.removeprefix("{name:"))[0] for each in METHODS} == set(
        ALGORITHMS
    )


@pytest.mark.parametrize(("engine", "algorithm"), ENGINES)
def test_engines_agree_over_a_run(tiny_run, known_run, algorithm, engine) -> None:
    """Ragged clients with momentum."""
    common = [f"algorithm={algorithm}", "execution.precision=float64", "rounds=2"]
    common += ["split.server=30"]
    reference = known_run(*common, "execution.engine=loop")
    other = tiny_run(*common, f"execution.engine={engine}", "execution.block=2")
    assert [r.summary["engine"] for r in (reference, other)] == ["loop", engine]
    assert np.abs(_test_losses(reference) - _test_losses(other)).max() < 1e-10
    by_round = reference.clients.query("part == 'test'").groupby("round")["loss"].mean()
    assert abs(by_round[2] - by_round[1]) > 1e-3  # training changed the models


def test_block_of_the_same_size_gives_the_same_bits(tiny_run) -> None:
    """The cohort of 3 in blocks of 3; participation 1 puts clients beside other neighbours."""
    a = tiny_run("execution.block=3", "algorithm=local", "rounds=1", "participation=1")
    b = tiny_run("execution.block=3", "algorithm=local", "rounds=1", "participation=0.5")
    mine, theirs = (r.clients.query("part == 'test'").set_index("client")["loss"] for r in (a, b))
    assert (mine == theirs).sum() == 3

"""What every registered algorithm promises."""

import dataclasses
import pickle

import numpy as np
import pandas as pd
import pytest
import yaml

from flray.algorithms import ALGORITHMS
from flray.algorithms.algorithm import Branching
from flray.clustering.points import by_smallest_member
from flray.columns import PLACING_BYTES
from flray.config.experiment import parse_experiment
from flray.records.checkpoint import CheckpointStore
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.runs.preparing import deal

from scenarios import Result, federation_of, run_experiment, some_long, tiny_experiment

# What fits tiny images: no encoder that would have to be trained on another dataset.
LINEAR = "algorithm.clustering.signature={name: pca_centres, components: 16, k: 2}"
NUMBER = "algorithm.clustering.partition.number=%d"
FITTING = {
    "flt": [LINEAR, "algorithm.clustering.embed=none"],
    "pca_km_hc": [LINEAR],
    "cfl_gp": ["algorithm.rounds_before=1", NUMBER % 2],
    "feddrift": ["algorithm.every=2"],
    "lg_fedavg": ["algorithm.global_layers=1"],  # of the two that the model has
    "repa": [
        "algorithm.rounds_before=2",
        NUMBER % 2,
        "algorithm.clustering.signature.statistics=[mean, quantiles, std, skewness, kurtosis]",
    ],
    "fedrep": ["algorithm.head_epochs=1"],
    "cfl": ["algorithm={name: cfl, rounds_before: 1, mean_norm: 9, max_norm: 0}"],  # splits early
    "flis_dc": ["split.server=30", "algorithm.beta=0.2"],
    "flis_hc": ["split.server=30", "algorithm.clustering.partition.threshold=0.9"],
}


# A step of Per-FedAvg takes two batches, of which one sample makes one.
# Ditto trains twice, pFedMe once more for one of two epochs, FedEM and FedRC three models.
STEPS_ON_ONE_SAMPLE = {"per_fedavg": 0, "ditto": 2, "pfedme": 1.5, "fedem": 3, "fedrc": 3}
STEPS_ON_ONE_SAMPLE |= {"fedala": 3.75}  # 11 passes of one step for weights, in round 2
# Trainings of everybody that are not rounds, in rounds of two epochs.
PASSES_BEFORE = {"cfl_gp": 0.5, "fedclust": 1, "flexcfl": 1, "flis_hc": 1}


def named(name: str, *split: str) -> list[str]:
    """Overrides for an algorithm, on a split of its own where one is given."""
    return [*split, f"algorithm={name}", *FITTING.get(name, [])]


@pytest.mark.parametrize("name", ALGORITHMS)
class TestEveryAlgorithm:
    def test_is_a_frozen_dataclass_with_defaults(self, name) -> None:
        cls = ALGORITHMS[name]
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen
        cls()

    def test_its_gradient_travels(self, name) -> None:
        gradient = ALGORITHMS[name]().gradient
        copy = pickle.loads(pickle.dumps(gradient))
        if hasattr(gradient, "__self__"):
            assert (copy.__func__, copy.__self__) == (gradient.__func__, gradient.__self__)
            hash(copy.__self__)  # engines keep a recorded step for each
        else:
            assert copy is gradient

    def test_one_sample_clients_do_not_break_it(self, name, tiny_run) -> None:
        result = tiny_run(
            *named(name, "split={name: iid, clients: 5, samples_per_client: 1}"),
            "participation=1",
            "rounds=2",
            "evaluate.every=2",
        )
        steps = STEPS_ON_ONE_SAMPLE.get(name, 1)
        rounds = 2 + PASSES_BEFORE.get(name, 0)
        assert result.summary["client_steps"] == 5 * 2 * rounds * steps  # clients, epochs


# One of each kind of state: what clients share, what they keep, who belongs to which cluster.
LEARNS_QUICKLY = ("cfl", "ditto", "fedavg", "feddrift", "fedem")
LEARNS_QUICKLY += ("fedrep", "flis_dc", "flhc", "flt", "ifca", "scaffold")


@pytest.mark.parametrize("name", some_long(ALGORITHMS, LEARNS_QUICKLY))
def test_learns_and_its_resolved_config_resumes_to_the_same_result(
    name, tiny_run, tmp_path
) -> None:
    rounds = 6 if name in ("fedrep", "per_fedavg") else 4  # those two learn slowly
    first = tiny_run(*named(name), f"rounds={rounds}", "participation=1", "evaluate.every=6")
    losses = first.rounds["train_loss"]
    assert losses.iloc[-1] < losses.iloc[0]
    assert first.summary["accuracy_mean"] > 0.15
    assert first.summary["client_steps"] == first.rounds["client_steps"].sum() > 0
    config, seen = yaml.safe_load((first.path / "config.yaml").read_text()), []
    experiment, out = parse_experiment(config), tmp_path / "again"
    run_experiment(experiment, out, on_round=seen.append, should_stop=lambda: len(seen) >= 2)
    assert len(seen) == 2
    again = run_experiment(experiment, out, resume=True)
    assert again.summary["params_sha256"] == first.summary["params_sha256"]
    assert yaml.safe_load((again.path / "config.yaml").read_text()) == config
    method = experiment.algorithm.build()
    if read_clusterings(first.path):  # so that what measures need of it is checked before the run
        assert isinstance(method, Branching) or method.returns_clusterings


ENCODER = "{dataset: {name: synthetic, num_train: 64, size: 8}, model: conv_ae, epochs: 1}"


def fine_tuned(how: str) -> list[str]:
    """FLT that clusters again with the encoder that it went on fine-tuning."""
    signature = f"{{name: encoder_centres, encoder: {ENCODER}, k: 2, epochs: 1, fine_tune: {how}}}"
    clustering = f"{{signature: {signature}, embed: none, relate: {{name: threshold, gamma: 0.5}}}}"
    return [f"algorithm={{name: flt, clustering: {clustering}, dynamic: {{every: 3}}}}"]


NO_INFLUENCE = {name: named(name) for name in ALGORITHMS} | {
    "ifca, sharing layers": [
        "algorithm={name: ifca, number: 3, restarts: 2, rounds_before: 1, own: last_layer}"
    ],
    "wd": ["algorithm={name: wd, rounds_before: 1}", NUMBER % 2],
    "wd, before round 1": ["algorithm={name: wd, rounds_before: 0}", NUMBER % 2],
    "repa, by directions": [
        "algorithm={name: repa, rounds_before: 1}",
        "algorithm.clustering.signature.statistics=[correlation, components, covariance]",
        NUMBER % 2,
    ],
    "flhc": ["algorithm={name: flhc, rounds_before: 1}"],
    "flhc, clustered again": [
        "algorithm={name: flhc, rounds_before: 1, recluster: {when: every, every: 2}}",
        "algorithm.clustering.partition={name: hierarchical, number: 2}",
    ],
    "wd, clustered again": [
        "algorithm={name: wd, rounds_before: 1, recluster: {when: every, every: 1}}",
        NUMBER % 2,
    ],
    "flis_hc, clustered again": [*named("flis_hc"), "algorithm.recluster={when: every, every: 2}"],
    "flt, fine-tuned in turn": fine_tuned("sequential"),
    "flt, fine-tuned centrally": fine_tuned("central"),
    # Everybody hears everybody a little: what is averaged in another order has other bits.
    "flt, soft": [
        *named("flt"),
        "algorithm.clustering.relate=kernel",
        "algorithm.clustering.partition={name: hierarchical, linkage: average, number: 2}",
        "aggregate.unheard=stale",
    ],
}


NO_INFLUENCE_QUICKLY = ("feddrift", "fedem", "flhc, clustered again", "flis_dc")
NO_INFLUENCE_QUICKLY += ("flt, fine-tuned in turn", "ifca, sharing layers")


@pytest.mark.parametrize("case", some_long(NO_INFLUENCE, NO_INFLUENCE_QUICKLY))
def test_data_of_holdout_clients_change_nothing_for_others(
    case, tiny_run, tmp_path, monkeypatch
) -> None:
    """Holdout clients pass their data around with a client that is never there; one client joins
    in round 2 and one in round 4, when holdout clients have been placed."""
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    split = "split={name: dirichlet, clients: 12, alpha: 0.5, min_samples: 2, holdout: 3}"
    experiment = tiny_experiment(split)
    dealt = deal(experiment, experiment.dataset.build().load())  # who is holdout is the same in all
    away, first, second = dealt.clients[:3].tolist()
    exchange = {"round": 1, "kind": "exchange", "clients": [*dealt.holdout.tolist(), away]}
    common = [
        {"round": 1, "kind": "leave", "clients": [away]},
        {"round": 2, "kind": "join", "clients": [first]},
        {"round": 4, "kind": "join", "clients": [second]},
    ]
    one, other = (
        tiny_run(split, *NO_INFLUENCE[case], f"events={events}", "rounds=5", "evaluate.every=2")
        for events in (common, [exchange, *common])
    )
    others = np.setdiff1d(dealt.clients, [away])
    theirs = [_scores(result, dealt.holdout) for result in (one, other)]
    assert not theirs[0]["loss"].equals(theirs[1]["loss"])
    pd.testing.assert_frame_equal(_scores(one, others), _scores(other, others), check_exact=True)
    pd.testing.assert_frame_equal(_rounds(one), _rounds(other), check_exact=True)
    assert _digests(one, others) == _digests(other, others)
    _assert_same_clusterings(one, other)


# What a newcomer costs beside the model it is given: a signature, by which the server places it, or
# all models, among which it chooses. The other methods have one model for everybody who comes.
PLACED_BY_SIGNATURE = {"cfl", "cfl_gp", "fedclust", "fedsem", "flexcfl", "flhc", "flt", "pacfl"}
PLACED_BY_SIGNATURE |= {"pca_km_hc", "repa", "wd"}
PLACED_BY_CHOICE = {"clove", "feddrift", "fedem", "fedrc", "fedsoft", "flis_dc", "flis_hc", "ifca"}


# Each with a mechanism of its own to place clients, and methods that need none.
UNSEEN_QUICKLY = ("ditto", "fedem", "fedrep", "flhc", "flis_dc", "flt", "ifca")


@pytest.mark.parametrize("name", some_long(ALGORITHMS, UNSEEN_QUICKLY))
def test_unseen_clients_get_a_model_and_train_it(name, tiny_run) -> None:
    """FLIS, Table IV: clients that never trained are scored after some epochs of their own, and
    their placing is counted, beside the same training from which they are away."""
    split = "split={name: dirichlet, clients: 10, alpha: 0.5, min_samples: 2, holdout: 2}"
    overrides = [*named(name, split), "participation=1", "rounds=2"]
    overrides += ["evaluate={every: 2, fine_tune: {epochs: 5}}"]
    overrides += ["algorithm.rounds_before=1"] if name in ("flhc", "repa", "wd") else []
    overrides += [NUMBER % 2] if name == "wd" else []
    experiment = tiny_experiment(*overrides)
    unseen = deal(experiment, experiment.dataset.build().load()).holdout.tolist()
    away = f"events=[{{round: 1, kind: leave, clients: {unseen}}}]"
    there, alone = tiny_run(*overrides), tiny_run(*overrides, away)
    assert there.summary["tuned_holdout_loss_mean"] < there.summary["holdout_loss_mean"]
    own = there.clients.query("round == 2 and client in @unseen").groupby("part")["loss"]
    assert own.mean()["tuned_test"] == pytest.approx(there.summary["tuned_holdout_loss_mean"])
    assert there.rounds["train_loss"].equals(alone.rounds["train_loss"])
    more = [
        there.rounds.filter(regex=kind).sum().sum() - alone.rounds.filter(regex=kind).sum().sum()
        for kind in ("^bytes_", f"^{PLACING_BYTES}")
    ]
    assert [cost > 0 for cost in more] == [name in PLACED_BY_SIGNATURE, name in PLACED_BY_CHOICE]


def _scores(result: Result, clients: np.ndarray) -> pd.DataFrame:
    """Scores of the clients; models are compared by who shares one, not by their numbers."""
    scores = result.clients[result.clients["client"].isin(clients)].reset_index(drop=True)
    models = scores.groupby(["round", "part"])["model"]
    return scores.assign(model=models.transform(lambda own: by_smallest_member(own.to_numpy())))


def _rounds(result: Result) -> pd.DataFrame:
    """What is recorded of rounds, but for what the placing costs and what it gains."""
    of_placing = ("holdout_", "bytes_", "placing_", "client_steps", "seconds")
    return result.rounds[[c for c in result.rounds if not c.startswith(of_placing)]]


def _digests(result: Result, clients: np.ndarray) -> list[str]:
    held = CheckpointStore(RunDirectory(result.path).checkpoints).load_latest()
    experiment = parse_experiment(RunDirectory(result.path).config())
    fed = federation_of(experiment).during(held.round)
    return experiment.algorithm.build().deploy(held.state, clients, fed).digests(clients)


def _assert_same_clusterings(one: Result, other: Result) -> None:
    found, again = read_clusterings(one.path), read_clusterings(other.path)
    assert list(found) == list(again)
    for t in found:
        for name, array in dataclasses.asdict(found[t]).items():
            np.testing.assert_array_equal(array, getattr(again[t], name), err_msg=f"{name}, {t}")

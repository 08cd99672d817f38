"""What every registered algorithm promises."""

import dataclasses
import pickle

import pytest
import yaml

from flray.algorithms import ALGORITHMS
from flray.config.build import run_experiment
from flray.config.experiment import parse_experiment

# What fits tiny images: no encoder that would have to be trained on another dataset.
LINEAR = "algorithm.clustering.signature={name: pca_centres, components: 16, k: 2}"
FITTING = {"flt": [LINEAR, "algorithm.clustering.embed=none"], "pca_km_hc": [LINEAR]}


def named(name: str) -> list[str]:
    return [f"algorithm={name}", *FITTING.get(name, [])]


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

    def test_runs_learns_and_reports(self, name, tiny_run) -> None:
        result = tiny_run(*named(name), "rounds=6", "participation=1")
        losses = result.rounds["train_loss"]
        assert losses.iloc[-1] < losses.iloc[0]
        assert result.summary["accuracy_mean"] > 0.15
        assert result.summary["client_steps"] == result.rounds["client_steps"].sum() > 0

    def test_one_sample_clients_do_not_break_it(self, name, tiny_run) -> None:
        result = tiny_run(
            *named(name),
            "split={name: iid, clients: 5, samples_per_client: 1}",
            "participation=1",
            "rounds=2",
        )
        assert result.summary["client_steps"] == 5 * 2 * 2  # clients, epochs, rounds

    def test_a_resumed_run_ends_alike(self, name, tiny_run, tmp_path) -> None:
        whole = tiny_run(*named(name))
        seen = []
        out = tmp_path / "stopped"
        tiny_run(*named(name), out=out, on_round=seen.append, should_stop=lambda: len(seen) >= 2)
        again = tiny_run(*named(name), out=out, resume=True)
        assert again.summary["params_sha256"] == whole.summary["params_sha256"]

    def test_its_resolved_config_runs_again_to_the_same_result(self, name, tiny_run) -> None:
        first = tiny_run(*named(name), "rounds=2")
        config = yaml.safe_load((first.path / "config.yaml").read_text())
        again = run_experiment(parse_experiment(config), first.path.parent / "again")
        assert again.summary["params_sha256"] == first.summary["params_sha256"]
        assert yaml.safe_load((again.path / "config.yaml").read_text()) == config

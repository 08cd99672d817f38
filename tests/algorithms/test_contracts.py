"""What every registered algorithm promises."""

import dataclasses
import pickle

import pytest

from flray.algorithms import ALGORITHMS


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
        assert (copy.__func__, copy.__self__) == (gradient.__func__, gradient.__self__)
        hash(copy.__self__)  # engines keep a recorded step for each

    def test_runs_learns_and_reports(self, name, tiny_run) -> None:
        result = tiny_run(f"algorithm={name}", "rounds=6", "participation=1")
        losses = result.rounds["train_loss"]
        assert losses.iloc[-1] < losses.iloc[0]
        assert result.summary["accuracy_mean"] > 0.15
        assert result.summary["client_steps"] == result.rounds["client_steps"].sum() > 0

    def test_one_sample_clients_do_not_break_it(self, name, tiny_run) -> None:
        result = tiny_run(
            f"algorithm={name}",
            "split={name: iid, clients: 5, samples_per_client: 1}",
            "participation=1",
            "rounds=2",
        )
        assert result.summary["client_steps"] == 5 * 2 * 2  # clients, epochs, rounds

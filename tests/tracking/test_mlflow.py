"""MLflow as a mirror, with a module in its place that notes what it is told."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flray.config.deciding import leaves
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory
from flray.runs.launch import run_experiment
from flray.tracking.mirrors import tracked

from scenarios import TINY

PLAIN = override(TINY, ["rounds=3", "tracking={name: mlflow, uri: somewhere, experiment: mine}"])


class FakeMLflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def note(*values: Any, **options: Any) -> Any:
            self.told.append((name, (*values, *options.values())))
            return SimpleNamespace(info=SimpleNamespace(run_id="id7"))

        return note

    def of(self, name: str) -> list[Any]:
        return [values for told, values in self.told if told == name]


def run(out, should_stop=lambda: False) -> None:
    experiment = parse_experiment(PLAIN)
    with tracked(experiment, out) as on_round:
        run_experiment(experiment, out, out.exists(), on_round, should_stop)


def test_it_is_told_configuration_rounds_and_summary_in_one_run(tmp_path, monkeypatch) -> None:
    """A resumed run goes on in the same run of MLflow."""
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    out = tmp_path / "run"
    run(out, should_stop=lambda: True)
    run(out)
    directory = RunDirectory(out)
    assert fake.of("set_tracking_uri") == [("somewhere",)] * 2
    assert fake.of("set_experiment") == [("mine",)] * 2
    assert fake.of("start_run") == [(None, "run"), ("id7", None)]
    assert fake.of("log_params") == [(leaves(directory.config()),)]
    *rounds, last = fake.of("log_metrics")
    rows = directory.rows()
    assert [step for _, step in rounds] == [1, 2, 3]
    assert [metrics["accuracy_mean"] for metrics, _ in rounds] == [r["accuracy_mean"] for r in rows]
    assert last[0]["summary_accuracy_mean"] == directory.summary()["accuracy_mean"]
    assert len(fake.of("end_run")) == 2


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ExperimentError, match="pip install mlflow"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""Every experiment in the repository is read, built and run for a round on toy data."""

from pathlib import Path

import pytest

from flray.cli.campaign import demo_files
from flray.config.build import run_experiment
from flray.config.experiment import override, parse_experiment, read_yaml

FILES = sorted((Path(__file__).parents[1] / "experiments").rglob("*.yaml"))
TOY = [
    "dataset={name: synthetic, num_train: 400, num_test: 200}",
    "split.clients=10",
    "rounds=1",
    "train.epochs=1",
]


def test_there_are_experiments() -> None:
    assert len(FILES) > 0
    assert len(demo_files()) > 0


@pytest.mark.parametrize("path", [*FILES, *demo_files()], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_an_experiment_runs(path, tmp_path) -> None:
    plain = read_yaml(path)
    parse_experiment(plain)  # as it stands
    result = run_experiment(parse_experiment(override(plain, TOY)), tmp_path / "run")
    assert result.summary["rounds"] == 1
    assert path.read_text().startswith("# flray run"), "the file opens with its command"

"""Every experiment in the repository is read, built and run for a round on toy data."""

from pathlib import Path

import pytest

from flray.cli.campaign import demo_files
from flray.config.build import run_experiment
from flray.config.experiment import override, parse_experiment, read_yaml
from flray.config.pretrain import parse_encoder

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
ENCODERS = sorted((EXPERIMENTS / "encoders").glob("*.yaml"))
FILES = sorted(set(EXPERIMENTS.rglob("*.yaml")) - set(ENCODERS))
TOY = [
    "dataset={name: synthetic, num_train: 400, num_test: 200, num_groups: 10}",
    "split.clients=10",
    "rounds=1",
    "train.epochs=1",
]


# An encoder is pre-trained on embedded data, not on what the paper has.
ENCODER = "{dataset: {name: synthetic, num_train: 200, num_test: 100}, model: conv_ae, epochs: 1}"
TOY_OF = {"flt": [f"algorithm.clustering.signature.encoder={ENCODER}"]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))


def test_there_are_experiments() -> None:
    assert len(FILES) > 5
    assert len(ENCODERS) > 0
    assert len(demo_files()) > 0


@pytest.mark.parametrize("path", [*FILES, *demo_files()], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_an_experiment_runs(path, tmp_path) -> None:
    plain = read_yaml(path)
    name = parse_experiment(plain).algorithm.name  # as it stands
    toy = override(plain, [*TOY, *TOY_OF.get(name, [])])
    result = run_experiment(parse_experiment(toy), tmp_path / "run")
    assert result.summary["rounds"] == 1
    assert path.read_text().startswith("# flray run"), "the file opens with its command"


@pytest.mark.parametrize("path", ENCODERS, ids=lambda p: p.name)
def test_an_encoder_is_read(path) -> None:
    encoder = parse_encoder(read_yaml(path))
    assert encoder.epochs > 0
    assert path.read_text().startswith("# flray pretrain"), "the file opens with its command"

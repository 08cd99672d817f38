"""Every experiment in the repository is read, built and run for a round on toy data.

Each method and each split is run once; with the marker `long`, one of those that differ in numbers
only (thresholds, targets).
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flray.config.deciding import leaves
from flray.config.experiment import Experiment, parse_encoder, parse_experiment, read_yaml
from flray.config.overrides import override
from flray.config.shipped import demo_files
from flray.data.split import Split
from flray.runs.preparing import deal

from scenarios import run_experiment

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
ENCODERS = sorted((EXPERIMENTS / "encoders").glob("*.yaml"))
DEMO = sorted((EXPERIMENTS / "demo").glob("*.yaml"))
SPACES = sorted((EXPERIMENTS.parent / "tune_spaces").glob("*.yaml"))
FILES = sorted({*EXPERIMENTS.rglob("*.yaml")} - {*ENCODERS, *DEMO})
TOY = [
    "dataset={name: synthetic, num_train: 200, num_test: 100, num_groups: 10, size: 16}",
    "split.clients=10",
    "rounds=1",
    "train.epochs=1",
]


# An encoder is pre-trained on embedded data, not on what the paper has.
IMAGES = "{name: synthetic, num_train: 100, num_test: 50, size: 16}"
ENCODER = f"{{dataset: {IMAGES}, model: conv_ae, epochs: 1}}"
TOY_OF = {
    "flt": [
        f"algorithm.clustering.signature.encoder={ENCODER}",
        "algorithm.clustering.signature.epochs=1",
        "algorithm.clustering.embed=none",
    ],
    "repa": [
        "dataset.size=8",
        "algorithm.rounds_before=1",
        "algorithm.clustering.partition.number=2",
    ],
}
# Few images without colours.
TOY_SPLIT = {
    "image_shift": [
        "split.samples_per_client=10",
        "split.pipelines=[identity, invert]",
    ]
}
# Where an experiment says it: fewer images of the server, test images and unseen clients.
FEWER = {"server": 20, "test_size": 10, "holdout": 2, "min_samples": 2, "test_by": "share"}
# Of sequences, which the toy data are not.
OWN = ("har", "power", "shakespeare")
# The owners of the toy data have no kinds; turned clients have.
KINDS = "split={name: rotation, clients: 8, degrees: [0, 180]}"


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory) -> Iterator[None]:
    """One for all, so that the encoder is pre-trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLRAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """The experiments that were run, without their numbers, and their methods and splits."""
    return set()


def test_there_are_experiments() -> None:
    assert len(FILES) > 5
    assert len(ENCODERS) > 0
    assert len(demo_files()) > 0


HEADED = [*FILES, *ENCODERS, *DEMO]
EXPECTED = re.compile(r"\d %|(ARI|loss|error|robustness|accuracy)\D{1,30}\d|not run", re.IGNORECASE)


def header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(itertools.takewhile(lambda line: line.startswith("#"), lines))


def test_an_experiment_opens_with_its_number_or_with_not_run() -> None:
    for path in HEADED:
        assert EXPECTED.search(header(path)), path


def test_a_space_opens_with_its_numbers_or_with_not_run() -> None:
    for path in SPACES:
        assert re.search(r"\d %|\d\.\d|not run", header(path), re.IGNORECASE), path


by_file = pytest.mark.parametrize(
    "path", [*FILES, *demo_files()], ids=lambda p: f"{p.parent.name}/{p.name}"
)


@by_file
def test_an_experiment_is_read_and_its_method_and_its_split_run(path, tmp_path, ran) -> None:
    assert path.read_text().startswith("# flray run"), "the file opens with its command"
    toy = toy_of(path)
    kinds = {f"{part.kind} {part.name}" for part in (toy.algorithm, toy.split)}
    if not kinds <= ran:
        assert run_experiment(toy, tmp_path / "run").summary["rounds"] == 1
        ran |= kinds


@pytest.mark.long
@by_file
def test_an_experiment_runs(path, tmp_path, ran) -> None:
    toy = toy_of(path)
    if without_numbers(toy.plain) not in ran:
        assert run_experiment(toy, tmp_path / "run").summary["rounds"] == 1
        ran.add(without_numbers(toy.plain))


def toy_of(path: Path) -> Experiment:
    """The experiment of a file on toy data, for one round."""
    plain = read_yaml(path)
    as_it_stands = parse_experiment(plain)
    name, split = as_it_stands.algorithm.name, as_it_stands.split.name
    smaller = [f"split.{key}={value}" for key, value in FEWER.items() if key in plain["split"]]
    smaller += ["model=lenet5"] if plain["model"] == "resnet9" else []
    smaller += ["model=mlp"] if path.parent.name in OWN else []
    smaller += [KINDS] if path.stem == "given" else []
    tuned = "fine_tune" in plain.get("evaluate", {})
    smaller += ["evaluate.fine_tune.epochs=1"] if tuned else []
    changes = [*TOY, *smaller, *TOY_OF.get(name, []), *TOY_SPLIT.get(split, [])]
    return parse_experiment(override(plain, changes))


def without_numbers(plain: dict[str, Any]) -> str:
    """An experiment as text, with 0 for every number."""
    values = leaves(plain).items()
    return json.dumps({k: 0 if type(v) in (int, float) else v for k, v in values}, sort_keys=True)


@pytest.mark.parametrize("path", ENCODERS, ids=lambda p: p.name)
def test_an_encoder_is_read(path) -> None:
    encoder = parse_encoder(read_yaml(path))
    assert encoder.epochs > 0
    assert path.read_text().startswith("# flray pretrain"), "the file opens with its command"


PAPERS = [path for path in FILES if path.parent.name in ("flhc", "flt")]


@pytest.mark.parametrize("path", PAPERS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_experiments_of_papers_hold_nothing_out(path) -> None:
    """Their clients train on everything they hold; where a space chooses, the space says so."""
    assert parse_experiment(read_yaml(path)).split.build().validation == 0


def dealt(path: Path) -> Split:
    experiment = parse_experiment(read_yaml(path))
    return deal(experiment, experiment.dataset.build().load())


def test_all_of_repas_clients_on_cifar10_are_dealt_alike() -> None:
    kinds = ("form", "pipelines", "labels")
    splits = [
        {k: v for k, v in parse_experiment(read_yaml(path)).split.plain.items() if k not in kinds}
        for path in (EXPERIMENTS / "repa").glob("cifar10*.yaml")
    ]
    assert len(splits) == 4
    assert all(each == splits[0] for each in splits)


@pytest.mark.data
def test_clients_of_repa_have_300_images_and_20_of_100_are_held_out() -> None:
    split = dealt(EXPERIMENTS / "repa" / "cifar10_labels.yaml")  # whose images are as they are
    assert {len(ids) for ids in split.train} == {300}
    assert {len(ids) for ids in split.validation} == {100}
    assert (len(split.clients), len(split.holdout)) == (80, 20)


@pytest.mark.data
@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "flhc").glob("mnist_*.yaml")), ids=str)
def test_clients_of_flhc_are_tested_on_a_hundred_images(path) -> None:
    """So that 99 % allows one error, for every client alike."""
    split = dealt(path)
    assert [len(ids) for ids in split.test] == [100] * 100
    assert sum(len(ids) for ids in split.train) == 60_000


@pytest.mark.data
@pytest.mark.parametrize(
    "path", sorted((EXPERIMENTS / "flt").glob("mnist_scenario2*.yaml")), ids=str
)
def test_clients_of_flts_second_scenario_have_200_images_of_three_labels(path) -> None:
    split = dealt(path)
    for ids in split.train:
        labels, counts = np.unique(split.labels[ids], return_counts=True)
        assert len(labels) == 3
        assert counts.tolist() == [200, 200, 200]


@pytest.mark.data
def test_windows_of_one_execution_are_in_one_part() -> None:
    experiment = parse_experiment(read_yaml(EXPERIMENTS / "har" / "fedavg.yaml"))
    dataset = experiment.dataset.build().load()
    split = deal(experiment, dataset)
    execution = dataset.columns["execution"][split.image_ids]
    for train, test in zip(split.train, split.test, strict=True):
        assert not np.isin(execution[train], execution[test]).any()
    assert (split.num_clients, np.bincount(split.groups).tolist()) == (46, [23, 23])


@pytest.mark.data
@pytest.mark.parametrize(("folder", "clients"), [("power", 53), ("shakespeare", 13)])
def test_what_a_client_is_tested_on_comes_after_its_training(folder: str, clients: int) -> None:
    experiment = parse_experiment(read_yaml(EXPERIMENTS / folder / "fedavg.yaml"))
    dataset = experiment.dataset.build().load()
    split = deal(experiment, dataset)
    spans = dataset.columns["time"][split.image_ids]
    for train, test in zip(split.train, split.test, strict=True):
        assert spans[train].max() < spans[test].min()
    assert split.num_clients == clients

"""Components from outside the package, and the package from Python."""

import pytest
import yaml

import flray
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError

from scenarios import TINY

MINE = '''
from dataclasses import dataclass

import numpy as np
import torch
from pytorch_lightning import LightningModule

from flray.algorithms.fedavg import FedAvg
from flray.data.dataset import Dataset, Normalization
from flray.data.split import Split


class PlainModule(LightningModule):
    """Knows nothing of flray: a training_step, its own optimiser, torch's dropout."""

    def __init__(self, width: int = 8, num_classes: int = 10):
        super().__init__()
        layers = torch.nn.Flatten(), torch.nn.LazyLinear(width), torch.nn.Dropout(0.1)
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, num_classes))
        self.net(torch.zeros(1, 1, 4, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


@dataclass(frozen=True)
class Stripes:
    num: int = 60

    def load(self) -> Dataset:
        images = np.zeros((self.num, 1, 4, 4), np.uint8)
        images[np.arange(self.num), 0, np.arange(self.num) % 4] = 255
        scale = Normalization((0.0,), (1.0,))
        return Dataset("stripes", images, np.arange(self.num) % 4, self.num, 4, scale)


@dataclass(frozen=True)
class Halves:
    def split(self, dataset: Dataset, seed: int) -> Split:
        ids = np.arange(60)
        parts = [tuple(np.split(p, 2)) for p in (ids[:40], ids[40:50], ids[50:])]
        return Split(ids, dataset.labels, *parts)


@dataclass(frozen=True)
class HalfWay(FedAvg):
    """A direction half as long."""

    def gradient(self, grad, w, batch, w0, memo):
        return {name: g / 2 for name, g in grad(w, batch).items()}
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "mine_of_tests.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_dataset_split_model_and_algorithm_of_ones_own(outside) -> None:
    experiment = {
        "dataset": {"name": "mine_of_tests:Stripes", "num": 60},
        "split": "mine_of_tests:Halves",
        "model": {"name": "mine_of_tests:PlainModule", "width": 12},
        "algorithm": "mine_of_tests:HalfWay",
        "train": {"optimizer": "module", "epochs": 3},
        "rounds": 5,
    }
    result = flray.run(experiment, outside / "run")
    assert result.summary["accuracy_mean"] == 1
    assert result.summary["model"] == "mine_of_tests:PlainModule"


def test_run_from_python_is_the_same_as_from_a_file(tmp_path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    a = flray.run(file, tmp_path / "a", ["rounds=2"])
    b = flray.run(TINY | {"rounds": 2}, tmp_path / "b")
    assert a.summary["params_sha256"] == b.summary["params_sha256"]
    assert list(a.rounds["round"]) == [1, 2]


@pytest.mark.usefixtures("outside")
def test_half_a_gradient_is_half_a_learning_rate(tmp_path) -> None:
    plain = {**TINY, "execution": {"precision": "float64"}}
    half = flray.run(plain, tmp_path / "a", ["algorithm=mine_of_tests:HalfWay"])
    slow = flray.run(plain, tmp_path / "b", ["train.lr=0.05"])
    assert half.summary["loss_mean"] == pytest.approx(slow.summary["loss_mean"], abs=1e-12)


@pytest.mark.parametrize(
    "name",
    [":", "..:x", "a b:c", "builtins:dict", "ray:init", "flray:run", "os:path", "json:JSONDecoder"],
)
@pytest.mark.parametrize("key", ["dataset", "split", "model", "algorithm"])
def test_names_that_are_no_component_are_refused(name, key) -> None:
    with pytest.raises(ExperimentError, match=key):
        parse_experiment({**TINY, key: name})


@pytest.mark.parametrize("name", [":", "builtins:dict", "ray:init", "mine:Stage"])
def test_names_that_are_no_stage_are_refused(name) -> None:
    algorithm = {"name": "flhc", "clustering": {"distance": name}}
    with pytest.raises(ExperimentError, match="distance"):
        parse_experiment({**TINY, "algorithm": algorithm})

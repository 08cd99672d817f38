"""Components from outside the package, and the package from Python."""

import json
import shutil
import sys
from contextlib import chdir
from dataclasses import make_dataclass
from functools import partial

import pytest
import yaml

import flray
from flray.cli.campaign import read_campaign
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError
from flray.imports import is_inside_run
from flray.runs.preparing import load_dataset, prepare
from flray.sweeps.describing import planned_rows
from flray.sweeps.space import parse_space

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


LOADS = ("{}['x']", "open('missing.csv')", "np.ones(2) + np.ones(3)")


@pytest.mark.parametrize("load", LOADS, ids=["key", "file", "shapes"])
def test_an_error_of_ones_own_dataset_is_one_message_with_its_line(load, tmp_path, monkeypatch):
    name = f"loading_{LOADS.index(load)}"
    lines = ["import dataclasses", "import numpy as np", "@dataclasses.dataclass", "class Data:"]
    lines += [f"    load = lambda self: {load}"]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    plain = {**TINY, "dataset": f"{name}:Data"}
    message = rf"^dataset {name}:Data \({name}.py, line 5\): \S"
    with pytest.raises(ExperimentError, match=message):
        load_dataset(parse_experiment(plain))
    with pytest.raises(ExperimentError, match=message):
        planned_rows(parse_space({"experiment": plain, "space": {"seed": [0]}}))


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


# Each of these writes a file when it is called.
STRANGE = """
from pathlib import Path

import torch
from pytorch_lightning import LightningModule

class Marks:
    def __init__(self, **keys):
        Path("ran").touch()

class NoArguments(Marks):
    def __call__(self): ...
    def load(self, environment, name): ...

class Network(Marks, torch.nn.Module):
    def training_step(self, batch): ...

class Empty(LightningModule):
    def __init__(self):
        Path("ran").touch()

def function(**keys):
    Path("ran").touch()

instance = object()
"""
EVERY_KIND = ["dataset", "split", "model", "algorithm", "tracking"]
STAGES = ["signature", "embed", "distance", "relate", "partition"]


def with_name(key: str, name: object) -> dict[str, object]:
    """The tiny experiment in which one component, stage or encoder is this one."""
    if key in STAGES:
        return {**TINY, "algorithm": {"name": "flhc", "clustering": {key: name}}}
    if key.startswith("encoder."):
        encoder = {"dataset": "digits", "model": "conv_ae", key.partition(".")[2]: name}
        signature = {"name": "encoder_centres", "encoder": encoder}
        return {**TINY, "algorithm": {"name": "flt", "clustering": {"signature": signature}}}
    return {**TINY, key: name}


NO_COMPONENTS = [
    *(":", "..:x", "a b:c", "builtins:dict", "ray:init", "flray:run", "os:path"),
    *("json:JSONDecoder", "functools:partial", "torch.nn:Linear", "click:Command"),
    "sympy.plotting.experimental_lambdify:lambdify",  # executes text when it is built
    *("strange_of_tests:Marks", "strange_of_tests:NoArguments", "strange_of_tests:Network"),
    *("strange_of_tests:Empty", "strange_of_tests:function", "strange_of_tests:instance"),
]


@pytest.mark.parametrize("key", [*EVERY_KIND, *STAGES, "encoder.dataset", "encoder.model"])
def test_names_that_are_no_component_are_refused_and_never_called(key, tmp_path) -> None:
    (tmp_path / "strange_of_tests.py").write_text(STRANGE)
    for name in NO_COMPONENTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            sys.modules.pop("strange_of_tests", None)
            patch.setattr(sys, "path", list(sys.path))
            with pytest.raises(ExperimentError, match=key.rpartition(".")[2]):
                parse_experiment(with_name(key, {"name": name}))
        assert not (tmp_path / "ran").exists(), name


SHELL = {"name": "subprocess:Popen", "args": "touch ran", "shell": True}


@pytest.mark.parametrize("key", [*EVERY_KIND, *STAGES, "encoder.dataset", "encoder.model"])
def test_no_experiment_runs_a_command(key, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match=r"subprocess:Popen"):
        parse_experiment(with_name(key, SHELL))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["search", "scheduler"])
def test_no_space_runs_a_command(key, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = {"experiment": dict(TINY), "space": {"train.lr": [0.1, 0.2]}, key: SHELL}
    with pytest.raises(ExperimentError, match=rf"unknown {key} 'subprocess:Popen'"):
        parse_space(space)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["antigravity:x", "this:d", "test.regrtest:x", "pip.__main__:x"])
def test_modules_of_python_and_programs_are_not_imported(name) -> None:
    before = set(sys.modules)
    with pytest.raises(ExperimentError, match="belongs to Python itself or is a program"):
        parse_experiment({**TINY, "dataset": name})
    assert name.partition(":")[0] not in set(sys.modules) - before


class Methods:
    """Everything that an algorithm has but the hook."""

    def init(self, fed): ...
    def cohort(self, state, t, fed): ...
    def round(self, state, cohort, fed): ...
    def deploy(self, state, clients, fed): ...
    def partition(self, state): ...


class Proximal:
    def __call__(self, grad, w, batch, w0, memo): ...


HOOKS = {
    "a function": staticmethod(Proximal()),
    "a partial": partial(Proximal.__call__, None),
    "an object that is called": Proximal(),
    "a property": property(repr),
}


def test_an_algorithm_without_a_local_equation_is_refused() -> None:
    message = r"Mine' cannot be used: it has no gradient\(grad, w, batch, w0, memo\)"
    with pytest.raises(ExperimentError, match=message):
        parse_experiment({**TINY, "algorithm": make_dataclass("Mine", (), bases=(Methods,))})


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
def test_a_local_equation_is_any_attribute_that_can_be_called(hook) -> None:
    mine = make_dataclass("Mine", (), bases=(Methods,), namespace={"gradient": hook})
    parse_experiment({**TINY, "algorithm": mine})


WRONG = {  # by the name of the file; folders of tests stay on sys.path
    "wrong_syntax": ("class Mine\n", r"expected ':' \(wrong_syntax\.py, line 1\)"),
    "wrong_import": ("import numpyy\n", r"'numpyy' \(wrong_import\.py, line 1\)"),
    "wrong_name": ("\n@dataclas\nclass Mine: ...\n", r"'dataclas'.* \(wrong_name\.py, line 2\)"),
    "wrong_default": (
        "import dataclasses\n@dataclasses.dataclass\nclass Mine:\n    reach: list = []\n",
        r"ValueError: mutable default.* \(wrong_default\.py, line 2\)",
    ),
}


@pytest.mark.parametrize("module", WRONG)
def test_a_file_that_cannot_be_imported_is_refused_with_its_line(
    module: str, tmp_path, monkeypatch
) -> None:
    content, reason = WRONG[module]
    (tmp_path / f"{module}.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match=rf"cannot be imported: .*{reason}; correct the file"):
        parse_experiment({**TINY, "algorithm": f"{module}:Mine"})


def test_a_callback_is_one_of_lightnings() -> None:
    execution = {"engine": "lightning", "callbacks": ["subprocess:Popen", "torch.nn:Linear"]}
    with pytest.raises(ExperimentError, match=r"callback 'subprocess:Popen' is not imported"):
        prepare(parse_experiment({**TINY, "execution": execution}))
    execution["callbacks"] = ["torch.nn:Linear"]
    with pytest.raises(ExperimentError, match=r"it is no subclass of pytorch_lightning\.Callback"):
        prepare(parse_experiment({**TINY, "execution": execution}))


def test_no_file_of_the_current_folder_takes_the_place_of_an_installed_module(outside) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [entry for entry in sys.path if entry != str(outside)])
        parse_experiment({**TINY, "algorithm": "mine_of_tests:HalfWay"})
        assert sys.path[-1] == str(outside)


COMMAND = json.dumps({"overrides": [], "runs": []})
FOREIGN = ["", "{", "[]", "null", '{"runs": []}', '{"argv": ["make"]}', "[" * 100_000, "ÿ"]


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: repr(content[:12]))
def test_a_file_command_json_of_another_program_makes_no_folder_of_runs(content, tmp_path) -> None:
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    (tmp_path / "command.json").write_text(content, encoding="latin-1")
    assert not is_inside_run(here)
    (tmp_path / "command.json").write_text(COMMAND)
    assert is_inside_run(here)


@pytest.fixture
def somebodys(tmp_path, known_run, monkeypatch):
    """A folder of runs that holds a module too, which its configuration names."""
    folder = tmp_path / "somebodys"
    shutil.copytree(known_run().path, folder)
    (folder / "strange.py").write_text("from pathlib import Path\n\nPath('ran').touch()\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.mark.parametrize("has_environment", [True, False])
@pytest.mark.parametrize("here", [".", "checkpoints", ".."])
def test_a_run_names_no_module_of_its_own_folder(somebodys, here, has_environment) -> None:
    """Neither from inside the folder, nor as a package from the folder above it."""
    config = yaml.safe_load((somebodys / "config.yaml").read_text())
    name = "somebodys.strange:Model" if here == ".." else "strange:Model"
    config["model"] = {"name": name}
    (somebodys / "config.yaml").write_text(yaml.safe_dump(config))
    (somebodys / "summary.json").unlink()  # which would not fit the other files
    if not has_environment:
        (somebodys / "environment.json").unlink()
        (somebodys / "rounds.parquet").unlink()
    with chdir(somebodys / here):
        for read in (
            lambda: flray.load(somebodys).model(0),
            lambda: read_campaign([], somebodys, True),
        ):
            with pytest.raises(ExperimentError, match=r"in a folder of runs|No module named"):
                read()
    assert not list(somebodys.parent.rglob("ran"))

"""flray from Python: objects as components, and what a result gives."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

import flray
from flray.algorithms.fedprox import FedProx
from flray.algorithms.flhc import Flhc
from flray.algorithms.ifca import Ifca
from flray.cli import cli
from flray.config.experiment import parse_experiment
from flray.data.splits.label_swap import LabelSwap
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.models.mlp200 import Mlp200
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import deployed_models

from scenarios import TINY

pytestmark = pytest.mark.slow


class Small(LightningModule):
    """Knows nothing of flray."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, width), torch.nn.Linear(width, 3)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


LABELS = torch.arange(90) % 3
IMAGES = torch.nn.functional.one_hot(LABELS, 16).float().view(90, 4, 4) * 2
DATA = (IMAGES, LABELS, IMAGES[:30], LABELS[:30])
KEYS = {
    "split": {"name": "iid", "clients": 3},
    "algorithm": "fedavg",
    "train": {"lr": 0.1, "epochs": 5},
    "rounds": 2,
}


def test_a_module_and_tensors_run_and_come_back_as_a_model() -> None:
    rows: list[dict] = []
    module = Small(width=12)
    before = module.net[1].weight.detach().clone()
    result = flray.run(dataset=DATA, model=module, on_round=rows.append, **KEYS)
    assert [row["round"] for row in rows] == [1, 2]
    assert torch.equal(module.net[1].weight, before)  # the user's own module is left alone
    trained = result.model(client=2)
    assert isinstance(trained, Small)
    assert not trained.training
    assert not torch.equal(trained.net[1].weight, before)
    predicted = trained(IMAGES[:30, None]).argmax(1)
    assert result.summary["accuracy_mean"] == 1
    assert (predicted == LABELS[:30]).all()


def test_the_initial_weights_are_those_of_the_module() -> None:
    """FedAvg of one round with a step of length 1e-9 gives the weights back."""
    module = Small()
    keys = KEYS | {"rounds": 1, "train": {"lr": 1e-9}}
    trained = flray.run(dataset=DATA, model=module, **keys).model(0)
    assert torch.allclose(trained.net[1].weight, module.net[1].weight, atol=1e-6)


def test_a_function_builds_the_same_model_for_the_same_seed() -> None:
    one, two = (flray.run(dataset=DATA, model=lambda: Small(4), **KEYS).summary for _ in range(2))
    other = flray.run(dataset=DATA, model=lambda: Small(4), seed=1, **KEYS).summary
    assert one["params_sha256"] == two["params_sha256"] != other["params_sha256"]


def test_float_images_reach_the_model_as_they_are_and_bytes_are_divided_by_255() -> None:
    as_bytes = (IMAGES * 127).byte()
    floats = as_bytes.float() / 255
    keys = KEYS | {"model": lambda: Small(4)}
    byte_run = flray.run(dataset=flray.from_tensors(as_bytes, LABELS, as_bytes, LABELS), **keys)
    float_run = flray.run(
        dataset=(TensorDataset(floats, LABELS), TensorDataset(floats, LABELS)), **keys
    )
    assert byte_run.summary["params_sha256"] == float_run.summary["params_sha256"]


def test_one_tensor_dataset_is_the_pair_of_its_tensors() -> None:
    keys = KEYS | {"split": {**KEYS["split"], "test": "own_split"}, "model": lambda: Small(4)}
    pair, tensors = (
        flray.run(dataset=dataset, **keys)
        for dataset in ((IMAGES, LABELS), TensorDataset(IMAGES, LABELS))
    )
    assert pair.summary["params_sha256"] == tensors.summary["params_sha256"]


def test_objects_and_yaml_are_the_same_experiment() -> None:
    """Components that are dataclasses are written as the YAML that describes them."""
    given = {
        "dataset": "digits",
        "split": LabelSwap(clients=4, groups=2),
        "model": Mlp200,
        "algorithm": Flhc(rounds_before=1),
        "train": Training(lr=0.05, epochs=2),
    }
    described = parse_experiment(yaml.safe_load(yaml.safe_dump(parse_experiment(given).plain)))
    assert described.plain == parse_experiment(given).plain
    assert described.algorithm.build() == given["algorithm"]
    assert described.settings.train == given["train"]
    assert described.plain["split"]["groups"] == 2


@pytest.mark.parametrize("mu", [np.float64(0.25), np.float32(0.25)])
def test_numbers_of_numpy_in_components_are_those_of_python(mu) -> None:
    plain = parse_experiment(
        {**KEYS, "dataset": "digits", "model": "mlp200", "algorithm": FedProx(mu=mu)}
    ).plain
    assert yaml.safe_load(yaml.safe_dump(plain))["algorithm"] == {"name": "fedprox", "mu": 0.25}


def test_what_no_yaml_can_have_is_refused_unless_it_is_a_default() -> None:
    class Net(Mlp200):
        def __init__(self, image_shape, num_classes, activation=nn.ReLU, scale=None):
            super().__init__(image_shape, num_classes)

    keys = {**KEYS, "dataset": "digits"}
    described = parse_experiment({**keys, "model": Net}).plain["model"]
    assert set(described) == {"name", "scale"}
    with pytest.raises(ExperimentError, match=r"mu of .*FedProx must be what YAML .* got tensor"):
        parse_experiment({**keys, "model": Net, "algorithm": FedProx(mu=torch.ones(1))})


def test_a_module_that_is_built_cannot_start_several_models() -> None:
    with pytest.raises(ExperimentError, match="function that builds it"):
        flray.run(dataset=DATA, model=Mlp200((1, 4, 4), 3), **KEYS | {"algorithm": Ifca(number=2)})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ((IMAGES, LABELS[:-1]), "each of 90 training images, got 89 labels"),
        ((IMAGES[0, 0], LABELS), "images must be"),
        ((IMAGES, LABELS.float()), "labels must be whole numbers"),
        ((IMAGES, LABELS, IMAGES[:, :2], LABELS), "both must have one shape"),
        ((IMAGES,), "TensorDatasets, a LightningDataModule"),
    ],
)
def test_wrong_tensors_are_refused(dataset, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        flray.run(dataset=dataset, model=Small(), **KEYS)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    plain = {
        **TINY,
        "split": {"name": "label_swap", "clients": 6, "groups": 2},
        "algorithm": {
            "name": "flhc",
            "rounds_before": 1,
            "clustering": {"partition": {"name": "hierarchical", "number": 2, "threshold": None}},
        },
    }
    return flray.run(plain, tmp_path_factory.mktemp("clustered") / "run")


def test_a_loaded_run_gives_the_models_that_were_deployed(clustered) -> None:
    loaded = flray.load(clustered.path)
    assert loaded.summary == clustered.summary
    experiment = parse_experiment(dict(RunDirectory(loaded.path).config()))
    bank = deployed_models(experiment, RunDirectory(loaded.path))[1]
    assert bank.sha256() == loaded.summary["params_sha256"]
    clusters = loaded.clusters
    assert sorted(clusters.unique()) == [0, 1]
    apart = [clusters.index[clusters == c][0] for c in (0, 1)]
    one, other = (loaded.model(int(client)) for client in apart)
    assert any((a != b).any() for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(ExperimentError, match=r"0\.\.5"):
        loaded.model(6)


def test_an_exported_checkpoint_is_read_by_lightning_and_by_torch(clustered, tmp_path) -> None:
    file = tmp_path / "client.ckpt"
    done = CliRunner().invoke(cli, ["export", str(clustered.path), "--client", "3", str(file)])
    assert done.exit_code == 0, done.output
    expected = clustered.model(3).state_dict()
    module = Mlp200.load_from_checkpoint(file)
    read = torch.load(file, weights_only=True)
    for name, leaf in expected.items():
        assert torch.equal(module.state_dict()[name], leaf)
        assert torch.equal(read["state_dict"][name], leaf)
    assert read["hyper_parameters"]["hidden"] == 16


def test_an_export_says_that_a_client_uses_more_than_the_model_written(tmp_path) -> None:
    mixed = flray.run({**TINY, "algorithm": "fedem", "rounds": 1}, tmp_path / "run")
    shares, file = mixed.mixture(2), tmp_path / "client.ckpt"
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1)
    done = CliRunner().invoke(cli, ["export", str(mixed.path), "--client", "2", str(file)])
    assert "client 2 uses a mixture of 3 models" in done.stderr
    assert f"the largest weight, {max(shares):.2f}" in done.stderr


def test_figures_by_name(clustered) -> None:
    for name in ("accuracy", "clients", "bytes", "distance", "graph"):
        assert isinstance(clustered.figure(name), Figure)
    with pytest.raises(ExperimentError, match="known: accuracy"):
        clustered.figure("pie")
    with pytest.raises(ExperimentError, match="there are: 1"):
        clustered.figure("distance", round=3)


def test_a_run_of_objects_needs_them_again_for_its_models(tmp_path) -> None:
    flray.run(dataset=DATA, model=Small(), out=tmp_path / "run", **KEYS)
    loaded = flray.load(tmp_path / "run")
    assert loaded.summary["accuracy_mean"] > 0.5
    with pytest.raises(ExperimentError, match=r"flray.load\(path, dataset="):
        loaded.model(0)
    again = flray.load(tmp_path / "run", dataset=DATA, model=Small())
    assert again.model(0)(IMAGES[:3, None]).shape == (3, 3)
    wrong = flray.load(tmp_path / "run", dataset=(IMAGES + 1, LABELS), model=Small())
    with pytest.raises(ExperimentError, match="another dataset"):
        wrong.model(0)


@pytest.mark.usefixtures("no_figures")
def test_a_folder_of_several_runs_is_a_mapping_of_them_by_name(tmp_path) -> None:
    given = ["fedavg", {"name": "flhc", "rounds_before": 1}]
    results = flray.run(TINY, tmp_path / "both", algorithm=given)
    loaded = flray.load(tmp_path / "both")
    assert list(results) == list(loaded) == ["fedavg", "flhc"]
    assert loaded["flhc"].path == tmp_path / "both" / "flhc" / "seed_0"
    assert loaded["flhc"].summary == results["flhc"].summary
    assert loaded["flhc"].summary != loaded["fedavg"].summary
    alone = flray.run(TINY, algorithm="fedavg").summary
    assert loaded["fedavg"].summary["params_sha256"] == alone["params_sha256"]
    assert loaded.table["accuracy_mean"].to_dict() == {
        name: result.summary["accuracy_mean"] for name, result in loaded.items()
    }
    assert "both" in flray.report(loaded).read_text()
    with pytest.raises(KeyError, match="there are: fedavg, flhc"):
        loaded["flch"]
    with pytest.raises(ExperimentError, match="holds no run"):
        flray.load(tmp_path / "absent")


class Unsized(Small):
    def __init__(self, width: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"overrides": "rounds=1"}, r"overrides must be a list, as in \['rounds=1'\]"),
        ({"lr": 0.1}, "did you mean train.lr"),
        ({"dataset": IMAGES}, "a dataset is a name.*got 1 value of Tensor"),
        ({"dataset": pd.DataFrame({"x": [1]})}, "flray.from_frame or .* 1 value of DataFrame"),
        ({"split": "natural", "dataset": "digits"}, r"in Python dataset=\(x, y\) with clients="),
        ({"model": Unsized}, r"no default for 'width'; give functools.partial\(Unsized, width=\."),
        ({"model": torch.nn.Linear(2, 2)}, "must be a LightningModule, got .*Linear"),
        ({"model": [torch.nn.Linear(2, 2)]}, "model must be a name"),
        ({"algorithm": ["fedavg", "fedavg"]}, "'fedavg' twice"),
    ],
    ids=["overrides", "lr", "images", "frame", "owners", "class", "module", "modules", "twice"],
)
def test_mistakes_are_one_message(keys, expected) -> None:
    with pytest.raises(ExperimentError, match=expected) as caught:
        flray.run(TINY, **keys)
    assert "\n" not in str(caught.value)


def test_what_is_no_data_frame_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"frame must be a pandas DataFrame, got dict; "):
        flray.from_frame({"owner": ["a"], "y": [1.0]}, client="owner", target="y")


def test_a_report_of_nothing_is_refused() -> None:
    with pytest.raises(ExperimentError, match="expected a folder or a result"):
        flray.report()


def test_a_space_file_beside_runs_hides_none_of_them(tmp_path) -> None:
    (tmp_path / "space.yaml").write_text("experiment: mine.yaml\n")
    flray.run(TINY, tmp_path / "runs" / "mine", rounds=1)
    assert list(flray.load(tmp_path / "runs")) == ["mine"]


def test_names_of_several_seeds_have_the_seed(tmp_path) -> None:
    results = flray.run(TINY, tmp_path / "seeds", seed=3, seeds=2, rounds=1)
    assert list(results) == ["experiment/seed_3", "experiment/seed_4"]
    assert results.table["seed"].tolist() == [3, 4]
    one, two = results.values()
    assert one.summary["params_sha256"] != two.summary["params_sha256"]
    done = CliRunner().invoke(cli, ["export", str(results.path), "--client", "0", "x.ckpt"])
    assert "holds 2 runs; name the folder of one" in str(done.exception)


@pytest.mark.usefixtures("no_figures")
def test_a_report_of_results(clustered, tmp_path) -> None:
    page = flray.report(clustered, out=tmp_path / "page.html")
    assert "label_swap" in page.read_text()


def test_python_is_silent_unless_asked(capsys, tmp_path) -> None:
    flray.run(TINY, overrides=["rounds=1"])
    assert capsys.readouterr() == ("", "")
    flray.run(TINY, tmp_path / "loud", rounds=1, progress=True)
    assert "round 1/1" in capsys.readouterr().out


def settings_of_torch() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    return (*flags, torch.get_num_threads(), torch.get_float32_matmul_precision())


def test_settings_of_torch_are_left_as_they_were(clustered, monkeypatch) -> None:
    """A host fixes others, for the bits of its results."""
    for name in ("benchmark", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    torch.set_num_threads(2)
    before = settings_of_torch()
    inside: list[tuple[object, ...]] = []
    try:
        flray.run(TINY, rounds=1, on_round=lambda _: inside.append(settings_of_torch()))
        assert inside[0][:3] == (False, True, False)
        assert settings_of_torch() == before
        flray.load(clustered.path).model(0)
        assert settings_of_torch() == before
    finally:
        torch.set_num_threads(1)
    assert np.isfinite(clustered.summary["accuracy_mean"])

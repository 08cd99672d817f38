"""What `flray check` refuses is what a run would refuse, or fail with in its first round."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy

from flray.config.experiment import Experiment
from flray.errors import ClientFailure, ExperimentError
from flray.execution import nodes
from flray.models.classifier import Classifier
from flray.runs.rehearsal import describe

from scenarios import run_experiment, tiny_experiment


class Square(Classifier):
    """Takes images of 28 x 28 pixels, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(28 * 28, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


class NoLosses(LightningModule):
    """Has a training step alone, on images of any size."""

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(torch.Size(image_shape).numel(), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))

    def training_step(self, batch, index):
        return cross_entropy(self(batch[0]), batch[1])


@pytest.fixture(autouse=True)
def _importable(monkeypatch) -> None:
    module = ModuleType("rehearsed")
    module.Square, module.NoLosses = Square, NoLosses
    monkeypatch.setitem(sys.modules, "rehearsed", module)


SMALL = "dataset={name: digits, size: 8}"
ENCODER = "algorithm.clustering.signature.encoder={dataset: digits, model: conv_ae}"
REFUSED = {
    "public examples": ("algorithm=flis_dc", "split.server"),
    "public examples for a stage": ("algorithm=flis_hc", "split.server"),
    "plain steps": ("algorithm=scaffold; train={optimizer: adam}", "train.optimizer=sgd"),
    "those heard alone": ("algorithm=fednova; aggregate.unheard=stale", "unheard=ignore"),
    "clients for all stages": ("algorithm={name: flt, stages: 99}", "stages must be at most"),
    "ground truth": (
        "algorithm={name: flhc, clustering: {partition: label_counts}}",
        "uses_ground_truth: true",
    ),
    "losses of examples": ("model=rehearsed:NoLosses; algorithm=ifca", "example_losses"),
    "validation examples": (
        "algorithm={name: ifca, choose_by: validation}; split.validation=0",
        "no client has a validation part: set split.validation > 0, or algorithm.choose_by=train",
    ),
    "losses of examples of newcomers": (
        "model=rehearsed:NoLosses; algorithm=flis_hc; split.server=30; "
        "events=[{round: 2, kind: join, clients: [5]}]",
        "example_losses",
    ),
    "test data of holdout clients": (
        "algorithm={name: flis_hc, choose_by: test_accuracy}; split.server=30; split.holdout=1",
        "reads the test data of clients; say `uses_ground_truth: true`",
    ),
    "images of the encoder's shape": (
        f"algorithm=flt; {ENCODER}",
        r"\(1, 28, 28\).* clients hold images \(1, 8, 8\)",
    ),
    "images of an encoder for statistics": (
        f"algorithm=repa; {ENCODER}",
        r"\(1, 28, 28\).* clients hold images \(1, 8, 8\)",
    ),
    "inputs of so many numbers": ("algorithm=pca_km_hc", "components must be at most the 64 num"),
    "one vector of each client": (
        "algorithm={name: flhc, clustering: {signature: subspace}}",
        "L2 needs one vector a client, and Subspace sends several",
    ),
    "one vector for k-means": (
        "algorithm={name: pacfl, clustering: {partition: {name: kmeans, number: 2}}}",
        "KMeans needs one vector a client, and Subspace sends several",
    ),
    "relations": (
        "algorithm={name: flhc, clustering: {partition: components}}",
        "Components needs a relation between clients, got relate: none",
    ),
    "no more clusters than clients": (
        "algorithm={name: repa, rounds_before: 2, clustering: {partition: {number: 7}}}",
        "number must be at most the number of clients, 6, got 7",
    ),
    "no more clusters of groups than clients": (
        "algorithm={name: flhc, rounds_before: 1, clustering: {partition: {name: two_level, "
        "number: 7}}}",
        "number must be at most the number of clients, 6, got 7",
    ),
    "models of clients that train": (
        "algorithm={name: ifca, start: clients}; train.drop_last=true; train.batch_size=999",
        "needs the models of 2 clients, and 0 of those drawn .* lower train.batch_size",
    ),
    "a weight of each client's own": (
        "algorithm={name: fedamp, alpha: 0.9}; participation=1",
        "own model would have the weight -3.5 in its attention over 6 clients",
    ),
    "an algorithm that places clients": (
        "algorithm={name: flhc, rounds_before: 1}; evaluate.robustness={draws: 3}",
        r"evaluate\.robustness needs .*Flhc does not",
    ),
    "an algorithm that places clients, in each of its rounds": (
        "algorithm={name: fedsem, number: 2}; evaluate.robustness={draws: 3}",
        r"evaluate\.robustness needs .*FedSem does not",
    ),
    "no more clusters than clients of the first stage": (
        "algorithm={name: pca_km_hc, stages: 3, clustering: {signature: {components: 16}, "
        "partition: {name: hierarchical, linkage: average, number: 3}}}",
        "number must be at most the number of clients, 2, got 3",
    ),
    "no more clusters than founders": (
        "algorithm={name: flexcfl, founders: 2}",
        "number must be at most the number of clients, 2, got 3",
    ),
    "layers": ("algorithm={name: lg_fedavg, global_layers: 9}", "this model has 2"),
}


def experiment(arguments: str) -> Experiment:
    return tiny_experiment(SMALL, *filter(None, arguments.split("; ")))


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_method_that_lacks_something_is_refused_before_the_directory_is_made(
    tmp_path, arguments, message
) -> None:
    with pytest.raises(ExperimentError, match=message):
        describe(experiment(arguments))
    with pytest.raises(ExperimentError, match=message):
        run_experiment(experiment(arguments), tmp_path / "run")
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize(
    "method", ["{name: cfl, rounds_before: 1}", "clove", "feddrift", "fedsem", "flis_dc"]
)
def test_robustness_is_refused_for_methods_that_cluster_by_rules_of_their_own(method) -> None:
    arguments = f"algorithm={method}; split.server=30; evaluate.robustness={{draws: 3}}"
    with pytest.raises(ExperimentError, match=r"evaluate\.robustness needs an algorithm that plac"):
        describe(experiment(arguments))


def test_robustness_is_left_out_for_methods_that_never_cluster() -> None:
    """So that one file compares FedAvg with methods that do."""
    assert "of ifca with" in describe(experiment("algorithm=ifca; evaluate.robustness={draws: 3}"))


def test_an_encoder_without_its_images_is_refused_before_the_directory_is_made(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path))
    where = "algorithm.clustering.signature.encoder"
    encoder = "{dataset: cifar100_subset, model: conv_ae}"
    wrong = experiment(f"algorithm=flt; {where}={encoder}")
    for start in (describe, lambda wrong: run_experiment(wrong, tmp_path / "run")):
        with pytest.raises(ExperimentError, match="cifar100 was not found") as raised:
            start(wrong)
        for advice in (f"{where}.dataset.download=true", f"{where}.dataset.files=cifar100_jpeg"):
            assert advice in str(raised.value)
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("engine", ["vectorized", "loop", "lightning"])
def test_a_model_of_another_size_is_refused_by_a_batch(tmp_path: Path, engine) -> None:
    wrong = experiment(f"model=rehearsed:Square; execution.engine={engine}")
    with pytest.raises(ExperimentError, match=r"Square cannot train on .*\(1, 8, 8\).*784"):
        describe(wrong)
    with pytest.raises(ClientFailure, match=r"784.* the cause is the model") as raised:
        run_experiment(wrong, tmp_path / "run")
    assert "drop" not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        "metric: ExplainedVariance",
        "metric: classification.MulticlassF1Score, options: {num_classes: 3}",
    ],
)
def test_a_metric_that_does_not_fit_the_outputs_is_refused(fields: str) -> None:
    with pytest.raises(
        ExperimentError, match=r"evaluate\.scores: .* failed on outputs \(\d+, 10\)"
    ):
        describe(experiment(f"evaluate.scores=[{{name: torchmetrics, {fields}}}]"))


def test_actors_that_this_machine_cannot_hold_are_refused(monkeypatch) -> None:
    large = experiment("execution.executor=ray; execution.actors.memory_gb=99999")
    with pytest.raises(ExperimentError, match=r"2 x 1e\+05 .* GB of memory"):
        describe(large)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # another machine's memory is not known here
    assert "2 client actors" in describe(large)


def test_this_machine_has_what_ray_counts() -> None:
    here = nodes.this_machine()
    assert here["CPU"] >= 1
    assert 1e8 < here["memory"] < 1e14


def test_a_rehearsal_changes_no_settings_of_torch() -> None:
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic
    assert "4 rounds of fedavg" in describe(experiment("execution.threads=2"))
    assert (torch.get_num_threads(), torch.backends.cudnn.deterministic) == before


def test_a_run_that_is_not_stacked_says_so_as_check_does(tmp_path, caplog) -> None:
    experiment = tiny_experiment(SMALL, "model=rehearsed:NoLosses", "rounds=1")
    caplog.set_level("INFO", logger="flray")
    run_experiment(experiment, tmp_path / "run")
    (remark,) = [line for line in caplog.messages if line.startswith("note: ")]
    assert remark.startswith("note: models are not stacked, which takes about twice as long: it ")
    assert remark.removeprefix("note: ") in describe(experiment)

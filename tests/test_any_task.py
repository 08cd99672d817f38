"""Regression and sequences with clients of the user's own, from the rows to trained models."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from pytorch_lightning import LightningModule
from torch import nn

import flray
from flray.cli import cli
from flray.data.owned import Rows
from flray.data.split import Split
from flray.data.tensors import from_tensors
from flray.engines.loop import Loop
from flray.engines.training import Training, plain_gradient
from flray.engines.vectorized import Vectorized
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import build_seeded
from flray.models.predictor import Predictor

from scenarios import RAGGED, block_of, place, some_long

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
OWNER = np.repeat(["b", "a", "c"], [9, 30, 14])
X = RNG.random((53, 4))
Y = X @ [1.0, -2.0, 0.5, 3.0] + 0.1 * RNG.random(53)
KIND = np.where(OWNER == "a", "city", "farm")
STEP = {
    "algorithm": "fedavg",
    "rounds": 1,
    "train": {"lr": 0.1, "batch_size": 1000},
    "execution": {"precision": "float64"},
    "split": {"name": "natural", "validation": 0},
}


def test_one_step_of_fedavg_on_least_squares_is_the_central_step() -> None:
    """w - lr * grad of the mean over all training rows, whoever holds them."""
    result = flray.run(dataset=(X, Y), clients=OWNER, model="linear", **STEP)
    data = Rows(X, Y, OWNER).dataset("tensors")
    split = result._experiment.split.build().split(data, 0)
    rows = split.image_ids[np.concatenate(split.train)]
    x, y = data.images[rows].astype(np.float64), data.labels[rows].astype(np.float64)
    module = build_seeded(lambda: MODELS["linear"]((4,), 1), _seed_of_initial_model())
    w = torch.cat([p.detach().flatten() for p in module.double().parameters()]).numpy()
    errors = x @ w[:4] + w[4] - y
    assert np.abs(errors).max() > 0.1
    w = w - 0.1 * 2 / len(x) * np.append(errors @ x, errors.sum())
    trained = result.model(client=0)
    found = torch.cat([p.detach().flatten() for p in trained.parameters()]).double().numpy()
    assert np.abs(found - w).max() < 1e-10


def _seed_of_initial_model() -> int:
    from flray.randomness import torch_seed

    return torch_seed(0, "initial model")


def test_how_rows_of_clients_alternate_in_a_file_changes_no_bit(tmp_path) -> None:
    frame = pd.DataFrame(X, columns=list("pqrs")).assign(owner=OWNER, kind=KIND, y=Y)
    turns, order = np.random.default_rng(1).permutation(OWNER), np.empty(53, np.int64)
    for name in "abc":
        order[turns == name] = np.flatnonzero(name == OWNER)
    digests = []
    for rows in (np.arange(53), order):
        frame.iloc[rows].to_csv(tmp_path / "visits.csv", index=False)
        dataset = {"name": "table", "file": str(tmp_path / "visits.csv")}
        dataset |= {"client": "owner", "target": "y", "group": "kind"}
        result = flray.run(dataset=dataset, model="mlp", **STEP)
        digests.append(result.summary["params_sha256"])
    assert digests[0] == digests[1]
    assert result.summary["clients"] == 3


def test_a_run_whose_files_have_changed_is_not_resumed(tmp_path, monkeypatch) -> None:
    """The dataset, of which the split has the targets alone, and metadata of clients."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(X, columns=list("pqrs")).assign(owner=OWNER, y=Y)
    beds = pd.DataFrame({"owner": list("abc"), "beds": [1, 2, 9]})
    frame.to_csv("visits.csv", index=False)
    beds.to_csv("beds.csv", index=False)
    signature = {"name": "metadata", "file": "beds.csv", "client": "owner"}
    clustering = {"signature": signature, "partition": TWO}
    keys = STEP | {
        "dataset": {"name": "table", "file": "visits.csv", "client": "owner", "target": "y"},
        "algorithm": {"name": "flhc", "rounds_before": 1, "clustering": clustering},
        "model": "linear",
    }
    result = flray.run(keys, "run")
    assert result.clusters.tolist() == [0, 0, 1]
    flray.run(keys, "run", resume=True, rounds=2)
    for file, changed in (("beds.csv", beds.assign(beds=9)), ("visits.csv", frame.assign(p=0.0))):
        content = Path(file).read_bytes()
        changed.to_csv(file, index=False)
        with pytest.raises(ExperimentError, match=r"the file of .*\.file has changed since"):
            flray.run(keys, "run", resume=True, rounds=3)
        Path(file).write_bytes(content)
    flray.run(keys, "run", resume=True, rounds=3)


def test_frames_clients_and_arrays_are_one_dataset() -> None:
    frame = pd.DataFrame(X.astype(np.float32), columns=list("pqrs")).assign(owner=OWNER, y=Y)
    framed = flray.from_frame(frame, client="owner", target="y")
    listed = flray.from_clients([(X[name == OWNER], Y[name == OWNER]) for name in "abc"])
    assert framed.client_names == ("a", "b", "c")
    assert np.array_equal(framed.images, listed.images)
    assert np.array_equal(framed.labels, listed.labels)
    keys = STEP | {"model": "linear"}
    one = flray.run(dataset=listed, **keys).summary["params_sha256"]
    other = flray.run(dataset=(torch.tensor(X), list(Y)), clients=OWNER, time=np.arange(53), **keys)
    assert one == other.summary["params_sha256"]
    del keys["split"]
    assert flray.run(dataset=listed, **keys).summary["clients"] == 3


def test_features_are_scaled_by_training_rows_alone() -> None:
    """Rows of the test part and of clients that never train may hold anything."""
    frame = pd.DataFrame(X.astype(np.float32), columns=list("pqrs")).assign(owner=OWNER, y=Y)
    split = {"name": "natural", "holdout": 1}
    keys = STEP | {"model": "linear", "split": split}
    digests = []
    for factor in (1.0, 1000.0):
        data = flray.from_frame(frame, client="owner", target="y")
        dealt = flray.data.SPLITS["natural"](holdout=1).split(data, 0)
        trained = dealt.image_ids[np.concatenate([dealt.train[i] for i in dealt.clients])]
        others = np.setdiff1d(np.arange(53), trained)
        data.images[others] *= factor
        digests.append(flray.run(dataset=data, **keys).summary["params_sha256"])
        assert len(others) > 20
        data.images[trained[:1]] *= 1.5  # whereas a training row changes the model
        assert flray.run(dataset=data, **keys).summary["params_sha256"] != digests[-1]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clients": OWNER[:-1]}, "client has 52 rows and inputs 53"),
        ({"groups": KIND}, r"clients=, .* one value for each example of dataset=\(x, y\)"),
        ({"clients": OWNER, "groups": OWNER[::-1]}, "has another group in row"),
        ({"clients": OWNER[:, None]}, r"client must have one value .*, got the shape \(53, 1\)"),
        ({"clients": [[0, 1], [2]] * 26 + [[0]]}, "rows of one length, got rows of several len"),
        ({"clients": OWNER, "model": "lenet5"}, r"images .* the shape \(4,\); .* linear, mlp"),
        ({"clients": OWNER, "split": {"name": "iid", "clients": 3}}, "are numbers: set split: nat"),
        ({"clients": OWNER, "algorithm": "fedrc"}, "fedrc counts the labels of clients, and"),
    ],
)
def test_wrong_owners_are_refused(keys, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        flray.run(dataset=(X, Y), **(STEP | {"model": "linear"} | keys))


OF_LABELS = {"name": "flhc", "rounds_before": 1, "clustering": {"partition": "label_counts"}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"evaluate": {"similarity": True}}, r"evaluate\.similarity counts .*; set it to false"),
        ({"evaluate": {"robustness": {"draws": 2}}}, r"evaluate\.robustness counts .* to null"),
        ({"algorithm": OF_LABELS}, "partition label_counts counts .* choose another partition"),
    ],
)
def test_whatever_counts_labels_refuses_numbers_before_the_run(keys, message, tmp_path) -> None:
    given = STEP | {"model": "linear", "clients": OWNER, "uses_ground_truth": True} | keys
    with pytest.raises(ExperimentError, match=message):
        flray.run(dataset=(X, Y), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_bfloat16_tensors_are_the_numbers_they_hold() -> None:
    rounded = torch.tensor(X).bfloat16()
    data = [from_tensors(x, np.zeros(53, int)) for x in (rounded, rounded.float())]
    assert data[0].images.dtype == np.float32
    np.testing.assert_array_equal(data[0].images, data[1].images)


class Empty(LightningModule):
    def training_step(self, batch, batch_idx):
        return batch[0].sum()


class Frozen(Empty):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).requires_grad_(False)


@pytest.mark.parametrize("model", [Empty, Frozen])
def test_a_model_with_nothing_to_train_is_refused(model) -> None:
    with pytest.raises(ExperimentError, match=rf"model .*{model.__name__} has no parameter that"):
        flray.run(dataset=(X, Y), clients=OWNER, **STEP | {"model": model})


def test_models_of_classes_refuse_numbers() -> None:
    images = RNG.random((53, 1, 28, 28))
    with pytest.raises(ExperimentError, match=r"lenet5 classifies, .* numbers; choose linear"):
        flray.run(dataset=(images, Y), clients=OWNER, **(STEP | {"model": "lenet5"}))


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn1d", "gru"])
def test_whole_numbers_are_inputs_as_floats_are(model) -> None:
    x = RNG.integers(-4, 5, (53, 6, 2) if model in ("gru", "cnn1d") else (53, 4))
    digests = [
        flray.run(dataset=(x.astype(kind), Y), clients=OWNER, model=model, **STEP).summary
        for kind in (np.int16, np.float64)
    ]
    assert digests[0]["params_sha256"] == digests[1]["params_sha256"]


TOKENS = RNG.integers(0, 5, (53, 8))
UNREADABLE = {
    "a float table": (
        "char_gru",
        X,
        TOKENS[:, 0],
        r"are floats of the shape \(4,\); choose linear,",
    ),
    "bytes": ("char_gru", TOKENS.astype(np.uint8), TOKENS, "are bytes .* give tokens as int64"),
    "pairs": ("char_gru", np.stack([TOKENS] * 2, -1), TOKENS, r"are whole numbers .*\(8, 2\)"),
    "unknown tokens": (
        "char_gru",
        TOKENS + 9,
        TOKENS,
        "knows the tokens 0 to 4, .* got .* in row 0",
    ),
    "negative tokens": (
        "char_gru",
        TOKENS - 1,
        TOKENS,
        "knows the tokens 0 to 4, .* got -1 in row",
    ),
    "one class": (
        "char_gru",
        TOKENS,
        TOKENS[:, 0],
        "each of the 8 tokens .* are classes of the sha",
    ),
    "fewer classes": ("char_gru", TOKENS, TOKENS[:, :4], r"each of the 8 tokens .* shape \(4,\)"),
    "numbers": ("char_gru", TOKENS, Y, "each of the 8 tokens .* are numbers of the shape"),
    "sequences": (
        "mlp",
        TOKENS,
        TOKENS,
        r"mlp gives one .* shape \(8,\); choose char_gru, which",
    ),
    "one class in a column": (
        "mlp",
        X,
        TOKENS[:, :1],
        r"classes of the shape \(1,\); give them the shape \(N,\), as y.flatten\(\) does",
    ),
    "one number": ("mlp", X[:, 0], Y, r"one number for each example; give them the shape \(N, 1\)"),
    "sequences by time": ("gru", TOKENS[..., None], TOKENS, "gru gives one prediction"),
    "sequences of images": ("mlp200", RNG.random((53, 1, 4, 4)), TOKENS, "mlp200 gives one predic"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_model_that_cannot_read_the_data_is_refused_before_the_run(case, tmp_path) -> None:
    model, x, y, message = UNREADABLE[case]
    with pytest.raises(ExperimentError, match=message):
        flray.run(dataset=(x, y), clients=OWNER, model=model, out=tmp_path / "run", **STEP)
    assert not (tmp_path / "run").exists()


def test_a_model_of_characters_is_refused_a_table_by_check_and_run(tmp_path, monkeypatch) -> None:
    frame = pd.DataFrame(X, columns=list("pqrs")).assign(owner=OWNER, y=KIND)
    frame.to_csv(tmp_path / "visits.csv", index=False)
    dataset = {"name": "table", "file": "visits.csv", "client": "owner", "target": "y"}
    (tmp_path / "visits.yaml").write_text(yaml.safe_dump(STEP | {"dataset": dataset}))
    monkeypatch.chdir(tmp_path)
    expected = (
        "model char_gru reads sequences of whole numbers, such as characters, and the inputs of "
        "visits are floats of the shape (4,); choose linear, mlp, cnn1d or gru, or give tokens as "
        "int64"
    )
    for command in ("check", "run"):
        done = CliRunner().invoke(cli, [command, "visits.yaml", "model=char_gru"])
        assert expected in (done.output + str(done.exception)).replace("\n", " ")
        assert isinstance(done.exception, ExperimentError) or done.exit_code == 2
    assert not Path("runs").exists()


@pytest.mark.parametrize("model", ["lenet5", pytest.param("conv_ae", marks=pytest.mark.long)])
def test_images_of_whole_numbers_are_inputs_as_floats_are(model) -> None:
    x = RNG.integers(0, 1000, (53, 1, 16, 16))
    digests = [
        flray.run(dataset=(x.astype(kind), TOKENS[:, 0]), clients=OWNER, model=model, **STEP)
        for kind in (np.int64, np.float64)
    ]
    assert len({run.summary["params_sha256"] for run in digests}) == 1


class Scaled(LightningModule):
    """Has a parameter and a buffer that are one number, and returns one number per example."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.w = nn.Parameter(torch.zeros(4))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x):
        return self.scale * (x @ self.w) + self.scale + self.offset

    def example_losses(self, batch):
        x, y = batch
        return (self(x) - y).square()

    def training_step(self, batch, batch_idx):
        return self.example_losses(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


SCALED = {
    "fedavg": {},
    "fedadam": {"aggregate": {"optimizer": "fedadam", "server_lr": 0.1}},
    "scaffold": {"algorithm": "scaffold"},
    "apfl": {"algorithm": "apfl"},
    "fedamp": {"algorithm": "fedamp"},
    "fedem": {"algorithm": {"name": "fedem", "number": 2}},
    "flhc": {"algorithm": {"name": "flhc", "rounds_before": 1}},
    "flis_hc": {"algorithm": "flis_hc", "split": {"name": "natural", "server": 5}},
    "fedper": {"algorithm": "fedper"},
}


@pytest.mark.parametrize(
    "method", some_long(SCALED, ["fedavg", "fedadam", "scaffold", "apfl", "fedem", "flhc"])
)
def test_a_module_with_parameters_that_are_one_number_trains_in_all_engines(method) -> None:
    keys = STEP | {"model": Scaled, "rounds": 2, "train": {"lr": 0.1, "epochs": 2}} | SCALED[method]
    engines = ("loop", "vectorized", "lightning") if method == "fedavg" else ("loop", "vectorized")
    runs = [
        flray.run(dataset=(X, Y), clients=OWNER, **keys | {"execution": STEP["execution"] | e})
        for e in ({"engine": engine} for engine in engines)
    ]
    scales = [run.model(0).scale.item() for run in runs]
    assert scales == pytest.approx([scales[0]] * len(runs), abs=1e-10)
    assert abs(scales[0] - 1) > 1e-3
    losses = [run.summary["loss_mean"] for run in runs]
    assert losses == pytest.approx([losses[0]] * len(runs), rel=1e-9)


class NextToken(Predictor):
    """Expects a token by the one before it: sequences that can be stacked."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(num_outputs, 3), nn.Linear(3, num_outputs)

    def forward(self, x):
        return self.head(self.embedding(x))


INPUTS = {
    "sequences": (NextToken, (7,), np.int64, (7,)),
    "regression": ("mlp", (5,), np.float32, ()),
    "forecast": ("mlp", (6, 1), np.float32, (3,)),
    "windows": ("cnn1d", (2, 8), np.int64, ()),
    "numbers_of_windows": ("cnn1d", (2, 8), np.float32, ()),
}


@pytest.mark.parametrize("case", INPUTS)
def test_vectorized_is_loop_for_any_task_on_ragged_clients(case) -> None:
    name, shape, kind, more = INPUTS[case]
    rng = np.random.default_rng(3)
    num = sum(RAGGED)
    targets = rng.integers(0, 4, (num, *more)) if kind == np.int64 else rng.random((num, *more))
    owner = np.repeat(np.arange(len(RAGGED)), RAGGED)
    inputs = rng.integers(0, 4, (num, *shape)) if more == shape else rng.normal(size=(num, *shape))
    data = Rows(inputs, targets.astype(kind), owner).dataset("any")
    ids = np.arange(num)
    parts = tuple(np.split(ids, np.cumsum(RAGGED)[:-1]))
    split = Split(ids, data.labels, parts, parts, parts)
    build = MODELS.get(name, name)
    module = build_seeded(lambda: build(shape, data.num_outputs), 0).double()
    training = Training(lr=0.05, momentum=0.9, epochs=2, batch_size=4)
    examples, block = place(data, split, torch.float64), block_of(split, module, training)
    a = Loop(module, examples).train(block, training, plain_gradient)
    b = Vectorized(module, examples, 6).train(block, training, plain_gradient)
    for leaf, w in block.w0.items():
        assert float((a.params[leaf] - w).abs().flatten(1).max(1).values.min()) > 1e-5  # all moved
        assert float((a.params[leaf] - b.params[leaf]).abs().max()) < 1e-10
    assert np.abs(a.loss - b.loss).max() < 1e-10


TWO = {"name": "hierarchical", "number": 2}
CLUSTERED = {
    "update": {"name": "flhc", "rounds_before": 1, "clustering": {"partition": TWO}},
    "weights": {"name": "wd", "rounds_before": 1, "clustering": {"partition": TWO}},
    "predictions": {"name": "flis_hc", "clustering": {"distance": "l2", "partition": TWO}},
    "statistics": {
        "name": "flhc",
        "rounds_before": 1,
        "clustering": {"signature": {"name": "statistics"}, "partition": TWO},
    },
    "loss": {"name": "ifca", "number": 2},
}


@pytest.mark.parametrize("signature", CLUSTERED)
def test_clients_of_a_regression_are_clustered_by_whatever_they_send(signature) -> None:
    """Two kinds that see other inputs and predict the opposite."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(8), 40)
    kind = owner % 2
    x = rng.normal(size=(320, 4)) + np.array([3.0, 0, 0, 0]) * (2 * kind - 1)[:, None]
    y = (2 * kind - 1) * x[:, 0] + x[:, 1]
    result = flray.run(
        dataset=(x, np.stack([y, 2 * y], axis=1)),  # two numbers for each example
        clients=owner,
        groups=kind,
        split={"name": "natural", "server": 20},
        model={"name": "mlp", "hidden": (8,)},
        algorithm=CLUSTERED[signature],
        train={"lr": 0.01, "epochs": 4},
        rounds=3,
    )
    assert result.summary["ari"] == 1.0
    assert np.isfinite(result.summary["loss_mean"])

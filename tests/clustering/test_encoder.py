"""Pre-training an encoder: the same one for the same words, trained once."""

import dataclasses
import functools
import importlib
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from flray.client.encoder_training import mean_loss
from flray.clustering import encoder as encoder_module
from flray.clustering.encoder import Encoder, ImageKind
from flray.clustering.encoder_cache import cache_folder
from flray.clustering.encoder_training import Epoch
from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.digits import Digits
from flray.data.datasets.synthetic import Synthetic
from flray.errors import ExperimentError
from flray.models.bank import load_params
from flray.models.conv_ae import ConvAe
from flray.models.mlp200 import Mlp200
from flray.models.residual_conv_ae import ResidualConvAe

pytestmark = pytest.mark.slow

SMALL = functools.partial(ConvAe, latent=8)
TINY = Encoder(Synthetic(num_train=96, num_test=32, size=8), SMALL, epochs=2, lr=1e-2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_same_seed_gives_the_same_bits_whatever_came_before() -> None:
    first = TINY.train("cpu")
    torch.randn(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert equal(first, TINY.train("cpu"))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert not equal(first, replace(TINY, seed=1).train("cpu"))


def test_training_is_adam_on_shuffled_batches_by_hand() -> None:
    """One epoch: its order is a permutation, so over one full batch it does not matter."""
    one = replace(TINY, epochs=1, batch_size=96, lr=1e-3, validation=0.0)
    dataset = one.dataset.load()
    model = one.module(ImageKind((1, 8, 8), 10))
    x = torch.from_numpy(dataset.images[:96]).float() / 255
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    found = one.train("cpu")
    for name, leaf in model.state_dict().items():
        torch.testing.assert_close(found[name], leaf, atol=1e-6, rtol=0)


@dataclass(frozen=True)
class Images:
    """A dataset of these images, the first of which are for training."""

    images: np.ndarray
    num_train: int

    def load(self) -> Dataset:
        labels = np.zeros(len(self.images), np.int64)
        return Dataset("own", self.images, labels, self.num_train, 1, Normalization((0.0,), (1.0,)))


def test_the_epoch_with_the_lowest_validation_loss_is_kept() -> None:
    """The validation images get worse the better the others are learned."""
    encoder = Encoder(Images(np.zeros((0,)), 0), SMALL, epochs=6, lr=1e-2, validation=0.25)
    trained, judged = encoder.parts(48)
    images = np.zeros((48, 1, 8, 8), np.uint8)
    images[trained] = 255
    encoder = replace(encoder, dataset=Images(images, 48))
    seen: list[Epoch] = []
    params = encoder.train("cpu", seen.append)
    lowest = min(epoch.validation_loss for epoch in seen)
    assert lowest < seen[-1].validation_loss
    module = encoder.module(ImageKind((1, 8, 8), 1))
    load_params(module, params)
    examples = encoder.examples(images, np.zeros(48, np.int64), torch.device("cpu"))
    assert mean_loss(module, examples, torch.from_numpy(judged)) == lowest


def test_test_images_decide_nothing() -> None:
    """Clients of the same dataset are tested on them."""
    images = TINY.dataset.load().images
    changed = images.copy()
    changed[96:] = 255 - changed[96:]
    seen: list[list[Epoch]] = [[], []]
    first, second = (
        replace(TINY, epochs=4, dataset=Images(own, 96)).train("cpu", epochs.append)
        for own, epochs in zip((images, changed), seen, strict=True)
    )
    assert equal(first, second)
    assert seen[0] == seen[1]
    changed[:96] = 255 - changed[:96]
    assert not equal(first, replace(TINY, epochs=4, dataset=Images(changed, 96)).train("cpu"))


@pytest.mark.parametrize(
    ("num", "validation", "num_judged"),
    [(96, 0.1, 10), (2, 0.1, 1), (3, 0.9, 2), (1000, 0.25, 250)],
)
def test_a_part_of_the_training_images_is_not_trained_on(num, validation, num_judged) -> None:
    encoder = replace(TINY, validation=validation)
    trained, judged = encoder.parts(num)
    assert len(judged) == num_judged
    assert sorted([*trained, *judged]) == list(range(num))
    if num > 3:
        assert judged.tolist() != replace(encoder, seed=1).parts(num)[1].tolist()


def test_without_validation_all_images_are_trained_on_and_judged() -> None:
    trained, judged = replace(TINY, validation=0.0).parts(5)
    assert trained.tolist() == judged.tolist() == [0, 1, 2, 3, 4]
    one = Images(np.full((1, 1, 8, 8), 9, np.uint8), 1)
    replace(TINY, validation=0.0, dataset=one).train("cpu")


def test_one_training_image_cannot_be_divided() -> None:
    one = Images(np.zeros((3, 1, 8, 8), np.uint8), 1)
    with pytest.raises(ExperimentError, match=r"at least 2 training images.*got 1.*validation=0"):
        replace(TINY, dataset=one).train("cpu")


def test_the_rate_is_halved_on_schedule() -> None:
    seen: list[Epoch] = []
    replace(TINY, epochs=5, halve_every=2).train("cpu", seen.append)
    assert [epoch.lr for epoch in seen] == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3]
    assert [epoch.epoch for epoch in seen] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("pixels", "make", "epochs"),
    [
        ("unit", ConvAe, 6),
        pytest.param("signed", ResidualConvAe, 3, marks=pytest.mark.long),
    ],
)
def test_reconstructions_are_better_than_the_mean_image(pixels, make, epochs) -> None:
    encoder = Encoder(Digits(size=8), make, epochs=epochs, lr=5e-3, pixels=pixels)
    seen: list[Epoch] = []
    encoder.train("cpu", seen.append)
    dataset = encoder.dataset.load()
    x = dataset.images / 255 if pixels == "unit" else dataset.images / 127.5 - 1
    trained, judged = (x[ids] for ids in encoder.parts(dataset.num_train))
    mean_image = ((judged - trained.mean(0)) ** 2).mean()
    assert min(epoch.validation_loss for epoch in seen) < 0.8 * mean_image


def test_a_cached_encoder_is_not_trained_again(monkeypatch) -> None:
    assert not TINY.is_cached()
    trained = TINY.load_or_train("cpu")
    assert TINY.is_cached()
    assert equal(trained, TINY.train("cpu"))

    monkeypatch.setattr(Encoder, "train", pytest.fail)
    monkeypatch.setattr(Synthetic, "load", pytest.fail)  # nor is the data needed
    assert equal(TINY.load_or_train("cpu"), trained)
    assert TINY.kind() == ImageKind((1, 8, 8), 10)
    same = replace(TINY, model=functools.partial(ConvAe, latent=8, loss="mse"))
    assert equal(same.load_or_train("cpu"), trained)


def test_the_record_tells_how_it_went() -> None:
    TINY.load_or_train("cpu")
    record = json.loads((TINY.folder / "encoder.json").read_text())
    assert TINY.folder.name == TINY.key()[:16] == record["key"][:16]
    assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2]
    assert record["configuration"]["dataset"]["num_train"] == 96
    assert record["torch"] == torch.__version__
    assert sorted(path.name for path in TINY.folder.iterdir()) == [
        "encoder.json",
        "encoder.safetensors",
    ]


@pytest.mark.parametrize("file", ["encoder.safetensors", "encoder.json"])
@pytest.mark.parametrize("harm", ["cut", "emptied", "garbled"])
def test_a_broken_file_is_replaced_with_a_warning(file, harm, caplog) -> None:
    trained = TINY.load_or_train("cpu")
    path = TINY.folder / file
    content = path.read_bytes()
    harmed = {"cut": content[: len(content) // 2], "emptied": b"", "garbled": b"[1, 2]"}
    path.write_bytes(harmed[harm])
    _expect_new_training(trained)
    assert f"{file} cannot be read, it is trained anew" in caplog.text


def test_params_that_are_not_those_of_the_record_are_replaced(caplog) -> None:
    trained = TINY.load_or_train("cpu")
    path = TINY.folder / "encoder.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    _expect_new_training(trained)
    assert "is not the one that was written" in caplog.text


@pytest.mark.parametrize("file", ["encoder.safetensors", "encoder.json"])
def test_a_missing_file_is_written_again(file) -> None:
    trained = TINY.load_or_train("cpu")
    (TINY.folder / file).unlink()
    _expect_new_training(trained)


def _expect_new_training(trained) -> None:
    seen: list[Epoch] = []
    assert equal(TINY.load_or_train("cpu", seen.append), trained)
    assert len(seen) == TINY.epochs
    assert equal(TINY.load_or_train("cpu", pytest.fail), trained)


class Renamed(ConvAe):
    """The same fields in another class."""


def test_the_key_changes_with_every_field() -> None:
    changes = {
        "dataset": Synthetic(num_train=97, num_test=32, size=8),
        "model": functools.partial(ConvAe, latent=9),
        "epochs": 3,
        "batch_size": 32,
        "lr": 2e-2,
        "halve_every": 0,
        "pixels": "signed",
        "validation": 0.2,
        "seed": 1,
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(Encoder)}
    keys = {replace(TINY, **{name: value}).key() for name, value in changes.items()}
    other_class = replace(TINY, model=functools.partial(Renamed, latent=8))
    keys |= {TINY.key(), other_class.key()}
    assert len(keys) == len(changes) + 2


def test_the_key_changes_with_the_file_of_a_model_of_ones_own(tmp_path, monkeypatch) -> None:
    file = tmp_path / "own_encoder.py"
    file.write_text("from flray.models.conv_ae import ConvAe\nclass Mine(ConvAe):\n    scale = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    encoder = replace(TINY, model=importlib.import_module("own_encoder").Mine)
    before = encoder.key()
    assert before == encoder.key()
    file.write_text(file.read_text().replace("scale = 1", "scale = 2"))
    assert encoder.key() != before
    assert "files" not in TINY.configuration()  # those of flray decide by FORMAT


def test_the_key_changes_with_the_format(monkeypatch) -> None:
    before = TINY.key()
    monkeypatch.setattr(encoder_module, "FORMAT", -1)
    assert TINY.key() != before


def test_where_the_cache_is(monkeypatch, tmp_path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FLRAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "flray"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "flray"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"halve_every": -1}, "halve_every must be >= 0, got -1"),
        ({"validation": 1.0}, r"validation must be in \[0, 1\), got 1.0"),
        ({"validation": -0.1}, r"validation must be in \[0, 1\), got -0.1"),
        ({"model": Mlp200}, r"model must have encode\(x\), got Mlp200; choose conv_ae, repa_net"),
    ],
)
def test_what_cannot_be_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_images_that_do_not_fit_the_model_are_named() -> None:
    with pytest.raises(ExperimentError, match=r"ConvAe: height and width must be multiples of 4"):
        replace(TINY, dataset=Synthetic(num_train=20, num_test=5, size=9)).train("cpu")


def test_a_loss_that_is_never_finite_is_an_error() -> None:
    with pytest.raises(ExperimentError, match=r"loss is not finite in any of 2 epochs; lower"):
        replace(TINY, lr=1e30, model=functools.partial(ResidualConvAe, latent=8)).train("cpu")


def test_pre_training_goes_on_where_it_was_cut_short(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path))
    encoder = replace(TINY, epochs=4)

    def stop(epoch: Epoch) -> None:
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoder.load_or_train("cpu", stop)
    assert encoder.epochs_done() == 2
    seen: list[Epoch] = []
    resumed = encoder.load_or_train("cpu", seen.append)
    assert [epoch.epoch for epoch in seen] == [3, 4]
    assert equal(resumed, encoder.train("cpu"))
    assert encoder.epochs_done() == 0
    assert replace(encoder, seed=1).epochs_done() == 0

"""Facts about the datasets that need no download, and the refusal when one is missing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from flray.data import DATASETS
from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.cifar_mixes import classes_of
from flray.data.datasets.digits import Digits
from flray.data.datasets.synthetic import Synthetic
from flray.errors import ExperimentError


def test_digits_counts_and_order() -> None:
    dataset = Digits().load()
    assert dataset.images.shape == (1797, 1, 28, 28)
    assert dataset.images.dtype == np.uint8
    assert (dataset.images.min(), dataset.images.max()) == (0, 255)
    assert dataset.num_train == 1797 - 359  # 1797 = 5 * 359 + 2
    assert dataset.num_classes == 10
    target = load_digits().target
    assert dataset.labels[:5].tolist() == target[[0, 1, 2, 3, 5]].tolist()
    assert dataset.labels[dataset.test_ids].tolist() == target[4::5].tolist()


def test_digits_at_their_own_size_are_the_originals() -> None:
    dataset = Digits(size=8).load()
    original = load_digits().images[4::5]
    resized = dataset.images[dataset.test_ids, 0]
    assert np.array_equal(resized, np.rint(original * 255 / 16))


def test_synthetic_is_balanced_and_of_the_size_asked_for() -> None:
    dataset = Synthetic(num_classes=4, num_train=80, num_test=40, size=9, num_groups=2).load()
    assert dataset.images.shape == (120, 1, 9, 9)
    assert dataset.images.dtype == np.uint8
    assert dataset.image_shape == (1, 9, 9)
    assert dataset.num_train == 80
    assert dataset.source is not None
    for part, each in ((slice(0, 80), 10), (slice(80, 120), 5)):
        cells = dataset.source[part] * 4 + dataset.labels[part]
        assert np.bincount(cells).tolist() == [each] * 8


def test_synthetic_with_one_group_has_no_source() -> None:
    assert Synthetic(num_train=20, num_test=10).load().source is None


def test_synthetic_follows_its_seed_only() -> None:
    first, again = Synthetic(num_train=50).load(), Synthetic(num_train=50).load()
    other = Synthetic(num_train=50, seed=1).load()
    assert first.images is not again.images
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_synthetic_has_the_same_bits_on_any_number_of_threads(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = Synthetic(num_train=9000, size=6).load()  # three streams of random numbers
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert np.array_equal(one.images, Synthetic(num_train=9000, size=6).load().images)


def test_synthetic_test_part_does_not_depend_on_the_training_part() -> None:
    small, large = Synthetic(num_train=10).load(), Synthetic(num_train=5000).load()
    assert np.array_equal(small.images[small.test_ids], large.images[large.test_ids])


def test_synthetic_without_variation_is_prototypes_per_group_and_class() -> None:
    plain = Synthetic(num_classes=3, num_train=12, num_groups=2, variation=0.0, noise=0.0)
    dataset = plain.load()
    assert dataset.source is not None
    cells = dataset.source[:12] * 3 + dataset.labels[:12]
    assert len(np.unique(dataset.images[:12].reshape(12, -1), axis=0)) == 6
    for cell in range(6):
        assert len(np.unique(dataset.images[:12][cells == cell], axis=0)) == 1


def test_synthetic_classes_can_be_told_apart() -> None:
    dataset = Synthetic().load()
    flat = dataset.images.reshape(len(dataset.images), -1).astype(float)
    train, test = flat[: dataset.num_train], flat[dataset.num_train :]
    labels = dataset.labels[: dataset.num_train]
    means = np.stack([train[labels == label].mean(axis=0) for label in range(10)])
    nearest = ((test[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    accuracy = (nearest == dataset.labels[dataset.num_train :]).mean()
    assert 0.6 < accuracy < 1.0  # chance is 0.1; neither hopeless nor trivial


def test_normalize_names_the_three_normalizations() -> None:
    assert Digits().load().normalization == Normalization((0.0,), (1.0,))
    assert Digits(normalize="half").load().normalization == Normalization((0.5,), (0.5,))
    for dataset in (Digits(normalize="standard").load(), Synthetic(normalize="standard").load()):
        mean, std = dataset.normalization.mean[0], dataset.normalization.std[0]
        pixels = (dataset.images[: dataset.num_train] / 255 - mean) / std
        assert abs(pixels.mean()) < 1e-3
        assert abs(pixels.std() - 1) < 1e-3


def test_augment_reaches_the_dataset() -> None:
    assert Digits().load().augment == "none"
    assert Digits(augment="crop_flip").load().augment == "crop_flip"


def test_classes_are_chosen_and_numbered_in_the_order_given() -> None:
    images = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1)
    labels = np.array([3, 1, 2, 3, 0, 2])
    whole = Dataset("all", images, labels, 4, 4, Normalization((0.0,), (1.0,)))
    some = classes_of(whole, (2, 3))
    assert some.images.ravel().tolist() == [0, 2, 3, 5]
    assert some.labels.tolist() == [1, 0, 1, 0]
    assert (some.num_train, some.num_classes) == (3, 2)


DOWNLOADED = {"mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "svhn"}
IDX = ("images-idx3", "labels-idx1")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("usps", "usps.npz"),
        ("cifar100_jpeg", "cifar100_jpeg.npz"),
        ("svhn_recut", "svhn_recut.npz"),
        ("mnist_writers", "mnist_writers.npz"),
        ("femnist", "femnist/train/*.json"),
        ("mnist", "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"),
        ("fashion_mnist", "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"),
        ("emnist", "EMNIST/raw/emnist-balanced-{train,test}-{images-idx3,labels-idx1}-ubyte"),
        ("cifar10", "cifar-10-batches-py/{data_batch_1,"),
        ("cifar100", "cifar-100-python/{train,test,meta}"),
        ("svhn", "{train,test}_32x32.mat"),
    ],
)
def test_missing_file_is_named(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    with pytest.raises(ExperimentError) as caught:
        DATASETS[name]().load()
    for part in (f"dataset {name} was not found", str(tmp_path), "FLRAY_DATA", file):
        assert part in str(caught.value)
    assert ("dataset.download=true" in str(caught.value)) == (name in DOWNLOADED)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("usps", ["usps.npz"]),
        ("femnist", ["femnist/train/all.json", "femnist/test/all.json"]),
        ("mnist", [f"MNIST/raw/{p}-{f}-ubyte" for p in ("train", "t10k") for f in IDX]),
    ],
)
@pytest.mark.parametrize(
    "content", [b"", b"x", b"PK\x03\x04", b"\x00\x00\x08\x01\x00\x00\x00\x09x"]
)
def test_damaged_file_is_named(
    name: str, files: list[str], content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ExperimentError, match=f"dataset {name}: .*cannot be read.*FLRAY_DATA"):
        DATASETS[name]().load()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("digits", {"normalize": "none"}, "unknown normalize 'none'; known: unit, half, standard"),
        ("cifar10", {"augment": "flip"}, "unknown augment 'flip'; known: none, crop_flip"),
        ("digits", {"size": 7}, "size must be >= 8, got 7"),
        ("synthetic", {"num_groups": 0}, "num_groups must be >= 1, got 0"),
        ("synthetic", {"noise": -1.0}, "noise must be >= 0, got -1.0"),
        ("emnist", {"variant": "digits"}, "unknown variant 'digits'; known: balanced, byclass, le"),
        (
            "cifar20",
            {"files": "cifar10"},
            "unknown files 'cifar10'; known: cifar100, cifar100_jpeg",
        ),
        ("usps", {"size": 8}, "size must be >= 16, got 8"),
        ("femnist", {"shards": 0}, "shards must be >= 1 or null, got 0"),
    ],
)
def test_fields_are_checked(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DATASETS[name](**fields)

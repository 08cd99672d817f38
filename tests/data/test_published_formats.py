"""Loaders of datasets that are not at hand, on small files in the published formats."""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from numpy.typing import NDArray
from scipy.io import savemat

from flray.data.dataset import Normalization
from flray.data.datasets.downloaded import Cifar100, Emnist, Svhn
from flray.data.datasets.femnist import Femnist
from flray.data.datasets.prepared import Cifar100Jpeg, MnistWriters, SvhnRecut, Usps
from flray.data.splits.by_writer import ByWriter
from flray.errors import ExperimentError

Bytes = NDArray[np.uint8]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    return tmp_path


def noise(*shape: int) -> Bytes:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


# IDX, as MNIST and EMNIST


def write_idx(file: Path, array: Bytes) -> None:
    """Two zeros, 8 for bytes, the number of axes; the axes as big-endian integers; the bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    file.write_bytes(head + array.tobytes())


def write_emnist(folder: Path, variant: str, part: str, images: Bytes, labels: Bytes) -> None:
    start = folder / "EMNIST" / "raw" / f"emnist-{variant}-{part}"
    write_idx(Path(f"{start}-images-idx3-ubyte"), images)
    write_idx(Path(f"{start}-labels-idx1-ubyte"), labels)


@pytest.mark.parametrize(
    ("variant", "file_labels", "labels", "num_classes"),
    [
        ("balanced", [0, 46, 10], [0, 46, 10], 47),
        ("byclass", [0, 61, 10], [0, 61, 10], 62),
        ("letters", [1, 26, 5], [0, 25, 4], 26),
    ],
)
def test_emnist_is_upright_and_counts_from_zero(
    folder: Path, variant: Any, file_labels: list[int], labels: list[int], num_classes: int
) -> None:
    train, test = noise(3, 28, 28), noise(2, 28, 28)
    write_emnist(folder, variant, "train", train, np.array(file_labels, np.uint8))
    write_emnist(folder, variant, "test", test, np.array(file_labels[:2], np.uint8))
    dataset = Emnist(variant=variant, normalize="standard").load()
    assert dataset.name == "emnist"
    assert dataset.labels.tolist() == labels + labels[:2]
    assert (dataset.num_train, dataset.num_classes) == (3, num_classes)
    assert dataset.images.shape == (5, 1, 28, 28)
    assert dataset.images.flags.c_contiguous
    # Turned right by 90 degrees, then mirrored left to right.
    upright = np.rot90(np.concatenate([train, test]), -1, axes=(1, 2))[:, :, ::-1]
    assert np.array_equal(dataset.images[:, 0], upright)
    assert dataset.normalization.mean == (round(float(train.mean()) / 255, 4),)
    assert dataset.normalization.std == (round(float(train.std()) / 255, 4),)


def test_mnist_writers_are_read_beside_mnist(folder: Path) -> None:
    raw = folder / "MNIST" / "raw"
    for part, num in (("train", 4), ("t10k", 2)):
        write_idx(raw / f"{part}-images-idx3-ubyte", noise(num, 28, 28))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(num, dtype=np.uint8))
    writers = {"train_writer": [5, 5, 900, 5], "test_writer": [2000, 2001]}
    as_stored = {key: np.array(value, np.uint16) for key, value in writers.items()}
    np.savez(folder / "mnist_writers.npz", **as_stored)
    dataset = MnistWriters(normalize="standard", augment="crop_flip").load()
    assert dataset.name == "mnist_writers"
    assert dataset.source is not None
    assert dataset.source.dtype == np.int64
    assert dataset.source.tolist() == [5, 5, 900, 5, 2000, 2001]
    assert dataset.labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert np.array_equal(dataset.images[:4, 0], noise(4, 28, 28))
    assert dataset.normalization == Normalization((0.1307,), (0.3081,))
    assert dataset.augment == "crop_flip"


# CIFAR-100's pickles and SVHN's .mat files, whose checksums torchvision knows


def test_cifar100_takes_the_fine_labels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = folder / "cifar-100-python"
    batches.mkdir()
    train, test = noise(3, 3, 32, 32), noise(2, 3, 32, 32)
    contents = {
        "train": {
            "data": train.reshape(3, -1),
            "fine_labels": [99, 0, 7],
            "coarse_labels": [1] * 3,
        },
        "test": {"data": test.reshape(2, -1), "fine_labels": [3, 4], "coarse_labels": [1] * 2},
        "meta": {"fine_label_names": [str(i) for i in range(100)]},
    }
    for name, content in contents.items():
        (batches / name).write_bytes(pickle.dumps(content))
    published = torchvision.datasets.CIFAR100
    monkeypatch.setattr(published, "train_list", [["train", md5(batches / "train")]])
    monkeypatch.setattr(published, "test_list", [["test", md5(batches / "test")]])
    monkeypatch.setattr(published, "meta", {**published.meta, "md5": md5(batches / "meta")})
    dataset = Cifar100().load()
    assert dataset.labels.tolist() == [99, 0, 7, 3, 4]
    assert (dataset.num_train, dataset.num_classes) == (3, 100)
    assert np.array_equal(dataset.images, np.concatenate([train, test]))
    assert dataset.images.flags.c_contiguous
    assert dataset.normalization == Normalization((0.5,) * 3, (0.5,) * 3)
    standard = Cifar100(normalize="standard").load().normalization
    assert standard == Normalization((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    (batches / "train").write_bytes(b"half a download")
    with pytest.raises(ExperimentError, match="dataset cifar100 was not found"):
        Cifar100().load()


def test_svhn_calls_the_digit_0_label_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": (noise(3, 32, 32, 3), [10, 1, 9]), "test": (noise(2, 32, 32, 3), [2, 10])}
    published = torchvision.datasets.SVHN
    known = {}
    for part, (images, labels) in parts.items():
        file = folder / f"{part}_32x32.mat"
        by_row = images.transpose(1, 2, 3, 0)  # MATLAB's order: the image number comes last
        savemat(file, {"X": by_row, "y": np.array(labels, np.uint8)[:, None]})
        known[part] = ["", file.name, md5(file)]
    monkeypatch.setattr(published, "split_list", known)
    dataset = Svhn().load()
    assert dataset.labels.tolist() == [0, 1, 9, 2, 0]
    assert (dataset.num_train, dataset.num_classes) == (3, 10)
    stacked = np.concatenate([parts["train"][0], parts["test"][0]])
    assert np.array_equal(dataset.images, stacked.transpose(0, 3, 1, 2))
    assert dataset.images.flags.c_contiguous
    standard = Normalization((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
    assert dataset.normalization == standard


# LEAF's JSON


def write_leaf(file: Path, writers: dict[str, list[int]]) -> dict[str, Bytes]:
    """A shard with these writers and labels; returns the grey levels of each writer."""
    file.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, file.name + file.parent.name))
    rng = np.random.default_rng(seed)
    grey = {
        name: rng.integers(0, 256, (len(y), 784), dtype=np.uint8) for name, y in writers.items()
    }
    content = {
        "users": list(writers),
        "num_samples": [len(y) for y in writers.values()],
        "user_data": {
            name: {"x": (grey[name] / 255).tolist(), "y": writers[name]} for name in grey
        },
    }
    file.write_text(json.dumps(content))
    return grey


def write_femnist(folder: Path) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    """Shards 0, 2 and 10: in this order, which is not that of the alphabet."""
    train, test = {}, {}
    shards: dict[int, dict[str, list[int]]] = {
        10: {"f4": [61] * 4},
        0: {"f0": [0, 1, 2], "f1": [3, 4]},
        2: {"f2": [5, 6, 7, 8]},
    }
    for shard, writers in shards.items():
        name = f"all_data_{shard}_niid_0_keep_0"
        train |= write_leaf(folder / "femnist" / "train" / f"{name}_train_9.json", writers)
        few = {writer: labels[:1] for writer, labels in writers.items()}
        test |= write_leaf(folder / "femnist" / "test" / f"{name}_test_9.json", few)
    return train, test


def test_femnist_has_a_source_per_writer_and_train_first(folder: Path) -> None:
    train, test = write_femnist(folder)
    dataset = Femnist().load()
    in_order = ["f0", "f1", "f2", "f4"]
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 61, 61, 61, 61, 0, 3, 5, 61]
    assert (dataset.num_train, dataset.num_classes) == (13, 62)
    assert dataset.source is not None
    assert dataset.source.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0, 1, 2, 3]
    # The grey levels exactly, with paper as 255: LEAF stores level / 255.
    stored = np.concatenate([part[name] for part in (train, test) for name in in_order])
    assert np.array_equal(dataset.images, stored.reshape(-1, 1, 28, 28))


def test_femnist_by_writer_tests_on_the_writers_own_rows(folder: Path) -> None:
    write_femnist(folder)
    split = ByWriter(validation=0.0).split(Femnist().load(), 0)
    assert split.num_train_examples.tolist() == [3, 2, 4, 4]
    assert [split.image_ids[ids].tolist() for ids in split.test] == [[13], [14], [15], [16]]


def test_femnist_of_the_first_shards_only(folder: Path) -> None:
    write_femnist(folder)
    dataset = Femnist(shards=2).load()
    assert dataset.source is not None
    assert dataset.source.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 0, 1, 2]


def test_femnist_writer_only_in_the_test_files_is_a_new_one(folder: Path) -> None:
    write_leaf(folder / "femnist" / "train" / "a_0.json", {"f0": [1, 2]})
    write_leaf(folder / "femnist" / "test" / "a_0.json", {"f9": [3], "f0": [4]})
    dataset = Femnist().load()
    assert dataset.source is not None
    assert dataset.source.tolist() == [0, 0, 1, 0]


def test_femnist_file_that_is_cut_short_is_named(folder: Path) -> None:
    write_leaf(folder / "femnist" / "train" / "a_0.json", {"f0": [1, 2]})
    file = folder / "femnist" / "test" / "a_0.json"
    write_leaf(file, {"f0": [1, 2]})
    file.write_text(file.read_text().replace('"y": [1, 2]', '"y": [1]'))
    with pytest.raises(ExperimentError, match=r"writer f0 has 2 images and 1 labels in .*a_0.json"):
        Femnist().load()


# One .npz file


@pytest.mark.parametrize(
    ("name", "load"), [("cifar100_jpeg", Cifar100Jpeg), ("svhn_recut", SvhnRecut)]
)
def test_coloured_archives_are_turned_channels_first(folder: Path, name: str, load: Any) -> None:
    train, test = noise(3, 32, 32, 3), noise(2, 32, 32, 3)
    labels = np.array([9, 0, 1], np.uint8)
    arrays = {"train_x": train, "train_y": labels, "test_x": test, "test_y": labels[:2]}
    np.savez(folder / f"{name}.npz", **arrays)
    dataset = load().load()
    assert dataset.name == name
    assert dataset.labels.tolist() == [9, 0, 1, 9, 0]
    assert dataset.labels.dtype == np.int64
    assert np.array_equal(dataset.images, np.concatenate([train, test]).transpose(0, 3, 1, 2))
    assert dataset.num_train == 3


def test_usps_keeps_its_size_unless_asked(folder: Path) -> None:
    images = noise(5, 16, 16)
    labels = np.arange(5, dtype=np.uint8)
    arrays = {"x_train": images[:3], "y_train": labels[:3], "x_test": images[3:]}
    np.savez(folder / "usps.npz", **arrays)
    with pytest.raises(ExperimentError, match="has no column 'y_test'; it has x_test"):
        Usps().load()
    np.savez(folder / "usps.npz", y_test=labels[3:], **arrays)
    assert np.array_equal(Usps().load().images[:, 0], images)
    large = Usps(size=32).load()
    assert large.images.shape == (5, 1, 32, 32)
    assert large.labels.tolist() == [0, 1, 2, 3, 4]
    # Twice the size: the corner stays, the next is 3/4 of it and 1/4 of its neighbour.
    corner, neighbour = images[:, 0, 0].astype(float), images[:, 0, 1].astype(float)
    assert np.array_equal(large.images[:, 0, 0, 0], images[:, 0, 0])
    assert np.abs(large.images[:, 0, 0, 1] - (0.75 * corner + 0.25 * neighbour)).max() <= 0.5

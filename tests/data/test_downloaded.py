"""Facts about the published datasets; needs them below FLRAY_DATA."""

import os

import numpy as np
import pytest

from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.downloaded import Cifar10, FashionMnist, Mnist
from flray.data.splits.pathological import Pathological

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("FLRAY_DATA" not in os.environ, reason="FLRAY_DATA is not set"),
]


def train_counts(dataset: Dataset) -> list[int]:
    return np.bincount(dataset.labels[: dataset.num_train]).tolist()


def test_mnist_is_the_published_one() -> None:
    dataset = Mnist().load()
    assert dataset.images.shape == (70_000, 1, 28, 28)
    assert dataset.images.dtype == np.uint8
    assert dataset.num_train == 60_000
    assert train_counts(dataset)[5] == 5421
    assert dataset.labels[:3].tolist() == [5, 0, 4]
    assert dataset.labels[60_000:60_003].tolist() == [7, 2, 1]
    assert dataset.normalization == Normalization((0.0,), (1.0,))
    pixels = dataset.images[:60_000] / np.float32(255)
    assert (round(float(pixels.mean()), 4), round(float(pixels.std()), 4)) == (0.1307, 0.3081)


def test_fashion_mnist_is_the_published_one() -> None:
    dataset = FashionMnist(normalize="standard").load()
    assert dataset.images.shape == (70_000, 1, 28, 28)
    assert dataset.num_train == 60_000
    assert train_counts(dataset) == [6000] * 10
    assert dataset.normalization == Normalization((0.1307,), (0.3081,))


def test_cifar10_is_the_published_one() -> None:
    dataset = Cifar10().load()
    assert dataset.images.shape == (60_000, 3, 32, 32)
    assert dataset.images.flags.c_contiguous
    assert dataset.num_train == 50_000
    assert train_counts(dataset) == [5000] * 10
    assert dataset.normalization == Normalization((0.5,) * 3, (0.5,) * 3)
    pixels = dataset.images[:50_000] / np.float32(255)
    means = pixels.mean(axis=(0, 2, 3), dtype=np.float64).round(4).tolist()
    assert means == [0.4914, 0.4822, 0.4465]  # red, green, blue: channels are where they belong


def test_pathological_mnist_of_the_papers() -> None:
    dataset = Mnist().load()
    split = Pathological(clients=100, test_size=100).split(dataset, 0)
    assert [len(ids) for ids in split.test] == [100] * 100
    for client in range(100):
        own = np.concatenate([split.train[client], split.validation[client]])
        counts = np.bincount(split.labels[own], minlength=10)
        assert (counts > 0).sum() == 2
        assert counts[counts > 0].min() >= 5421 // 20
        assert counts.max() <= 6742 // 20 + 1

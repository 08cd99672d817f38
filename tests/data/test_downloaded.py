"""Facts about the published datasets; needs them below FLRAY_DATA."""

import numpy as np
import pytest

from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.cifar_mixes import BESIDE_CIFAR10, SUBSET, Cifar20, Cifar100Subset
from flray.data.datasets.downloaded import Cifar10, FashionMnist, Mnist
from flray.data.datasets.mnist_mixes import MnistFashion
from flray.data.datasets.prepared import Cifar100Jpeg, MnistWriters, SvhnRecut, Usps
from flray.data.splits.by_writer import ByWriter
from flray.data.splits.pathological import Pathological

pytestmark = pytest.mark.data


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


def test_mnist_writers_are_those_of_mnist() -> None:
    dataset, mnist = MnistWriters().load(), Mnist().load()
    assert np.array_equal(dataset.images, mnist.images)
    assert np.array_equal(dataset.labels, mnist.labels)
    assert dataset.source is not None
    train, test = dataset.source[:60_000], dataset.source[60_000:]
    assert (len(np.unique(train)), len(np.unique(test))) == (539, 297)
    assert not np.isin(test, train).any()
    split = ByWriter(min_samples=100).split(dataset, 0)
    assert split.num_clients == 440
    assert min(map(len, split.test)) >= 20


def test_usps_is_the_published_one() -> None:
    dataset = Usps().load()
    assert dataset.images.shape == (9298, 1, 16, 16)
    assert dataset.num_train == 7291
    assert train_counts(dataset) == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    large = Usps(size=28).load()
    assert large.images.shape == (9298, 1, 28, 28)
    assert abs(float(large.images.mean()) - float(dataset.images.mean())) < 1


def test_cifar100_jpeg_has_the_colours_of_cifar100() -> None:
    dataset = Cifar100Jpeg(normalize="standard").load()
    assert dataset.images.shape == (60_000, 3, 32, 32)
    assert dataset.images.flags.c_contiguous
    assert train_counts(dataset) == [500] * 100
    assert dataset.normalization.mean == (0.507, 0.487, 0.441)
    means = dataset.images[:50_000].mean(axis=(0, 2, 3)) / 255
    assert np.abs(means - dataset.normalization.mean).max() < 0.002


@pytest.mark.long
def test_flts_encoders_see_twenty_classes() -> None:
    subset = Cifar100Subset(files="cifar100_jpeg").load()
    assert (subset.images.shape, subset.num_train) == ((12_000, 3, 32, 32), 10_000)
    assert train_counts(subset) == [500] * 20
    both = Cifar20(files="cifar100_jpeg").load()
    assert (both.images.shape, both.num_train) == ((66_000, 3, 32, 32), 55_000)
    assert train_counts(both) == [5000] * 10 + [500] * 10
    known = Cifar10().load()
    assert np.array_equal(both.images[:50_000], known.images[:50_000])
    assert np.array_equal(both.labels[55_000:65_000], known.labels[50_000:])
    # Of the classes that both have (chair, clock, elephant, ...) they have the same images.
    shared = [(SUBSET.index(c), 10 + BESIDE_CIFAR10.index(c)) for c in BESIDE_CIFAR10[1:]]
    for one, other in shared:
        a, b = (
            d.images[: d.num_train][d.labels[: d.num_train] == c]
            for d, c in ((subset, one), (both, other))
        )
        assert np.array_equal(a, b)


def test_digits_and_clothing_are_twenty_classes() -> None:
    both, clothing = MnistFashion().load(), FashionMnist().load()
    assert (both.images.shape, both.num_train) == ((140_000, 1, 28, 28), 120_000)
    assert train_counts(both)[:2] == [5923, 6742]
    assert train_counts(both)[10:] == [6000] * 10
    assert np.array_equal(both.images[60_000:120_000], clothing.images[:60_000])
    assert np.array_equal(both.labels[130_000:], clothing.labels[60_000:] + 10)


def test_svhn_recut_has_the_counts_and_colours_of_svhn() -> None:
    dataset = SvhnRecut().load()
    assert dataset.images.shape == (99_289, 3, 32, 32)
    assert dataset.num_train == 73_257
    published = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    assert train_counts(dataset) == published
    means = dataset.images[:73_257].mean(axis=(0, 2, 3)) / 255
    assert np.abs(means - dataset.normalization.mean).max() < 0.01


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

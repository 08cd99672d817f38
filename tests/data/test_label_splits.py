"""What label_skew and power_law_groups promise about labels, sizes and groups."""

import numpy as np
import pytest

from flray.data.dataset import Dataset, Ids, Normalization
from flray.data.datasets.synthetic import Synthetic
from flray.data.split import Split
from flray.data.splits.label_skew import LabelSkew, skewed_label_sets
from flray.data.splits.power_law_groups import PowerLawGroups, power_law_exponent

DATASET = Synthetic(num_train=600, num_test=200, size=2).load()


def own_labels(split: Split, client: int) -> Ids:
    return split.labels[np.concatenate([split.train[client], split.validation[client]])]


# label_skew


@pytest.mark.parametrize(("share", "labels_each"), [(0.2, 2), (0.3, 3), (0.04, 1), (1.0, 10)])
def test_skewed_client_holds_its_own_label_and_others(share: float, labels_each: int) -> None:
    split = LabelSkew(clients=20, share=share).split(DATASET, 0)
    assert split.groups is None
    for client in range(20):
        labels = np.unique(own_labels(split, client))
        assert len(labels) == labels_each
        assert client % 10 in labels


def test_skewed_labels_are_split_evenly_among_their_clients() -> None:
    split = LabelSkew(clients=20, share=0.3).split(DATASET, 0)
    counts = np.stack([np.bincount(own_labels(split, i), minlength=10) for i in range(20)])
    owners = (counts > 0).sum(axis=0)
    assert len(np.unique(owners)) > 1  # drawn freely: labels are not used equally often
    for label in range(10):
        held = counts[counts[:, label] > 0, label]
        assert held.sum() == 60
        assert set(held.tolist()) <= {60 // owners[label], -(-60 // owners[label])}


def test_other_labels_are_drawn_uniformly() -> None:
    sets = skewed_label_sets(9000, 2, 10, np.random.default_rng(0))
    counts = np.bincount(sets[::10, 1], minlength=10)  # clients whose own label is 0
    assert counts[0] == 0
    assert counts[1:].min() > 60  # 900 draws of 9 labels: 100 each, standard deviation 9.4
    assert counts[1:].max() < 140


def test_skewed_client_is_tested_on_all_images_of_its_labels() -> None:
    split = LabelSkew(clients=20).split(DATASET, 0)
    assert [len(ids) for ids in split.test] == [40] * 20  # two labels of 20


# power_law_groups


def emnist_balanced_shape() -> Dataset:
    """47 classes of 2,400 + 400 images, of one pixel each."""
    labels = np.concatenate([np.arange(47 * 2400) % 47, np.arange(47 * 400) % 47])
    blank = np.zeros((len(labels), 1, 1, 1), np.uint8)
    return Dataset("stub", blank, labels, 47 * 2400, 47, Normalization((0.0,), (1.0,)))


STUB = emnist_balanced_shape()


@pytest.mark.parametrize(
    ("clients", "sizes", "median", "last_sizes"),
    [(2400, (26, 259), 29, (11, 105)), (600, (101, 1256), 106.5, (41, 429))],
)
def test_power_law_sizes_are_flts(
    clients: int, sizes: tuple[int, int], median: float, last_sizes: tuple[int, int]
) -> None:
    options = PowerLawGroups(clients=clients, validation=0.0, test="proportional")
    split = options.split(STUB, 0)
    held = split.num_train_examples.reshape(10, -1)  # (groups, clients of a group)
    assert held.sum() == 47 * 2400
    for group in held[:9]:
        assert (group.min(), group.max(), np.median(group)) == (*sizes, median)
        assert (np.diff(group[1:]) >= 0).all()  # the first client takes the remainder
    assert (held[9].min(), held[9].max()) == last_sizes


def test_power_law_exponent_is_flts() -> None:
    assert round(power_law_exponent(12000 - 240 * 25, 240), 8) == 9.477e-5
    assert round(power_law_exponent(12000 - 60 * 100, 60), 6) == 1.959e-3


def test_power_law_groups_take_classes_in_order_and_test_on_all_of_them() -> None:
    split = PowerLawGroups(clients=20).split(STUB, 0)
    assert split.groups is not None
    assert split.groups.tolist() == np.repeat(np.arange(10), 2).tolist()
    for client, group in enumerate(split.groups.tolist()):
        classes = set(range(5 * group, min(5 * group + 5, 47)))
        assert set(own_labels(split, client).tolist()) == classes
        tested = split.labels[split.test[client]]
        assert set(tested.tolist()) == classes
        assert len(tested) == 400 * len(classes)


def test_power_law_client_without_a_class_is_tested_on_it_all_the_same() -> None:
    options = PowerLawGroups(clients=40, groups=2, validation=0.0)
    split = options.split(DATASET, 0)
    trained = [set(split.labels[ids].tolist()) for ids in split.train]
    assert min(len(labels) for labels in trained) < 5
    assert {len(ids) for ids in split.test} == {100}  # 5 classes of 20


@pytest.mark.parametrize(("images", "clients"), [(2, 1), (10, 5), (11, 5), (1000, 7)])
def test_power_law_deals_everything(images: int, clients: int) -> None:
    labels = np.zeros(images + 1, np.int64)
    blank = np.zeros((images + 1, 1, 1, 1), np.uint8)
    unit = Normalization((0.0,), (1.0,))
    dataset = Dataset("tiny", blank, labels, images, 1, unit)
    split = PowerLawGroups(clients=clients, groups=1, validation=0.0).split(dataset, 0)
    assert split.num_train_examples.sum() == images
    assert split.num_train_examples.min() >= images // (2 * clients) + 1

"""One client per writer: who is a client, and on what it is tested."""

from dataclasses import replace

import numpy as np
import pytest

from flray.data.dataset import Dataset
from flray.data.datasets.synthetic import Synthetic
from flray.data.splits.by_writer import ByWriter


def written_by(train: list[int], test: list[int]) -> Dataset:
    plain = Synthetic(num_classes=2, num_train=len(train), num_test=len(test), size=2).load()
    return replace(plain, source=np.array(train + test))


OWN_TEST = written_by([7] * 20 + [3] * 30 + [9] * 10, [3] * 6 + [7] * 5 + [9] * 4 + [1] * 5)
OTHER_TEST = written_by([7] * 20 + [3] * 30 + [9] * 10, [4] * 10 + [5] * 10)


def test_clients_are_the_writers_in_order() -> None:
    split = ByWriter(validation=0.1).split(OWN_TEST, 0)
    assert OWN_TEST.source is not None
    assert split.num_clients == 3
    assert split.groups is None
    assert split.num_train_examples.tolist() == [27, 18, 9]
    assert [len(ids) for ids in split.validation] == [3, 2, 1]
    for client, writer in enumerate([3, 7, 9]):
        held = [part[client] for part in (split.train, split.validation, split.test)]
        assert set(OWN_TEST.source[split.image_ids[np.concatenate(held)]].tolist()) == {writer}


def test_writer_is_tested_on_its_own_test_images_where_there_are_some() -> None:
    split = ByWriter().split(OWN_TEST, 0)
    tested = [split.image_ids[ids].tolist() for ids in split.test]
    assert tested == [[*range(60, 66)], [*range(66, 71)], [*range(71, 75)]]


def test_writer_gives_some_of_its_own_where_others_wrote_the_test_part() -> None:
    split = ByWriter(validation=0.1, test_fraction=0.2).split(OTHER_TEST, 0)
    assert OTHER_TEST.source is not None
    assert [len(ids) for ids in split.test] == [6, 4, 2]
    assert split.num_train_examples.tolist() == [21, 14, 7]
    for client, writer in enumerate([3, 7, 9]):
        assert set(OTHER_TEST.source[split.image_ids[split.test[client]]].tolist()) == {writer}


@pytest.mark.parametrize("dataset", [OWN_TEST, OTHER_TEST])
def test_test_images_are_dealt_to_their_writers_where_all_are_dealt(dataset) -> None:
    """As `own_split` of any other split: a fifth of what a writer has, wherever it was."""
    split = ByWriter(pool="all", validation=0.0, test_fraction=0.2).split(dataset, 0)
    writers, counts = np.unique(dataset.source, return_counts=True)
    assert [len(ids) for ids in split.test] == [max(n // 5, 1) for n in counts]
    assert split.num_train_examples.tolist() == [n - max(n // 5, 1) for n in counts]
    for client, writer in enumerate(writers):
        held = np.concatenate([split.train[client], split.test[client]])
        assert set(dataset.source[split.image_ids[held]].tolist()) == {writer}


def test_other_rules_test_on_other_peoples_images() -> None:
    split = ByWriter(test="all_of_labels").split(OTHER_TEST, 0)
    for ids in split.test:
        assert split.image_ids[ids].tolist() == list(range(60, 80))


def test_writers_with_too_little_are_left_out() -> None:
    split = ByWriter(min_samples=20, validation=0.0).split(OWN_TEST, 0)
    assert split.num_train_examples.tolist() == [30, 20]


def test_a_few_writers_are_drawn_by_the_seed() -> None:
    dataset = written_by([writer for writer in range(20) for _ in range(5)], [99] * 4)
    drawn = []
    for seed in range(3):
        split = ByWriter(clients=6, holdout=2).split(dataset, seed)
        assert dataset.source is not None
        writers = [int(dataset.source[split.image_ids[ids[0]]]) for ids in split.train]
        assert writers == sorted(set(writers))
        assert len(split.clients) == 4
        drawn.append(tuple(writers))
    assert len(set(drawn)) == 3

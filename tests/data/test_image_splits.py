"""What rotation and image_shift promise about images, groups and labels."""

from dataclasses import replace

import numpy as np
import pytest

from flray.data.dataset import Ids
from flray.data.datasets.synthetic import Synthetic
from flray.data.pipelines import PIPELINES, apply_pipeline
from flray.data.split import Split
from flray.data.splits.image_shift import ImageShift
from flray.data.splits.rotation import Rotation

GREY = Synthetic(num_train=600, num_test=200, size=4).load()
PIXELS = np.random.default_rng(0).integers(0, 256, (800, 3, 4, 4), dtype=np.uint8)
DATASET = replace(GREY, images=PIXELS)
ROWS = 800


def seen(split: Split, client: int) -> tuple[np.ndarray, Ids]:
    """All images of a client as it sees them, and the rows of the dataset they come from."""
    held = np.concatenate([split.train[client], split.validation[client], split.test[client]])
    images = DATASET.images
    if split.new_images is not None:
        images = np.concatenate([images, split.new_images])
    return images[split.image_ids[held]], split.original_rows(ROWS)[held]


def turned_left(images: np.ndarray, times: int) -> np.ndarray:
    """By 90 degrees each: what was the last column becomes the first row."""
    for _ in range(times):
        images = images.swapaxes(2, 3)[:, :, ::-1]
    return images


# rotation


def test_groups_see_their_images_turned() -> None:
    split = Rotation(clients=8).split(DATASET, 0)
    assert split.groups is not None
    assert split.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for client, group in enumerate(split.groups.tolist()):
        images, rows = seen(split, client)
        assert len(rows) > 50
        assert np.array_equal(images, turned_left(PIXELS[rows], group))
    assert not np.array_equal(turned_left(PIXELS, 1), PIXELS)


def test_degrees_name_the_groups_in_order() -> None:
    split = Rotation(clients=4, degrees=(180, -90)).split(DATASET, 0)
    for client, turns in enumerate([2, 2, 3, 3]):
        images, rows = seen(split, client)
        assert np.array_equal(images, turned_left(PIXELS[rows], turns))


def test_upright_images_stay_those_of_the_dataset() -> None:
    split = Rotation(clients=4, degrees=(0,)).split(DATASET, 0)
    assert split.new_images is None
    assert split.origin is None


def test_test_image_seen_at_four_angles_is_one_image_and_three_new_ones() -> None:
    split = Rotation(clients=4, test="all_of_labels").split(DATASET, 0)
    assert split.origin is not None
    tested = split.image_ids[np.concatenate(split.test)]
    assert len(np.unique(tested)) == 4 * 200
    assert (np.bincount(split.origin, minlength=ROWS)[600:] == 3).all()
    assert (np.bincount(split.origin, minlength=ROWS)[:600] <= 1).all()


# image_shift


def test_shared_pipelines_take_turns_and_are_the_groups() -> None:
    options = ImageShift(clients=20, form="shared", labels="iid", samples_per_client=20)
    split = options.split(DATASET, 3)
    assert split.groups is not None
    assert split.groups.tolist() == [*range(10), *range(10)]
    for client in range(20):
        images, rows = seen(split, client)
        wanted = apply_pipeline(PIPELINES[client % 10], PIXELS[rows], rows, 3)
        assert np.array_equal(images, wanted)


def test_own_pipelines_are_one_after_the_other() -> None:
    options = ImageShift(clients=20, labels="iid", samples_per_client=20)
    split = options.split(DATASET, 3)
    assert split.groups is None
    order_matters = 0
    for client, view in enumerate(options._views(3)):
        first, second = PIPELINES[view % 10], PIPELINES[view // 10]
        images, rows = seen(split, client)
        halfway = apply_pipeline(first, PIXELS[rows], rows, 3)
        assert np.array_equal(images, apply_pipeline(second, halfway, rows, 3))
        other_way = apply_pipeline(second, PIXELS[rows], rows, 3)
        order_matters += not np.array_equal(images, apply_pipeline(first, other_way, rows, 3))
    assert order_matters > 5


def test_own_pairs_are_different_while_they_last() -> None:
    options = ImageShift(clients=95, samples_per_client=4, labels="iid")
    views = options._views(0)
    first, second = views % 10, views // 10
    assert (first != second).all()
    assert len(np.unique(views[:90])) == 90
    assert np.array_equal(views[90:], views[:5])
    assert not np.array_equal(views, options._views(1))


def test_sizes_are_300_and_100_by_default() -> None:
    large = Synthetic(num_train=4000, num_test=200, size=2).load()
    options = ImageShift(clients=8, form="shared", pipelines=("identity", "invert"))
    split = options.split(large, 0)
    assert split.num_train_examples.tolist() == [300] * 8
    assert [len(ids) for ids in split.validation] == [100] * 8


def test_skewed_client_has_three_classes_with_four_fifths_of_its_images() -> None:
    split = ImageShift(clients=20, samples_per_client=20).split(DATASET, 0)
    majors = np.zeros(10, np.int64)
    for client in range(20):
        own = np.concatenate([split.train[client], split.validation[client]])
        counts = np.bincount(split.labels[own], minlength=10)
        assert counts.sum() == 20
        assert np.sort(counts)[-3:].tolist() == [5, 5, 6]  # 16 images of 3 classes
        assert np.sort(counts)[:-3].tolist() == [0, 0, 0, 1, 1, 1, 1]
        majors += counts >= 5
    assert majors.tolist() == [6] * 10  # 20 * 3 over 10 classes


def test_dirichlet_client_has_the_classes_it_draws() -> None:
    def largest(alpha: float) -> float:
        options = ImageShift(clients=10, samples_per_client=20, labels="dirichlet", alpha=alpha)
        split = options.split(DATASET, 0)
        return float(np.mean([np.bincount(split.labels[ids]).max() for ids in split.train]) / 15)

    assert largest(0.3) > 0.35
    assert largest(1000.0) < 0.25


def test_skew_alone_is_the_identity_without_groups() -> None:
    options = ImageShift(clients=5, form="shared", pipelines=("identity",), samples_per_client=20)
    split = options.split(GREY, 0)
    assert split.new_images is None
    assert split.groups is None


@pytest.mark.parametrize("form", ["shared", "own"])
def test_digest_sees_the_new_images(form: str) -> None:
    options = ImageShift(clients=10, form=form, labels="iid", samples_per_client=10)
    split = options.split(DATASET, 0)
    assert split.new_images is not None
    other = split.new_images.copy()
    other[0, 0, 0, 0] ^= 1
    assert replace(split, new_images=other).digest() != split.digest()
    assert split.origin is not None
    assert replace(split, origin=split.origin[::-1]).digest() != split.digest()

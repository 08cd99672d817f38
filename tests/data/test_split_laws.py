"""Laws that hold for every split, whatever its options."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flray.data import SPLITS
from flray.data.dataset import Dataset, Ids
from flray.data.datasets.synthetic import Synthetic
from flray.data.pipelines import PIPELINES
from flray.data.split import Split
from flray.data.splits.by_writer import ByWriter
from flray.data.splits.dirichlet import Dirichlet
from flray.data.splits.iid import Iid
from flray.data.splits.image_shift import ImageShift
from flray.data.splits.label_groups import LabelGroups
from flray.data.splits.label_skew import LabelSkew
from flray.data.splits.label_swap import LabelSwap
from flray.data.splits.natural import Natural
from flray.data.splits.options import PartOptions
from flray.data.splits.pathological import Pathological
from flray.data.splits.power_law_groups import PowerLawGroups
from flray.data.splits.rotation import Rotation

pytestmark = pytest.mark.slow


def coloured_dataset_of_writers() -> Dataset:
    """60 + 20 images of each of 10 labels; 20 people wrote the first 600, others the last 200."""
    plain = Synthetic(num_train=600, num_test=200, size=2).load()
    pixels = np.random.default_rng(0).integers(0, 256, (800, 3, 2, 2), dtype=np.uint8)
    rows = np.arange(800)
    return replace(plain, images=pixels, source=rows // 30)


DATASET = coloured_dataset_of_writers()
PARTS = {
    "validation": st.sampled_from([0.0, 0.1, 0.29]),
    "server": st.sampled_from([0, 7, 50]),
    "holdout": st.integers(0, 4),
}
COMMON = {"clients": st.integers(5, 20), **PARTS}
ANY_SPLIT = st.one_of(
    st.builds(Iid, **COMMON),
    st.builds(Pathological, labels_per_client=st.integers(1, 10), **COMMON),
    st.builds(Pathological, variant=st.just("shards"), **COMMON),
    st.builds(LabelGroups, groups=st.sampled_from([1, 2, 5]), **COMMON),
    st.builds(
        LabelGroups,
        scenario=st.just("ring"),
        groups=st.just(5),
        overlap=st.booleans(),
        **COMMON,
    ),
    st.builds(LabelGroups, drawn=st.just(True), samples_per_client=st.just(20), **COMMON),
    st.builds(LabelSwap, groups=st.integers(1, 5), seeded_pairs=st.booleans(), **COMMON),
    st.builds(
        Dirichlet,
        alpha=st.sampled_from([0.1, 1.0, 100.0]),
        min_samples=st.just(2),
        max_tries=st.just(1000),
        **COMMON,
    ),
    st.builds(LabelSkew, share=st.sampled_from([0.1, 0.2, 0.5, 1.0]), **COMMON),
    st.builds(PowerLawGroups, groups=st.sampled_from([1, 2, 3, 5]), **COMMON),
    st.builds(
        Rotation,
        degrees=st.sampled_from([(0, 90, 180, 270), (-90, 0), (180,)]),
        **COMMON,
    ),
    st.builds(
        ImageShift,
        form=st.sampled_from(["shared", "own"]),
        pipelines=st.sampled_from([PIPELINES, ("invert", "identity", "noise")]),
        labels=st.sampled_from(["iid", "skew", "dirichlet"]),
        samples_per_client=st.just(10),
        **COMMON,
    ),
    st.builds(ByWriter, clients=st.integers(8, 12), min_samples=st.integers(1, 15), **PARTS),
)
RULES = st.sampled_from(["own_split", "proportional", "all_of_labels"])
SEEDS = st.integers(0, 1000)
law = settings(max_examples=60)


def images(split: Split, part: tuple[Ids, ...]) -> list[Ids]:
    """Rows of the dataset: for a new image the one it was made from."""
    rows = split.original_rows(len(DATASET.labels))
    return [rows[examples] for examples in part]


def num_owners(split: Split, part: tuple[Ids, ...]) -> Ids:
    return np.bincount(np.concatenate(images(split, part)), minlength=len(DATASET.labels))


def own_data(split: Split, options: PartOptions) -> list[Ids]:
    parts = [split.train, split.validation]
    parts += [split.test] if options.test == "own_split" else []
    return [
        np.concatenate(client) for client in zip(*(images(split, p) for p in parts), strict=True)
    ]


def overlaps(options: PartOptions) -> bool:
    return isinstance(options, LabelGroups) and (options.overlap or options.drawn)


def test_the_laws_cover_every_registered_split() -> None:
    covered = {Iid, Pathological, LabelGroups, LabelSwap, Dirichlet}
    covered |= {LabelSkew, PowerLawGroups, Rotation, ImageShift, ByWriter}
    # Those of natural, which does not deal images by label, are in test_natural.
    assert covered == set(SPLITS.values()) - {Natural}


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_nobody_trains_on_what_anybody_is_judged_on(
    options: PartOptions, rule: str, seed: int
) -> None:
    split = replace(options, test=rule).split(DATASET, seed)
    trained = num_owners(split, split.train) > 0
    validated = num_owners(split, split.validation) > 0
    tested = num_owners(split, split.test) > 0
    assert trained.any()
    assert tested.any()
    assert not (trained & validated).any()
    assert not (trained & tested).any()
    assert not (validated & tested).any()


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_an_image_has_one_owner(options: PartOptions, rule: str, seed: int) -> None:
    options = replace(options, test=rule)
    split = options.split(DATASET, seed)
    owners = num_owners(split, split.train) + num_owners(split, split.validation)
    assert owners.max() == 1 or (overlaps(options) and (options.drawn or owners.max() == 2))
    if rule == "all_of_labels" or overlaps(options):
        return
    # A client that rounding left with nothing shares a single image.
    several = tuple(ids for ids in split.test if len(ids) > 1)
    assert num_owners(split, several).max() == 1


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_every_training_image_is_dealt_or_the_servers(
    options: PartOptions, rule: str, seed: int
) -> None:
    options = replace(options, test=rule)
    split = options.split(DATASET, seed)
    own = np.concatenate(own_data(split, options))
    public = split.image_ids[split.server]
    if isinstance(options, ImageShift):
        assert [len(ids) for ids in own_data(split, options)] == [10] * options.clients
        return
    # Too few clients for all labels: those nobody was assigned stay with nobody.
    dealt = DATASET.labels
    if isinstance(options, ByWriter):
        assert DATASET.source is not None
        dealt = DATASET.source
    elif isinstance(options, Pathological):
        num_labels = min(options.clients * options.labels_per_client, 10)
        assert len(np.unique(DATASET.labels[own])) == num_labels
    elif not isinstance(options, LabelSkew):
        assert len(np.unique(DATASET.labels[own])) == 10
    wanted = DATASET.train_ids[np.isin(dealt[DATASET.train_ids], dealt[own])]
    assert np.array_equal(np.union1d(own, public), np.union1d(wanted, public))


@law
@given(ANY_SPLIT, SEEDS)
def test_the_server_set_is_balanced_and_held_by_no_client(options: PartOptions, seed: int) -> None:
    split = options.split(DATASET, seed)
    assert len(split.server) == options.server
    held = np.concatenate([*split.train, *split.validation, *split.test])
    public = split.image_ids[split.server]
    rows = split.original_rows(len(DATASET.labels))
    assert not np.isin(public, rows[held]).any()
    assert (public < DATASET.num_train).all()
    assert np.array_equal(split.labels[split.server], DATASET.labels[public])
    counts = np.bincount(split.labels[split.server], minlength=10)
    assert counts.max() - counts.min() <= 1


@law
@given(ANY_SPLIT, SEEDS)
def test_holdout_clients_hold_data_and_do_not_train(options: PartOptions, seed: int) -> None:
    split = options.split(DATASET, seed)
    assert len(split.holdout) == len(np.unique(split.holdout)) == options.holdout
    assert not np.isin(split.holdout, split.clients).any()
    assert len(split.clients) == options.clients - options.holdout
    assert all(len(split.train[client]) for client in split.holdout)


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_examples_are_distinct_pairs_ascending_and_all_used(
    options: PartOptions, rule: str, seed: int
) -> None:
    split = replace(options, test=rule).split(DATASET, seed)
    pairs = np.stack([split.image_ids, split.labels], axis=1)
    assert len(np.unique(pairs, axis=0)) == len(pairs)
    used = np.concatenate([*split.train, *split.validation, *split.test, split.server])
    assert np.array_equal(np.unique(used), np.arange(len(pairs)))
    for ids in (*split.train, *split.validation, *split.test):
        assert (np.diff(ids) > 0).all()
        assert ids.dtype == np.int64


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_new_images_are_used_and_say_where_they_come_from(
    options: PartOptions, rule: str, seed: int
) -> None:
    split = replace(options, test=rule).split(DATASET, seed)
    num_images = len(DATASET.labels)
    if split.new_images is None:
        assert split.origin is None
        assert split.image_ids.max() < num_images
        return
    assert isinstance(options, Rotation | ImageShift)
    assert split.origin is not None
    new = np.unique(split.image_ids[split.image_ids >= num_images])
    assert np.array_equal(new, num_images + np.arange(len(split.origin)))
    assert split.new_images.shape == (len(new), *DATASET.image_shape)
    assert split.new_images.dtype == np.uint8
    true = DATASET.labels[split.original_rows(num_images)]
    assert np.array_equal(split.labels, true)


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_validation_and_own_test_have_the_size_asked_for(
    options: PartOptions, rule: str, seed: int
) -> None:
    options = replace(options, test=rule)
    if overlaps(options):  # there an image is validation for both owners if for one
        return
    split = options.split(DATASET, seed)
    percent = round(100 * options.validation)
    for client, owned in enumerate(own_data(split, options)):
        n = len(owned)
        num_test = 0
        if rule == "own_split":
            num_test = min(max(n // 5, 1), n - 1)
            assert len(split.test[client]) == num_test
        wanted = 0 if percent == 0 else max(n * percent // 100, 1)
        assert len(split.validation[client]) == min(wanted, n - num_test - 1)
        assert len(split.train[client]) >= 1


@law
@given(ANY_SPLIT, SEEDS)
def test_all_of_labels_is_every_test_image_of_the_training_labels(
    options: PartOptions, seed: int
) -> None:
    split = replace(options, test="all_of_labels").split(DATASET, seed)
    tested_on = images(split, split.test)
    for trained, tested in zip(images(split, split.train), tested_on, strict=True):
        labels = DATASET.labels[trained]
        if isinstance(options, PowerLawGroups):  # there it is the labels of the group
            each = -(-10 // options.groups)
            labels = np.flatnonzero(np.isin(np.arange(10) // each, labels // each))
        wanted = np.isin(DATASET.labels[DATASET.test_ids], labels)
        assert np.array_equal(tested, DATASET.test_ids[wanted])


@law
@given(ANY_SPLIT, SEEDS)
def test_proportional_gives_out_every_test_image_by_training_counts(
    options: PartOptions, seed: int
) -> None:
    split = replace(options, test="proportional").split(DATASET, seed)
    trained, tested = images(split, split.train), images(split, split.test)
    counts = np.stack([np.bincount(DATASET.labels[i], minlength=10) for i in trained])
    given_out = np.stack([np.bincount(DATASET.labels[i], minlength=10) for i in tested])
    several = np.array([len(ids) > 1 for ids in tested])
    held = np.flatnonzero(counts.sum(0))
    there = DATASET.test_ids[np.isin(DATASET.labels[DATASET.test_ids], held)]
    assert np.array_equal(np.unique(np.concatenate(tested)), there)
    quota = 20 * counts / np.maximum(counts.sum(0), 1)  # 20 test images of each label
    assert (np.abs(given_out - quota)[several] < 1).all()
    assert min(map(len, tested)) >= 1


@law
@given(ANY_SPLIT, SEEDS)
def test_test_size_draws_that_many_images_in_the_clients_proportions(
    options: PartOptions, seed: int
) -> None:
    split = replace(options, test="proportional", test_size=15).split(DATASET, seed)
    tested_on = images(split, split.test)
    for trained, tested in zip(images(split, split.train), tested_on, strict=True):
        assert len(np.unique(tested)) == 15
        assert (tested >= DATASET.num_train).all()
        quota = 15 * np.bincount(DATASET.labels[trained], minlength=10) / len(trained)
        counts = np.bincount(DATASET.labels[tested], minlength=10)
        assert (np.abs(counts - quota) < 1).all()


@law
@given(ANY_SPLIT, RULES, SEEDS)
def test_the_seed_is_the_split(options: PartOptions, rule: str, seed: int) -> None:
    # With one label a client, and a label for each, nothing is left to draw.
    assume(not isinstance(options, LabelSkew) or options.share > 0.1)
    options = replace(options, test=rule)
    digest = options.split(DATASET, seed).digest()
    assert digest == options.split(DATASET, seed).digest()
    assert digest != options.split(DATASET, seed + 1).digest()


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_splits_leave_the_dataset_untouched(name: str) -> None:
    images, labels = DATASET.images.copy(), DATASET.labels.copy()
    fields = {"samples_per_client": 10} if name == "image_shift" else {}
    SPLITS[name](clients=10, server=20, **fields).split(DATASET, 0)
    assert np.array_equal(DATASET.images, images)
    assert np.array_equal(DATASET.labels, labels)

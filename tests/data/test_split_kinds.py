"""What each split promises about sizes, label sets and groups."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flray.data.dataset import Dataset, Ids, Normalization
from flray.data.datasets.synthetic import Synthetic
from flray.data.events import Timeline
from flray.data.global_test import with_global_test
from flray.data.split import Split
from flray.data.splits.dirichlet import Dirichlet, deal_by_dirichlet
from flray.data.splits.iid import Iid
from flray.data.splits.label_groups import LabelGroups
from flray.data.splits.label_swap import LabelSwap
from flray.data.splits.pathological import Pathological, balanced_label_sets
from flray.data.splits.rotation import Rotation

DATASET = Synthetic(num_train=600, num_test=200, size=2).load()


def tiny_dataset(train: list[int], test: list[int], num_classes: int) -> Dataset:
    labels = np.array(train + test)
    blank = np.zeros((len(labels), 1, 2, 2), np.uint8)
    unit = Normalization((0.0,), (1.0,))
    return Dataset("tiny", blank, labels, len(train), num_classes, unit)


def own_images(split: Split, client: int) -> Ids:
    own = np.concatenate([split.train[client], split.validation[client]])
    return np.sort(split.image_ids[own])


def own_labels(split: Split, client: int) -> set[int]:
    return set(DATASET.labels[own_images(split, client)].tolist())


# iid


@pytest.mark.parametrize("clients", [1, 7, 600])
def test_iid_sizes_differ_by_at_most_one(clients: int) -> None:
    split = Iid(clients=clients).split(DATASET, 0)
    sizes = [len(own_images(split, client)) for client in range(clients)]
    assert sum(sizes) == 600
    assert max(sizes) - min(sizes) <= 1
    assert split.groups is None


def test_iid_with_samples_per_client_deals_exactly_that() -> None:
    split = Iid(clients=7, samples_per_client=20, validation=0.1).split(DATASET, 0)
    assert split.num_train_examples.tolist() == [18] * 7
    assert [len(ids) for ids in split.validation] == [2] * 7


def test_iid_client_holds_and_is_tested_on_one_source() -> None:
    dataset = Synthetic(num_train=600, num_test=200, size=2, num_groups=3).load()
    assert dataset.source is not None
    by_source = Iid(clients=7, by_source=True)
    for options in (by_source, replace(by_source, test="all_of_labels")):
        split = options.split(dataset, 0)
        assert split.groups is not None
        assert split.groups.tolist() == [0, 1, 2, 0, 1, 2, 0]
        for client, group in enumerate(split.groups):
            held = [part[client] for part in (split.train, split.validation, split.test)]
            assert all(len(ids) for ids in held)
            sources = dataset.source[split.image_ids[np.concatenate(held)]]
            assert set(sources.tolist()) == {group}


def test_iid_ignores_the_source_unless_told() -> None:
    dataset = Synthetic(num_train=600, num_test=200, size=2, num_groups=3).load()
    assert dataset.source is not None
    split = Iid(clients=7).split(dataset, 0)
    assert split.groups is None
    assert set(dataset.source[own_images(split, 0)].tolist()) == {0, 1, 2}
    assert split.digest() == Iid(clients=7).split(replace(dataset, source=None), 0).digest()


# pathological


@settings(max_examples=100)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12), st.integers(0, 1000))
def test_label_sets_are_distinct_and_balanced_for_any_numbers(
    clients: int, labels_each: int, more_classes: int, seed: int
) -> None:
    classes = labels_each + more_classes
    rng = np.random.default_rng(seed)
    chosen = balanced_label_sets(clients, labels_each, classes, rng)
    assert chosen.shape == (clients, classes)
    assert set(np.unique(chosen).tolist()) <= {0, 1}
    assert (chosen.sum(axis=1) == labels_each).all()
    assert chosen.sum(axis=0).max() - chosen.sum(axis=0).min() <= 1


@pytest.mark.parametrize("labels_per_client", [1, 2, 3, 10])
def test_pathological_client_holds_exactly_its_labels(labels_per_client: int) -> None:
    split = Pathological(clients=20, labels_per_client=labels_per_client).split(DATASET, 0)
    sets = [own_labels(split, client) for client in range(20)]
    assert {len(labels) for labels in sets} == {labels_per_client}
    holders = np.bincount([label for labels in sets for label in labels])
    assert holders.tolist() == [2 * labels_per_client] * 10
    # 60 images of each label among 2 * labels_per_client holders
    each = 60 // (2 * labels_per_client)
    for client in range(20):
        counts = np.bincount(DATASET.labels[own_images(split, client)])
        assert set(counts[counts > 0].tolist()) <= {each, each + 1}


def test_pathological_shards_are_dealt_by_mcmahans_rule() -> None:
    # 60 images of each of 10 labels, 10 clients with 2 shards of 30: no shard straddles.
    split = Pathological(clients=10, variant="shards", validation=0.0).split(DATASET, 0)
    assert split.num_train_examples.tolist() == [60] * 10
    for client in range(10):
        counts = np.bincount(DATASET.labels[own_images(split, client)], minlength=10)
        assert set(counts.tolist()) <= {0, 30, 60}


def test_uneven_labels_go_to_neighbours_in_random_sizes() -> None:
    """20 clients with 2 of 10 labels of 60: 4 neighbours share a label, so the mean is 15. Three of
    them get 1 to 14 images of it, the fourth the rest, at least 60 - 3 * 14 = 18."""
    options = Pathological(clients=20, variant="uneven", validation=0)
    split = options.split(DATASET, 0)
    counts = split.label_counts(split.clients)  # (20, 10)
    for label in range(10):
        first = label // 2 * 4
        assert np.flatnonzero(counts[:, label]).tolist() == list(range(first, first + 4))
        *drawn, rest = counts[first : first + 4, label].tolist()
        assert all(1 <= num < 15 for num in drawn)
        assert rest == 60 - sum(drawn) >= 18
    assert len(np.unique(counts[counts > 0])) > 5


def test_uneven_labels_are_rounded_up_until_all_clients_have_theirs() -> None:
    """3 clients with 2 of 4 labels: ⌈6 / 4⌉ = 2 of them share a label, as long as 2 lack one."""
    dataset = tiny_dataset([0, 1, 2, 3] * 8, [0, 1, 2, 3], 4)
    options = Pathological(clients=3, variant="uneven", validation=0, test="own_split")
    split = options.split(dataset, 0)
    held = [sorted(set(split.labels[ids].tolist())) for ids in split.train]
    assert held == [[0, 1], [0, 1], [2, 3]]


# pool


def test_a_pool_of_all_images_is_dealt_and_cut() -> None:
    """600 training and 200 test images on 4 clients: 200 each, 150 to train and 50 to test on."""
    options = Iid(clients=4, pool="all", test="own_split", test_fraction=0.25, validation=0)
    split = options.split(DATASET, 0)
    assert split.num_train_examples.tolist() == [150] * 4
    assert [len(ids) for ids in split.test] == [50] * 4
    dealt = split.image_ids[np.concatenate([*split.train, *split.test])]
    assert np.sort(dealt).tolist() == list(range(800))
    trained = split.image_ids[np.concatenate(split.train)]
    assert (trained >= 600).sum() > 100  # of the 200 test images


def test_nobody_is_judged_globally_on_what_clients_trained_on() -> None:
    for pool, num in (("all", 0), ("train", 200)):
        options = Iid(clients=4, pool=pool, test="own_split", validation=0)
        timeline = Timeline(((1, options.split(DATASET, 0)),))
        assert len(with_global_test(timeline, DATASET).at(1).global_test) == num


# label_groups


def test_disjoint_groups_part_the_labels() -> None:
    split = LabelGroups(clients=10, groups=5).split(DATASET, 0)
    assert split.groups is not None
    assert split.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    sets = [own_labels(split, client) for client in range(0, 10, 2)]
    assert [len(labels) for labels in sets] == [2] * 5
    assert set.union(*sets) == set(range(10))
    for client in range(10):
        assert own_labels(split, client) == sets[client // 2]
        assert len(own_images(split, client)) == 60  # half of two labels of 60


def test_label_sets_follow_the_seed() -> None:
    first = LabelGroups(clients=10)
    sets = {frozenset(own_labels(first.split(DATASET, seed), 0)) for seed in range(5)}
    assert len(sets) > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_ring_neighbours_share_exactly_one_label(overlap: bool) -> None:
    split = LabelGroups(clients=10, scenario="ring", overlap=overlap).split(DATASET, 0)
    sets = [own_labels(split, client) for client in range(0, 10, 2)]
    assert [len(labels) for labels in sets] == [3] * 5
    for g in range(5):
        assert len(sets[g] & sets[(g + 1) % 5]) == 1
        assert not sets[g] & sets[(g + 2) % 5]


def test_ring_with_overlap_gives_neighbours_the_same_images() -> None:
    split = LabelGroups(
        clients=10, scenario="ring", overlap=True, samples_per_client=30, validation=0.0
    ).split(DATASET, 0)
    assert split.num_train_examples.tolist() == [30] * 10  # 10 of each of 3 labels
    for client in range(10):
        own, neighbour = own_images(split, client), own_images(split, (client + 2) % 10)
        assert len(np.intersect1d(own, neighbour)) == 10  # client j of the next group
        assert len(np.intersect1d(own, own_images(split, (client + 3) % 10))) == 0


@pytest.mark.parametrize("scenario", ["disjoint", "ring"])
def test_drawn_images_are_of_the_clients_labels_and_may_be_those_of_others(scenario: str) -> None:
    options = LabelGroups(clients=20, scenario=scenario, samples_per_client=120, validation=0.0)
    apart = options.split(DATASET, 0)
    split = replace(options, drawn=True).split(DATASET, 0)
    labels = 2 if scenario == "disjoint" else 3
    assert split.num_train_examples.tolist() == [120] * 20  # more than there are
    assert split.groups.tolist() == apart.groups.tolist()
    for client in range(20):
        assert own_labels(split, client) == own_labels(apart, client)
        counts = np.bincount(DATASET.labels[own_images(split, client)], minlength=10)
        assert sorted(counts)[-labels:] == [120 // labels] * labels
    few = replace(options, drawn=True, samples_per_client=10 * labels).split(DATASET, 0)
    own = [set(own_images(few, client)) for client in range(4)]  # a group
    assert len(set.union(*own)) > 10 * labels  # each draws for itself


def test_label_that_runs_out_is_split_evenly() -> None:
    # A ring of 5 with 2 clients a group: 4 clients share a label of 60, so 15 each and not 20.
    options = LabelGroups(clients=10, scenario="ring", samples_per_client=60, validation=0.0)
    split = options.split(DATASET, 0)
    for client in range(10):
        counts = np.bincount(DATASET.labels[own_images(split, client)])
        assert sorted(counts[counts > 0].tolist()) == [15, 15, 20]


# label_swap


def test_label_swap_by_hand() -> None:
    dataset = tiny_dataset(train=[0, 1, 2, 3] * 4, test=[0, 1, 2, 3], num_classes=4)
    options = LabelSwap(clients=4, groups=2, validation=0.25, test="all_of_labels")
    split = options.split(dataset, 0)
    assert split.groups is not None
    assert split.groups.tolist() == [0, 0, 1, 1]
    seen = {0: [1, 0, 2, 3], 1: [0, 1, 3, 2]}
    for client, group in enumerate([0, 0, 1, 1]):
        for part in (split.train, split.validation, split.test):
            true = dataset.labels[split.image_ids[part[client]]]
            assert len(true) > 0
            assert split.labels[part[client]].tolist() == [seen[group][label] for label in true]


def test_image_tested_by_two_groups_is_two_examples() -> None:
    dataset = tiny_dataset(train=[0] * 4, test=[0], num_classes=4)
    options = LabelSwap(clients=2, groups=2, validation=0.0, test="all_of_labels")
    split = options.split(dataset, 0)
    (first,), (second,) = split.test
    assert split.image_ids[[first, second]].tolist() == [4, 4]
    assert split.labels[[first, second]].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("label_sets", "has_groups"),
    [
        ([{0, 1, 2}, {0, 1, 2}], False),
        ([{0, 1, 2, 3}, {0, 1, 2}, {0, 1, 3}], False),  # each holds at least half of another's
        ([{0, 1, 2, 3}, {0}], True),  # the second holds a quarter of the first one's
        ([{0, 1}, {2, 3}], True),
        ([{0, 1}, set()], False),  # a client without examples is in no group
    ],
)
def test_label_sets_are_groups_where_a_client_lacks_most_labels_of_another(
    label_sets, has_groups
) -> None:
    labels = np.array([label for own in label_sets for label in sorted(own)])
    parts = tuple(np.split(np.arange(len(labels)), np.cumsum([len(s) for s in label_sets])[:-1]))
    assert Split(np.arange(len(labels)), labels, parts, parts, parts).has_label_groups is has_groups


def test_a_server_set_from_test_is_the_last_of_each_class_and_stays_in_the_test_sets() -> None:
    labels = [0, 1, 0, 1, 1, 0]
    data = tiny_dataset([0, 1] * 6, labels, num_classes=2)
    plain = Iid(clients=2, test="all_of_labels", validation=0).split(data, 0)
    split = Iid(clients=2, test="all_of_labels", validation=0, server=3, server_from="test").split(
        data, 0
    )
    # Rows 12 to 17: class 0 is 12, 14, 17, of which two are taken, class 1 is 13, 15, 16.
    assert split.image_ids[split.server].tolist() == [14, 16, 17]
    for one, other in zip(plain.train + plain.test, split.train + split.test, strict=True):
        assert np.array_equal(plain.image_ids[one], split.image_ids[other])


def test_a_synthetic_server_set_uses_no_image_of_the_dataset() -> None:
    """Clients hold what they would hold without a server, whose images follow from the seed."""
    options = {"clients": 3, "test": "all_of_labels"}
    plain = Iid(**options).split(DATASET, 0)
    made = Iid(**options, server=25, server_from="synthetic")
    split = made.split(DATASET, 0)
    for one, other in zip(plain.train + plain.test, split.train + split.test, strict=True):
        assert np.array_equal(one, other)
    assert (split.image_ids[split.server] >= len(DATASET.labels)).all()
    assert (split.original_rows(len(DATASET.labels))[split.server] == -1).all()
    assert split.new_images is not None
    assert split.new_images.shape == (25, 1, 2, 2)
    assert len(np.unique(split.new_images, axis=0)) > 20
    inverted = replace(DATASET, images=255 - DATASET.images)
    assert np.array_equal(made.split(inverted, 0).new_images, split.new_images)
    assert not np.array_equal(made.split(DATASET, 1).new_images, split.new_images)


def test_synthetic_images_come_after_those_a_split_makes() -> None:
    plain = Rotation(clients=4).split(DATASET, 0)
    split = Rotation(clients=4, server=5, server_from="synthetic").split(DATASET, 0)
    assert plain.new_images is not None
    assert split.new_images is not None
    assert np.array_equal(split.new_images[:-5], plain.new_images)
    assert split.image_ids[: len(plain.image_ids)].tolist() == plain.image_ids.tolist()
    rows = split.image_ids[split.server] - len(DATASET.labels)
    assert rows.tolist() == list(range(len(plain.new_images), len(split.new_images)))
    assert (split.original_rows(len(DATASET.labels))[split.server] == -1).all()


def test_label_swap_leaves_the_servers_labels_alone() -> None:
    split = LabelSwap(clients=8, server=10).split(DATASET, 0)
    assert sorted(split.labels[split.server].tolist()) == list(range(10))
    assert np.array_equal(split.labels[split.server], DATASET.labels[split.image_ids[split.server]])


def test_seeded_pairs_are_disjoint_and_follow_the_seed() -> None:
    drawn = set()
    for seed in range(5):
        options = LabelSwap(clients=5, groups=5, seeded_pairs=True, test="all_of_labels")
        split = options.split(DATASET, seed)
        pairs = []
        for test in split.test:
            true, seen = DATASET.labels[split.image_ids[test]], split.labels[test]
            pairs.append(frozenset(true[true != seen].tolist()))
        assert [len(pair) for pair in pairs] == [2] * 5
        assert frozenset.union(*pairs) == set(range(10))
        drawn.add(tuple(pairs))
    assert len(drawn) > 1


# dirichlet


def test_small_alpha_skews_and_large_alpha_evens_out() -> None:
    def largest_share(alpha: float) -> float:
        split = Dirichlet(clients=10, alpha=alpha, min_samples=5, max_tries=1000).split(DATASET, 0)
        own = [DATASET.labels[own_images(split, client)] for client in range(10)]
        return float(np.mean([np.bincount(labels).max() / len(labels) for labels in own]))

    assert largest_share(0.1) > 0.4
    assert largest_share(1000.0) < 0.2


def test_dirichlet_honours_min_samples() -> None:
    split = Dirichlet(clients=10, min_samples=20, max_tries=1000).split(DATASET, 0)
    assert min(len(own_images(split, client)) for client in range(10)) >= 20


@settings(max_examples=50)
@given(st.integers(0, 1000), st.sampled_from([1e-6, 0.1, 1.0]))
def test_full_clients_get_nothing_of_later_labels(seed: int, alpha: float) -> None:
    by_label = [np.arange(label * 60, label * 60 + 60) for label in range(10)]
    owned = deal_by_dirichlet(by_label, 8, alpha, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(owned)), np.arange(600))
    for ids in owned:
        counts = np.bincount(ids // 60, minlength=10)
        before = np.cumsum(counts) - counts  # what it held when the label was dealt
        assert (counts[before >= 600 / 8] == 0).all()


# cutting


def test_client_with_one_image_trains_on_it() -> None:
    dataset = tiny_dataset(train=[0, 1], test=[0, 1], num_classes=2)
    for rule in ("own_split", "proportional", "all_of_labels"):
        split = Iid(clients=2, validation=0.5, test_fraction=0.2, test=rule).split(dataset, 0)
        assert split.num_train_examples.tolist() == [1, 1]
        assert [len(ids) for ids in split.validation] == [0, 0]


def test_client_without_a_proportional_slice_shares_one_image() -> None:
    dataset = tiny_dataset(train=[0] * 6, test=[0, 0], num_classes=1)
    split = Iid(clients=3, validation=0.0).split(dataset, 0)
    tested = [split.image_ids[ids] for ids in split.test]
    assert [len(ids) for ids in tested] == [1, 1, 1]
    assert set(np.concatenate(tested).tolist()) == {6, 7}

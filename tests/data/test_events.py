"""Events: what each kind does to a small split by hand, and laws for any of them together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flray.data.datasets.synthetic import Synthetic
from flray.data.events import Event, Timeline, make_timeline
from flray.data.global_test import with_global_test
from flray.data.split import Split
from flray.data.splits.label_groups import LabelGroups
from flray.data.splits.label_swap import LabelSwap
from flray.data.splits.rotation import Rotation
from flray.errors import ExperimentError

DATASET = Synthetic(num_classes=4, num_train=120, num_test=40, size=2).load()
SPLIT = LabelSwap(clients=6, groups=2, holdout=1, server=8, test="all_of_labels").split(DATASET, 0)

# Clients 0, 1 and 2: client i trains on image i with label i, validates on 3 + i, tests on 6 + i.
ONE = np.arange(3)
BY_HAND = Split(
    image_ids=np.arange(9),
    labels=np.tile(ONE, 3),
    train=tuple(ONE[i : i + 1] for i in ONE),
    validation=tuple(ONE[i : i + 1] + 3 for i in ONE),
    test=tuple(ONE[i : i + 1] + 6 for i in ONE),
    groups=np.array([0, 0, 1]),
)


def held(split: Split, client: int) -> list[list[tuple[int, int]]]:
    """(image, label) of a client's training, validation and test data."""
    parts = [part[client] for part in (split.train, split.validation, split.test)]
    return [
        sorted(zip(split.image_ids[ids].tolist(), split.labels[ids].tolist(), strict=True))
        for ids in parts
    ]


def everything(split: Split) -> list[list[list[tuple[int, int]]]]:
    return [held(split, client) for client in range(split.num_clients)]


# By hand


@pytest.mark.parametrize("split", [BY_HAND, SPLIT, Rotation(clients=4).split(DATASET, 0)])
def test_without_events_there_is_one_phase_and_it_is_the_split(split: Split) -> None:
    timeline = make_timeline(split, [])
    assert [first for first, _ in timeline.phases] == [1]
    assert timeline.digest() == split.digest() == timeline.at(1).digest()
    assert everything(timeline.at(10_000)) == everything(split)


RELABEL = Event(2, "relabel", (0, 1, 2, 3), ((0, 1),))


@pytest.mark.parametrize("events", [[], [RELABEL, Event(3, "exchange", (0, 3))]])
@pytest.mark.parametrize(
    "split",
    [
        SPLIT,
        LabelGroups(clients=4, groups=2).split(DATASET, 0),
        Rotation(clients=4).split(DATASET, 0),
        LabelSwap(clients=6, groups=2, test="own_split").split(DATASET, 0),
    ],
)
def test_every_test_image_is_in_the_global_test_set_once_with_its_own_label(split, events) -> None:
    before = make_timeline(split, events)
    after = with_global_test(before, DATASET)
    assert after.digest() == before.digest()
    assert len(after.phases) == len(before.phases)
    for (first, old), (same, new) in zip(before.phases, after.phases, strict=True):
        assert first == same
        assert everything(new) == everything(old)
        for part in ("train", "validation", "test"):
            pairs = zip(getattr(old, part), getattr(new, part), strict=True)
            assert all(np.array_equal(*pair) for pair in pairs)
        shown = new.image_ids[new.global_test], new.labels[new.global_test]
        assert sorted(shown[0].tolist()) == DATASET.test_ids.tolist()
        assert np.array_equal(shown[1], DATASET.labels[shown[0]])
        assert np.array_equal(new.image_ids[: new.num_dealt], old.image_ids)
        assert np.array_equal(new.labels[: new.num_dealt], old.labels)
        assert new.part_of(0, "global") is new.global_test
    assert len(before.at(1).global_test) == 0
    held = np.intersect1d(split.image_ids, DATASET.test_ids)
    assert after.at(1).num_global_only >= len(DATASET.test_ids) - len(held)


def test_phases_begin_with_their_events() -> None:
    events = [Event(7, "join", (0,)), Event(3, "leave", (0,)), Event(3, "leave", (2,))]
    timeline = make_timeline(BY_HAND, events)
    assert [first for first, _ in timeline.phases] == [1, 3, 7]
    clients = {t: timeline.at(t).clients.tolist() for t in (1, 2, 3, 6, 7, 100)}
    assert clients == {1: [0, 1, 2], 2: [0, 1, 2], 3: [1], 6: [1], 7: [0, 1], 100: [0, 1]}
    assert timeline.at(3).absent.tolist() == [0, 2]
    assert everything(timeline.at(3)) == everything(BY_HAND)  # who left keeps its data


def test_newcomer_is_absent_until_it_joins() -> None:
    timeline = make_timeline(BY_HAND, [Event(4, "join", (1, 2)), Event(9, "leave", (1,))])
    assert timeline.at(1).absent.tolist() == [1, 2]
    assert timeline.at(3).clients.tolist() == [0]
    assert timeline.at(4).clients.tolist() == [0, 1, 2]
    assert timeline.at(9).clients.tolist() == [0, 2]


def test_client_that_joins_in_round_1_was_always_there() -> None:
    timeline = make_timeline(BY_HAND, [Event(1, "join", (1,))])
    assert timeline.digest() == BY_HAND.digest()


def test_holdout_clients_do_not_train_when_they_join() -> None:
    split = replace(BY_HAND, holdout=np.array([2]))
    timeline = make_timeline(split, [Event(2, "join", (2,))])
    assert timeline.at(1).absent.tolist() == [2]
    assert timeline.at(2).absent.tolist() == []
    assert timeline.at(1).clients.tolist() == timeline.at(2).clients.tolist() == [0, 1]


def test_exchange_passes_all_parts_to_the_next_with_the_group() -> None:
    timeline = make_timeline(BY_HAND, [Event(2, "exchange", (0, 2, 1))])
    before, after = everything(timeline.at(1)), everything(timeline.at(2))
    assert before == everything(BY_HAND)
    # 0 gives to 2, 2 to 1, 1 to 0.
    assert after == [before[1], before[2], before[0]]
    assert timeline.at(2).groups is not None
    assert timeline.at(2).groups.tolist() == [0, 1, 0]


def test_relabel_swaps_the_labels_of_all_parts() -> None:
    timeline = make_timeline(BY_HAND, [Event(2, "relabel", (0, 2), ((0, 2),))])
    assert everything(timeline.at(1)) == everything(BY_HAND)
    after = timeline.at(2)
    assert held(after, 0) == [[(0, 2)], [(3, 2)], [(6, 2)]]
    assert held(after, 1) == held(BY_HAND, 1)
    assert held(after, 2) == [[(2, 0)], [(5, 0)], [(8, 0)]]
    # Six new examples after the nine there were, client by client and part by part.
    assert after.image_ids.tolist() == [*range(9), 0, 3, 6, 2, 5, 8]
    assert after.labels.tolist() == [0, 1, 2] * 3 + [2, 2, 2, 0, 0, 0]
    assert after.groups is not None
    assert after.groups.tolist() == [2, 0, 3]  # (group 0 relabelled), 0, (group 1 relabelled)


def test_relabel_twice_is_back_where_it_was() -> None:
    events = [Event(t, "relabel", (1,), ((0, 1),)) for t in (2, 4)]
    timeline = make_timeline(BY_HAND, events)
    assert held(timeline.at(2), 1) == [[(1, 0)], [(4, 0)], [(7, 0)]]
    assert everything(timeline.at(4)) == everything(BY_HAND)
    assert timeline.at(4).train[1].tolist() == [1]  # the example it had at first
    groups = [timeline.at(t).groups for t in (1, 2, 4)]
    assert [None if g is None else g.tolist() for g in groups] == [[0, 0, 1], [0, 2, 1], [0, 0, 1]]


def test_relabels_follow_each_other_and_travel_with_the_data() -> None:
    events = [
        Event(2, "relabel", (0,), ((0, 1),)),
        Event(3, "relabel", (0,), ((1, 2),)),  # its 0 has become 1, and becomes 2
        Event(4, "exchange", (0, 1)),
    ]
    timeline = make_timeline(BY_HAND, events)
    assert held(timeline.at(3), 0)[0] == [(0, 2)]
    assert held(timeline.at(4), 1)[0] == [(0, 2)]
    assert held(timeline.at(4), 0) == held(BY_HAND, 1)


def test_events_of_a_round_happen_in_the_order_given() -> None:
    relabel, exchange = Event(2, "relabel", (0,), ((0, 1),)), Event(2, "exchange", (0, 1))
    first_relabel = make_timeline(BY_HAND, [relabel, exchange]).at(2)
    first_exchange = make_timeline(BY_HAND, [exchange, relabel]).at(2)
    assert held(first_relabel, 1)[0] == [(0, 1)]
    assert held(first_relabel, 0)[0] == [(1, 1)]
    assert held(first_exchange, 1)[0] == [(0, 0)]
    assert held(first_exchange, 0)[0] == [(1, 0)]


def test_split_without_groups_stays_without() -> None:
    split = replace(BY_HAND, groups=None)
    events = [Event(2, "exchange", (0, 1)), Event(3, "relabel", (0,), ((0, 1),))]
    assert make_timeline(split, events).at(3).groups is None


def test_new_images_stay_with_every_phase() -> None:
    split = Rotation(clients=4).split(DATASET, 0)
    timeline = make_timeline(split, [Event(2, "exchange", (0, 3)), Event(3, "leave", (1,))])
    assert split.new_images is not None
    for _, phase in timeline.phases:
        assert phase.new_images is split.new_images
        assert phase.origin is split.origin
    assert held(timeline.at(2), 0) == held(split, 3)


def test_digest_follows_rounds_and_order() -> None:
    leave = Event(3, "leave", (0,))
    digests = {
        make_timeline(BY_HAND, events).digest()
        for events in (
            [],
            [leave],
            [replace(leave, round=4)],
            [replace(leave, clients=(1,))],
            [leave, Event(5, "join", (0,))],
            [Event(3, "exchange", (0, 1))],
            [Event(3, "relabel", (0,), ((0, 1),))],
        )
    }
    assert len(digests) == 7
    assert make_timeline(BY_HAND, [leave]).digest() == make_timeline(BY_HAND, [leave]).digest()


# Laws

PEOPLE = st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True).map(tuple)
ROUNDS = st.integers(1, 9)
PAIRS = st.sampled_from([((0, 1),), ((2, 3),), ((0, 3), (1, 2)), ((0, 2),)])
EXCHANGES = st.builds(Event, ROUNDS, st.just("exchange"), PEOPLE)
RELABELS = st.builds(Event, ROUNDS, st.just("relabel"), PEOPLE, PAIRS)
EVENTS = st.lists(st.one_of(EXCHANGES, RELABELS), max_size=6)
SPLITS = st.sampled_from(
    [
        SPLIT,
        LabelGroups(clients=6, groups=2, validation=0.2).split(DATASET, 0),
        Rotation(clients=6, degrees=(0, 90), server=4).split(DATASET, 0),
    ]
)
law = settings(max_examples=50)


def splits_of(timeline: Timeline) -> list[Split]:
    return [split for _, split in timeline.phases]


@law
@given(SPLITS, EVENTS)
def test_ids_never_change_their_meaning(split: Split, events: list[Event]) -> None:
    phases = splits_of(make_timeline(split, events))
    num_examples = len(split.labels)
    table = np.stack([phases[0].image_ids, phases[0].labels], axis=1)
    assert len(np.unique(table, axis=0)) == len(table)
    assert np.array_equal(phases[0].image_ids[:num_examples], split.image_ids)
    assert np.array_equal(phases[0].labels[:num_examples], split.labels)
    used = [split.server, np.arange(num_examples)]
    for phase in phases:
        assert np.array_equal(phase.image_ids, phases[0].image_ids)
        assert np.array_equal(phase.labels, phases[0].labels)
        assert np.array_equal(phase.server, split.server)
        assert np.array_equal(phase.holdout, split.holdout)
        for ids in (*phase.train, *phase.validation, *phase.test):
            assert (np.diff(ids) > 0).all()
            assert ids.dtype == np.int64
            used.append(ids)
    assert np.array_equal(np.unique(np.concatenate(used)), np.arange(len(table)))


@law
@given(SPLITS, st.lists(EXCHANGES, min_size=1, max_size=6))
def test_exchange_is_a_permutation_of_the_data(split: Split, events: list[Event]) -> None:
    before = everything(split)
    for phase in splits_of(make_timeline(split, events)):
        assert np.array_equal(phase.labels, split.labels)
        after = everything(phase)
        origin = [before.index(hand) for hand in after]
        assert sorted(origin) == list(range(6))
        assert split.groups is not None
        assert phase.groups is not None
        assert phase.groups.tolist() == split.groups[origin].tolist()


@law
@given(SPLITS, EVENTS)
def test_nobody_ever_trains_on_what_anybody_is_ever_judged_on(
    split: Split, events: list[Event]
) -> None:
    phases = splits_of(make_timeline(split, events))
    rows = phases[0].original_rows(len(DATASET.labels))

    def ever(name: str) -> set[int]:
        return {int(row) for p in phases for ids in getattr(p, name) for row in rows[ids]}

    train, validation, test = ever("train"), ever("validation"), ever("test")
    assert train
    assert not train & (validation | test)
    assert not validation & test
    assert not (train | validation | test) & set(rows[split.server].tolist())


@law
@given(SPLITS, EVENTS)
def test_images_and_label_counts_survive(split: Split, events: list[Event]) -> None:
    def summary(phase: Split) -> list[tuple[list[int], list[int]]]:
        found = []
        for ids in phase.train:
            counts = np.bincount(phase.labels[ids], minlength=4)
            found.append((phase.image_ids[ids].tolist(), np.sort(counts).tolist()))
        return sorted((sorted(images), counts) for images, counts in found)

    for phase in splits_of(make_timeline(split, events)):
        assert summary(phase) == summary(split)


@law
@given(EVENTS)
def test_groups_tell_apart_what_was_relabelled_differently(events: list[Event]) -> None:
    assert SPLIT.groups is not None
    owner_of = {int(SPLIT.image_ids[ids[0]]): owner for owner, ids in enumerate(SPLIT.train)}
    for phase in splits_of(make_timeline(SPLIT, events)):
        assert phase.groups is not None
        kinds = set()
        for client, group in enumerate(phase.groups.tolist()):
            parts = held(phase, client)
            owner = owner_of[parts[0][0][0]]
            before = dict(pair for part in held(SPLIT, owner) for pair in part)
            change = {(before[image], label) for part in parts for image, label in part}
            assert len(change) == 4  # each of the 4 labels has become one label
            kinds.add((group, int(SPLIT.groups[owner]), frozenset(change)))
        # One to one: a group is an original group and one change of labels.
        assert len(kinds) == len({group for group, *_ in kinds}) == len({k[1:] for k in kinds})


# Errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"round": 0, "kind": "leave", "clients": (0,)}, "round must be >= 1, got 0"),
        ({"round": 1, "kind": "go", "clients": (0,)}, "unknown kind 'go'; known: join, leave, ex"),
        (
            {"round": 1, "kind": "leave", "clients": ()},
            r"leave needs at least 1 clients.* got \[\]",
        ),
        ({"round": 1, "kind": "exchange", "clients": (0,)}, "exchange needs at least 2 clients"),
        ({"round": 4, "kind": "join", "clients": (1, 1)}, r"all different; got \[1, 1\] \(round 4"),
        (
            {"round": 1, "kind": "leave", "clients": (0,), "labels": ((0, 1),)},
            "leave has no labels",
        ),
        ({"round": 1, "kind": "relabel", "clients": (0,)}, "relabel needs labels as pairs to swap"),
        (
            {"round": 1, "kind": "relabel", "clients": (0,), "labels": ((0, 1), (1, 2))},
            "no label in two of them; got ",
        ),
        (
            {"round": 1, "kind": "relabel", "clients": (0,), "labels": ((0, 1, 2),)},
            "relabel needs labels as pairs to swap",
        ),
    ],
)
def test_events_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Event(**fields)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event(2, "leave", (3,))], "unknown client 3 in the leave of round 2; clients are 0 to 2"),
        ([Event(2, "leave", (-1,))], "unknown client -1 in the leave of round 2"),
        (
            [Event(2, "relabel", (0,), ((0, 3),))],
            "unknown label 3 in the relabel of round 2; labels of this split are 0 to 2",
        ),
        (
            [Event(2, "join", (1,)), Event(5, "join", (0, 1))],
            "client 1 cannot join in round 5: it is there already; .* first event",
        ),
        (
            [Event(2, "exchange", (1, 2)), Event(5, "join", (1,))],
            "client 1 cannot join in round 5: it is there already",
        ),
        (
            [Event(2, "leave", (1,)), Event(5, "leave", (1,))],
            "client 1 cannot leave in round 5: it is not there",
        ),
        ([Event(6, "leave", (0, 1, 2))], "nobody is there to train from round 6"),
        ([Event(6, "join", (0, 1, 2))], "nobody is there to train from round 1"),
    ],
)
def test_timelines_that_cannot_be_are_refused(events: list[Event], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        make_timeline(BY_HAND, events)


def test_holdout_clients_alone_are_nobody_to_train() -> None:
    split = replace(BY_HAND, holdout=np.array([2]))
    with pytest.raises(ExperimentError, match="nobody is there to train from round 3"):
        make_timeline(split, [Event(3, "leave", (0, 1))])


def test_everybody_may_go_and_come_within_a_round() -> None:
    swap = [Event(3, "leave", (0, 1)), Event(3, "join", (2,))]
    timeline = make_timeline(BY_HAND, swap)
    assert timeline.at(2).clients.tolist() == [0, 1]
    assert timeline.at(3).clients.tolist() == [2]


def test_round_0_has_no_split() -> None:
    with pytest.raises(ExperimentError, match="round must be at least 1, got 0"):
        make_timeline(BY_HAND, []).at(0)

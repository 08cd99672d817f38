"""Split `natural`: owners are clients, and nothing of a test part is trained on."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flray.data.dataset import Dataset
from flray.data.events import Event, make_timeline
from flray.data.owned import TIME, Rows, window_rows
from flray.data.splits.natural import Natural
from flray.errors import ExperimentError
from flray.randomness import generator

SIZES = st.lists(st.integers(8, 40), min_size=2, max_size=5)
SHARES = st.sampled_from([0.1, 0.25, 0.4])
SERVERS, SEEDS = st.integers(1, 6), st.integers(0, 3)
PARTS = ("train", "validation", "test")


def owned(sizes: list[int], **fields) -> Dataset:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    num = len(owner)
    return Rows(np.arange(float(num)), np.zeros(num), owner, owner % 2, **fields).dataset("mine")


@settings(max_examples=40)
@given(SIZES, SHARES, SHARES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_a_split_by_time_has_no_leak(sizes, test, validation, length, every, seed) -> None:
    """All instants of a training window are before all of validation, and these before test."""
    sizes = [size + 40 for size in sizes]
    data = window_rows(owned(sizes, time=np.arange(sum(sizes))), length, every)
    split = Natural("time", test, validation).split(data, seed)
    spans = data.columns[TIME][split.image_ids]
    for client in range(len(sizes)):
        parts = [spans[getattr(split, part)[client]] for part in PARTS]
        assert all(len(part) for part in parts)
        assert (parts[0] < parts[1].min()).all()
        assert (parts[1] < parts[2].min()).all()


@settings(max_examples=40)
@given(
    st.sampled_from(["time", "share"]), SHARES, st.integers(2, 6), st.integers(1, 4), SERVERS, SEEDS
)
def test_no_public_window_has_an_instant_of_a_test_or_validation_window(
    test_by, share, length, every, server, seed
) -> None:
    """Instants are compared one by one; no window is lost but those that overlap a later part."""
    data = window_rows(owned([90, 120], time=np.arange(210) * 0.5), length, every)
    options = Natural(test_by, share, validation=0.1, server=server)
    try:
        split = options.split(data, seed)
    except ExperimentError as error:
        assert "share no sample" in str(error)  # noqa: PT017
        assume(False)
    instants = [set(range(round(2 * a), round(2 * b) + 1)) for a, b in data.columns[TIME]]
    public = split.image_ids[split.server]
    judged = split.image_ids[np.concatenate([*split.validation, *split.test])]
    assert len(public) == server
    assert not set.union(*(instants[k] for k in public)) & set.union(*(instants[k] for k in judged))
    assert len(judged) > server
    for k in np.setdiff1d(np.arange(len(instants)), split.image_ids):
        assert test_by == "time"
        assert any(instants[k] & instants[j] for j in judged)
    assert split.digest() == options.split(data, seed).digest()


@settings(max_examples=40)
@given(SHARES, SERVERS, SEEDS)
def test_no_public_example_has_a_value_of_a_test_or_validation_part(share, server, seed) -> None:
    """As where windows of a recording overlap, and their times are not known."""
    recording = np.tile(np.repeat(np.arange(10), 6), 3)
    data = owned([60, 60, 60], columns={"recording": recording})
    split = Natural("recording", share, validation=0.1, server=server).split(data, seed)
    key = 10 * data.source + recording
    judged = split.image_ids[np.concatenate([*split.validation, *split.test])]
    assert not set(key[split.image_ids[split.server]]) & set(key[judged])
    assert (len(split.server), len(split.image_ids)) == (server, 180)


@pytest.mark.parametrize("test_by", ["share", "time"])
@pytest.mark.parametrize("seed", range(3))
def test_public_examples_that_overlap_nothing_stay_the_first_of_a_random_order(
    test_by, seed
) -> None:
    """Rows of one instant share no sample, even at the same time."""
    data = owned([20, 20], time=np.arange(40) // 4)
    split = Natural(test_by, server=9).split(data, seed)
    drawn = generator(seed, "split.server").permutation(40)[:9]
    assert split.image_ids[split.server].tolist() == sorted(drawn)


def test_more_public_windows_than_overlap_no_test_window_are_refused() -> None:
    """Of the 80 windows 70 are asked for, and parts of the other ten overlap some of these."""
    data = window_rows(owned([41, 41], time=np.arange(82)), 2, 1)
    for test_by, advice in (("time", "lower test_fraction"), ("share", "set split.test_by: time")):
        message = rf"mine has .* share no sample .* split.server is 70; lower it, or {advice}"
        with pytest.raises(ExperimentError, match=message):
            Natural(test_by, server=70).split(data, 0)


@settings(max_examples=40)
@given(SIZES, SHARES, st.integers(0, 3))
def test_a_value_of_a_column_is_in_one_part(sizes, share, seed) -> None:
    day = np.random.default_rng(seed).integers(0, 4, sum(sizes))
    day[np.cumsum(sizes) - 1], day[np.cumsum(sizes) - 2], day[np.cumsum(sizes) - 3] = 0, 1, 2
    data = owned(sizes, columns={"day": day})
    split = Natural("day", share, validation=0.2).split(data, seed)
    for client in range(len(sizes)):
        days = [set(day[split.image_ids[getattr(split, part)[client]]]) for part in PARTS]
        assert days[0]
        assert days[2]
        assert sum(map(len, days)) == len(set.union(*days))


@settings(max_examples=40)
@given(SIZES, SHARES, st.integers(0, 9), st.integers(0, 1), st.integers(0, 3))
def test_each_owner_is_a_client_and_every_example_has_one_place(
    sizes, share, server, holdout, seed
) -> None:
    data = owned(sizes)
    options = Natural(test_fraction=share, server=server, holdout=holdout)
    split = options.split(data, seed)
    held = [*split.train, *split.validation, *split.test, split.server]
    rows = np.sort(split.image_ids[np.concatenate(held)])
    assert rows.tolist() == list(range(sum(sizes)))  # each once
    for client, parts in enumerate(zip(split.train, split.validation, split.test, strict=True)):
        assert set(data.source[split.image_ids[np.concatenate(parts)]]) == {client}
    assert split.groups.tolist() == [client % 2 for client in range(len(sizes))]
    assert (len(split.server), len(split.holdout)) == (server, holdout)
    assert split.digest() == options.split(data, seed).digest()
    assert split.digest() != options.split(data, seed + 1).digest()


def test_small_clients_are_refused_by_name_or_left_out() -> None:
    owner = np.array(["big"] * 9 + ["small"] + ["tall"] * 6)
    data = Rows(np.zeros(16), np.zeros(16), owner, owner).dataset("mine")
    with pytest.raises(ExperimentError, match=r"client small has too few examples, 1, .*min_samp"):
        Natural().split(data, 0)
    split = Natural(min_samples=2).split(data, 0)
    assert (split.num_clients, split.groups.tolist()) == (2, [0, 2])
    assert Natural(min_samples=2, clients=1).split(data, 0).num_clients == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_fraction": 1.5}, r"test_fraction must be in \[0, 1\), got 1.5"),
        ({"validation": 0.5, "test_fraction": 0.5}, r"must be below 1.* got 0.5 \+ 0.5"),
        ({"min_samples": 0}, "min_samples must be >= 1 or null, got 0"),
        ({"server": -1}, "server must be >= 0, got -1"),
        ({"clients": 3}, "mine has 2 clients with at least 1 examples, and 3 of 3 are needed"),
        ({"clients": 1, "holdout": 1}, "mine has 2 clients .* and 2 of 1 are needed"),
        ({"min_samples": 50}, "mine has 0 clients with at least 50 examples"),
        ({"server": 18}, "mine has 0 clients .* beside the 18 of the .*; lower split.server,"),
        ({"server": 17, "clients": 2}, "mine has 1 clients .* beside the 17 .*split.server,"),
        ({"test_by": "week"}, "test_by is 'week', .* no such column; known: share, time"),
    ],
)
def test_what_cannot_be_split_is_refused(fields, message) -> None:
    data = owned([9, 9], time=np.arange(18))
    assert "time" not in owned([9, 9], columns={"time": np.arange(18)}).columns  # not said to be it
    with pytest.raises(ValueError, match=message):
        Natural(**fields).split(data, 0)


def test_clients_of_a_regression_exchange_data_and_leave() -> None:
    split = Natural(holdout=1).split(owned([9, 9, 9]), 0)
    events = [
        Event(2, "exchange", tuple(split.clients)),
        Event(3, "leave", (int(split.clients[0]),)),
    ]
    timeline = make_timeline(split, events)
    a, b = split.clients
    assert np.array_equal(timeline.at(2).train[a], split.train[b])
    assert timeline.at(3).clients.tolist() == [b]
    assert np.array_equal(timeline.at(3).labels, split.labels)
    assert timeline.at(2).groups[a] == split.groups[b]
    with pytest.raises(ExperimentError, match="unknown label 3 in the relabel of round 2"):
        make_timeline(split, [Event(2, "relabel", (0,), ((0, 3),))])

"""Data and clients that change in time: clients join and leave, pass on their data, change labels.

A timeline is the split of every round. Its phases share one table of examples: the split's own come
first, so an example id means the same image and label in every round.
"""

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_literals
from flray.data.dataset import Ids
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.values import require_at_least

Kind = Literal["join", "leave", "exchange", "relabel"]


@dataclass(frozen=True)
class Event:
    """What happens to `clients` at the start of a round.

    `leave`: they keep their data but neither train nor are evaluated until they join again.
    `join`: they are there from now on; who was never there before is absent from round 1.
    `exchange`: each passes all its data, as it stands, to the next in the list, the last to the
    first. `relabel`: the pairs of `labels` are swapped in all the data they hold now.

    >>> Event(round=5, kind="relabel", clients=(0, 1), labels=((3, 8),)).round
    5
    """

    round: int  # Round at whose start it happens
    kind: Kind  # What happens to the clients
    clients: tuple[int, ...]  # Clients to which it happens
    labels: tuple[tuple[int, int], ...] = ()  # Pairs of labels to swap, with kind: relabel

    def __post_init__(self) -> None:
        check_literals(self)
        require_at_least(self, round=1)
        least = 2 if self.kind == "exchange" else 1
        if len(set(self.clients)) < max(least, len(self.clients)):
            raise ValueError(
                f"{self.kind} needs at least {least} clients, all different; "
                f"got {list(self.clients)} (round {self.round})"
            )
        if self.kind != "relabel" and self.labels:
            raise ValueError(f"{self.kind} has no labels, got {self.labels}; leave them out")
        named = [label for pair in self.labels for label in pair]
        is_pairs = all(len(pair) == 2 for pair in self.labels)
        if self.kind == "relabel" and not (named and is_pairs and len(set(named)) == len(named)):
            raise ValueError(
                f"relabel needs labels as pairs to swap, no label in two of them; "
                f"got {self.labels} (round {self.round})"
            )


@dataclass(frozen=True)
class Timeline:
    """The split of every round of a run: phases of (first round, split), in order of rounds.

    The first phase begins with round 1. All phases have the same examples (`image_ids`, `labels`),
    so an id means the same in every round; they differ in who holds what and who is absent.

    >>> nothing = np.empty(0, np.int64)
    >>> split = Split(np.arange(2), np.array([0, 1]), (np.array([0]), np.array([1])),
    ...               (nothing, nothing), (nothing, nothing))
    >>> timeline = make_timeline(split, [Event(round=3, kind="exchange", clients=(0, 1))])
    >>> [timeline.at(t).train[0].tolist() for t in (1, 2, 3)], timeline.changed(3)
    ([[0], [0], [1]], array([0, 1]))
    """

    phases: tuple[tuple[int, Split], ...]

    def at(self, t: int) -> Split:
        """The split of round t, counted from 1; rounds after the last phase have its split."""
        if t < 1:
            raise ExperimentError(f"round must be at least 1, got {t}")
        return self.phases[bisect_right([first for first, _ in self.phases], t) - 1][1]

    def changed(self, t: int) -> Ids:
        """The clients that hold other data than in round t - 1, or were not there then.

        Ascending; empty for round 1. Validation and test parts change together with training parts.
        """
        before = max(t - 1, 1)
        joined = np.setdiff1d(self.at(before).absent, self.at(t).absent)
        return np.union1d(np.flatnonzero(self.differs(before, t)), joined)

    def differs(self, t: int, later: int) -> NDArray[np.bool_]:
        """(M,) True for clients that hold other data in the later round than in round t."""
        a, b = self.at(t), self.at(later)
        if a is b:
            return np.zeros(a.num_clients, np.bool_)
        return ~np.array([np.array_equal(*both) for both in zip(a.train, b.train, strict=True)])

    def trained_on(self, client: int, rounds: Sequence[int]) -> Ids:
        """The training examples that a client holds in any of these rounds, each of them once."""
        ids = np.concatenate([self.at(t).trained_on(client) for t in rounds])
        return ids[np.sort(np.unique(ids, return_index=True)[1])]

    def digest(self) -> str:
        """A hash of all phases; of a timeline without events it is the split's own."""
        (_, split), *later = self.phases
        if not later:
            return split.digest()
        lines = [f"{first} {phase.digest()}" for first, phase in self.phases]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class _Hand:
    """A client's data: whose it was in the original split, and what each label has become."""

    origin: int
    labels: tuple[int, ...]

    @property
    def is_changed(self) -> bool:
        """True if a label of the data was swapped."""
        return self.labels != tuple(range(len(self.labels)))


@dataclass(frozen=True)
class _World:
    """Who holds what, and who is not there."""

    hands: tuple[_Hand, ...]
    absent: frozenset[int]


def make_timeline(split: Split, events: Sequence[Event]) -> Timeline:
    """The timeline of a split and its events; events of one round happen in the order given.

    Planted groups travel with the data; relabelled data of a group is a group of its own.

    Raises:
        ExperimentError: An event names a client or label that does not exist, a client joins that
            is there or leaves that is not, or nobody is left to train.
    """
    in_time = sorted(events, key=lambda event: event.round)  # stable
    num_labels = int(split.labels.max()) + 1 if split.has_classes else 1
    for event in in_time:
        _check_fits(event, split.num_clients, num_labels)
    world = _first_world(split, in_time, num_labels)
    worlds = {1: world}
    for event in in_time:
        world = _happen(event, world)
        worlds[event.round] = world
    phases = _write_out(split, list(worlds.values()))
    for t, phase in zip(worlds, phases, strict=True):
        if len(phase.clients) == 0:
            raise ExperimentError(
                f"nobody is there to train from round {t}: all clients that may train are absent; "
                f"let fewer leave, or somebody join earlier"
            )
    return Timeline(tuple(zip(worlds, phases, strict=True)))


def _check_fits(event: Event, num_clients: int, num_labels: int) -> None:
    """Refuse clients and labels that the split does not have."""
    for client in event.clients:
        if not 0 <= client < num_clients:
            raise ExperimentError(
                f"unknown client {client} in the {event.kind} of round {event.round}; "
                f"clients are 0 to {num_clients - 1}"
            )
    for label in (label for pair in event.labels for label in pair):
        if not 0 <= label < num_labels:
            raise ExperimentError(
                f"unknown label {label} in the relabel of round {event.round}; "
                f"labels of this split are 0 to {num_labels - 1}"
            )


def _first_world(split: Split, in_time: list[Event], num_labels: int) -> _World:
    """The world of round 1: clients whose first event is a join are absent."""
    first: dict[int, str] = {}
    for event in in_time:
        for client in event.clients:
            first.setdefault(client, event.kind)
    newcomers = [client for client, kind in first.items() if kind == "join"]
    same = tuple(range(num_labels))
    return _World(
        hands=tuple(_Hand(client, same) for client in range(split.num_clients)),
        absent=frozenset([*newcomers, *split.absent.tolist()]),
    )


def _happen(event: Event, world: _World) -> _World:
    """The world after an event."""
    if event.kind == "join" or event.kind == "leave":
        return replace(world, absent=_absent_after(event, world.absent))
    hands = list(world.hands)
    if event.kind == "exchange":
        takers = event.clients[1:] + event.clients[:1]
        for giver, taker in zip(event.clients, takers, strict=True):
            hands[taker] = world.hands[giver]
    else:
        swap = {a: b for pair in event.labels for a, b in (pair, pair[::-1])}
        for client in event.clients:
            labels = tuple(swap.get(label, label) for label in hands[client].labels)
            hands[client] = replace(hands[client], labels=labels)
    return replace(world, hands=tuple(hands))


def _absent_after(event: Event, absent: frozenset[int]) -> frozenset[int]:
    """The absent clients after a join or leave; refuses a client that is there, or is not."""
    named = frozenset(event.clients)
    wrong = named - absent if event.kind == "join" else named & absent
    if wrong:
        state = "is there already" if event.kind == "join" else "is not there"
        raise ExperimentError(
            f"client {min(wrong)} cannot {event.kind} in round {event.round}: it {state}; "
            f"a client is absent from round 1 if join is its first event"
        )
    return absent - named if event.kind == "join" else absent | named


def _write_out(split: Split, worlds: list[_World]) -> list[Split]:
    """The split of each world, all over one table of examples that begins with the split's own."""
    hands = list(dict.fromkeys(hand for world in worlds for hand in world.hands))
    num_labels = len(hands[0].labels)
    old = split.image_ids * num_labels + (split.labels if split.has_classes else 0)
    keys = {hand: _keys(split, hand) for hand in hands if hand.is_changed}
    table = grown_table(old, np.concatenate([old[:0], *(key for k in keys.values() for key in k)]))
    order = np.argsort(table)

    def examples(hand: _Hand) -> list[Ids]:
        if not hand.is_changed:
            return _parts(split, hand)
        return [np.sort(order[np.searchsorted(table, k, sorter=order)]) for k in keys[hand]]

    parts = {hand: examples(hand) for hand in hands}
    number = _group_numbers(split, hands)
    image_ids, labels = np.divmod(table, num_labels) if keys else (split.image_ids, split.labels)
    return [
        replace(
            split,
            image_ids=image_ids,
            labels=labels,
            train=tuple(parts[hand][0] for hand in world.hands),
            validation=tuple(parts[hand][1] for hand in world.hands),
            test=tuple(parts[hand][2] for hand in world.hands),
            groups=None if number is None else np.array([number[hand] for hand in world.hands]),
            absent=np.array(sorted(world.absent), np.int64),
        )
        for world in worlds
    ]


def _parts(split: Split, hand: _Hand) -> list[Ids]:
    """Training, validation and test examples of the hand, with their original labels."""
    return [part[hand.origin] for part in (split.train, split.validation, split.test)]


def _keys(split: Split, hand: _Hand) -> list[Ids]:
    """Image and label of the hand's training, validation and test data, as one number each."""
    now = np.array(hand.labels)
    return [split.image_ids[ids] * len(now) + now[split.labels[ids]] for ids in _parts(split, hand)]


def grown_table(table: Ids, used: Ids) -> Ids:
    """The table with the numbers it lacks at its end, in the order in which they are used first.

    >>> grown_table(np.array([5, 3]), np.array([9, 3, 4, 9])).tolist()
    [5, 3, 9, 4]
    """
    if not len(used):
        return table
    new, first = np.unique(used, return_index=True)
    is_new = ~np.isin(new, table)
    return np.concatenate([table, new[is_new][np.argsort(first[is_new])]])


def _group_numbers(split: Split, hands: list[_Hand]) -> dict[_Hand, int] | None:
    """The group of each hand: its own, or with labels changed a new one after all the others."""
    if split.groups is None:
        return None
    planted = split.groups.tolist()
    same = tuple(range(len(hands[0].labels)))
    number_of_kind = {(group, same): group for group in planted}
    new = itertools.count(max(planted) + 1)
    numbers = {}
    for hand in hands:
        kind = (planted[hand.origin], hand.labels)
        if kind not in number_of_kind:
            number_of_kind[kind] = next(new)
        numbers[hand] = number_of_kind[kind]
    return numbers

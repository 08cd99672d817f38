"""Rounds are written in order and whole, by as many checkpoints as the disk is fast enough for."""

from threading import Event

import numpy as np
import pytest

from flray.records.checkpoint import CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.records.writer import RoundWriter


class SlowStore(CheckpointStore):
    """Its writes wait until `may_write` is set; a round of `failing` fails."""

    def __init__(self, directory, failing=()):
        super().__init__(directory)
        self.begun, self.may_write, self.written, self.failing = Event(), Event(), [], failing

    def write(self, snapshot):
        self.begun.set()
        assert self.may_write.wait(timeout=20)
        if snapshot.round in self.failing:
            raise OSError(f"round {snapshot.round}")
        super().write(snapshot)
        self.written.append(snapshot.round)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path)


def add(writer, t, done=None, **options):
    writer.add({"round": t}, [lambda: done.append(t)] if done is not None else [], t, **options)


def rounds_of(directory):
    return [row["round"] for row in directory.rows()]


def test_rounds_that_end_during_a_write_share_the_next_checkpoint(directory):
    store, done = SlowStore(directory.checkpoints), []
    with RoundWriter(directory, store) as writer:
        add(writer, 1, done)
        assert store.begun.wait(timeout=20)
        for t in (2, 3, 4):
            add(writer, t, done)  # does not wait: nothing may be written yet
        assert done == [1]
        store.may_write.set()
    assert done == [1, 2, 3, 4]
    assert rounds_of(directory) == [1, 2, 3, 4]
    assert store.written == [1, 4]
    assert CheckpointStore(directory.checkpoints).load_latest().state == 4


def test_a_round_may_ask_for_a_checkpoint_of_its_own(directory):
    store = SlowStore(directory.checkpoints)
    store.may_write.set()
    with RoundWriter(directory, store) as writer:
        for t in range(1, 30):
            add(writer, t, at_once=t >= 28)
    assert store.written[-2:] == [28, 29]
    assert rounds_of(directory) == list(range(1, 30))


def test_rounds_within_the_interval_share_a_write_at_the_end(directory):
    store = SlowStore(directory.checkpoints)
    store.may_write.set()
    with RoundWriter(directory, store, every_s=600.0) as writer:
        for t in range(1, 30):
            add(writer, t)
        assert rounds_of(directory) == []
    assert store.written == [29]
    assert rounds_of(directory) == list(range(1, 30))


def test_flushing_writes_the_rounds_that_wait_too(directory):
    store = SlowStore(directory.checkpoints)
    with RoundWriter(directory, store) as writer:
        add(writer, 1)
        assert store.begun.wait(timeout=20)
        add(writer, 2)
        store.may_write.set()
        writer.flush()
        assert rounds_of(directory) == [1, 2]
        assert store.written == [1, 2]


def test_complete_rounds_are_written_whatever_ends_the_run(directory):
    store = SlowStore(directory.checkpoints)

    def interrupted():
        with RoundWriter(directory, store) as writer:
            for t in (1, 2, 3):
                add(writer, t)
            store.may_write.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert rounds_of(directory) == [1, 2, 3]
    assert CheckpointStore(directory.checkpoints).load_latest().round == 3


@pytest.mark.parametrize("at_once", [False, True])
def test_nothing_is_written_after_a_failed_write(directory, at_once):
    store, done = SlowStore(directory.checkpoints, failing=(2,)), []

    def fail():
        with RoundWriter(directory, store) as writer:
            store.may_write.set()
            add(writer, 1, done)
            add(writer, 2, done, at_once=True)
            add(writer, 3, done, at_once=at_once)

    with pytest.raises(OSError, match="round 2"):
        fail()
    assert done == [1, 2]
    assert CheckpointStore(directory.checkpoints).load_latest().round == 1


def test_states_of_arrays_are_those_of_their_rounds(directory):
    states = [np.full((3, 2), float(t)) for t in range(6)]
    with RoundWriter(directory, CheckpointStore(directory.checkpoints)) as writer:
        for t, state in enumerate(states):
            writer.add({"round": t}, [], state)
    found = CheckpointStore(directory.checkpoints).load_latest()
    np.testing.assert_array_equal(found.state, states[found.round])
    assert found.round == 5

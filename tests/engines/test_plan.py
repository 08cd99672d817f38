"""Which example is in which batch of which step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flray.engines.plan import num_local_steps, plan_clients
from flray.engines.training import PairedTraining, Training
from flray.errors import ExperimentError
from flray.randomness import generator, step_keys

from scenarios import tiny_experiment

OWN = np.arange(100, 200)  # ids of a client's examples


def plan_of(num_examples: int, training: Training):
    return plan_clients([OWN[:num_examples]], training, 5, 2, np.array([9]))[0]


def order_of(num_examples: int, epochs: int) -> list[list[int]]:
    """The client's examples in the order of each epoch."""
    rng = generator(5, "order", 2, 9)
    return [(100 + rng.permutation(num_examples)).tolist() for _ in range(epochs)]


def batches_of(plan) -> list[list[list[int]]]:
    """Steps, each a list of batches, each a list of examples without padding."""
    return [
        [ids[kept].tolist() for ids, kept in zip(step_ids, step_mask, strict=True)]
        for step_ids, step_mask in zip(plan.ids, plan.mask, strict=True)
    ]


def test_a_step_of_one_batch_takes_every_batch_in_turn() -> None:
    plan = plan_of(5, Training(batch_size=2, epochs=2))
    a, b = order_of(5, 2)
    assert batches_of(plan) == [
        [[a[0], a[1]]], [[a[2], a[3]]], [[a[4]]], [[b[0], b[1]]], [[b[2], b[3]]], [[b[4]]],
    ]  # fmt: skip
    assert plan.ids.shape == plan.mask.shape == (6, 1, 2)
    assert plan.keys.tolist() == [[key] for key in step_keys(generator(5, "step", 2, 9), 6)]


def test_a_step_of_two_batches_takes_consecutive_ones() -> None:
    plan = plan_of(7, PairedTraining(batch_size=2, epochs=2))
    a, b = order_of(7, 2)
    assert batches_of(plan) == [
        [[a[0], a[1]], [a[2], a[3]]],
        [[a[4], a[5]], [a[6]]],  # the last batch is short
        [[b[0], b[1]], [b[2], b[3]]],
        [[b[4], b[5]], [b[6]]],
    ]
    first = step_keys(generator(5, "step", 2, 9), 8)
    assert plan.keys.tolist() == first.reshape(4, 2).tolist()


def test_a_short_last_batch_may_be_left_out() -> None:
    plan = plan_of(9, Training(batch_size=4, epochs=2, drop_last=True))
    a, b = order_of(9, 2)
    assert batches_of(plan) == [[a[:4]], [a[4:8]], [b[:4]], [b[4:8]]]
    full = Training(batch_size=4, drop_last=True)
    assert [plan_of(num, full).num_steps for num in (3, 4, 8)] == [0, 1, 2]
    pairs = PairedTraining(batch_size=4, drop_last=True)
    assert [plan_of(num, pairs).num_steps for num in (3, 4, 8, 15, 16)] == [0, 1, 1, 1, 2]


def test_an_odd_last_batch_of_an_epoch_is_left_out() -> None:
    plan = plan_of(9, PairedTraining(batch_size=4))
    (a,) = order_of(9, 1)
    assert batches_of(plan) == [[a[:4], a[4:8]]]


@pytest.mark.parametrize("batch_size", [5, 6])
def test_a_client_with_one_batch_splits_it(batch_size) -> None:
    plan = plan_of(5, PairedTraining(batch_size=batch_size, epochs=2))
    a, b = order_of(5, 2)
    assert batches_of(plan) == [[a[:3], a[3:]], [b[:3], b[3:]]]
    assert plan.ids.shape == (2, 2, batch_size)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_client_with_one_example_has_no_pair(batch_size) -> None:
    plan = plan_of(1, PairedTraining(batch_size=batch_size, epochs=3))
    assert plan.num_steps == 0
    assert plan.ids.shape == plan.mask.shape == (0, 2, batch_size)
    assert plan.keys.shape == (0, 2)
    assert plan_of(1, Training(batch_size=batch_size, epochs=3)).num_steps == 3


def test_a_client_without_examples_has_no_steps() -> None:
    assert [plan_of(0, how).num_steps for how in (Training(), PairedTraining())] == [0, 0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [Training, PairedTraining])
@given(num=st.integers(0, 40), batch_size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_laws(kind, drop_last, num, batch_size, epochs) -> None:
    """Every example at most once an epoch, and as many steps as were announced."""
    training = kind(batch_size=batch_size, epochs=epochs, drop_last=drop_last)
    plan = plan_of(num, training)
    assert plan.num_steps == num_local_steps(np.array([num]), training)[0]
    assert plan.ids.shape[1:] == (training.batches_per_step, batch_size)
    assert plan.keys.shape == plan.ids.shape[:2]
    assert len(np.unique(plan.keys)) == plan.keys.size  # the second batch has a key of its own
    steps = batches_of(plan)
    assert all(batch for step in steps for batch in step)
    each_epoch = np.split(np.arange(plan.num_steps), epochs)
    for epoch in each_epoch:
        seen = [i for step in epoch for batch in steps[step] for i in batch]
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(OWN[:num].tolist())
        left_out = num - len(seen)
        most = (0 if kind is Training else batch_size) + drop_last * (batch_size - 1)
        assert left_out <= most
        if drop_last and kind is Training:
            assert {len(batch) for step in epoch for batch in steps[step]} <= {batch_size}


def test_pairs_are_the_same_settings_and_no_key_of_the_experiment() -> None:
    training = Training(lr=0.3, momentum=0.5, epochs=4, batch_size=7)
    paired = training.paired()
    assert paired == PairedTraining(lr=0.3, momentum=0.5, epochs=4, batch_size=7)
    assert paired.paired() == paired
    assert paired != training
    assert (training.batches_per_step, paired.batches_per_step) == (1, 2)
    with pytest.raises(ExperimentError, match=r"unknown key 'train\.batches_per_step'"):
        tiny_experiment("train.batches_per_step=2")

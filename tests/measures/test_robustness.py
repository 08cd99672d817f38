"""Clients made up to resemble others: whose images they have, and how many of each label."""

import numpy as np
import pytest

from flray.measures.measure import RunData
from flray.measures.robustness import Robustness, noisy_counts
from flray.runs.preparing import prepare

from scenarios import tiny_experiment

SPLIT = (
    "split={name: image_shift, form: shared, pipelines: [identity, invert], labels: skew, "
    "clients: 6, samples_per_client: 40, test_size: 60, holdout: 1}"
)
EIGHT = Robustness(draws=8)
DEALT = [SPLIT, "dataset.num_test=600"]


@pytest.fixture(scope="module")
def split():
    experiment = tiny_experiment(*DEALT, "evaluate.robustness={draws: 8}")
    return prepare(experiment).payload.timeline.at(1)


def test_they_hold_images_of_the_test_part_of_whom_they_resemble(split) -> None:
    assert len(split.similar) == 8 * split.num_clients
    held = np.concatenate([*split.train, *split.validation])
    for r in split.clients:
        drawn = [split.trained_on(EIGHT.similar_id(6, r, j)) for j in range(8)]
        assert all(np.isin(ids, split.test[r]).all() for ids in drawn)
        assert all(len(np.unique(ids)) == len(ids) >= 15 for ids in drawn)
        assert not np.isin(np.concatenate(drawn), held).any()
        assert len({ids.tobytes() for ids in drawn}) == 8
        assert len({len(ids) for ids in drawn}) > 3  # of different sizes
    assert all(not len(split.trained_on(EIGHT.similar_id(6, r, 0))) for r in split.holdout)


def test_clients_and_digest_are_what_they_would_be_without(split) -> None:
    alone = prepare(tiny_experiment(*DEALT)).payload.timeline.at(1)
    assert split.digest() == alone.digest()
    assert split.num_clients == alone.num_clients
    assert alone.similar == ()


def test_without_noise_their_labels_are_those_of_whom_they_resemble() -> None:
    exact = Robustness(draws=2, noise=0.0, smallest=1.0, largest=1.0, least=1)
    experiment = tiny_experiment(*DEALT)
    timeline = prepare(experiment).payload.timeline
    split = exact.prepare(RunData(None, None, timeline, has_events=False, seed=0)).at(1)
    for r in split.clients.tolist():
        counts = split.label_counts(np.array([r]))[0]
        for j in range(2):
            ids = split.trained_on(exact.similar_id(6, r, j))
            found = np.bincount(split.labels[ids], minlength=len(counts))
            np.testing.assert_array_equal(found, counts)  # the test part has twice as many


def test_counts_by_hand() -> None:
    """(d + n) s = (60 + 3, 20 - 30, 10 + 1) 1.5 = 94.5, below 0, 16.5; rounded to even, capped."""
    noise, there = np.array([3.0, -30.0, 1.0]), np.array([90, 90, 90])
    assert noisy_counts(np.array([60, 20, 10]), noise, 1.5, there, 20).tolist() == [90, 0, 16]
    # Nothing left: those of r itself, in proportion up to the least number.
    assert noisy_counts(np.array([6, 2]), np.array([-9.0, -9.0]), 1.0, there[:2], 20).tolist() == [
        15,
        5,
    ]


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"noise": -1}, {"smallest": 0}, {"largest": 0.1}])
def test_bad_numbers(wrong) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Robustness(**wrong)

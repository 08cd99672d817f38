"""What a stage of one's own returns or raises is reported with its name, and with what to do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from flray.clustering.partitions import KMeans
from flray.clustering.pipeline import Pipeline
from flray.clustering.points import Partition, Points
from flray.errors import ExperimentError
from flray.execution.federation import Cohort

from scenarios import line_federation


@dataclass(frozen=True)
class Mine:
    """A stage that returns what it is given, whatever it is asked."""

    returned: Any
    euclidean = False

    def __call__(self, *inputs: object) -> Any:
        return self.returned


SQUARE = 1.0 - np.eye(3)
FOUR = Points.vectors(np.arange(4), torch.zeros(4, 1))
WRONG = {
    "an embedding that is an array": (
        *("embed", np.zeros((3, 1))),
        r"Points of the same clients, got a ndarray; return points.moved_to\(array\)",
    ),
    "an embedding of others": ("embed", FOUR, r"Points of the same clients, got 4 of 3 clients"),
    "a distance that is a tensor": (
        *("distance", torch.from_numpy(SQUARE)),
        r"must be a NumPy array, got a Tensor; a tensor t is one after t.cpu\(\).numpy\(\)",
    ),
    "a distance that is a list": ("distance", SQUARE.tolist(), "NumPy array, got a list"),
    "a relation of pairs": ("relate", SQUARE[:2], r"must be \(3, 3\), .* got the shape \(2, 3\)"),
    "a relation with NaN": (
        *("relate", np.where(np.eye(3), 1, np.nan)),
        "without NaN, got NaN from client 10 to 20",
    ),
    "labels alone": ("partition", np.zeros(3, int), r"got a ndarray; return Partition\(labels\)"),
    "too few labels": (
        *("partition", Partition(np.zeros(2, int))),
        r"\(3,\) of whole numbers, one for each client, got \(2,\) of int64",
    ),
    "labels in a list": ("partition", Partition([0, 0, 1]), r"NumPy array .* got \(3,\) of list"),
    "labels of DBSCAN": (
        *("partition", Partition(np.array([0, -1, 0]))),
        r"from 0 to C - 1, got the labels -1, 0; .*Partition\(by_smallest_member\(labels\)\)",
    ),
    "labels with a gap": ("partition", Partition(np.array([0, 2, 0])), "got the labels 0, 2"),
}


@pytest.mark.parametrize(("kind", "returned", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_result_of_a_stage_is_refused_by_its_name(kind, returned, message) -> None:
    points = Points.vectors(np.array([10, 20, 30]), torch.zeros(3, 1))
    fed = line_federation([(1, 0)] * 3, [1] * 3, [1] * 3, [[0.0, 0.0]], 0.1)
    stages = {"partition": KMeans(number=1), kind: Mine(returned)}
    with pytest.raises(ExperimentError, match=f"after round 2: .*{kind} Mine .*{message}"):
        Pipeline(**stages).decide(points, fed, 2)


@pytest.mark.parametrize(
    ("returned", "got"), [(torch.zeros(3, 1), "a Tensor"), ((FOUR, {}, {}), "a Points and a dict")]
)
def test_a_signature_returns_points_and_a_memory(returned, got) -> None:
    fed = line_federation([(1, 0)] * 3, [1] * 3, [1] * 3, [[0.0, 0.0]], 0.1)
    with pytest.raises(ExperimentError, match=f"^signature Mine must return Points .* got {got}"):
        Pipeline(signature=Mine(returned)).observe(fed, fed.initial_bank(), Cohort(1, [0]), {})


@dataclass(frozen=True)
class Failing:
    """A stage with a mistake in it, whatever it is asked."""

    def __call__(self, *inputs: object) -> Any:
        return {}["nothing"]


@dataclass(frozen=True)
class FailingOnNewcomers:
    def __call__(self, points: Points, seed: int) -> Points:
        return points

    def transform(self, known: Points, new: Points, seed: int) -> Points:
        return undefined  # noqa: F821


@dataclass(frozen=True)
class Refusing:
    def __call__(self, points: Points) -> Any:
        raise ValueError("expected unit vectors, got others;\nchoose embed unit")


def three_points() -> Points:
    return Points.vectors(np.array([10, 20, 30]), torch.zeros(3, 1))


@pytest.mark.parametrize("kind", ["embed", "distance", "relate", "partition"])
def test_an_error_in_a_stage_names_the_stage_its_line_and_the_error(kind) -> None:
    fed = line_federation([(1, 0)] * 3, [1] * 3, [1] * 3, [[0.0, 0.0]], 0.1)
    message = (
        rf"^clustering after round 2: {kind} Failing \(test_checks.py, line \d+\): KeyError: 'no"
    )
    with pytest.raises(ExperimentError, match=message):
        Pipeline(**{kind: Failing()}).decide(three_points(), fed, 2)


def test_an_error_in_a_signature_names_it_too() -> None:
    fed = line_federation([(1, 0)] * 3, [1] * 3, [1] * 3, [[0.0, 0.0]], 0.1)
    with pytest.raises(
        ExperimentError, match=r"^signature Failing \(test_checks.py, line \d+\): Key"
    ):
        Pipeline(signature=Failing()).observe(fed, fed.initial_bank(), Cohort(1, fed.clients), {})


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"distance": Failing()}, r"^distance Failing \(test_checks.py, line \d+\): KeyError"),
        ({"embed": FailingOnNewcomers()}, r"^embed FailingOnNewcomers \(.*\): NameError: name 'un"),
    ],
)
def test_an_error_while_newcomers_are_placed_names_the_stage(stage, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        Pipeline(**stage).place(three_points(), np.zeros(3, int), three_points(), seed=0)


def test_a_value_error_of_a_stage_is_shown_as_it_stands() -> None:
    fed = line_federation([(1, 0)] * 3, [1] * 3, [1] * 3, [[0.0, 0.0]], 0.1)
    message = r"distance Refusing \(.*\): expected unit vectors, got others;\nchoose embed unit$"
    with pytest.raises(ExperimentError, match=message):
        Pipeline(distance=Refusing()).decide(three_points(), fed, 2)

"""The rows of a sweep: one for each configuration that its space describes."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flray.clustering.hierarchical import Hierarchical
from flray.clustering.points import Matrix
from flray.config.binding import Plain
from flray.config.experiment import (
    Experiment,
    evaluated_together,
    parse_experiment,
    with_value,
)
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.sweep.space import (
    THRESHOLD,
    BetweenMerges,
    Drawn,
    Grid,
    RandomSearch,
    Space,
    Values,
)

SAME_HEIGHT = 1e-6  # relative difference below which a threshold counts as on a merge
SINGLE_MERGE_SPACING = 2.0  # of thresholds where all merges have one height
STAND_IN = 1.0  # for a threshold that is not known before the row's tree


@dataclass(frozen=True)
class MergePoint:
    """The place-th of so many thresholds between the merges of the row's own tree."""

    place: int
    number: int

    def threshold(self, tree: Matrix) -> float:
        return float(between_merges(tree, self.number)[self.place])


@dataclass(frozen=True)
class Row:
    number: int
    overrides: dict[str, Any]  # Any: YAML; without a threshold that is still to be found
    plain: Plain  # resolved; with a stand-in for such a threshold
    merge_point: MergePoint | None = None

    def at(self, threshold: float) -> "Row":
        """The row once its threshold is known."""
        plain = parse_experiment(with_value(self.plain, THRESHOLD, threshold)).plain
        return replace(self, overrides={**self.overrides, THRESHOLD: threshold}, plain=plain)


def between_merges(tree: Matrix, number: int) -> Matrix:
    """(number,) thresholds in equal ratios from the lowest to the highest merge, never on a merge.

    Whether a merge at exactly the threshold happens differs between libraries (scipy: yes,
    scikit-learn: no), so a threshold that meets a merge is raised to lie between it and the next:
    the merge happens under both rules. Merges of equal clients, at height 0, happen at any
    threshold and are left out.

    >>> tree = np.array([[0, 1, 0.0, 2], [2, 4, 1.0, 3], [3, 5, 4.0, 4]])
    >>> between_merges(tree, 3).round(3).tolist()  # 1, 2 and 4 before they are raised
    [1.414, 2.0, 5.657]
    """
    height = tree[:, 2]
    merges = np.unique(height[height > 0])
    if not len(merges):
        return np.zeros(number)
    thresholds = np.geomspace(merges[0], merges[-1], number)
    spacing = thresholds[1] / thresholds[0] if len(merges) > 1 else SINGLE_MERGE_SPACING
    return np.array([_off_merges(each, merges, spacing) for each in thresholds])


def _off_merges(threshold: float, merges: Matrix, spacing: float) -> float:
    """The threshold, raised by less than the spacing where it meets one of the merges."""
    met = np.isclose(merges, threshold, rtol=SAME_HEIGHT, atol=0)
    if not met.any():
        return threshold
    merge = float(merges[met].max())
    higher = merges[merges > merge * (1 + 2 * SAME_HEIGHT)]
    room = min(spacing, float(higher[0]) / merge) if len(higher) else spacing
    return merge * math.sqrt(room)


def expand(space: Space) -> tuple[Row, ...]:
    """Every row of the space, then its baselines; a configuration that repeats is one row."""
    found: dict[str, Row] = {}
    for overrides, plain, point in itertools.chain(_varied(space), _baselines(space)):
        key = canonical([plain, None if point is None else [point.place, point.number]])
        found.setdefault(key, Row(len(found), overrides, plain, point))
    if not found:
        raise ExperimentError("the space has no rows: `except` leaves no combination")
    rows = found.values()
    together = evaluated_together([parse_experiment(row.plain) for row in rows])
    return tuple(replace(row, plain=each.plain) for row, each in zip(rows, together, strict=True))


def canonical(value: object) -> str:
    """The same text for equal configurations."""
    return json.dumps(value, sort_keys=True)


Expanded = tuple[dict[str, Any], Plain, MergePoint | None]  # Any: YAML


def _varied(space: Space) -> Iterator[Expanded]:
    for name, experiment in space.experiments.items():
        named = {"experiment": name} if len(space.experiments) > 1 else {}
        for chosen in _combinations(space, space.varied):
            if not any(_matches(chosen, pattern) for pattern in space.excluded):
                yield _expanded(experiment, named, chosen)


def _baselines(space: Space) -> Iterator[Expanded]:
    for (name, experiment), changes in itertools.product(
        space.experiments.items(), space.baselines
    ):
        named = {"experiment": name} if len(space.experiments) > 1 else {}
        applying = {key: v for key, v in space.varied.items() if not _is_replaced(key, changes)}
        for chosen in _combinations(space, applying):
            yield _expanded(experiment, named, {**changes, **chosen})


def _is_replaced(key: str, changes: Mapping[str, Any]) -> bool:
    """Does a baseline set this key, or the component it is a field of?

    >>> [_is_replaced(key, {"algorithm": "fedavg"}) for key in ("algorithm.mu", "seed")]
    [True, False]
    """
    return any(key == changed or key.startswith(f"{changed}.") for changed in changes)


def _combinations(space: Space, varied: Mapping[str, Values]) -> Iterator[dict[str, Any]]:
    """A value for each key; draws repeat with every combination of the lists."""
    lists = [_listed(values) for values in varied.values() if not isinstance(values, Drawn)]
    keys = [key for key, values in varied.items() if not isinstance(values, Drawn)]
    for values in itertools.product(*lists):
        fixed = dict(zip(keys, values, strict=True))
        for drawn in _draws(space, varied):
            chosen = fixed | drawn
            yield {key: chosen[key] for key in varied}


def _listed(values: Values) -> Sequence[Any]:
    if isinstance(values, BetweenMerges):
        return [MergePoint(place, values.number) for place in range(values.number)]
    assert isinstance(values, Grid)
    return values.values


def _draws(space: Space, varied: Mapping[str, Values]) -> Iterator[dict[str, Any]]:
    search = space.options.search
    if not isinstance(search, RandomSearch):
        yield {}
        return
    for sample in range(search.samples):
        # All keys are drawn whether they apply or not: a baseline meets the same values.
        rng = generator(search.seed, "search", sample)
        drawn = {k: v.draw(rng) for k, v in space.varied.items() if isinstance(v, Drawn)}
        yield {key: value for key, value in drawn.items() if key in varied}


def _matches(chosen: Mapping[str, Any], pattern: Mapping[str, tuple[Any, ...]]) -> bool:
    return all(chosen[key] in values for key, values in pattern.items())


def _expanded(experiment: Plain, named: dict[str, Any], chosen: Mapping[str, Any]) -> Expanded:
    point = chosen.get(THRESHOLD)
    waits = isinstance(point, MergePoint)
    plain = experiment
    for key, value in chosen.items():
        plain = with_value(plain, key, STAND_IN if isinstance(value, MergePoint) else value)
    overrides = {key: value for key, value in chosen.items() if not isinstance(value, MergePoint)}
    try:
        parsed = parse_experiment(plain)
    except ExperimentError as error:
        raise ExperimentError(
            f"{error} (in the row {overrides}; `except` leaves combinations out)"
        ) from error
    if waits:
        _require_tree(parsed)
    return named | overrides, parsed.plain, point if waits else None


def _require_tree(experiment: Experiment) -> None:
    pipeline = getattr(experiment.algorithm.build(), "clustering", None)
    partition = getattr(pipeline, "partition", None)
    if not isinstance(partition, Hierarchical):
        raise ExperimentError(
            f"between_merges needs partition hierarchical, got {type(partition).__name__} "
            f"({THRESHOLD})"
        )

"""The values that a space gives a key: lists, spaced numbers, ranges to draw from.

| form | argument | values |
|---|---|---|
| a value, a list, `grid` | values | each of them |
| `linspace`, `logspace` | [from, to, how many] | numbers at equal distances, in equal ratios |
| `between_merges` | how many | thresholds between the merges of a row's own tree |
| `choice` | values | one of them, drawn |
| `uniform`, `loguniform` | [from, to] | a number, drawn |
| `randint` | [from, to] | a whole number, drawn; both ends may be drawn |

Drawn values need `search: random` or `search: optuna`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search.sample import Domain

from flray.config.overrides import THRESHOLD
from flray.errors import ExperimentError
from flray.values import shown
from flray.wording import suggestion


@dataclass(frozen=True)
class Grid:
    """Values that are all tried, or among which Optuna chooses.

    Any values of YAML, also mappings that configure a component.
    """

    values: tuple[Any, ...]  # Any: YAML


@dataclass(frozen=True)
class BetweenMerges:
    """Thresholds in equal ratios from the lowest to the highest merge of each row's own tree.

    None of them lies on a merge. Heights of merges are known only when a row has clustered, and
    differ by distance, linkage and seed: `{between_merges: 10}` covers each tree alike, from every
    client alone to one cluster.
    """

    number: int  # number of thresholds


Values = Grid | BetweenMerges | Domain  # Domain: drawn, in the notation of Ray Tune


def _listed(given: Any) -> list[Any]:  # Any: YAML
    """A list of at least one value, each once."""
    if not isinstance(given, list) or not given:
        raise ValueError("must be a list of at least one value")
    texts = [json.dumps(value, sort_keys=True) for value in given]
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ValueError(f"names {twice[0]} twice; leave one out")
    return given


def _bounds(given: Any, form: str = "[from, to]") -> list[float]:
    """The numbers that the form names, the second above the first."""
    is_list = isinstance(given, list) and len(given) == len(form.split(","))
    if not is_list or not all(type(value) in (int, float) for value in given):
        raise ValueError(f"takes {form}")
    if not given[0] < given[1] or not all(map(math.isfinite, given)):
        raise ValueError("goes from low to high, both finite")
    return [float(value) for value in given]


def _positive(numbers: list[float]) -> list[float]:
    """The numbers, if a logarithm can be taken of all of them."""
    if not numbers[0] > 0:
        raise ValueError("must start above 0")
    return numbers


def _whole(value: Any, least: float = -math.inf) -> int:
    """A whole number; YAML may write it as 3.0."""
    if type(value) not in (int, float) or int(value) != value:
        raise ValueError("takes whole numbers")
    if value < least:
        raise ValueError(f"takes a whole number >= {least}")
    return int(value)


def _spaced(space: Callable[..., Any], bounds: list[float]) -> Grid:
    low, high, number = bounds
    return Grid(tuple(float(value) for value in space(low, high, _whole(number, 2))))


def _between(low: int, high: int) -> Any:  # Any: Tune leaves its domains untyped
    """Whole numbers from low to high, both included."""
    return tune.randint(low, high + 1)


SPACED = "[from, to, how many]"
FORMS: dict[str, Callable[[Any], Any]] = {  # Any: YAML to a Grid, BetweenMerges or Tune's Domain
    "grid": lambda given: Grid(tuple(_listed(given))),
    "choice": lambda given: tune.choice(_listed(given)),
    "uniform": lambda given: tune.uniform(*_bounds(given)),
    "loguniform": lambda given: tune.loguniform(*_positive(_bounds(given))),
    "randint": lambda given: _between(*map(_whole, _bounds(given))),
    "linspace": lambda given: _spaced(np.linspace, _bounds(given, SPACED)),
    "logspace": lambda given: _spaced(np.geomspace, _positive(_bounds(given, SPACED))),
    "between_merges": lambda given: BetweenMerges(_whole(given, 2)),
}


def parse_values(key: str, given: object) -> Any:  # Any: Tune leaves its domains untyped
    """The values that a space gives a key: a single value, a list, or one of FORMS.

    A mapping with a `name` is a value, the configuration of a component. The result is a `Grid`, a
    `BetweenMerges` or a `Domain` of Ray Tune.

    Args:
        key: The dotted key of the experiment, for messages.
        given: What the space has for it.

    Raises:
        ExperimentError: The message names the key, what was expected and what came.

    >>> parse_values("train.lr", {"logspace": [0.01, 1.0, 3]})
    Grid(values=(0.01, 0.1, 1.0))
    >>> parse_values("algorithm", {"name": "fedprox", "mu": 0.1})
    Grid(values=({'name': 'fedprox', 'mu': 0.1},))
    """
    if isinstance(given, list):
        given = {"grid": given}
    if not isinstance(given, Mapping) or "name" in given:
        return Grid((given,))
    form, argument = next(iter(given.items()), ("", None))
    if len(given) != 1 or form not in FORMS:
        raise ExperimentError(
            f"space.{key}: a value, a list of values or one of the forms {', '.join(FORMS)} was "
            f"expected, got {shown(dict(given))}{suggestion(str(form), FORMS)}"
        )
    if form == "between_merges" and key != THRESHOLD:
        raise ExperimentError(
            f"between_merges is for {THRESHOLD}, the height at which a tree is cut, got {key}"
        )
    try:
        return FORMS[form](argument)
    except (OverflowError, ValueError) as error:
        raise ExperimentError(f"space.{key}: {form} {error}, got {shown(argument)}") from error

"""Values that a command sets in an experiment, as in `train.lr=0.1`; imports nothing heavy.

Keys are dotted, values are YAML. Setting never changes the mapping that was given.
"""

from collections.abc import Collection, Sequence
from typing import Any

from yaml import YAMLError

from flray.config.reading import Plain, parse_yaml
from flray.errors import ExperimentError
from flray.values import copied, shown

THRESHOLD = "algorithm.clustering.partition.threshold"
RIVALS = ("threshold", "number")  # keys of a partition, of which only one is set


def override(plain: Plain, overrides: Sequence[str]) -> Plain:
    """Set dotted keys; a component given as a bare name becomes a mapping when a field is set.

    A partition's threshold and number exclude each other: one that is set here unsets the other
    where that is not set here too.

    Args:
        plain: keys and values of an experiment, which are not changed.
        overrides: texts like `train.lr=0.1`; of equal keys the last counts.

    >>> override({"algorithm": "fedprox"}, ["algorithm.mu=0.1"])
    {'algorithm': {'name': 'fedprox', 'mu': 0.1}}
    >>> override({"partition": {"threshold": 3.0}}, ["partition.number=auto"])
    {'partition': {'number': 'auto'}}
    """
    if isinstance(overrides, str):
        raise ExperimentError(f"overrides must be a list, as in [{overrides!r}], got text")
    values: Plain = {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ExperimentError(f"expected key=value, got {shown(item)}, as in train.lr=0.1")
        values.pop(key, None)  # the last of equal keys, in its own turn
        values[key] = _value(item, text)
    return _with_values(plain, values)


def with_value(plain: Plain, key: str, value: object) -> Plain:
    """A copy in which one dotted key is set, as `override` does.

    >>> with_value({"rounds": 5}, "train.lr", 0.1)
    {'rounds': 5, 'train': {'lr': 0.1}}
    """
    return _with_values(plain, {key: value})


def _with_values(plain: Plain, values: Plain) -> Plain:
    result: Plain = copied(plain)
    for key, value in values.items():
        if value is not None:
            _unset_rivals(result, key.split("."), values)
        _set(result, key.split("."), value)
    return result


def _value(item: str, text: str) -> Any:
    try:
        return parse_yaml(f"value: {text}")["value"]
    except YAMLError as error:
        raise ExperimentError(
            f"{shown(item)}: the value is not valid YAML: {error}; one with spaces needs quotes, "
            'as in "train.lr={start: 0.1, decay: 0.99}"'
        ) from error


def _unset_rivals(node: Plain, path: list[str], kept: Collection[str]) -> None:
    """Remove what excludes the key of a partition that is set next, but not the keys `kept`."""
    *parents, name = path
    if parents[-1:] != ["partition"] or name not in RIVALS:
        return
    for key in parents:
        child = node.get(key)
        if not isinstance(child, dict):
            return
        node = child
    for rival in RIVALS:
        if rival != name and ".".join([*parents, rival]) not in kept:
            node.pop(rival, None)


def _set(node: Plain, path: list[str], value: object) -> None:
    """Set a key in place; mappings on the way to it are made, a bare name becomes one."""
    for key in path[:-1]:
        child = node.get(key)
        if isinstance(child, list):
            raise ExperimentError(
                f"{'.'.join(path)} cannot be set because {key} is a list; set it inside the list, "
                "as in algorithm=[{name: flhc, rounds_before: 3}, fedavg]"
            )
        if not isinstance(child, dict):
            child = {"name": child} if isinstance(child, str) else {}
            node[key] = child
        node = child
    node[path[-1]] = value

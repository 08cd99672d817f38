"""A part of a space: some of its named methods and experiments, and methods of the user's own."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from flray.config.reading import Plain, read_mapping
from flray.errors import ExperimentError
from flray.wording import suggestion

KEYS = {"methods": "method", "splits": "experiment"}  # what is chosen, by its name in a row


def part_of(plain: Plain, overrides: Sequence[str]) -> tuple[Plain, list[str]]:
    """The space with what `methods=[...]` and `splits=[...]` choose, and all other overrides.

    Names may have wildcards. A method that ends in .yaml is a file, whose name it gets: keys as the
    methods of a space have them, or an experiment, of which the algorithm counts.

    Args:
        plain: The content of a space.
        overrides: `key=value`, as `flray.sweeps.space.read_space` takes them.

    Raises:
        ExperimentError: Nothing in the space has this name.

    >>> space = {"experiment": {"swap": {}, "iid": {}}, "methods": {"fedavg": {}, "fedprox": {}}}
    >>> part_of(space, ["methods=[fed*]", "splits=iid", "rounds=3"])
    ({'experiment': {'iid': {}}, 'methods': {'fedavg': {}, 'fedprox': {}}}, ['rounds=3'])
    """
    rest = []
    for item in overrides:
        key, _, text = item.partition("=")
        if key not in KEYS or "{" in text:
            rest.append(item)
            continue
        names = [name.strip() for name in text.strip("[]").split(",")]
        chosen = _methods(plain, names) if key == "methods" else _experiments(plain, names)
        plain = _without_others(plain | chosen, KEYS[key], _names(next(iter(chosen.values()))))
    return plain, rest


def _methods(plain: Plain, names: Sequence[str]) -> Plain:
    known = plain.get("methods", {})
    chosen: dict[str, Any] = {}  # Any: YAML
    for name in names:
        if name.endswith((".yaml", ".yml")):
            keys = read_mapping(Path(name), "the method")
            is_experiment = "dataset" in keys and "algorithm" in keys
            chosen[Path(name).stem] = {"algorithm": keys["algorithm"]} if is_experiment else keys
        else:
            chosen |= {found: known[found] for found in _found(name, known, "method")}
    return {"methods": chosen}


def _experiments(plain: Plain, names: Sequence[str]) -> Plain:
    given = plain["experiment"]
    chosen = {found for name in names for found in _found(name, _names(given), "split")}
    if isinstance(given, Mapping):
        return {"experiment": {name: given[name] for name in given if name in chosen}}
    return {"experiment": [file for file in given if Path(file).stem in chosen]}


def _names(given: object) -> list[str]:
    """The names of experiments or methods: keys, or files without folder and ending."""
    if isinstance(given, Mapping):
        return list(given)
    return [Path(file).stem for file in (given if isinstance(given, list) else [str(given)])]


def _found(name: str, known: Collection[str], kind: str) -> list[str]:
    found = matching(known, name)
    if not found:
        names = ", ".join(known) or "none"
        raise ExperimentError(f"unknown {kind} {name!r}{suggestion(name, known)}; known: {names}")
    return found


def _without_others(plain: Plain, key: str, kept: Collection[str]) -> Plain:
    """The space without what `except` says of methods or experiments that are left out."""
    patterns = []
    for pattern in plain.get("except", []):
        values = pattern.get(key, [])
        names = [n for n in (values if isinstance(values, list) else [values]) if n in kept]
        if names or key not in pattern:
            patterns.append(pattern | ({key: names} if key in pattern else {}))
    return plain | ({"except": patterns} if "except" in plain else {})

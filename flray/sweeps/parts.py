"""A part of a space: some of its named methods and experiments, and methods of the user's own.

Values of the command line hold for every method and baseline.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from fnmatch import filter as filter_names
from pathlib import Path
from typing import Any

from flray.config.overrides import override
from flray.config.reading import Plain, read_mapping
from flray.errors import ExperimentError
from flray.wording import suggestion

_log = logging.getLogger("flray")
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
    methods = plain.get("methods", {})
    chosen: dict[str, Any] = {}  # Any: YAML
    for name in names:
        if name.endswith((".yaml", ".yml")):
            keys = read_mapping(Path(name), "the method")
            is_experiment = "dataset" in keys and "algorithm" in keys
            chosen[Path(name).stem] = {"algorithm": keys["algorithm"]} if is_experiment else keys
        else:
            chosen |= {method: methods[method] for method in _matching(name, methods, "method")}
    return {"methods": chosen}


def _experiments(plain: Plain, names: Sequence[str]) -> Plain:
    given = plain["experiment"]
    chosen = {split for name in names for split in _matching(name, _names(given), "split")}
    if isinstance(given, Mapping):
        return {"experiment": {name: given[name] for name in given if name in chosen}}
    return {"experiment": [file for file in given if Path(file).stem in chosen]}


def _names(given: object) -> list[str]:
    """The names of experiments or methods: keys, or files without folder and ending."""
    if isinstance(given, Mapping):
        return list(given)
    return [Path(file).stem for file in (given if isinstance(given, list) else [str(given)])]


def _matching(pattern: str, names: Collection[str], kind: str) -> list[str]:
    if not (chosen := filter_names(names, pattern)):
        known = ", ".join(names) or "none"
        meant = suggestion(pattern, names)
        raise ExperimentError(f"unknown {kind} {pattern!r}{meant}; known: {known}")
    return chosen


def _without_others(plain: Plain, key: str, kept: Collection[str]) -> Plain:
    """The space without what `except` says of methods or experiments that are left out."""
    patterns = []
    for pattern in plain.get("except", []):
        values = pattern.get(key, [])
        names = [n for n in (values if isinstance(values, list) else [values]) if n in kept]
        if names or key not in pattern:
            patterns.append(pattern | ({key: names} if key in pattern else {}))
    return plain | ({"except": patterns} if "except" in plain else {})


def overridden(plain: Plain, overrides: Sequence[str]) -> Plain:
    """The space with overrides of its experiments set in methods and baselines that have the key.

    They count more than what the file says, so `rounds=5` holds for every row. Which algorithm a
    method or baseline is, with its fields, stays. Logs whose values were replaced.

    >>> space = {"methods": {"flhc": {"algorithm": "flhc", "rounds": 45}}}
    >>> overridden(space, ["rounds=5", "algorithm.mu=1"])
    {'methods': {'flhc': {'algorithm': 'flhc'}}}
    """
    baselines = plain.get("baseline", [])
    listed = baselines if isinstance(baselines, list) else [baselines]
    replaced: dict[str, list[str]] = {}

    def changed(name: str, keys: Any) -> Any:  # Any: YAML, which is checked later
        for item in overrides if isinstance(keys, Mapping) else ():
            key = item.partition("=")[0]
            kept = {k: v for k, v in keys.items() if not f"{k}.".startswith(f"{key}.")}
            above = [k for k, v in kept.items() if key.startswith(f"{k}.") and isinstance(v, dict)]
            if key.split(".")[0] != "algorithm" and (above or len(kept) < len(keys)):
                keys = override(kept, [item]) if above else kept
                replaced.setdefault(item, []).append(name)
        return keys

    if isinstance(plain.get("methods"), Mapping):
        methods = {name: changed(name, keys) for name, keys in plain["methods"].items()}
        plain = plain | {"methods": methods}
    if listed:
        named = [f"baseline {i + 1}" for i in range(len(listed))]
        changes = [changed(name, keys) for name, keys in zip(named, listed, strict=True)]
        plain = plain | {"baseline": changes}
    for item, names in replaced.items():
        _log.info("%s also replaces what the space sets for %s", item, ", ".join(names))
    return plain

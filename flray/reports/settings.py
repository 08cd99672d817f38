"""Settings of runs: what runs of one experiment share, and what tells experiments apart."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flray import columns as recorded
from flray.config.deciding import is_below, leaves
from flray.reports.configuration import setting_text

Plain = Mapping[str, Any]  # Any: YAML

# Keys that do not change the experiment, each with all keys below it.
NO_MATTER = ("execution", "tracking", "dataset.download", "on_client_failure")
SEED_FOLDER = re.compile(r"seed_\d+")
TIME_FOLDER = re.compile(r"\d{8}-\d{6}-\d{6}")  # of a command without --out


def without(config: Plain, keys: Sequence[str]) -> dict[str, Any]:  # Any: YAML
    """The values of a configuration by dotted key, without `keys` and all keys below them.

    >>> without({"seed": 0, "train": {"lr": 0.1, "epochs": 5}, "execution": {"block": 8}},
    ...         ["execution", "train.lr"])
    {'seed': 0, 'train.epochs': 5}
    """
    return {key: value for key, value in leaves(config).items() if not is_below(key, keys)}


def settings_text(config: Plain, *left_out: str) -> str:
    """The settings of an experiment, without `left_out`, as text: equal for equal settings.

    Keys that cannot change a result (`NO_MATTER`) are always left out, and the order of keys does
    not matter. Leave out the seed to compare the seeds of one experiment.

    >>> first = {"seed": 0, "rounds": 5, "execution": {"block": 8}}
    >>> settings_text(first, "seed") == settings_text({"rounds": 5, "seed": 1}, "seed")
    True
    """
    return json.dumps(without(config, (*NO_MATTER, *left_out)), sort_keys=True, default=str)


def experiment_names(runs: Sequence[Path]) -> list[str]:
    """The experiment of each run: the folder above its seeds, from where such folders differ.

    >>> experiment_names([Path("x/a/seed_0"), Path("x/a/seed_1"), Path("x/b")])
    ['a', 'a', 'b']
    """
    paths = [p.parent if SEED_FOLDER.fullmatch(p.name) else p for p in runs]
    if len(set(paths)) < 2:
        return [path.name for path in paths]
    common = Path(os.path.commonpath([str(path) for path in paths]))
    return [path.relative_to(common).as_posix() if path != common else "." for path in paths]


def readable_names(runs: Sequence[Path], configs: Sequence[Plain]) -> list[str]:
    """As `experiment_names`, for readers: without the times that name folders.

    Commands with the same name are told apart by what differs in their settings; equal ones keep
    their times.

    >>> runs = [Path("a/20260101-120000-000000"), Path("a/20260101-130000-000000")]
    >>> readable_names(runs, [{"seed": 0, "rounds": 5}, {"seed": 0, "rounds": 9}])
    ['a rounds=5', 'a rounds=9']
    """
    names = experiment_names(runs)
    first = {name: k for k, name in reversed([*enumerate(names)])}  # run of each experiment
    alike: defaultdict[str, list[str]] = defaultdict(list)  # by name without times
    for name, k in first.items():
        parts = [part for part in Path(name).parts if not TIME_FOLDER.fullmatch(part)]
        above = next(p for p in runs[k].parents if not TIME_FOLDER.fullmatch(p.name))
        alike["/".join(parts or [above.name])].append(name)
    readable = {}
    for short, timed in alike.items():
        texts = differences([configs[first[name]] for name in timed])
        for name, text in zip(timed, texts, strict=True):
            is_clear = texts.count(text) == 1
            readable[name] = f"{short} {text}".strip() if is_clear else name
    return [readable[name] for name in names]


def differences(configs: Sequence[Plain]) -> list[str]:
    """What tells experiments apart, as it would be typed: few keys, the algorithm first.

    >>> differences([{"algorithm": "fedavg", "rounds": 5}, {"algorithm": "local", "rounds": 9}])
    ['algorithm=fedavg', 'algorithm=local']
    """
    settings = [without(config, (*NO_MATTER, recorded.SEED)) for config in configs]
    keys = sorted({key for values in settings for key in values})
    texts = [""] * len(settings)
    for key in sorted(keys, key=lambda key: not key.startswith("algorithm")):
        name = key.removesuffix(".name")
        typed = [f"{name}={setting_text(values.get(key))}" for values in settings]
        longer = [f"{text} {more}".strip() for text, more in zip(texts, typed, strict=True)]
        if len({*longer}) > len({*texts}):
            texts = longer
    return texts

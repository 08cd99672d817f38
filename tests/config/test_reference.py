"""The reference of keys, read from sources, says what the loader does."""

import importlib
from dataclasses import MISSING
from typing import Any

import pytest

from flray.algorithms import ALGORITHMS
from flray.config.binding import bind_component
from flray.config.experiment import Settings
from flray.config.parameters import defaults_of, hints_of, plain, signature
from flray.config.reading import parse_yaml
from flray.config.reference import (
    OPTIONS,
    REGISTRIES,
    SETTINGS,
    Key,
    components,
    every_key,
    experiment_keys,
    keys,
    keys_meant,
)
from flray.errors import ExperimentError
from flray.sweeps.space import Options
from flray.values import FROM_DATASET


def registry_of(kind: str) -> dict[str, Any]:
    module, _, name = REGISTRIES[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def check_keys(found: tuple[Key, ...], target: Any, injected: tuple[str, ...] = ()) -> None:
    """Names and defaults are those of the class that the loader calls."""
    parameters = [name for name in signature(target).parameters if name not in injected]
    assert {key.name for key in found} == set(parameters)
    defaults, hints = defaults_of(target), hints_of(target)
    for key in found:
        default = plain(defaults[key.name], hints[key.name]) if key.name in defaults else MISSING
        assert (key.default is None) == (default is MISSING), key
        if key.default is None or key.default in ("see below", "all"):
            continue
        told = parse_yaml(key.default)
        if isinstance(default, dict):  # a component: its name, and what differs from its defaults
            told = {"name": key.default} if not isinstance(told, dict) else told
            assert told.items() <= default.items(), key
        else:
            assert told == default, key


@pytest.mark.parametrize("kind", REGISTRIES)
def test_components_have_the_keys_and_defaults_of_their_classes(kind) -> None:
    described, registry = components(kind), registry_of(kind)
    assert [each.name for each in described] == sorted(registry)
    for each in described:
        check_keys(each.keys, registry[each.name], FROM_DATASET if kind == "model" else ())
        assert each.purpose
        assert each.purpose.count("(") == each.purpose.count(")")  # not cut at "l. 8)"


@pytest.mark.parametrize(("target", "cls"), [(SETTINGS, Settings), (OPTIONS, Options)])
def test_settings_have_the_keys_and_defaults_of_their_classes(target, cls) -> None:
    assert len(keys(target)) > 3
    check_keys(keys(target), cls)


def test_keys_below_mappings_and_allowed_values_are_listed() -> None:
    found = {key.name: key for key in experiment_keys()}
    assert found["train.optimizer"].values == "sgd, adam, module"
    assert found["execution.engine"].values == "auto, loop, vectorized, lightning"  # an alias
    assert found["execution.actors.count"].values == "whole number or per_client"
    assert found["evaluate.target"].values == "number or null"
    assert found["participation"].note.startswith("Share ρ of the clients")
    assert "flhc" in found["algorithm"].values
    assert found["algorithm"].default is None


@pytest.mark.parametrize(
    ("method", "old"),
    [
        ("cfl", "rounds_joint"),
        ("ifca", "pretrain_rounds"),
        ("repa", "pretrain_rounds"),
        ("wd", "pretrain_rounds"),
    ],
)
def test_a_renamed_key_is_refused_with_the_new_one_named(method, old) -> None:
    message = f"unknown key 'algorithm.{old}' .it is now called 'rounds_before'.; known here"
    with pytest.raises(ExperimentError, match=message):
        bind_component("algorithm", ALGORITHMS, {"name": method, old: 1}, "algorithm")
    assert keys_meant(f"algorithm.{old}") == keys_meant(old) == ["algorithm.rounds_before"]


SHOWN = [
    *every_key(),
    *keys(OPTIONS),
    *keys("flray.data.events:Event"),
    *(key for kind in ("search", "scheduler") for each in components(kind) for key in each.keys),
]


def test_every_key_has_a_note_that_can_be_read_alone() -> None:
    assert len(SHOWN) > 300
    for key in SHOWN:
        words = key.note.split()
        assert len(words) > 1, key.name
        assert words[0][0].isupper() or words[0][0] == "`", key.name
        assert words[0] not in ("Of", "In"), key.name

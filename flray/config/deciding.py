"""Which keys of a configuration decide results, and in which of them two configurations differ.

A configuration here is the resolved one, as `config.yaml` has it: nested mappings, lists and plain
values. A run may resume if the deciding keys are the same; where and on how many actors it is
computed may change.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]  # resolved: nested mappings, lists and plain values

# Keys with those below them that a run keeps: its clients and its state are made from them.
FIXED = (
    *("dataset", "split", "model", "algorithm", "events", "seed"),
    *("execution.precision", "evaluate.last_trained", "evaluate.scores"),
)
_ABSENT = object()


def deciding(config: Config) -> Config:
    """The keys that decide a result: all but `tracking` and the placement below `execution`.

    >>> deciding({"seed": 0, "tracking": "wandb", "execution": {"block": 4, "executor": "ray"}})
    {'seed': 0, 'execution': {'block': 4}}
    """
    kept = {key: value for key, value in config.items() if key not in ("execution", "tracking")}
    execution = config.get("execution", {})
    free = ("executor", "actors", "server")
    return kept | {"execution": {k: v for k, v in execution.items() if k not in free}}


def with_block_of(recorded: Config, config: Config) -> Config:
    """The configuration with the `execution.block` of another one, unless it names one itself.

    The default block is chosen when a run starts, and the bits depend on it: a resumed run keeps
    the block that was recorded.

    >>> with_block_of({"execution": {"block": 20}}, {"execution": {"block": None}})
    {'execution': {'block': 20}}
    """
    execution, block = config.get("execution", {}), recorded.get("execution", {}).get("block")
    if execution.get("block") is not None or block is None:
        return config
    return {**config, "execution": {**execution, "block": block}}


def is_below(key: str, keys: Collection[str]) -> bool:
    """True if a dotted key is one of the keys or lies below one of them.

    >>> is_below("train.lr", ["train"]), is_below("training", ["train"])
    (True, False)
    """
    return any(key == above or key.startswith(f"{above}.") for above in keys)


def differences(recorded: Config, config: Config) -> Iterator[tuple[str, object, object]]:
    """The keys in which two configurations differ, with both values; _ABSENT where there is none.

    >>> list(differences({"seed": 0, "train": {"lr": 0.1}}, {"seed": 0, "train": {"lr": 0.5}}))
    [('train.lr', 0.1, 0.5)]
    """
    there, here = leaves(recorded), leaves(config)
    for key in here | there:
        old, new = there.get(key, _ABSENT), here.get(key, _ABSENT)
        if old is _ABSENT or new is _ABSENT or old != new:
            yield key, old, new


def first_difference(recorded: Config, config: Config) -> str | None:
    """The first key two configs disagree in, with both values.

    >>> first_difference({"seed": 0, "model": {"name": "a"}}, {"seed": 0, "model": {"name": "b"}})
    "model.name is 'a' there and 'b' here"
    """
    for key, old, new in differences(recorded, config):
        return f"{key} is {text_or_absent(old)} there and {text_or_absent(new)} here"
    return None


def text_or_absent(value: object) -> str:
    """A value of `differences` as a message shows it."""
    return "absent" if value is _ABSENT else repr(value)


def leaves(config: Config, prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted keys.

    >>> leaves({"train": {"lr": 0.1}, "seed": 0})
    {'train.lr': 0.1, 'seed': 0}
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= leaves(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values

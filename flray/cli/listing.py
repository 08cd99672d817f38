"""`flray list`: the registries as tables."""

import inspect
from collections.abc import Callable
from typing import Any

from rich.table import Table

from flray.clustering import STAGES
from flray.config.binding import Registry
from flray.config.experiment import COMPONENTS, FROM_THE_DATASET


def component_tables(kind: str) -> list[Table]:
    """A table for a kind of component; for `stages`, one for each of the five."""
    if kind == "stages":
        return [_table(f"stage {stage}", registry) for stage, registry in STAGES.items()]
    return [_table(kind, COMPONENTS[kind.removesuffix("s")])]


def _table(title: str, registry: Registry) -> Table:
    """Name, purpose and keys with their defaults of every registered component of a kind."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("name", "what it is", "keys and defaults"):
        table.add_column(column, overflow="fold")
    for name, target in sorted(registry.items()):
        table.add_row(name, _purpose(target, registry), _keys(target))
    return table


def _purpose(target: Callable[..., Any], registry: Registry) -> str:
    """What the file says it is; where a file holds several, what the class says."""
    module = inspect.getmodule(target)
    alone = sum(inspect.getmodule(other) is module for other in registry.values()) == 1
    own = target.__doc__ or ""
    if own.startswith(f"{target.__name__}("):
        own = ""  # a dataclass's generated signature
    text = module.__doc__ if module and module.__doc__ and (alone or not own) else own
    return inspect.cleandoc(text).split("\n")[0]


def _keys(target: Callable[..., Any]) -> str:
    parameters = inspect.signature(target).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={_short(p.default)}"
        for p in parameters
        if p.name not in FROM_THE_DATASET
    )


def _short(default: object) -> str:
    """A default as YAML would have it; a component or a pipeline by what it is made of."""
    return "..." if "factory" in repr(default) else str(default)

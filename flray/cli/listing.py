"""`flray list`: the registries as tables."""

import inspect
from collections.abc import Callable
from typing import Any

from rich.table import Table

from flray.config.binding import Registry
from flray.config.experiment import COMPONENTS, FROM_THE_DATASET


def component_table(kind: str) -> Table:
    """Name, purpose and keys with their defaults of every registered component of a kind."""
    table = Table(title=kind, title_justify="left", title_style="bold")
    for column in ("name", "what it is", "keys and defaults"):
        table.add_column(column, overflow="fold")
    registry = COMPONENTS[kind.removesuffix("s")]
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
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.name not in FROM_THE_DATASET
    )

"""`flray list`: the registries as tables."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from rich.table import Table

from flray.config.experiment import COMPONENTS, FROM_THE_DATASET


def component_table(kind: str) -> Table:
    """Name, purpose and keys with their defaults of every registered component of a kind."""
    table = Table(title=kind, title_justify="left", title_style="bold")
    for column in ("name", "what it is", "keys and defaults"):
        table.add_column(column, overflow="fold")
    for name, target in sorted(COMPONENTS[kind.removesuffix("s")].items()):
        table.add_row(name, _purpose(target), _keys(target))
    return table


def _purpose(target: Callable[..., Any]) -> str:
    """The first line of the class's docstring, or of its module's."""
    own = target.__doc__ or ""
    generated = dataclasses.is_dataclass(target) and own.startswith(f"{target.__name__}(")
    text = own if own and not generated else inspect.getmodule(target).__doc__ or ""
    return inspect.cleandoc(text).split("\n")[0]


def _keys(target: Callable[..., Any]) -> str:
    parameters = inspect.signature(target).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.name not in FROM_THE_DATASET
    )

"""`flray list` and `flray keys`: components, keys and shipped files as tables.

Purposes and notes are read from docstrings and comments of the components
(`flray.config.reference`), so there is no second description to keep.
"""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flray.config.reference import (
    REGISTRIES,
    SEE_BELOW,
    STAGES,
    ComponentEntry,
    Key,
    component_keys,
    components,
    every_key,
    experiment_keys,
    keys_meant,
)
from flray.config.reference import names as component_names
from flray.config.shipped import EXPERIMENTS, SPACES, find_file, first_comment, names
from flray.errors import ExperimentError
from flray.values import shown
from flray.wording import suggestion

REQUIRED = "(must be given)"


def component_tables(kind: str) -> list[Table]:
    """The tables that `flray list` prints of a kind of component: name, purpose, keys.

    Args:
        kind: `algorithms`, `datasets`, `splits`, `models`, or `stages`, which has one table per
            stage.
    """
    if kind == "stages":
        return [_components(f"stage {stage}", stage) for stage in STAGES]
    return [_components(kind, kind.removesuffix("s"))]


def shipped_table(kind: str) -> Table:
    """The experiments or spaces that come with flray, by the names that commands take.

    The description of each is the first comment of its file.

    Args:
        kind: `experiments` or `spaces`.
    """
    folder = EXPERIMENTS if kind == "experiments" else SPACES
    table = titled_table(kind, "name", "what it is")
    for name in names(folder):
        file = find_file(name, folder)
        table.add_row(name, Text("" if file is None else first_comment(file)))
    return table


def key_tables(prefix: str | None) -> list[Table]:
    """The tables that `flray keys` prints.

    Args:
        prefix: A key, for it and those below it, or the name of a component; None: the keys of
            every experiment.

    Raises:
        ExperimentError: There is no such key or component; the message names similar ones.
    """
    if prefix is None:
        return [_keys("keys of an experiment", experiment_keys())]
    for keys in (experiment_keys(), every_key()):
        if below := [k for k in keys if k.name == prefix or k.name.startswith(f"{prefix}.")]:
            return [_keys(prefix, below)]
    # algorithm.flhc is the component flhc, and so is flhc
    path, _, name = prefix.rpartition(".")
    tables = [
        _keys(f"{kind} {name}: {component.purpose}", component_keys(component))
        for kind in REGISTRIES
        if not path or path.split(".")[-1] == kind
        for component in components(kind)
        if component.name == name
    ]
    if not tables:
        raise ExperimentError(
            f"unknown key or component {shown(prefix)}{_meant(prefix)}; `flray keys` shows the "
            "keys of every experiment, `flray list` the components"
        )
    return tables


def _meant(given: str) -> str:
    """What a misspelt key or component may have meant, for the end of a message."""
    if meant := keys_meant(given):
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    every_name = [name for kind in REGISTRIES for name in component_names(kind)]
    return suggestion(given, [*every_name, *(key.name for key in every_key())])


def _components(title: str, kind: str) -> Table:
    """Name, purpose and keys with their defaults of every registered component of a kind.

    Purposes are first sentences of docstrings, so that a new component needs no entry here.
    """
    table = titled_table(title, "name", "what it is", "keys and defaults")
    for component in components(kind):
        table.add_row(component.name, Text(component.purpose), Text(_short(component)))
    return table


def _short(component: ComponentEntry) -> str:
    """The keys of a component with their defaults, on one line."""
    defaults = {SEE_BELOW: "..."}
    return ", ".join(
        key.name if key.default is None else f"{key.name}={defaults.get(key.default, key.default)}"
        for key in component.keys
    )


def _keys(title: str, keys: Sequence[Key]) -> Table:
    table = titled_table(title, "key", "values", "default", "what it is")
    for key in keys:
        default = REQUIRED if key.default is None else key.default
        table.add_row(*map(Text, (key.name, key.values, default, key.note)))
    return table


def titled_table(title: str, *columns: str) -> Table:
    """An empty table for the terminal, whose long cells are folded."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

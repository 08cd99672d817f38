"""`flray list` and `flray keys`: components, keys and shipped files as tables."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flray.config.reference import (
    REGISTRIES,
    STAGES,
    Described,
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
    """A table for a kind of component; for `stages`, one for each of the five."""
    if kind == "stages":
        return [_components(f"stage {stage}", stage) for stage in STAGES]
    return [_components(kind, kind.removesuffix("s"))]


def shipped_table(kind: str) -> Table:
    """The experiments or spaces that come with flray, by the names that commands take."""
    folder = EXPERIMENTS if kind == "experiments" else SPACES
    table = _table(kind, "name", "what it is")
    for name in names(folder):
        file = find_file(name, folder)
        table.add_row(name, Text("" if file is None else first_comment(file)))
    return table


def key_tables(prefix: str | None) -> list[Table]:
    """The keys of every experiment; of one key and those below it; or of a component by name."""
    if prefix is None:
        return [_keys("keys of an experiment", experiment_keys())]
    for found in (experiment_keys(), every_key()):
        if below := [k for k in found if k.name == prefix or k.name.startswith(f"{prefix}.")]:
            return [_keys(prefix, below)]
    # algorithm.flhc is the component flhc, and so is flhc
    kind, _, name = prefix.rpartition(".")
    described = [
        (each, one)
        for each in REGISTRIES
        if not kind or kind.split(".")[-1] == each
        for one in components(each)
        if one.name == name
    ]
    if not described:
        raise ExperimentError(
            f"unknown key or component {shown(prefix)}{_meant(prefix)}; `flray keys` shows the "
            "keys of every experiment, `flray list` the components"
        )
    return [
        _keys(f"{each} {one.name}: {one.purpose}", component_keys(one)) for each, one in described
    ]


def _meant(given: str) -> str:
    if meant := keys_meant(given):
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    every_name = [name for kind in REGISTRIES for name in component_names(kind)]
    return suggestion(given, [*every_name, *(key.name for key in every_key())])


def _components(title: str, kind: str) -> Table:
    """Name, purpose and keys with their defaults of every registered component of a kind."""
    table = _table(title, "name", "what it is", "keys and defaults")
    for described in components(kind):
        table.add_row(described.name, Text(described.purpose), Text(_short(described)))
    return table


def _short(described: Described) -> str:
    texts = (
        key.name if key.default is None else f"{key.name}={_one(key.default)}"
        for key in described.keys
    )
    return ", ".join(texts)


def _one(default: str) -> str:
    return "..." if default == "see below" else default


def _keys(title: str, found: Sequence[Key]) -> Table:
    table = _table(title, "key", "values", "default", "what it is")
    for key in found:
        default = REQUIRED if key.default is None else key.default
        table.add_row(*map(Text, (key.name, key.values, default, key.note)))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

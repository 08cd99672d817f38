"""Bind YAML to code: parameters are the keys, their annotations the expected types.

`bind_dataclass` builds settings, `bind_component` a registered class by its name. Every value is
converted once, by its annotation (`_convert`), and every mistake is an ExperimentError that names
the key. `config/parameters.py` leads back from objects to YAML.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from flray.config.outside import import_class, is_extensible, require_interface
from flray.config.parameters import (
    ComponentHint,
    Registry,
    Target,
    defaults_of,
    hints_of,
    is_component,
    members_of,
    name_of,
    plain_fields,
    signature,
    values_of,
)
from flray.config.reading import YAML_FILES, Plain, read_mapping
from flray.config.reference import RENAMED, keys_meant
from flray.errors import ExperimentError, located, one_line_message
from flray.imports import class_of
from flray.values import FROM_DATASET, LARGEST_COUNT, LARGEST_WHOLE, shown
from flray.wording import suggestion


@dataclass(frozen=True)
class Component:
    """A registered class with its checked configuration, not built yet.

    >>> from flray.data import SPLITS
    >>> component = bind_component("split", SPLITS, {"name": "iid", "clients": 4}, "split")
    >>> component.plain["clients"], component.build().clients
    (4, 4)
    """

    kind: str
    name: str
    target: Target
    fields: Plain
    plain: Plain  # with every default filled in, for config.yaml

    def build(self, **injected: Any) -> Any:
        """Call the class; what it does not ask for is not passed.

        Args:
            injected: What is known only now, such as `image_shape` of the dataset for a model.

        Raises:
            ExperimentError: The class refuses its configuration or the shape of the inputs, or it
                is too large for the machine.
        """
        arguments = self.arguments(**injected)
        shape = arguments.get("input_shape", arguments.get("image_shape"))
        with self.reported():
            try:
                return self.target(**arguments)
            except IndexError as error:
                if shape is None:
                    raise
                raise ExperimentError(
                    f"{self.kind} {self.name} takes no inputs of the shape {shape} "
                    f"({one_line_message(error)}); choose another {self.kind} or other data"
                ) from error

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn what goes wrong while it is built or used into an error about its configuration.

        Errors of the user's own code have its file and line.
        """
        try:
            with located(f"{self.kind} {self.name}"):
                yield
        except ExperimentError:
            raise
        except (ValueError, OverflowError) as error:
            raise ExperimentError(f"{self.kind} {self.name}: {error}") from error
        except (MemoryError, RuntimeError) as error:  # torch raises the latter for both
            reason = one_line_message(error)
            raise ExperimentError(
                f"{self.kind} {self.name} cannot be built ({reason}): is a size too large?"
            ) from error

    def arguments(self, **injected: Any) -> Plain:
        """What the class is called with: its configuration, and what it asks for of the rest."""
        wanted = signature(self.target).parameters
        return self.fields | {key: value for key, value in injected.items() if key in wanted}

    def asked_of(self, dataset: object) -> Plain:
        """What a model's class asks to know of the dataset, such as `input_shape`."""
        wanted = signature(self.target).parameters
        return {name: getattr(dataset, name) for name in FROM_DATASET if name in wanted}


class ConfiguredClass(functools.partial[Any]):  # Any: what it builds is the caller's to know
    """A class with its configuration that receives further arguments when it is built.

    Equal to another one, to a partial or to the bare class if both would build the same.
    """

    def __eq__(self, other: object) -> bool:
        is_same_class = isinstance(other, functools.partial | type) and class_of(other) is self.func
        return is_same_class and values_of(other) == values_of(self)

    def __hash__(self) -> int:
        return hash(self.func)


def bind_component(
    kind: str,
    registry: Registry,
    given: object,
    where: str,
    injected: tuple[str, ...] = (),
    default: object = MISSING,
) -> Component:
    """A component from a bare name, a mapping with `name` and its fields, or a Python object.

    Args:
        kind: what the component is, for messages: `dataset`, `distance`.
        registry: the classes of that kind by name.
        given: the value of the key. A class or a dataclass instance is taken as it is; a mapping
            without a `name` changes fields of the default, where there is one.
        where: the dotted key.
        injected: parameters that the class receives when it is built.
        default: the component that the key has if nothing is given.

    >>> from flray.models import MODELS
    >>> given = {"name": "mlp200", "hiden": 50}
    >>> bind_component("model", MODELS, given, "model", ("image_shape", "num_classes"))
    Traceback (most recent call last):
    flray.errors.ExperimentError: unknown key 'model.hiden' (did you mean 'hidden'?); known here...
    """
    if not isinstance(given, str | Mapping) and is_component(given):
        return _component_of(kind, registry, given, injected)
    mapping = {"name": given} if isinstance(given, str) else given
    base = None
    if isinstance(mapping, Mapping) and "name" not in mapping and is_component(default):
        base, target = default, class_of(default)
        name = name_of(target, registry)
    elif isinstance(mapping, Mapping) and isinstance(mapping.get("name"), str):
        name = mapping["name"]
        target = look_up(kind, registry, name)
    else:
        raise ExperimentError(
            f"{where} must be a name or a mapping with a `name`, got {shown(given)}; "
            f"known: {', '.join(sorted(registry))}"
        )
    keys = {key: value for key, value in mapping.items() if key != "name"}
    fields = bind(target, keys, where, injected, base)
    return _component(kind, name, target, fields, injected)


def _component_of(
    kind: str, registry: Registry, given: object, injected: tuple[str, ...]
) -> Component:
    """The component of a class, or of an instance that tells its configuration (a dataclass)."""
    target = class_of(given)
    if is_extensible(kind):
        require_interface(kind, getattr(target, "__name__", str(target)), target)
    elif target not in registry.values():
        raise ExperimentError(f"{kind} must be one of {', '.join(registry)}, got {shown(given)}")
    fields = {name: value for name, value in values_of(given).items() if name not in injected}
    _require_all_given(target, {*fields, *injected}, kind)
    return _component(kind, name_of(target, registry), target, fields, injected)


def _require_all_given(target: Target, given: Collection[str], kind: str) -> None:
    """Refuse a class that cannot be called, because a parameter has neither value nor default."""
    for name, parameter in signature(target).parameters.items():
        is_open = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_open and parameter.default is parameter.empty and name not in given:
            raise ExperimentError(
                f"{kind} {target.__name__} has no default for {name!r}; give "
                f"functools.partial({target.__name__}, {name}=...) instead of the class"
            )


def _component(
    kind: str, name: str, target: Target, fields: Plain, injected: tuple[str, ...]
) -> Component:
    values = plain_fields(target, defaults_of(target) | fields, injected)
    return Component(kind, name, target, fields, {"name": name, **values})


def look_up(kind: str, registry: Registry, name: str) -> Target:
    """The registered class, or the one at `package.module:Name` of a kind that users may extend.

    Raises:
        ExperimentError: The name is unknown; the message lists the known ones and the nearest.
    """
    if ":" in name and is_extensible(kind):
        return import_class(kind, name)
    if name not in registry:
        remedy = "; your own is `package.module:Name`" if is_extensible(kind) else ""
        raise ExperimentError(
            f"unknown {kind} {shown(name)}{suggestion(name, registry)}; "
            f"known: {', '.join(sorted(registry))}{remedy}"
        )
    return registry[name]


def bind(
    target: Target,
    given: Mapping[str, Any],
    where: str,
    injected: tuple[str, ...] = (),
    base: object = None,
) -> Plain:
    """Check the keys `given` against the parameters of a class; returns the arguments for a call.

    Values are converted by the annotations; parameters that are not given are left out, so that the
    class's own defaults hold.

    Args:
        target: The class, or a function that builds one.
        where: The dotted key of the class, for messages; "" for a whole file.
        injected: Parameters that no YAML names.
        base: An instance of the class, from which comes what is not given; None: the defaults of
            the class. Keys that the class calls `exclusive` come from `base` only if none of them
            is given; for those of its `refused_keys` the message has the reason. Its `keys_beside`
            are keys of the same mapping that others bind; messages name them too.

    Raises:
        ExperimentError: A key is unknown or missing, or a value is of the wrong type.
    """
    hints, defaults = hints_of(target), defaults_of(target)
    parameters = {
        name: p for name, p in signature(target).parameters.items() if name not in injected
    }
    for key in (key for key in given if key not in parameters):
        path = _join(where, key)
        if reason := getattr(target, "refused_keys", {}).get(key):
            raise ExperimentError(f"{path} does not fit {target.__name__}: {reason}")
        keys = sorted({*parameters, *getattr(target, "keys_beside", ())})
        raise ExperimentError(
            f"unknown key {shown(path)}{_meant(path, keys)}; "
            f"known here: {', '.join(keys) or 'none'}"
        )
    kept = {} if base is None else values_of(base)
    exclusive: tuple[str, ...] = getattr(target, "exclusive", ())
    if any(given.get(name) is not None for name in exclusive):
        kept = {name: value for name, value in kept.items() if name not in exclusive}
    arguments = {name: value for name, value in kept.items() if name in parameters}
    for name, parameter in parameters.items():
        path = _join(where, name)
        if name in given and given[name] is defaults.get(name, MISSING) is None:
            arguments[name] = None  # a component that may be left out
        elif name in given:
            default = kept.get(name, defaults.get(name, MISSING))
            arguments[name] = _convert(given[name], hints.get(name, Any), path, default)
        elif name in kept or name in defaults:
            continue
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ExperimentError(f"missing key {path!r}: it has no default")
    return arguments


def _meant(path: str, parameters: Collection[str]) -> str:
    """The key that an unknown one may stand for, as a remark in brackets; "" if none is close.

    A renamed key, one that other tools have, one that lacks its section, or a similar parameter.
    """
    key = path.rpartition(".")[2]
    renamed = RENAMED.get(key)
    if renamed is not None and renamed in parameters:
        return f" (it is now called {renamed!r})"
    name, colon, value = key.partition(":")
    if colon and name in parameters:
        return f" (YAML needs a space after the colon, as in '{name}: {value}')"
    meant = [name for name in keys_meant(path) if name != path]
    return f" (did you mean {' or '.join(meant)}?)" if meant else suggestion(key, parameters)


def bind_dataclass(target: type, given: object, where: str) -> tuple[Any, Plain]:
    """A dataclass built from a mapping, or from a YAML file that holds one, and its plain values.

    Args:
        target: the dataclass, whose fields are the keys.
        given: keys and values, or the path of a YAML file.
        where: the dotted key of the mapping, for messages; "" for a whole file.

    >>> from flray.models.mixing import Aggregation
    >>> bind_dataclass(Aggregation, {"server_lr": 1}, "aggregate")[1]
    {'unheard': 'ignore', 'weights': 'samples', 'server_lr': 1.0, 'optimizer': {'name': 'none'}}
    """
    built = _dataclass(target, given, where)
    return built, plain_fields(type(built), values_of(built))


def _dataclass(target: type, given: object, where: str, default: object = MISSING) -> Any:
    """A dataclass whose own checks are reported under its key.

    What a mapping does not name is as in the default.
    """
    file, given = _file_and_changes(target, given)
    if file is not None:
        # As it would be bound alone: a file means the same in every experiment.
        default = _dataclass(target, read_mapping(Path(file), where), where)
        if not given:
            return default
    if not isinstance(given, Mapping):
        raise ExperimentError(
            f"{where or 'experiment'} must be a mapping of keys, got {shown(given)}"
        )
    base = default if isinstance(default, target) else None
    built = target if base is None else type(base)
    arguments = bind(built, given, where, base=base)
    try:
        return built(**arguments)
    except ExperimentError:
        raise
    except ValueError as error:
        raise ExperimentError(f"{where}: {error}" if where else str(error)) from error


def _file_and_changes(target: type, given: object) -> tuple[str | None, object]:
    """The YAML file that is given, and what is to be changed in it.

    A file of which a field is overridden comes as a mapping, with the file as its `name`.
    """
    if isinstance(given, str) and given.endswith(YAML_FILES):
        return given, {}
    if isinstance(given, Mapping) and "name" not in signature(target).parameters:
        name = given.get("name")
        if isinstance(name, str) and name.endswith(YAML_FILES):
            return name, {key: value for key, value in given.items() if key != "name"}
    return None, given


def _convert(value: Any, hint: Any, where: str, default: object = MISSING) -> Any:
    """The value as the annotation has it, or an error that names the key.

    Any: YAML or an object from Python in, what the annotation says out.
    """
    if isinstance(hint, type) and hint in _EXPECTED:
        return _convert_scalar(value, hint, where)
    members = members_of(hint)
    if len(members) > 1:
        return _convert_union(value, members, where, default)
    if (named := ComponentHint.of(hint)) is not None:
        component = bind_component(
            named.kind, named.registry, value, where, named.injected, default
        )
        if named.injected:
            return ConfiguredClass(component.target, **component.fields)
        return component.build()
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            raise ExperimentError(
                f"{where} must be one of {', '.join(map(str, args))}, got {shown(value)}"
                f"{suggestion(str(value), map(str, args))}"
            )
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else _dataclass(hint, value, where, default)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ExperimentError(f"{where} must be a mapping, got {shown(value)}")
        return {str(key): _convert(item, args[1], _join(where, key)) for key, item in value.items()}
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ExperimentError(f"{where} must be a list, got {shown(value)}")
        items = (_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
        return origin(items)
    return _convert_scalar(value, hint, where)


def _convert_union(value: Any, members: tuple[Any, ...], where: str, default: object) -> Any:
    """The value as the first member of a union that accepts it."""
    if value is None and NoneType in members:
        return None
    errors = []
    for member in members:
        if member is not NoneType:
            try:
                return _convert(value, member, where, default)
            except ExperimentError as error:
                errors.append(error)
    raise errors[-1] if isinstance(value, Mapping) else errors[0]


_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    """A number, a boolean or text, within bounds; other annotations accept any value."""
    is_bounded = get_origin(hint) is not Annotated
    hint = hint if is_bounded else get_args(hint)[0]
    if hint is Any or hint not in _EXPECTED:
        return value
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ExperimentError(
            f"{where} must be {_EXPECTED[hint]}, got {shown(value)} ({type(value).__name__})"
        )
    most = LARGEST_COUNT if hint is int and is_bounded else LARGEST_WHOLE
    if isinstance(value, int) and abs(value) > most:
        raise ExperimentError(f"{where} must be at most {most} in size, got {shown(value)}")
    if isinstance(value, float) and (math.isnan(value) or (is_bounded and math.isinf(value))):
        raise ExperimentError(f"{where} must be a finite number, got {value}")
    return hint(value)


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)

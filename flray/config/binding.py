"""Bind YAML to code: parameters are the keys, their annotations the expected types."""

import dataclasses
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from flray.errors import ExperimentError

Registry = Mapping[str, Callable[..., Any]]  # Any: a registry holds classes of one kind each
Plain = dict[str, Any]  # Any: YAML


@dataclass(frozen=True)
class Component:
    """A registered class with its checked configuration, not built yet."""

    kind: str
    name: str
    target: Callable[..., Any]  # Any: what it builds is the caller's to know
    fields: Plain
    plain: Plain  # with every default filled in, for config.yaml

    def build(self, **injected: Any) -> Any:
        """Call the class; what it does not ask for is not passed."""
        wanted = inspect.signature(self.target).parameters
        extra = {key: value for key, value in injected.items() if key in wanted}
        try:
            return self.target(**self.fields, **extra)
        except ExperimentError:
            raise
        except ValueError as error:
            raise ExperimentError(f"{self.kind} {self.name}: {error}") from error


def bind_component(
    kind: str, registry: Registry, given: object, where: str, injected: tuple[str, ...] = ()
) -> Component:
    """A component from a bare name or a mapping with `name` and its fields."""
    mapping = {"name": given} if isinstance(given, str) else given
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name"), str):
        raise ExperimentError(
            f"{where} must be a name or a mapping with a `name`, got {given!r}; "
            f"known: {', '.join(sorted(registry))}"
        )
    name = mapping["name"]
    target = look_up(kind, registry, name)
    fields, plain = bind(target, {k: v for k, v in mapping.items() if k != "name"}, where, injected)
    return Component(kind, name, target, fields, {"name": name, **plain})


def look_up(kind: str, registry: Registry, name: str) -> Callable[..., Any]:
    """The registered class, or for `package.module:Name` the one imported from there."""
    if ":" in name:
        return _import(kind, name)
    if name not in registry:
        raise ExperimentError(
            f"unknown {kind} {name!r}{_suggestion(name, registry)}; "
            f"known: {', '.join(sorted(registry))}; your own is `package.module:Name`"
        )
    return registry[name]


def bind(
    target: Callable[..., Any], given: Mapping[str, Any], where: str, injected: tuple[str, ...] = ()
) -> tuple[Plain, Plain]:
    """Check `given` against the target's parameters: (arguments to call it with, plain values)."""
    hints = get_type_hints(_annotated(target), include_extras=True)
    parameters = {
        name: p for name, p in inspect.signature(target).parameters.items() if name not in injected
    }
    for key in given:
        if key not in parameters:
            raise ExperimentError(
                f"unknown key {_join(where, key)!r}{_suggestion(str(key), parameters)}; "
                f"known here: {', '.join(sorted(parameters)) or 'none'}"
            )
    arguments, plain = {}, {}
    for name, parameter in parameters.items():
        path = _join(where, name)
        if name in given:
            arguments[name], plain[name] = _convert(given[name], hints.get(name, Any), path)
        elif (default := _factory_default(target, name)) is not None:
            plain[name] = _plain(default)
        elif parameter.default is not parameter.empty:
            plain[name] = _plain(parameter.default)
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ExperimentError(f"missing key {path!r}: it has no default")
    return arguments, plain


def bind_dataclass(target: type, given: object, where: str) -> tuple[Any, Plain]:
    """Build a dataclass from a mapping; its own checks are reported under its key."""
    if not isinstance(given, Mapping):
        raise ExperimentError(f"{where or 'experiment'} must be a mapping of keys, got {given!r}")
    arguments, plain = bind(target, given, where)
    try:
        return target(**arguments), plain
    except ExperimentError:
        raise
    except ValueError as error:
        raise ExperimentError(f"{where}: {error}" if where else str(error)) from error


def _convert(value: Any, hint: Any, where: str) -> tuple[Any, Any]:
    """(value for the code, plain value for YAML), or an error that names the key."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, registry = args[1], args[2]
        component = bind_component(kind, registry, value, where)
        return component.build(), component.plain
    if origin in (Union, UnionType):
        return _convert_union(value, args, where)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            choices = ", ".join(map(str, args))
            hint_text = _suggestion(str(value), {str(a): a for a in args})
            raise ExperimentError(f"{where} must be one of {choices}, got {value!r}{hint_text}")
        return value, value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return bind_dataclass(hint, value, where)
    if origin in (tuple, list):
        return _convert_sequence(value, origin, args, where)
    return _convert_scalar(value, hint, where)


def _convert_union(value: Any, args: tuple[Any, ...], where: str) -> tuple[Any, Any]:
    if value is None and NoneType in args:
        return None, None
    errors = []
    for hint in args:
        if hint is NoneType:
            continue
        try:
            return _convert(value, hint, where)
        except ExperimentError as error:
            errors.append(error)
    raise errors[0]


def _convert_sequence(
    value: Any,
    origin: type,
    args: tuple[Any, ...],
    where: str,
) -> tuple[Any, Any]:
    if not isinstance(value, list | tuple):
        raise ExperimentError(f"{where} must be a list, got {value!r}")
    pairs = [_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
    return origin(a for a, _ in pairs), [p for _, p in pairs]


_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert_scalar(value: Any, hint: Any, where: str) -> tuple[Any, Any]:
    if hint is Any or hint not in _EXPECTED:
        return value, value
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ExperimentError(
            f"{where} must be {_EXPECTED[hint]}, got {value!r} ({type(value).__name__})"
        )
    return hint(value), hint(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _factory_default(target: Callable[..., Any], name: str) -> object | None:
    if not dataclasses.is_dataclass(target):
        return None
    factory = {f.name: f.default_factory for f in dataclasses.fields(target)}[name]
    return None if factory is dataclasses.MISSING else factory()


def _annotated(target: Callable[..., Any]) -> Callable[..., Any]:
    """Where the annotations of the parameters are: the fields of a dataclass, or __init__."""
    if inspect.isclass(target) and not dataclasses.is_dataclass(target):
        return target.__init__  # of this very class
    return target


def _import(kind: str, name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed script does not see the current folder
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ExperimentError(
            f"{kind} {name!r} cannot be imported: {error}; expected `package.module:Name`, "
            "importable from the current folder or installed"
        ) from error
    return found


def _suggestion(key: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)

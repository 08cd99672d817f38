"""Bind YAML to code: parameters are the keys, their annotations the expected types."""

import dataclasses
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flray.config.reading import parse_yaml, read_text
from flray.config.reference import RENAMED
from flray.config.shipped import find_file
from flray.errors import ExperimentError, one_line_message
from flray.imports import is_program, require_own_module
from flray.values import LARGEST_COUNT, LARGEST_WHOLE, UNBOUNDED, shown
from flray.wording import suggestion

Registry = Mapping[str, Callable[..., Any]]  # Any: a registry holds classes of one kind each
Plain = dict[str, Any]  # Any: YAML
YAML_FILES = (".yaml", ".yml")
# Kinds that a user may extend by a dataclass: the methods it must define, and their arguments.
METHODS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dataset": {"load": ()},
    "split": {"split": ("dataset", "seed")},
    "algorithm": {
        "init": ("fed",),
        "cohort": ("state", "t", "fed"),
        "round": ("state", "cohort", "fed"),
        "deploy": ("state", "clients", "fed"),
        "partition": ("state",),
    },
    "signature": {"__call__": ("fed", "bank", "cohort", "memory")},
    "embed": {"__call__": ("points", "seed")},
    "distance": {"__call__": ("points",)},
    "relate": {"__call__": ("D",)},
    "partition": {"__call__": ("related",)},
}
# Kinds that a user may extend by a subclass of Lightning's: its name, and methods to override.
LIGHTNING = ("pytorch_lightning", "lightning")
BASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model": ("LightningModule", ("training_step",)),
    "callback": ("Callback", ()),
}


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
        with self.reported():
            return self.target(**self.arguments(**injected))

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn what goes wrong while it is built or used into an error about its configuration."""
        try:
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
        wanted = inspect.signature(self.target).parameters
        return self.fields | {key: value for key, value in injected.items() if key in wanted}


class Later(functools.partial[Any]):  # Any: what it builds is the caller's to know
    """A class with its configuration, still missing what it is given when it is built."""

    def __eq__(self, other: object) -> bool:
        """Would the other, a partial or the bare class, build the same?"""
        same_class = isinstance(other, functools.partial | type) and _class_of(other) is self.func
        return same_class and _values_of(other) == _values_of(self)

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
    """A component from a bare name or a mapping with `name` and its fields.

    A mapping without a `name` changes fields of the default, where there is one.
    """
    if not isinstance(given, str | Mapping) and _is_component(given):
        return component_of(kind, registry, given, injected)
    mapping = {"name": given} if isinstance(given, str) else given
    if isinstance(mapping, Mapping) and "name" not in mapping and _is_component(default):
        target = _class_of(default)
        name = _name_of(target, registry)
        fields, plain = bind(target, mapping, where, injected, default)
        return Component(kind, name, target, fields, {"name": name, **plain})
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name"), str):
        raise ExperimentError(
            f"{where} must be a name or a mapping with a `name`, got {shown(given)}; "
            f"known: {', '.join(sorted(registry))}"
        )
    name = mapping["name"]
    target = look_up(kind, registry, name)
    fields, plain = bind(target, {k: v for k, v in mapping.items() if k != "name"}, where, injected)
    return Component(kind, name, target, fields, {"name": name, **plain})


def component_of(
    kind: str, registry: Registry, given: object, injected: tuple[str, ...] = ()
) -> Component:
    """The component of a class, or of an instance that tells its configuration (a dataclass)."""
    if not _is_component(given):
        raise ExperimentError(
            f"{kind} must be a name, a mapping with a `name`, a class or a dataclass, "
            f"got {shown(given)}"
        )
    target, values = _class_of(given), _values_of(given)
    if kind in METHODS or kind in BASES:
        _require_interface(kind, getattr(target, "__name__", str(target)), target)
    elif target not in registry.values():
        raise ExperimentError(f"{kind} must be one of {', '.join(registry)}, got {shown(given)}")
    fields = {name: value for name, value in values.items() if name not in injected}
    name = _name_of(target, registry)
    plain = {"name": name, **_plain_fields(target, fields, injected)}
    return Component(kind, name, target, fields, plain)


def look_up(kind: str, registry: Registry, name: str) -> Callable[..., Any]:
    """The registered class or, of a kind that users may extend, the one at `package.module:Name`.

    Whoever wrote the name may be a stranger, so a class is returned only if it has what its kind
    asks for.
    """
    is_extended = kind in METHODS or kind in BASES
    if ":" in name and is_extended:
        return _import(kind, name)
    if name not in registry:
        own = "; your own is `package.module:Name`" if is_extended else ""
        raise ExperimentError(
            f"unknown {kind} {shown(name)}{suggestion(name, registry)}; "
            f"known: {', '.join(sorted(registry))}{own}"
        )
    return registry[name]


def bind(
    target: Callable[..., Any],
    given: Mapping[str, Any],
    where: str,
    injected: tuple[str, ...] = (),
    base: object = None,
) -> tuple[Plain, Plain]:
    """Check `given` against the target's parameters: (arguments to call it with, plain values).

    What is not given comes from `base`, an instance of the target, or is the target's default.
    Keys that the target calls `exclusive` come from `base` only if none of them is given.
    """
    hints = _hints(target)
    parameters = {
        name: p for name, p in _signature(target).parameters.items() if name not in injected
    }
    for key in given:
        if key not in parameters:
            raise ExperimentError(
                f"unknown key {shown(_join(where, key))}{_meant(str(key), parameters)}; "
                f"known here: {', '.join(sorted(parameters)) or 'none'}"
            )
    kept, own = {} if base is None else _values_of(base), _defaults(target)
    exclusive: tuple[str, ...] = getattr(target, "exclusive", ())
    if any(given.get(name) is not None for name in exclusive):
        kept = {name: value for name, value in kept.items() if name not in exclusive}
    defaults = own | kept
    arguments = {name: value for name, value in kept.items() if name in parameters}
    plain: Plain = {}
    for name, parameter in parameters.items():
        path, hint = _join(where, name), hints.get(name, Any)
        if name in given and given[name] is own.get(name, MISSING) is None:
            arguments[name] = plain[name] = None  # a component that may be left out
        elif name in given:
            default = defaults.get(name, MISSING)
            arguments[name], plain[name] = _convert(given[name], hint, path, default)
        elif name in defaults:
            plain[name] = _plain(defaults[name], hint)
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ExperimentError(f"missing key {path!r}: it has no default")
    return arguments, plain


def _meant(key: str, parameters: Collection[str]) -> str:
    """The new name of a renamed key, or the most similar parameter, as a remark in brackets."""
    renamed = RENAMED.get(key)
    if renamed is not None and renamed in parameters:
        return f" (it is now called {renamed!r})"
    return suggestion(key, parameters)


def bind_dataclass(
    target: type, given: object, where: str, default: object = MISSING
) -> tuple[Any, Plain]:
    """Build a dataclass from a mapping, or from a YAML file that holds one.

    Its own checks are reported under its key. What a mapping does not say is as in the default.
    """
    file, given = _file_and_changes(target, given)
    if file is not None:
        # As it would be bound alone: a file means the same in every experiment.
        default, plain = bind_dataclass(target, read_mapping(Path(file), where), where)
        if not given:
            return default, plain
    if not isinstance(given, Mapping):
        raise ExperimentError(
            f"{where or 'experiment'} must be a mapping of keys, got {shown(given)}"
        )
    base = default if isinstance(default, target) else None
    built = target if base is None else type(base)
    arguments, plain = bind(built, given, where, base=base)
    try:
        return built(**arguments), plain
    except ExperimentError:
        raise
    except ValueError as error:
        raise ExperimentError(f"{where}: {error}" if where else str(error)) from error


def read_mapping(path: Path, where: str) -> Plain:
    """The keys and values of a YAML file, which `where` names."""
    found = find_file(path)
    if found is None:
        raise ExperimentError(
            f"{where}: there is no file {path} (looked for from {Path.cwd()}); "
            "give a path relative to the current folder"
        )
    try:
        given = parse_yaml(read_text(found))
        plain = _resolved({} if given is None else given)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ExperimentError(f"{where}: {path} is not valid YAML: {error}") from error
    if not isinstance(plain, dict):
        raise ExperimentError(f"{where}: {path} must hold keys and values, got {shown(plain)}")
    return cast(Plain, plain)


def _resolved(given: Any) -> Any:
    """YAML with its `${...}` filled in: other keys of the file, and nothing from outside.

    OmegaConf would also call functions, and write the environment's secrets into a run directory.
    """
    if not isinstance(given, dict | list):
        return given
    _refuse_resolvers(given)
    return OmegaConf.to_container(OmegaConf.create(given), resolve=True)


def _refuse_resolvers(given: Any) -> None:
    if isinstance(given, dict | list):
        for child in given.values() if isinstance(given, dict) else given:
            _refuse_resolvers(child)
    elif isinstance(given, str) and _calls_resolver(given):
        raise YAMLError(f"${{...}} refers to another key of the file, got {shown(given)}")


def _calls_resolver(text: str) -> bool:
    """True if a colon stands inside `${...}`.

    >>> _calls_resolver("${seed}:x"), _calls_resolver("${oc.env:HOME}")
    (False, True)
    """
    depth = 0
    for mark in re.findall(r"\$\{|\}|:", text):
        if mark == ":" and depth:
            return True
        depth = max(0, depth + {"${": 1, "}": -1}.get(mark, 0))
    return False


def _file_and_changes(target: type, given: object) -> tuple[str | None, object]:
    """The YAML file that is given, and what is to be changed in it.

    A file of which a field is overridden comes as a mapping, with the file as its `name`.
    """
    if isinstance(given, str) and given.endswith(YAML_FILES):
        return given, {}
    if isinstance(given, Mapping) and "name" not in _signature(target).parameters:
        name = given.get("name")
        if isinstance(name, str) and name.endswith(YAML_FILES):
            return name, {key: value for key, value in given.items() if key != "name"}
    return None, given


def _convert(value: Any, hint: Any, where: str, default: object = MISSING) -> tuple[Any, Any]:
    """(value for the code, plain value for YAML), or an error that names the key."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated and args[1] != UNBOUNDED:
        kind, registry, injected = args[1], args[2], _injected(args)
        component = bind_component(kind, registry, value, where, injected, default)
        if injected:
            return Later(component.target, **component.fields), component.plain
        return component.build(), component.plain
    if origin in (Union, UnionType):
        return _convert_union(value, args, where, default)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            choices = ", ".join(map(str, args))
            hint_text = suggestion(str(value), map(str, args))
            raise ExperimentError(
                f"{where} must be one of {choices}, got {shown(value)}{hint_text}"
            )
        return value, value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value, _plain(value, hint)
        return bind_dataclass(hint, value, where, default)
    if origin in (tuple, list):
        return _convert_sequence(value, origin, args, where)
    return _convert_scalar(value, hint, where)


def _convert_union(
    value: Any, args: tuple[Any, ...], where: str, default: object
) -> tuple[Any, Any]:
    if value is None and NoneType in args:
        return None, None
    errors = []
    for hint in args:
        if hint is NoneType:
            continue
        try:
            return _convert(value, hint, where, default)
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
        raise ExperimentError(f"{where} must be a list, got {shown(value)}")
    pairs = [_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
    return origin(a for a, _ in pairs), [p for _, p in pairs]


_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert_scalar(value: Any, hint: Any, where: str) -> tuple[Any, Any]:
    is_bounded = get_origin(hint) is not Annotated
    hint = hint if is_bounded else get_args(hint)[0]
    if hint is Any or hint not in _EXPECTED:
        return value, value
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
    return hint(value), hint(value)


def _plain(value: Any, hint: Any) -> Any:
    """A default as YAML would say it, which binds to an equal value; components by their names."""
    if get_origin(hint) is Annotated and _is_component(value):
        args, target = get_args(hint), _class_of(value)
        fields = _plain_fields(target, _values_of(value), _injected(args))
        return {"name": _name_of(target, args[2]), **fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(type(value), _values_of(value))
    if isinstance(value, tuple | list):
        item = next(iter(get_args(hint)), Any)
        return [_plain(each, item) for each in value]
    return value


def _plain_fields(target: Callable[..., Any], values: Plain, injected: tuple[str, ...] = ()) -> Any:
    hints = _hints(target)
    return {
        name: _plain(value, hints.get(name, Any))
        for name, value in values.items()
        if name not in injected
    }


def _injected(args: tuple[Any, ...]) -> tuple[str, ...]:
    """Annotated[Any, kind, registry, names]: parameters that the class is given later."""
    names: tuple[str, ...] = args[3] if len(args) > 3 else ()
    return names


def _is_component(value: object) -> bool:
    """Does it tell its configuration: a dataclass, or a class that is built later?"""
    return dataclasses.is_dataclass(value) or isinstance(value, functools.partial | type)


def _class_of(component: object) -> Callable[..., Any]:
    if isinstance(component, functools.partial):
        return component.func
    return component if isinstance(component, type) else type(component)


def _name_of(target: Callable[..., Any], registry: Registry) -> str:
    for name, registered in registry.items():
        if registered is target:
            return name
    return f"{target.__module__}:{target.__qualname__}"


def _values_of(component: object) -> Plain:
    """The configuration of an instance, or of a class that is built later, by name."""
    if isinstance(component, functools.partial):
        return _defaults(component.func) | component.keywords
    if isinstance(component, type):
        return _defaults(component)
    instance = cast(Any, component)  # Any: a dataclass of whatever kind
    return {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance) if f.init}


def _defaults(target: Callable[..., Any]) -> Plain:
    """The default of every parameter that has one."""
    parameters = _signature(target).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    if dataclasses.is_dataclass(target):
        fields = {f.name: f.default_factory for f in dataclasses.fields(target)}
        made = {name: f for name, f in fields.items() if f is not MISSING}
        found |= {name: factory() for name, factory in made.items() if name in found}
    return found


@functools.lru_cache(maxsize=1024)
def _signature(target: Callable[..., Any]) -> inspect.Signature:
    """Looked at once: a space of a hundred rows binds every class a hundred times."""
    return inspect.signature(target)


@functools.lru_cache(maxsize=1024)
def _hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    return get_type_hints(_annotated(target), include_extras=True)


def _annotated(target: Callable[..., Any]) -> Callable[..., Any]:
    """Where the annotations of the parameters are: the fields of a dataclass, or __init__."""
    if inspect.isclass(target) and not dataclasses.is_dataclass(target):
        return target.__init__  # of this very class
    return target


def _import(kind: str, name: str) -> type:
    module_name, _, attribute = name.partition(":")
    expected = "expected `package.module:Name`, importable from the current folder or installed"
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ExperimentError(f"{kind} {shown(name)} is no name to import; {expected}")
    if is_program(module_name):
        raise ExperimentError(
            f"{kind} {shown(name)} is not imported: it belongs to Python itself or is a program; "
            f"{expected}"
        )
    require_own_module(name)
    try:
        found: object = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ExperimentError(
            f"{kind} {shown(name)} cannot be imported: {error}; {expected}"
        ) from error
    return _require_interface(kind, name, found)


def _require_interface(kind: str, name: str, found: object) -> type:
    """The class, refused where it lacks what a class of its kind must define."""
    if not inspect.isclass(found):
        raise ExperimentError(f"{kind} {shown(name)} must be a class, got {shown(found)}")
    lacks = [
        f"it has no {method}({', '.join(arguments)})"
        for method, arguments in METHODS.get(kind, {}).items()
        if not _takes(found, method, len(arguments))
    ]
    if kind in METHODS and not dataclasses.is_dataclass(found):
        lacks.append("it is no dataclass")
    if kind in BASES:
        lacks += _lacks_of_lightning(found, *BASES[kind])
    if lacks:
        raise ExperimentError(
            f"{kind} {shown(name)} cannot be used as a {kind}: {', '.join(lacks)}"
        )
    return found


def _lacks_of_lightning(cls: type, base: str, methods: Iterable[str]) -> Iterator[str]:
    """What a class lacks to be used as one of Lightning's: the base class, methods of its own."""
    packages = {ancestor: ancestor.__module__.partition(".")[0] for ancestor in cls.__mro__}
    if not any(a.__name__ == base and package in LIGHTNING for a, package in packages.items()):
        yield f"it is no subclass of pytorch_lightning.{base}"
    own = [ancestor for ancestor, package in packages.items() if package not in LIGHTNING]
    yield from (f"it has no {each}" for each in methods if not any(each in vars(a) for a in own))


def _takes(cls: type, method: str, num_arguments: int) -> bool:
    """True if instances define a method that can be called with so many arguments."""
    held = next((vars(each)[method] for each in cls.__mro__[:-1] if method in vars(each)), None)
    if not callable(held) and not isinstance(held, staticmethod | classmethod):
        return False
    bound = not isinstance(held, staticmethod | classmethod)
    try:
        inspect.signature(getattr(cls, method)).bind(*[None] * (num_arguments + bound))
    except (TypeError, ValueError):  # other arguments, or a builtin without a signature
        return False
    return True


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)

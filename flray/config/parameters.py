"""Parameters of classes that YAML configures: names, annotations, defaults, and values as YAML.

The parameters of a class are its keys. `values_of` and `plain_fields` lead from an object back to
the keys and values that describe it, so that `config.yaml` has every default.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from flray.errors import ExperimentError
from flray.imports import class_of, path_of
from flray.values import UNBOUNDED, shown

Target = Callable[..., Any]  # Any: a class, or what builds one, of whatever kind
Registry = Mapping[str, Target]  # classes of one kind by name
Values = dict[str, Any]  # Any: of whatever type the parameter has

_SCALARS = frozenset((type(None), str, bool, int, float))  # what YAML has beside lists, mappings


@dataclasses.dataclass(frozen=True)
class ComponentHint:
    """The annotation of a field that names a component: `Annotated[Any, kind, registry, ...]`.

    >>> ComponentHint.of(Annotated[Any, "embed", {"none": dict}])
    ComponentHint(kind='embed', registry={'none': <class 'dict'>}, injected=())
    """

    kind: str
    registry: Registry
    injected: tuple[str, ...] = ()  # parameters that no YAML names: given when it is built

    @staticmethod
    def of(hint: Any) -> "ComponentHint | None":  # Any: an annotation
        """The component that an annotation describes; None for other annotations."""
        if get_origin(hint) is not Annotated:
            return None
        _, *described = get_args(hint)
        return None if described[0] == UNBOUNDED else ComponentHint(*described)


def members_of(hint: Any) -> tuple[Any, ...]:  # Any: annotations
    """The members of a union; any other annotation alone.

    >>> members_of(int | None), members_of(str)
    ((<class 'int'>, <class 'NoneType'>), (<class 'str'>,))
    """
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@functools.lru_cache(maxsize=1024)
def signature(target: Target) -> inspect.Signature:
    """The signature, computed once: a sweep binds every class once per row."""
    return inspect.signature(target)


@functools.lru_cache(maxsize=1024)
def hints_of(target: Target) -> Mapping[str, Any]:
    """The annotations of the parameters: of the fields of a dataclass, or of `__init__`."""
    if inspect.isclass(target) and not dataclasses.is_dataclass(target):
        target = target.__init__  # of this very class
    return get_type_hints(target, include_extras=True)


def defaults_of(target: Target) -> Values:
    """The default of every parameter that has one; those of factories are made anew.

    >>> defaults_of(ComponentHint)
    {'injected': ()}
    """
    values, factories = _values_and_factories(target)
    return values | {name: make() for name, make in factories.items()}


@functools.lru_cache(maxsize=1024)
def _values_and_factories(target: Target) -> tuple[Values, dict[str, Callable[[], Any]]]:
    """The defaults of a class, and those of them that a factory makes anew, by parameter."""
    parameters = signature(target).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty}
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    return values, {
        field.name: field.default_factory
        for field in fields
        if field.name in values and field.default_factory is not dataclasses.MISSING
    }


def is_component(value: object) -> bool:
    """True if the configuration of an object can be read from it.

    That is so for instances of dataclasses, for classes and for partials of classes.
    """
    return dataclasses.is_dataclass(value) or isinstance(value, functools.partial | type)


def name_of(target: Target, registry: Registry) -> str:
    """The registered name of a class, or `package.module:Name` if it is not registered.

    >>> name_of(ComponentHint, {"hint": ComponentHint}), name_of(ComponentHint, {})
    ('hint', 'flray.config.parameters:ComponentHint')
    """
    for name, registered in registry.items():
        if registered is target:
            return name
    return path_of(target)


def values_of(component: object) -> Values:
    """The configuration of a component by parameter.

    An instance has the values of its fields, a class its defaults, a partial its keywords over the
    defaults of its class.

    >>> values_of(functools.partial(ComponentHint, kind="embed"))
    {'injected': (), 'kind': 'embed'}
    """
    if isinstance(component, functools.partial):
        return defaults_of(component.func) | component.keywords
    if isinstance(component, type):
        return defaults_of(component)
    instance = cast(Any, component)  # Any: a dataclass of whatever kind
    return {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance) if f.init}


def plain_fields(target: Target, values: Values, injected: tuple[str, ...] = ()) -> Values:
    """The values of parameters as YAML has them, in the order of the parameters.

    Args:
        values: by parameter; parameters without a value are left out, and so are defaults that no
            YAML can have, such as the class of an activation.
        injected: parameters that no YAML names.
    """
    hints, (defaults, _) = hints_of(target), _values_and_factories(target)
    fields: Values = {}
    for name in signature(target).parameters:
        if name in injected or name not in values:
            continue
        value = values[name]
        if type(value) in _SCALARS:  # most values are: sweeps have many
            fields[name] = value
        elif _is_plain(value, hints.get(name)):
            fields[name] = plain(value, hints.get(name, Any))
        elif value is not defaults.get(name):
            raise ExperimentError(
                f"{name} of {path_of(target)} must be what YAML can have: numbers, text, lists, "
                f"mappings or dataclasses, got {shown(value)}"
            )
    return fields


def _is_plain(value: object, hint: Any) -> bool:  # Any: of whatever type the annotation says
    """True if `plain` can write a value as YAML has it."""
    is_described = dataclasses.is_dataclass(value) and not isinstance(value, type)
    kinds = (str, int, float, np.generic, tuple, list, Mapping)
    is_data = value is None or is_described or isinstance(value, kinds)
    return is_data or ComponentHint.of(hint) is not None


def plain(value: Any, hint: Any = Any) -> Any:  # Any: of whatever type the annotation says
    """A value as YAML has it, which binds to an equal value; components have their names.

    >>> from flray.models.mixing import Aggregation
    >>> plain((1, np.int64(2))), plain(Aggregation(server_lr=0.5))["server_lr"]
    ([1, 2], 0.5)
    """
    if isinstance(value, np.generic):  # np.float64 is a float that YAML cannot write
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    component = ComponentHint.of(hint)
    if component is not None and is_component(value):
        target = class_of(value)
        fields = plain_fields(target, values_of(value), component.injected)
        return {"name": name_of(target, component.registry), **fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_fields(type(value), values_of(value))
    if isinstance(value, tuple | list):
        sequences = [get_args(m) for m in members_of(hint) if get_origin(m) in (tuple, list)]
        item = sequences[0][0] if sequences else Any
        return [plain(member, item) for member in value]
    return value

"""Classes that an experiment names as `package.module:Name`: imported with care, then checked.

Importing a module runs it, and an experiment may come from somebody else. So nothing of Python's
own library and nothing inside a folder of runs is imported, and a class is used only if it has the
methods of its kind.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping

from flray.errors import ExperimentError, line_of, one_line_message
from flray.imports import is_program, require_own_module
from flray.values import shown

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
        "gradient": ("grad", "w", "batch", "w0", "memo"),
    },
    "signature": {"__call__": ("fed", "bank", "cohort", "memory")},
    "embed": {"__call__": ("points", "seed")},
    "distance": {"__call__": ("points",)},
    "relate": {"__call__": ("D",)},
    "partition": {"__call__": ("related",)},
    "score": {"terms": ("output", "targets"), "value": ("terms",)},
}
# Kinds that a user may extend by a subclass of Lightning's: its name, and methods to override.
LIGHTNING = ("pytorch_lightning", "lightning")
BASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model": ("LightningModule", ("training_step",)),
    "callback": ("Callback", ()),
}


def is_extensible(kind: str) -> bool:
    """True for kinds of which users may define components of their own."""
    return kind in METHODS or kind in BASES


def import_class(kind: str, name: str) -> type:
    """The class at `package.module:Name`, importable from the current folder or installed.

    Raises:
        ExperimentError: if the name cannot or must not be imported, or if the class lacks
            something that components of its kind have.

    >>> import_class("distance", "flray.clustering.distances:L2").__name__
    'L2'
    >>> import_class("distance", "subprocess:Popen")
    Traceback (most recent call last):
    flray.errors.ExperimentError: distance 'subprocess:Popen' is not imported: it belongs to ...
    """
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
        cls: object = getattr(importlib.import_module(module_name), attribute)
    except SyntaxError as error:  # the message has file and line
        raise ExperimentError(
            f"{kind} {shown(name)} cannot be imported: {error}; correct the file"
        ) from error
    except (ImportError, AttributeError, NameError, TypeError, ValueError) as error:
        line = line_of(error)  # of the user's file; empty if there is no such file or name
        reason = f"{one_line_message(error)} ({line}); correct the file"
        raise ExperimentError(
            f"{kind} {shown(name)} cannot be imported: {reason if line else f'{error}; {expected}'}"
        ) from error
    return require_interface(kind, name, cls)


def require_interface(kind: str, name: str, cls: object) -> type:
    """The class itself; refused if it lacks what a class of its kind must define.

    Args:
        kind: one of METHODS or BASES.
        name: how the user named the class, for messages.

    >>> require_interface("embed", "my:Wrong", dict)
    Traceback (most recent call last):
    flray.errors.ExperimentError: embed 'my:Wrong' cannot be used: it has no __call__(points...
    """
    if not inspect.isclass(cls):
        raise ExperimentError(f"{kind} {shown(name)} must be a class, got {shown(cls)}")
    faults = [
        f"it has no {method}({', '.join(arguments)})"
        for method, arguments in METHODS.get(kind, {}).items()
        if not _has_method(cls, method, len(arguments))
    ]
    if kind in METHODS and not dataclasses.is_dataclass(cls):
        faults.append("it is no dataclass")
    if kind in BASES:
        faults += _faults_as_lightning(cls, *BASES[kind])
    if faults:
        raise ExperimentError(f"{kind} {shown(name)} cannot be used: {', '.join(faults)}")
    return cls


def _faults_as_lightning(cls: type, base: str, methods: Iterable[str]) -> Iterator[str]:
    """What a class lacks to be used as one of Lightning's: the base class, methods of its own."""
    packages = {ancestor: ancestor.__module__.partition(".")[0] for ancestor in cls.__mro__}
    if not any(a.__name__ == base and package in LIGHTNING for a, package in packages.items()):
        yield f"it is no subclass of pytorch_lightning.{base}"
    for method in methods:
        if not overrides(cls, method):
            yield f"it has no {method}"


def overrides(cls: type, method: str) -> bool:
    """True if a class defines a method that Lightning's base classes have too.

    >>> from flray.models.mlp200 import Mlp200
    >>> overrides(Mlp200, "training_step"), overrides(Mlp200, "validation_step")
    (True, False)
    """
    bases = (base for base in cls.__mro__ if base.__module__.partition(".")[0] not in LIGHTNING)
    return any(method in vars(base) for base in bases)


def _has_method(cls: type, name: str, num_arguments: int) -> bool:
    """True if instances have a property, or what can be called with so many arguments."""
    method = next((vars(base)[name] for base in cls.__mro__[:-1] if name in vars(base)), None)
    is_static = isinstance(method, staticmethod | classmethod | functools.partial)
    if not is_static and not callable(method):
        return isinstance(method, property)
    num_arguments += not is_static and hasattr(method, "__get__")  # self
    try:
        inspect.signature(getattr(cls, name)).bind(*[None] * num_arguments)
    except (TypeError, ValueError):  # other arguments, or a builtin without a signature
        return False
    return True

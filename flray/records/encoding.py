"""An algorithm's state as data: a tree for JSON, and the arrays it refers to by path.

What has no form in JSON is an object with one tag: {"tuple": [...]}, {"dict": {...}},
{"float": "nan"}, {"tensor": path}, {"array": path}, {"dataclass": "module:Name", "fields": {...}}.
Decoding imports the modules of dataclasses, so `classes_in` is to be checked first.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.errors import ExperimentError
from flray.imports import path_of

Json = Any  # what json.loads returns
Array = NDArray[Any]  # any of DTYPES
Arrays = dict[str, Array]

# What safetensors can hold of numpy.
DTYPES = frozenset(
    {"bool", "float16", "float32", "float64", "complex64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


class TensorCache:
    """Arrays of tensors that were encoded before, which need not be copied to the host again.

    It keeps references to the tensors, so that no other one can have their id.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Array]] = {}
        self._now: dict[int, tuple[Tensor, Array]] = {}

    def array_of(self, tensor: Tensor) -> Array:
        """The array of a tensor: the same object as before if the tensor is the same object."""
        pair = self._before.get(id(tensor)) or (tensor, tensor.numpy(force=True))
        self._now[id(tensor)] = pair
        return pair[1]

    def forget_unused(self) -> None:
        """Keep those alone that were asked for since the last call."""
        self._before, self._now = self._now, {}


def encode(
    value: object, path: str = "state", cache: TensorCache | None = None
) -> tuple[Json, Arrays]:
    """The tree of `value` and its arrays by path, in C order on the CPU, uncopied where possible.

    Args:
        value: dataclasses, dicts with str keys, lists, tuples, tensors, arrays and plain values.
        path: where the value lies, which begins the paths of its arrays.
        cache: tensors that need not be copied from a device again.

    Raises:
        TypeError: if the value contains anything else; the message has the path.

    >>> encode({"lr": 0.1, "rounds": (1, 2)})
    ({'dict': {'lr': 0.1, 'rounds': {'tuple': [1, 2]}}}, {})
    """
    if value is None or type(value) in (bool, int, str):
        return value, {}
    if type(value) is float:
        return (value if math.isfinite(value) else {"float": str(value)}), {}
    if isinstance(value, np.ndarray | np.generic) or type(value) is Tensor:
        kind, array = _as_array(value, path, cache)
        return {kind: path}, {path: array}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):  # no named tuples
        children, arrays = _encode_children(dict(enumerate(value)), path, cache)
        items = list(children.values())
        return (items if type(value) is list else {"tuple": items}), arrays
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(
                    f"cannot checkpoint the dict at {path}: its keys must be str, got {key!r} "
                    f"({type(key).__name__}), which JSON would turn into a str"
                )
        children, arrays = _encode_children(value, path, cache)
        return {"dict": children}, arrays
    if is_dataclass(value) and not isinstance(value, type):
        name = _dataclass_name(type(value), path)
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        children, arrays = _encode_children(values, path, cache)
        return {"dataclass": name, "fields": children}, arrays
    raise TypeError(
        f"cannot checkpoint a {type(value).__name__} at {path}: state is made of dataclasses, "
        "dicts with str keys, lists, tuples, tensors, arrays, int, float, str, bool and None"
    )


def decode(tree: Json, arrays: Mapping[str, Array], device: str = "cpu") -> Any:
    """The inverse of `encode`, tensors on `device`; on the CPU they share memory with `arrays`.

    >>> decode(*encode({"lr": 0.1, "rounds": (1, 2), "w": np.zeros(2)}))
    {'lr': 0.1, 'rounds': (1, 2), 'w': array([0., 0.])}
    """
    if isinstance(tree, list):
        return [decode(item, arrays, device) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"float": text}:
            return float(text)
        case {"tensor": path}:
            return torch.from_numpy(arrays[path]).to(device)
        case {"bfloat16": path}:
            return torch.from_numpy(arrays[path]).view(torch.bfloat16).to(device)
        case {"array": path}:
            return arrays[path]
        case {"scalar": path}:
            return arrays[path][()]
        case {"tuple": items}:
            return tuple(decode(item, arrays, device) for item in items)
        case {"dict": children}:
            return {key: decode(child, arrays, device) for key, child in children.items()}
        case {"dataclass": name, "fields": children}:
            values = {key: decode(child, arrays, device) for key, child in children.items()}
            return _build(name, values)
    raise ValueError(f"unknown tag in a checkpoint: {sorted(tree)}")


def _encode_children(
    children: Mapping[Any, object], path: str, cache: TensorCache | None
) -> tuple[dict[str, Json], Arrays]:
    """The trees of values by key, and all their arrays."""
    trees: dict[str, Json] = {}
    arrays: Arrays = {}
    for key, child in children.items():
        # JSON pointer's escapes: {"a/b": x} and {"a": {"b": x}} must not share a path.
        step = str(key).replace("~", "~0").replace("/", "~1")
        trees[key], below = encode(child, f"{path}/{step}", cache)
        arrays |= below
    return trees, arrays


def _as_array(
    value: Tensor | Array | np.generic, path: str, cache: TensorCache | None
) -> tuple[str, Array]:
    """The kind of a tensor, array or scalar as its tag names it, and its values as an array."""
    kind = "scalar" if isinstance(value, np.generic) else "array"
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"cannot checkpoint a {value.layout} tensor at {path}: make it dense")
        # numpy has no bfloat16: its bits travel as integers.
        kind = "bfloat16" if value.dtype is torch.bfloat16 else "tensor"
        if kind == "bfloat16":
            value = value.detach().view(torch.int16).numpy(force=True)
        else:
            value = cache.array_of(value) if cache else value.numpy(force=True)
    elif isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        raise TypeError(f"cannot checkpoint a {type(value).__name__} at {path}: use a plain array")
    array = np.asarray(value, order="C")
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise TypeError(
            f"cannot checkpoint dtype {array.dtype} at {path}; known: {', '.join(sorted(DTYPES))}"
        )
    return kind, array


def _dataclass_name(cls: type, path: str) -> str:
    """`package.module:Name` of a dataclass that can be imported by that name again."""
    name = path_of(cls)
    try:
        imported = _import_dataclass(name)
    except ExperimentError as error:
        raise TypeError(
            f"cannot checkpoint the {cls.__qualname__} at {path}: {error}; define it in a "
            "module of its own"
        ) from error
    if imported is not cls:
        raise TypeError(f"cannot checkpoint the {cls.__qualname__} at {path}: {name} is another")
    return name


def classes_in(tree: Json) -> set[str]:
    """The dataclasses that a tree names.

    >>> sorted(classes_in([{"dataclass": "a:B", "fields": {"x": {"dict": {}}}}, 1]))
    ['a:B']
    """
    if isinstance(tree, list):
        return set().union(*map(classes_in, tree))
    if not isinstance(tree, dict):
        return set()
    below = set().union(*map(classes_in, tree.values()))
    return below | {tree["dataclass"]} if isinstance(tree.get("dataclass"), str) else below


def _import_dataclass(name: str) -> type:
    """The dataclass `package.module:Name`; refuses whatever else has that name."""
    module, _, qualname = name.partition(":")
    try:
        target: Any = importlib.import_module(module)  # Any: a module, then what its names are
        for part in qualname.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ExperimentError(f"{name} cannot be imported ({error})") from error
    if not (isinstance(target, type) and is_dataclass(target)):
        raise ExperimentError(f"{name} is not a dataclass: a checkpoint holds no other objects")
    return target


def _build(name: str, values: dict[str, object]) -> object:
    """An instance of a dataclass with these values in its fields."""
    cls: Any = _import_dataclass(name)  # Any: its constructor is not known here
    is_argument = {f.name: f.init for f in fields(cls)}
    if set(is_argument) != set(values):
        raise ExperimentError(
            f"the checkpoint was written by other code: {name} has fields {sorted(is_argument)}, "
            f"the checkpoint {sorted(values)}"
        )
    built: object = cls(**{field: value for field, value in values.items() if is_argument[field]})
    for field, value in values.items():
        if not is_argument[field]:
            object.__setattr__(built, field, value)
    return built

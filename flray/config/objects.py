"""Components given from Python as objects: a module, a function that builds one, a dataset."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

from pytorch_lightning import LightningModule
from torch.nn import Module
from torch.utils.data import TensorDataset

from flray.config.binding import Component, component_of
from flray.config.parameters import Registry
from flray.data.dataset import Dataset
from flray.data.tensors import digest_of, from_tensors
from flray.errors import ExperimentError
from flray.models.bank import digest, params_of, stack
from flray.values import FROM_DATASET

OBJECT = "object"  # the key of config.yaml that marks a component which no YAML describes


class Given:
    """Builds copies of a module, or hands out a dataset, that came from Python."""

    def __init__(self, value: Module | Dataset) -> None:
        self.value = value

    def __call__(self) -> Any:  # Any: a module, or what loads a dataset
        return copy.deepcopy(self.value) if isinstance(self.value, Module) else self

    def load(self) -> Dataset:
        assert isinstance(self.value, Dataset)
        return self.value


def is_object(given: object) -> bool:
    """True if a component is given as neither a name nor a mapping."""
    return not isinstance(given, str | dict) and given is not None


def object_component(kind: str, registry: Registry, given: Any) -> Component:  # Any: from a user
    """The component of an object; config.yaml has its name and a digest of what it holds."""
    if kind == "dataset" and hasattr(given, "shape"):
        given = (given,)  # images without labels
    if kind == "dataset" and isinstance(given, Sequence):
        given = from_tensors(*_tensors(given))
    if kind == "dataset" and isinstance(given, Dataset):
        plain = {"name": given.name, OBJECT: digest_of(given)}
        return Component(kind, given.name, Given(given), {}, plain)
    if kind == "model" and isinstance(given, Module):  # of pytorch_lightning or of lightning
        if not hasattr(given, "training_step"):
            raise ExperimentError(
                f"model must be a LightningModule, got {_name(type(given))} without a training_step"
            )
        name, params = _name(type(given)), stack([params_of(cast(LightningModule, given))])
        plain = {"name": name, OBJECT: digest(params, 0)}
        return Component(kind, name, Given(given), {}, plain)
    if kind == "model" and callable(given) and not isinstance(given, type):
        return Component(kind, _name(given), given, {}, {"name": _name(given), OBJECT: "function"})
    if kind == "model" and isinstance(given, type):
        return component_of(kind, registry, given, FROM_DATASET)
    return component_of(kind, registry, given)


def _tensors(given: Sequence[Any]) -> list[Any]:  # Any: tensors or arrays
    """x and y of the training part, then of the test part."""
    tensors = list(given)
    if tensors and all(isinstance(each, TensorDataset) for each in given):
        tensors = [tensor for each in given for tensor in each.tensors[:2]]
    if len(tensors) not in (2, 4) or not all(hasattr(each, "shape") for each in tensors):
        raise ExperimentError(
            "a dataset is a name, a mapping, (x_train, y_train, x_test, y_test) as tensors, or two "
            f"TensorDatasets, got {len(given)} values of {_kinds(given)}"
        )
    return tensors


def _kinds(given: Sequence[Any]) -> str:
    return ", ".join(sorted({type(each).__name__ for each in given})) or "no kind"


def _name(target: Callable[..., Any]) -> str:  # Any: a class or a function
    own = getattr(target, "func", target)  # of a functools.partial
    qualified = getattr(own, "__qualname__", type(own).__qualname__)
    return f"{getattr(own, '__module__', '__main__')}:{qualified}"

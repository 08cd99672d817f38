"""Components given from Python as objects: a module, a function that builds one, a dataset.

No YAML describes them, so config.yaml has their name and a digest, and a run with one resumes only
from Python, where the same object is given again.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pytorch_lightning import LightningModule
from torch.nn import Module
from torch.utils.data import TensorDataset

from flray.config.binding import Component
from flray.config.outside import overrides
from flray.config.parameters import Target
from flray.data.dataset import Dataset
from flray.data.owned import Rows, examples_of
from flray.data.tensors import as_array, digest_of, from_tensors
from flray.errors import ExperimentError
from flray.models.bank import digest, params_of, stack
from flray.wording import counted

OWNED = ("clients", "groups", "time")  # what `flray.run` takes beside dataset=(x, y)
OBJECT = "object"  # the key of config.yaml that marks a component which no YAML describes


class ReadyObject:
    """Stands for the class of a component that exists already: a module or a dataset from Python.

    A module is copied for each build, so that no run changes what the caller holds. `remark` is
    what its user may not expect, "" if there is nothing.
    """

    def __init__(self, value: Module | Dataset, remark: str = "") -> None:
        self.value, self.remark = value, remark

    def __call__(self) -> Any:  # Any: a module, or what loads a dataset
        return copy.deepcopy(self.value) if isinstance(self.value, Module) else self

    def load(self) -> Dataset:
        """The dataset, as a component of that kind loads it."""
        assert isinstance(self.value, Dataset)
        return self.value


def object_component(kind: str, given: Any) -> Component | None:  # Any: from a user
    """The component of an object that no YAML describes; None for whatever can be bound.

    A dataset may be a `Dataset`, tensors or a LightningDataModule; a model a LightningModule or a
    function that builds one. config.yaml has its name and a digest of what it holds.
    """
    remark = ""
    if kind == "dataset" and hasattr(given, "train_dataloader"):
        if overrides(type(given), "val_dataloader"):
            remark = (
                f"{type(given).__name__}.val_dataloader is not used: validation parts are cut from "
                "the clients' training data (split.validation)"
            )
        given = from_datamodule(given)
    if kind == "dataset" and (hasattr(given, "shape") or isinstance(given, TensorDataset)):
        given = (given,)
    if kind == "dataset" and isinstance(given, list | tuple):
        given = from_tensors(*_tensors(given))
    if kind == "dataset" and isinstance(given, Dataset):
        return _component(kind, given.name, ReadyObject(given, remark), digest_of(given))
    if kind == "model" and isinstance(given, Module):  # from pytorch_lightning or lightning
        if not hasattr(given, "training_step"):
            raise ExperimentError(
                f"model must be a LightningModule, got {_name(type(given))} without a training_step"
            )
        params = stack([params_of(cast(LightningModule, given))])
        return _component(kind, _name(type(given)), ReadyObject(given), digest(params, 0))
    if kind == "model" and callable(given) and not isinstance(given, type):
        return _component(kind, _name(given), given, "function")
    return None


def with_owners(keys: Mapping[str, Any]) -> dict[str, Any]:  # Any: YAML and objects
    """The keys with `clients`, `groups` and `time` put into the dataset (x, y).

    A dataset that knows its clients is split by them if no split is named.
    """
    owned = {name: as_array(keys[name]) for name in OWNED if keys.get(name) is not None}
    plain = {name: value for name, value in keys.items() if name not in OWNED}
    if owned:
        dataset = plain.get("dataset")
        if "clients" not in owned or not isinstance(dataset, tuple | list) or len(dataset) != 2:
            raise ExperimentError(
                "clients=, and with it groups= and time=, have one value for each example of "
                "dataset=(x, y)"
            )
        x, y = (as_array(values) for values in dataset)
        rows = Rows(x, y, owned["clients"], owned.get("groups"), owned.get("time"))
        plain["dataset"] = rows.dataset("tensors")
    dataset = plain.get("dataset")
    if isinstance(dataset, Dataset) and dataset.client_names:
        plain.setdefault("split", "natural")
    return plain


def from_datamodule(data: Any) -> Dataset:  # Any: a LightningDataModule of either package
    """The examples (x, y) behind the loaders for training and, if there is one, for test.

    Loaders give the datasets alone: flray makes batches itself. Each example is read once, after
    its transforms, so random ones are drawn once. The loader for validation is not used, because a
    validation part is cut from each client's own data (`split.validation`).
    """
    names = ["train_dataloader", "test_dataloader"]
    data.prepare_data()
    arrays: list[Any] = []
    for name, stage in zip(names, ("fit", "test"), strict=True):
        if not overrides(type(data), name):
            continue
        data.setup(stage)
        loader = getattr(data, name)()
        if not hasattr(loader, "dataset") or not hasattr(loader.dataset, "__len__"):
            raise ExperimentError(
                f"{type(data).__name__}.{name} must return one DataLoader over a dataset with a "
                f"length, got {type(loader).__name__}"
            )
        arrays += examples_of(loader.dataset)
    return replace(from_tensors(*_tensors(arrays)), name=_name(type(data)))


def _component(kind: str, name: str, target: Target, content: str) -> Component:
    return Component(kind, name, target, {}, {"name": name, OBJECT: content})


def _tensors(given: Sequence[Any]) -> list[Any]:  # Any: tensors or arrays
    """x and y of the training part, then of the test part."""
    tensors = list(given)
    if tensors and all(isinstance(part, TensorDataset) for part in given):
        tensors = [tensor for part in given for tensor in part.tensors[:2]]
    if len(tensors) not in (2, 4) or not all(hasattr(tensor, "shape") for tensor in tensors):
        raise ExperimentError(
            "a dataset is a name, a mapping, (x_train, y_train, x_test, y_test) as tensors, "
            "TensorDatasets, a LightningDataModule of pairs (x, y), or what flray.from_frame or "
            f"flray.from_clients makes, got {counted(len(given), 'value')} of "
            f"{', '.join(sorted({type(value).__name__ for value in given})) or 'no kind'}"
        )
    return tensors


def _name(target: Callable[..., Any]) -> str:  # Any: a class or a function
    """`package.module:Name` of a class or a function, or of the one that a partial calls."""
    function = getattr(target, "func", target)
    qualified = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '__main__')}:{qualified}"

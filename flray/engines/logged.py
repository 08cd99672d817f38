"""What a module logs with `self.log` while a client trains, as means over the client's steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

Logged = dict[str, list[float | Tensor]]  # by name, one value per call


@contextmanager
def logged(module: LightningModule) -> Iterator[Logged]:
    """Collect the values that the module logs inside the `with` block.

    Lightning's own `log` is called too where a Trainer is attached, for callbacks that monitor a
    value; without one it would only warn, once per client and round.

    >>> module = LightningModule()
    >>> with logged(module) as values:
    ...     module.log("accuracy", 0.5)
    ...     module.log("accuracy", 0.7)
    >>> values
    {'accuracy': [0.5, 0.7]}
    """
    values: Logged = {}
    original = module.log

    def log(name: str, value: Any, *rest: Any, **options: Any) -> None:  # Any: as Lightning's
        number = _of_batch(value) if isinstance(value, Metric) else value
        if isinstance(number, int | float):
            values.setdefault(name, []).append(float(number))
        elif isinstance(number, Tensor) and number.numel() == 1:
            values.setdefault(name, []).append(number.detach())  # read at the end: no waiting here
        if getattr(module, "_trainer", None) is not None:
            original(name, value, *rest, **options)

    def log_dict(dictionary: Mapping[str, Any], *rest: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *rest, **options)

    # Attributes of the instance hide the methods of its class.
    vars(module).update(log=log, log_dict=log_dict)
    try:
        yield values
    finally:
        del vars(module)["log"], vars(module)["log_dict"]


def _of_batch(metric: Metric) -> Any:  # Any: of any metric
    """What a metric has for the batch that it was called with; if it was updated, for all so far.

    Lightning reads the same attribute.
    """
    return metric.compute() if metric._forward_cache is None else metric._forward_cache


def means(clients: Sequence[Logged]) -> dict[str, NDArray[np.float64]]:
    """(K,) by name, the mean over each client's calls; NaN for a client that logged none.

    >>> means([{"a": [1.0, 3.0]}, {}])
    {'a': array([ 2., nan])}
    """
    names = dict.fromkeys(name for values in clients for name in values)
    return {name: np.array([_mean(values.get(name, [])) for values in clients]) for name in names}


def _mean(values: Sequence[float | Tensor]) -> float:
    return float(np.mean([float(value) for value in values])) if values else np.nan

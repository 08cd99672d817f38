"""Score `torchmetrics`: a metric of the library over all predictions of a client."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.errors import ExperimentError, one_line_message

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True)
class TorchMetric:
    """A class of torchmetrics, which gets the outputs and targets of all examples of a client.

    Outputs of classes are (examples, classes) as the model returns them; positions of a sequence
    are examples. Hosts return predictions, so any metric is that of the client as a whole.

        {name: torchmetrics, metric: classification.MulticlassF1Score, options: {num_classes: 5}}

    >>> score = TorchMetric("regression.MeanSquaredError", {"squared": False})
    >>> terms = score.terms(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 1.0]))
    >>> score.name, score.higher_is_better, round(score.value(terms.numpy()), 4)  # root of 9 / 2
    ('mean_squared_error', False, 2.1213)
    """

    metric: str  # Class in torchmetrics, such as regression.MeanSquaredError
    options: Mapping[str, Any] | None = None  # Arguments of the class. None: its defaults
    unit: str = ""  # Unit of the score; %: a fraction, shown in percent
    higher_is_better: bool | None = None  # True if large values are good. None: as the class says

    needs_classes: ClassVar[bool | None] = None
    name = ""  # the class in small letters, which begins the columns

    def __post_init__(self) -> None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.metric.rpartition(".")[2]).lower()
        object.__setattr__(self, "name", name)
        if self.higher_is_better is None:
            is_high = self._build().higher_is_better
            if is_high is None:
                raise ValueError(f"{self.metric} has no direction: set higher_is_better")
            object.__setattr__(self, "higher_is_better", is_high)

    def _build(self) -> "Metric":
        """A new instance; refuses a name or arguments that torchmetrics does not have."""
        module, _, name = f"torchmetrics.{self.metric}".rpartition(".")
        try:
            metric: Metric = getattr(importlib.import_module(module), name)(**(self.options or {}))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ExperimentError(
                f"torchmetrics.{self.metric} cannot be used as a score: {one_line_message(error)}"
            ) from error
        return metric

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B, 1 + ...) the number of classes, 0 for numbers; outputs and targets in turn."""
        numbers = targets.is_floating_point()
        predicted = output.reshape(targets.shape)[..., None] if numbers else output
        pairs = (predicted, targets[..., None])
        rows = torch.cat([part.double() for part in pairs], -1).reshape(len(targets), -1)
        num_classes = 0 if numbers else output.shape[-1]
        return torch.cat([torch.full_like(rows[:, :1], num_classes), rows], 1)

    def value(self, terms: NDArray[np.float64]) -> float:
        num_classes, rows = int(terms[0, 0]), torch.from_numpy(terms[:, 1:])
        if num_classes:
            rows = rows.reshape(-1, num_classes + 1)
            output, targets = rows[:, :-1], rows[:, -1].long()
        else:
            output, targets = (part.squeeze(1) for part in (rows[:, ::2], rows[:, 1::2]))
        try:
            return float(self._build()(output, targets))
        except (ValueError, RuntimeError, TypeError) as error:
            if len(terms) < 2:
                return np.nan  # of a single example some metrics are not defined
            raise ExperimentError(
                f"evaluate.scores: {self.metric} failed on outputs {tuple(output.shape)} and "
                f"targets {tuple(targets.shape)}: {one_line_message(error)}"
            ) from error

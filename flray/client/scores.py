"""Scores of a client's predictions: name, unit, direction, and how they follow from sums.

Most scores follow from sums over examples (right answers, squared errors, counts of a confusion
matrix). Hosts send terms of examples, and whoever holds the terms adds up those of a client, so
clients that share a model and examples are predicted once. Scores that do not, such as AUROC, are
computed from the predictions themselves.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Values = NDArray[np.float64]


class Score(Protocol):
    """A number by which a client's model is judged on examples of the client."""

    name: str  # begins its columns, as in accuracy_mean
    unit: str  # shown behind numbers; empty: none
    higher_is_better: bool
    needs_classes: bool  # True for scores of classes, False for scores of numbers

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B, S) float64 terms of each example, whose sums decide the score.

        Args:
            output: (B, classes), (B, positions, classes) or (B, ...) numbers.
            targets: (B,) or (B, positions) classes, or (B, ...) numbers.
        """
        ...

    def value(self, sums: Values) -> Values:
        """(K,) the score of K clients from the sums (K, S) of their terms; NaN without examples."""
        ...


def _per_example(values: Tensor) -> Tensor:
    """(B,) means over what an example has of them."""
    return values.double().flatten(1).mean(1) if values.ndim > 1 else values.double()


def _ratio(numerator: Values, denominator: Values) -> Values:
    """The quotient; NaN where the denominator is 0."""
    safe = np.where(denominator == 0, np.nan, denominator)
    quotient: Values = numerator / safe
    return quotient


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers.

    >>> score = Accuracy()
    >>> terms = score.terms(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> score.value(terms.sum(0, keepdim=True).numpy())
    array([0.5])
    """

    name = "accuracy"
    unit = "%"
    higher_is_better = True
    needs_classes = True

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        right = _per_example(output.argmax(-1) == targets)
        return torch.stack([right, torch.ones_like(right)], 1)

    def value(self, sums: Values) -> Values:
        return _ratio(sums[:, 0], sums[:, 1])


@dataclass(frozen=True)
class MacroF1:
    """F1 of each class, averaged over the classes that occur in targets or predictions."""

    name = "macro_f1"
    unit = "%"
    higher_is_better = True
    needs_classes = True

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        num_classes = output.shape[-1]
        predicted, wanted = (
            F.one_hot(classes, num_classes).double().flatten(1, -2)
            if classes.ndim > 1
            else F.one_hot(classes, num_classes).double()
            for classes in (output.argmax(-1), targets)
        )
        return torch.cat([predicted * wanted, predicted + wanted], -1)

    def value(self, sums: Values) -> Values:
        both, either = np.split(sums, 2, axis=1)  # (K, classes): F1 = 2 tp / (2 tp + fp + fn)
        with np.errstate(invalid="ignore"):
            f1 = 2 * _ratio(both, either)
        occurs = either > 0
        return _ratio(np.where(occurs, f1, 0.0).sum(1), occurs.sum(1).astype(np.float64))


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean cross-entropy: among how many equally likely classes the model chooses."""

    name = "perplexity"
    unit = ""
    higher_is_better = False
    needs_classes = True

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        logits = output.double()
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        of_examples = _per_example(losses.view(targets.shape))
        return torch.stack([of_examples, torch.ones_like(of_examples)], 1)

    def value(self, sums: Values) -> Values:
        perplexity: Values = np.exp(_ratio(sums[:, 0], sums[:, 1]))
        return perplexity


@dataclass(frozen=True)
class _MeanError:
    """A mean over errors of predicted numbers."""

    unit = ""
    higher_is_better = False
    needs_classes = False

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        errors = _per_example(self._error(output.double().view_as(targets), targets.double()))
        return torch.stack([errors, torch.ones_like(errors)], 1)

    def _error(self, output: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def value(self, sums: Values) -> Values:
        return _ratio(sums[:, 0], sums[:, 1])


@dataclass(frozen=True)
class MeanAbsoluteError(_MeanError):
    """Mean of |prediction - target|."""

    name = "mae"

    def _error(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).abs()


@dataclass(frozen=True)
class RootMeanSquaredError(_MeanError):
    """Root of the mean of (prediction - target)²."""

    name = "rmse"

    def _error(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square()

    def value(self, sums: Values) -> Values:
        root: Values = np.sqrt(super().value(sums))
        return root


@dataclass(frozen=True)
class MeanAbsolutePercentageError(_MeanError):
    """Mean of |prediction - target| / |target|; targets near 0 are taken as 1.17e-6."""

    name = "mape"
    unit = "%"

    def _error(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).abs() / targets.abs().clamp(min=1.17e-6)


@dataclass(frozen=True)
class R2:
    """1 - squared errors / squared deviations of the targets from their mean; at most 1.

    Several targets of an example are scored apart and averaged, as scikit-learn does.
    """

    name = "r2"
    unit = ""
    higher_is_better = True
    needs_classes = False

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        y = targets.double().flatten(1) if targets.ndim > 1 else targets.double()[:, None]
        errors = (output.double().reshape(y.shape) - y).square()
        return torch.cat([errors, y, y.square(), torch.ones_like(y)], 1)

    def value(self, sums: Values) -> Values:
        errors, y, y_squared, num = np.split(sums, 4, axis=1)  # (K, targets) each
        deviations = y_squared - _ratio(y**2, num)
        r2: Values = (1 - _ratio(errors, np.maximum(deviations, 0))).mean(1)
        return r2


SCORES: dict[str, type[Any]] = {
    "accuracy": Accuracy,
    "mae": MeanAbsoluteError,
    "macro_f1": MacroF1,
    "mape": MeanAbsolutePercentageError,
    "perplexity": Perplexity,
    "r2": R2,
    "rmse": RootMeanSquaredError,
}

"""Scores of a client's predictions: name, unit, direction, and how they follow from examples.

A host computes terms of each example, and whoever holds the terms of a client's examples computes
the score. So clients that share a model and examples are predicted once, and scores that are no
means of examples, such as AUROC, need nothing else. All of them equal scikit-learn's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from flray.client.torch_metric import TorchMetric
from flray.columns import ScoreColumns
from flray.errors import ExperimentError

Terms = NDArray[np.float64]  # (R, S) numbers of R examples that decide a score

LEAST_TARGET = float(np.finfo(np.float64).eps)  # what MAPE divides by where a target is 0


class Score(Protocol):
    """A number by which a client's model is judged on examples of the client."""

    # Attributes of a class, or fields that YAML may set
    @property
    def name(self) -> str:
        """Begins the columns of the score, as in accuracy_mean; letters, digits and underscores."""
        ...

    @property
    def unit(self) -> str:
        """Shown behind numbers, empty for none. %: recorded as a fraction, shown in percent."""
        ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def needs_classes(self) -> bool | None:
        """True for scores of classes, False for scores of numbers, None for both."""
        ...

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B, S) what the score needs of each example.

        Args:
            output: (B, classes), (B, positions, classes) or (B, ...) numbers.
            targets: (B,) or (B, positions) classes, or (B, ...) numbers.
        """
        ...

    def value(self, terms: Terms) -> float:
        """The score of a client from the terms of its examples, at least one; NaN: not defined."""
        ...


def columns_of(score: Score) -> ScoreColumns:
    """The columns that a run records of a score; by default without a unit, and low is good."""
    is_high = getattr(score, "higher_is_better", False)
    return ScoreColumns(score.name, getattr(score, "unit", ""), is_high)


@dataclass(frozen=True)
class MeanScore:
    """A mean over examples; the base of scores of one's own, which define `of_examples`.

    >>> class Bias(MeanScore):
    ...     name = "bias"
    ...
    ...     def of_examples(self, output, targets):
    ...         return output.view_as(targets) - targets
    >>> terms = Bias().terms(torch.tensor([[1.0], [4.0]]), torch.tensor([0.0, 1.0]))
    >>> Bias().value(terms.numpy())
    2.0
    """

    name = ""
    unit = ""
    higher_is_better = False
    needs_classes: ClassVar[bool | None] = None

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        """(B,) or (B, ...) the values whose mean over everything is the score."""
        raise ExperimentError(
            f"score {type(self).__name__} must define of_examples(output, targets)"
        )

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        values = self.of_examples(output, targets)
        if not isinstance(values, Tensor) or values.shape[:1] != targets.shape[:1]:
            shape = f" of the shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
            raise ExperimentError(
                f"score {self.name}: expected a tensor with a value for each of {len(targets)} "
                f"examples, got {type(values).__name__}{shape}"
            )
        return _flat(values.double()).mean(1, keepdim=True)

    def value(self, terms: Terms) -> float:
        return float(terms.mean())


def _flat(values: Tensor) -> Tensor:
    """(B, n) everything that an example has."""
    return values.reshape(len(values), -1)


def is_right(output: Tensor, targets: Tensor) -> Tensor:
    """True where the class with the highest output is the target, in the shape of the targets."""
    return output.argmax(-1) == targets


@dataclass(frozen=True)
class Accuracy(MeanScore):
    """Share of right answers; of a sequence, of right positions.

    >>> score = Accuracy()
    >>> terms = score.terms(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> score.value(terms.numpy())
    0.5
    """

    name = "accuracy"
    unit = "%"
    higher_is_better = True
    needs_classes = True

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        return is_right(output, targets)


@dataclass(frozen=True)
class MacroF1:
    """F1 of each class, averaged over the classes that occur in targets or predictions."""

    name = "macro_f1"
    unit = "%"
    higher_is_better = True
    needs_classes = True

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        return torch.cat([_flat(output.argmax(-1)), _flat(targets)], 1)

    def value(self, terms: Terms) -> float:
        predicted, wanted = (half.ravel() for half in np.split(terms, 2, axis=1))
        classes = np.union1d(predicted, wanted)[:, None]
        is_predicted, is_wanted = predicted == classes, wanted == classes  # (classes, answers)
        both = (is_predicted & is_wanted).sum(1)
        return float(np.mean(2 * both / (is_predicted.sum(1) + is_wanted.sum(1))))


@dataclass(frozen=True)
class Auroc:
    """Area under the ROC curve of each class against the others, averaged over classes.

    Classes that a client's examples all have, or all lack, have no area and are left out.
    """

    name = "auroc"
    unit = "%"
    higher_is_better = True
    needs_classes = True

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        if targets.ndim > 1:
            raise ExperimentError(
                "evaluate.scores: auroc needs one class for each example, got targets of shape "
                f"{tuple(targets.shape[1:])}; choose accuracy, macro_f1 or perplexity"
            )
        return torch.cat([output.double().softmax(-1), targets[:, None]], 1)

    def value(self, terms: Terms) -> float:
        probabilities, targets = terms[:, :-1], terms[:, -1]
        areas = []
        for label in np.unique(targets).astype(int):
            is_class, probability = targets == label, probabilities[:, label]
            others = np.sort(probability[~is_class])
            if len(others):  # share of pairs in the right order, ties half (Mann and Whitney, 1947)
                class_scores = probability[is_class]
                below = [np.searchsorted(others, class_scores, side) for side in ("left", "right")]
                areas.append(np.mean(below) / len(others))
        return float(np.mean(areas)) if areas else np.nan


@dataclass(frozen=True)
class Perplexity(MeanScore):
    """exp of the mean cross-entropy: among how many equally likely classes the model chooses."""

    name = "perplexity"
    needs_classes = True

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        logits = output.double().flatten(0, -2)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view(targets.shape)

    def value(self, terms: Terms) -> float:
        return float(np.exp(super().value(terms)))


@dataclass(frozen=True)
class MeanAbsoluteError(MeanScore):
    """Mean of |prediction - target|."""

    name = "mae"
    needs_classes = False
    unit: str = ""  # Unit of the targets, such as kW

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        return _errors(output, targets).abs()


@dataclass(frozen=True)
class RootMeanSquaredError(MeanScore):
    """Root of the mean of (prediction - target)²."""

    name = "rmse"
    needs_classes = False
    unit: str = ""  # Unit of the targets, such as kW

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        return _errors(output, targets).square()

    def value(self, terms: Terms) -> float:
        return float(np.sqrt(super().value(terms)))


@dataclass(frozen=True)
class MeanAbsolutePercentageError(MeanScore):
    """Mean of |prediction - target| / |target|."""

    name = "mape"
    unit = "%"
    needs_classes = False

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        return _errors(output, targets).abs() / targets.double().abs().clamp(min=LEAST_TARGET)


def _errors(output: Tensor, targets: Tensor) -> Tensor:
    return output.double().reshape(targets.shape) - targets.double()


@dataclass(frozen=True)
class R2:
    """1 - squared errors / squared deviations of the targets from their mean; at most 1.

    Several targets of an example are scored apart and averaged, as scikit-learn does. NaN where all
    targets are equal.
    """

    name = "r2"
    unit = ""
    higher_is_better = True
    needs_classes = False

    def terms(self, output: Tensor, targets: Tensor) -> Tensor:
        return torch.cat([_flat(output.reshape(targets.shape)), _flat(targets)], 1).double()

    def value(self, terms: Terms) -> float:
        predicted, wanted = np.split(terms, 2, axis=1)  # (R, targets)
        errors = ((predicted - wanted) ** 2).sum(0)
        deviations = ((wanted - wanted.mean(0)) ** 2).sum(0)
        return float(np.mean(1 - errors / np.where(deviations > 0, deviations, np.nan)))


@dataclass(frozen=True)
class ModuleScore(MeanScore):
    """The mean of what the module's own `scores(batch)` returns under a key, (B,) values.

    `of_examples` receives these values as the output.
    """

    key: str  # Name of the score: a key of the dict that the module's scores(batch) returns
    unit: str = ""  # Unit of the score
    higher_is_better: bool = False  # True if large values are good

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.key)

    def of_examples(self, output: Tensor, targets: Tensor) -> Tensor:
        return output


SCORES: dict[str, type[Any]] = {
    "accuracy": Accuracy,
    "auroc": Auroc,
    "mae": MeanAbsoluteError,
    "macro_f1": MacroF1,
    "mape": MeanAbsolutePercentageError,
    "module": ModuleScore,
    "perplexity": Perplexity,
    "r2": R2,
    "rmse": RootMeanSquaredError,
    "torchmetrics": TorchMetric,
}

"""What a model is given: the examples as it takes them, or a refusal before anything is trained."""

from dataclasses import replace

import numpy as np
from pytorch_lightning import LightningModule

from flray.data.checks import refuse_values
from flray.data.dataset import Dataset
from flray.errors import ExperimentError
from flray.models.predictor import Predictor

OTHERS = "choose linear, mlp, cnn1d or gru"
_KINDS = {"u": "bytes", "i": "whole numbers", "f": "floats"}


def given_to(module: LightningModule, dataset: Dataset, name: str) -> Dataset:
    """The dataset with the inputs that a module takes (`Predictor.takes`).

    A module of the user's own, which does not say what it takes, is given everything as it is.

    Args:
        name: Name of the model in messages.

    Raises:
        ExperimentError: The module cannot read the inputs, or predicts no such targets.
    """
    takes = getattr(module, "takes", "any")
    if takes == "tokens":
        _check_tokens(dataset, name)
    if takes != "numbers":
        return dataset
    if isinstance(module, Predictor):
        _check_shapes(dataset, name)
    if dataset.images.dtype.kind != "i":
        return dataset
    return replace(dataset, images=dataset.images.astype(np.float32))


def _check_shapes(dataset: Dataset, name: str) -> None:
    """Refuse inputs without features, and a class for each position of an example."""
    if dataset.images.ndim == 1:
        raise ExperimentError(
            f"model {name} reads features, and the inputs of {dataset.name} are one number for "
            "each example; give them the shape (N, 1), as x[:, None] does"
        )
    if not dataset.num_classes or dataset.labels.ndim == 1:
        return
    advice = (
        "choose char_gru, which reads tokens, or a Predictor of your own whose output is "
        "(B, positions, classes)"
    )
    if dataset.labels[0].size == 1:
        advice = "give them the shape (N,), as y.flatten() does"
    raise ExperimentError(
        f"model {name} gives one prediction for each example, and the targets of "
        f"{dataset.name} are classes of the shape {dataset.labels.shape[1:]}; {advice}"
    )


def _check_tokens(dataset: Dataset, name: str) -> None:
    """Refuse examples that are no sequences of tokens with a class for each of them."""
    x, y = dataset.images, dataset.labels
    if x.dtype.kind != "i" or x.ndim != 2:
        raise ExperimentError(
            f"model {name} reads sequences of whole numbers, such as characters, and the inputs of "
            f"{dataset.name} are {_KINDS[x.dtype.kind]} of the shape {x.shape[1:]}; {OTHERS}, or "
            "give tokens as int64"
        )
    if not dataset.num_classes or x.shape != y.shape:
        kind = "classes" if dataset.num_classes else "numbers"
        raise ExperimentError(
            f"model {name} predicts a class for each of the {x.shape[1]} tokens of an example, and "
            f"the targets of {dataset.name} are {kind} of the shape {y.shape[1:]}; {OTHERS}, or "
            "give one class for each token"
        )
    rule = f"model {name} knows the tokens 0 to {dataset.num_classes - 1}, one for each class"
    advice = "number tokens and classes alike"
    refuse_values(x, (x < 0) | (x >= dataset.num_classes), rule, advice)

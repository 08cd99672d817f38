"""The `tracking` part of an experiment: where a run is shown beside its directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class NoTracking:
    """The run directory alone."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, as a mirror of the run directory."""

    project: str = "flray"
    mode: Literal["online", "offline", "disabled"] | None = None  # None: WANDB_MODE, else by key
    entity: str | None = None  # None: the one of the key
    group: str | None = None  # None: the sweep, where there is one
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard, as a mirror of the run directory in its folder tensorboard/."""


@dataclass(frozen=True)
class MLflow:
    """MLflow, as a mirror of the run directory."""

    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else what MLflow takes by default
    experiment: str = "flray"


# Any: one of them
TRACKING: Mapping[str, Callable[..., Any]] = {
    "mlflow": MLflow,
    "none": NoTracking,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}

"""The key `tracking` of an experiment: the tracker that mirrors a run directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class NoTracking:
    """No tracker: the run directory alone."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases: configuration, rounds, summary, figures and tables of clusterings."""

    project: str = "flray"  # W&B project that runs are shown in
    # Whether to send data to W&B. null: WANDB_MODE, else online if there is a key
    mode: Literal["online", "offline", "disabled"] | None = None
    entity: str | None = None  # W&B user or team. null: the default of the key
    group: str | None = None  # Group of the run in W&B. null: the name of the sweep, if any
    tags: tuple[str, ...] = ()  # Tags of the run in W&B


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard: event files in the folder tensorboard/ of the run directory."""


@dataclass(frozen=True)
class MLflow:
    """MLflow: configuration, rounds and summary; needs the package mlflow."""

    uri: str | None = None  # Tracking server or database. null: MLFLOW_TRACKING_URI or its default
    experiment: str = "flray"  # MLflow experiment that runs are shown in


# Any: one of these classes
TRACKING: Mapping[str, Callable[..., Any]] = {
    "mlflow": MLflow,
    "none": NoTracking,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}

"""The `tracking` part of an experiment: where a run is shown beside its directory.

A tracker mirrors the run directory and is never the only copy of a result; one that fails is a
remark and does not stop a run. `flray/tracking` has the code that talks to trackers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class NoTracking:
    """No tracker: the run directory alone (`tracking: none`, the default)."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, as a mirror of the run directory.

    In YAML: `tracking: {name: wandb, project: digits, tags: [baseline]}`.

    >>> Wandb(project="digits", tags=("baseline",)).mode is None  # W&B's own setting decides
    True
    """

    project: str = "flray"  # W&B project that runs are shown in
    # Whether to send data to W&B. null: WANDB_MODE, else online if there is a key
    mode: Literal["online", "offline", "disabled"] | None = None
    entity: str | None = None  # W&B user or team. null: the default of the key
    group: str | None = None  # Group of the run in W&B. null: the name of the sweep, if any
    tags: tuple[str, ...] = ()  # Tags of the run in W&B


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard, as a mirror of the run directory in its folder tensorboard/.

    In YAML: `tracking: tensorboard`; then `tensorboard --logdir RUN/tensorboard` shows the run.
    """


@dataclass(frozen=True)
class MLflow:
    """MLflow, as a mirror of the run directory.

    In YAML: `tracking: {name: mlflow, uri: "sqlite:///mlflow.db"}`.

    >>> MLflow(experiment="digits").uri is None  # MLflow's own setting decides
    True
    """

    uri: str | None = None  # Tracking server or database. null: MLFLOW_TRACKING_URI or its default
    experiment: str = "flray"  # MLflow experiment that runs are shown in


# Any: one of these classes
TRACKING: Mapping[str, Callable[..., Any]] = {
    "mlflow": MLflow,
    "none": NoTracking,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}

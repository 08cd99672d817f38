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

    project: str = "flray"
    mode: Literal["online", "offline", "disabled"] | None = None  # None: WANDB_MODE, else by key
    entity: str | None = None  # None: the one of the key
    group: str | None = None  # None: the sweep, where there is one
    tags: tuple[str, ...] = ()


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

    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else what MLflow takes by default
    experiment: str = "flray"


# Any: one of them
TRACKING: Mapping[str, Callable[..., Any]] = {
    "mlflow": MLflow,
    "none": NoTracking,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}

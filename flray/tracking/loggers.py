"""Lightning's loggers as flray opens them.

W&B does not get environment variables, command line, host name, hardware, installed packages, code,
commit or console output; what remains is its own version, Python's and the platform
(`linux-x86_64`), and for a table the folder in which wandb keeps its copy (WANDB_DATA_DIR).
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from flray.config.deciding import Config, leaves
from flray.config.tracking import MLflow, TensorBoard, Wandb
from flray.errors import ExperimentError

# Opens a logger for a configuration; the id is that of the tracker's run that goes on, or None.
OpenLogger = Callable[[Config, str | None], Logger]

SETTINGS: dict[str, Any] = {  # Any: settings of wandb, most of them for what stays on this machine
    "console": "off",
    "host": "",
    "program": "flray",  # else the path of what was called
    "save_code": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,  # and commit, command line, paths
    "x_disable_stats": True,
    "x_save_requirements": False,
    "init_timeout": 20.0,  # seconds for the server to answer; then the run is offline
    "finish_timeout": 30.0,  # seconds for the last uploads
    "finish_timeout_raises": True,
}
_log = logging.getLogger(__name__)


class WandbRounds(WandbLogger):
    """Lightning's W&B logger with the round as W&B's step.

    Lightning lets W&B count the steps, which begin at 0 in every part of a run that is kept
    offline: parts of a resumed run would overlap. A step that W&B has closed becomes the next one,
    because W&B ignores values for it.
    """

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=max(step or 0, self.experiment.step))

    def finalize(self, status: str) -> None:
        self.experiment.finish(exit_code=int(status != "success"))


def logger_opener(
    tracking: object, folder: Path, name: str, group: str | None
) -> OpenLogger | None:
    """A function that opens the logger of a run; None if nothing is tracked. Starts nothing.

    Args:
        folder: of the run; W&B and TensorBoard keep their files below it.
        name: of the run in W&B and MLflow.
        group: of the run in W&B, unless the experiment names one.
    """
    if isinstance(tracking, TensorBoard):
        return partial(_open_tensorboard, folder)
    if isinstance(tracking, MLflow):
        uri = tracking.uri or _imported("mlflow").get_tracking_uri()
        return partial(_open_mlflow, tracking.experiment, uri, name)
    if isinstance(tracking, Wandb) and (mode := chosen_mode(tracking)) != "disabled":
        choices = {
            "mode": mode,
            "project": tracking.project,
            "entity": tracking.entity,
            "group": tracking.group or group,
            "tags": tracking.tags or None,
            "name": name,
            "dir": str(folder.absolute()),
        }
        return partial(_open_wandb, _imported("wandb"), choices)
    return None


def chosen_mode(tracking: Wandb) -> str:
    """The mode that was asked for, or else online where there is a key; never asks for one."""
    asked = tracking.mode or os.environ.get("WANDB_MODE")
    if asked not in (None, "online"):
        return asked
    wandb = _imported("wandb")
    try:
        wandb.setup(wandb.Settings(silent=True))  # or `login` would ask the server who this is
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        raise ExperimentError(f"tracking: W&B cannot be used: {in_a_line(error)}") from error
    if asked == "online" and not has_key:  # W&B would ask for it in the middle of a run
        raise ExperimentError(
            "tracking is online but there is no key of W&B: `wandb login`, set WANDB_API_KEY or "
            "choose tracking.mode=offline"
        )
    return "online" if has_key else "offline"


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _open_tensorboard(folder: Path, config: Config, _id: str | None) -> Logger:
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # else a line for every NaN
    logger = TensorBoardLogger(
        folder,
        name="",
        version="tensorboard",
        default_hp_metric=False,
        filename_suffix=f".{len(list(folder.glob('tensorboard/events.*')))}",  # one file per start
    )
    logger.log_hyperparams(dict(config))
    return logger


def _open_mlflow(experiment: str, uri: str, name: str, config: Config, id: str | None) -> Logger:
    logger = MLFlowLogger(experiment, name, tracking_uri=uri, run_id=id)
    if id is None:  # MLflow refuses to change them
        logger.log_hyperparams(leaves(config))
    return logger


def _open_wandb(wandb: Any, choices: dict[str, Any], config: Config, id: str | None) -> Logger:
    settings = wandb.Settings(**SETTINGS, resume="allow", reinit="create_new")
    init = partial(wandb.init, id=id, config=dict(config), settings=settings)
    try:
        run = init(**choices)
    except Exception as error:  # whatever its server or its service may raise
        if choices["mode"] != "online":
            raise
        _log.warning("W&B does not answer (%s): the run is kept offline", in_a_line(error))
        wandb.teardown()  # its service holds on to the id of the run that failed
        run = init(**choices | {"mode": "offline"})
    return WandbRounds(experiment=run)


def _imported(package: str) -> Any:  # Any: a module
    # Else W&B's reports of its own errors keep a process from ending: 20 s without a network.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        return import_module(package)
    except ImportError as error:
        raise ExperimentError(
            f"tracking={package} needs the package {package} ({error}): pip install {package}, or "
            "choose tracking=tensorboard or tracking=none"
        ) from error

"""Lightning's loggers for W&B, TensorBoard and MLflow, as flray opens them.

W&B receives no environment variables, command line, host name, hardware, installed packages, code,
commit or console output. It receives its own version, that of Python, the platform
(`linux-x86_64`) and, for a table, the folder of wandb's copy (WANDB_DATA_DIR).
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

# Opens a logger: (configuration, id of the tracker's run to continue or None) to logger.
OpenLogger = Callable[[Config, str | None], Logger]

SETTINGS: dict[str, Any] = {  # Any: settings of wandb; most keep facts of the machine private
    "console": "off",
    "host": "",
    "program": "flray",  # instead of the path of the program
    "save_code": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,  # also commit, command line and paths
    "x_disable_stats": True,
    "x_save_requirements": False,
    "init_timeout": 20.0,  # seconds to wait for the server; after that the run is offline
    "finish_timeout": 30.0,  # seconds to wait for the last uploads
    "finish_timeout_raises": True,
}
_log = logging.getLogger(__name__)


class WandbRounds(WandbLogger):
    """Lightning's W&B logger with the round as W&B's step.

    Lightning lets W&B count the steps. They begin at 0 in every part of a run that is kept offline,
    so that the parts of a resumed run would overlap. W&B ignores values of steps that it has
    closed; they are logged in the next step.
    """

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers in the step of a round, or in the open step if that round is closed."""
        self.experiment.log(dict(metrics), step=max(step or 0, self.experiment.step))

    def finalize(self, status: str) -> None:
        """End the W&B run, which waits for the last uploads; Lightning would leave it open."""
        self.experiment.finish(exit_code=int(status != "success"))


def logger_opener(
    tracking: object, folder: Path, name: str, group: str | None
) -> OpenLogger | None:
    """A function that opens the logger of a run; None if nothing is tracked.

    Nothing is started here, so that a run can be refused before it begins. The function takes the
    configuration to log, and the id of the tracker's run to continue or None.

    Args:
        tracking: One of the classes of `flray.config.tracking`.
        folder: Folder of the run; W&B and TensorBoard keep their files below it.
        name: Name of the run in W&B and MLflow.
        group: Group of the run in W&B, unless the experiment names one.

    Raises:
        ExperimentError: The tracker's package or the key of W&B is missing.
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
    """W&B's mode: the configured one, else WANDB_MODE, else online if there is a key.

    Never prompts for a key, and asks no server whether a key is valid.

    Returns:
        "online", "offline", "disabled", or what else WANDB_MODE is.

    Raises:
        ExperimentError: The mode is online and there is no key.
    """
    mode = tracking.mode or os.environ.get("WANDB_MODE")
    if mode not in (None, "online"):
        return mode
    wandb = _imported("wandb")
    try:
        wandb.setup(wandb.Settings(silent=True))  # otherwise `login` asks the server for the user
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        raise ExperimentError(f"tracking: W&B cannot be used: {in_a_line(error)}") from error
    if mode == "online" and not has_key:  # W&B would prompt for it in the middle of a run
        raise ExperimentError(
            "tracking is online but there is no key of W&B: `wandb login`, set WANDB_API_KEY or "
            "choose tracking.mode=offline"
        )
    return "online" if has_key else "offline"


def in_a_line(error: BaseException) -> str:
    r"""The message of an error on one line; its class if it has none.

    >>> in_a_line(ValueError("two\n  lines")), in_a_line(KeyError())
    ('two lines', 'KeyError')
    """
    return " ".join(str(error).split()) or type(error).__name__


def _open_tensorboard(folder: Path, config: Config, _id: str | None) -> Logger:
    """Open a logger that writes below tensorboard/ of the run, one file per start of the run."""
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # no warning for every NaN
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
    """Open a logger for a new MLflow run, or for the run with this id."""
    logger = MLFlowLogger(experiment, name, tracking_uri=uri, run_id=id)
    if id is None:  # MLflow does not allow to change them later
        logger.log_hyperparams(leaves(config))
    return logger


def _open_wandb(wandb: Any, choices: dict[str, Any], config: Config, id: str | None) -> Logger:
    """Open a logger for a new W&B run, or go on with that of this id; offline without a server."""
    settings = wandb.Settings(**SETTINGS, resume="allow", reinit="create_new")
    init = partial(wandb.init, id=id, config=dict(config), settings=settings)
    try:
        run = init(**choices)
    except Exception as error:  # its server and its service raise errors of many classes
        if choices["mode"] != "online":
            raise
        _log.warning("W&B does not answer (%s): the run is kept offline", in_a_line(error))
        wandb.teardown()  # otherwise its service keeps the id of the failed run
        run = init(**choices | {"mode": "offline"})
    return WandbRounds(experiment=run)


def _imported(package: str) -> Any:  # Any: a module
    """The package of a tracker, or an error that names what to install."""
    # Without a network, W&B's reports of its own errors delay the end of a process by 20 s.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        return import_module(package)
    except ImportError as error:
        raise ExperimentError(
            f"tracking={package} needs the package {package} ({error}): pip install {package}, or "
            "choose tracking=tensorboard or tracking=none"
        ) from error

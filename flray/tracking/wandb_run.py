"""W&B as a mirror of run directories: never the only copy, never in the way of training.

W&B is told the resolved configuration without what looks like a secret, every row of
rounds.parquet (the step is the round), the partition of every clustering as a table, figures, and
the summary. It is not told environment variables, command line, host name, hardware, installed
packages, code, commit or console output; what remains is its own version, Python's and the platform
(`linux-x86_64`), and for a table the folder in which wandb keeps its copy (WANDB_DATA_DIR).

All of it happens in a thread of its own: training hands rows over and goes on. A server that does
not answer leaves the run offline; what is below `wandb/` can be sent later with
`wandb sync --include-online`.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flray.columns import CLIENT, GROUP, ROUND
from flray.config.deciding import Config
from flray.config.tracking import Wandb
from flray.errors import ExperimentError
from flray.files import read_json, reading, replace_text
from flray.records.clusterings import ClusteringRecord
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start
    import wandb

MARK = "wandb.json"  # in a run directory
INIT_TIMEOUT_S = 20.0  # for a server to answer; then the run is offline
FINISH_TIMEOUT_S = 30.0  # for the last uploads
CLOSE_TIMEOUT_S = 60.0  # for all that is still to be done when a run ends

MODES = ("online", "offline", "disabled")
STAYS_HERE: dict[str, Any] = {  # Any: settings of wandb
    "console": "off",
    "host": "",
    "program": "flray",  # else the path of what was called
    "save_code": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,  # and commit, command line, paths
    "x_disable_stats": True,
    "x_save_requirements": False,
}

_SECRET = re.compile(r"(?i)(^|[_-])(api_?key|key|token|passw(or)?d|secret|credentials?)s?$")
_log = logging.getLogger(__name__)


def open_tracker(
    tracking: object, folder: Path, config: Config, group: str | None
) -> "Tracker | None":
    """A tracker that has not started anything; None where nothing is to be tracked."""
    if not isinstance(tracking, Wandb):
        return None
    mode = chosen_mode(tracking)
    if mode == "disabled":
        return None
    mark = read_mark(folder)
    given = {
        "mode": mode,
        "project": tracking.project,
        "entity": tracking.entity,
        "run_group": group,
        "run_tags": tracking.tags or None,
        "run_id": mark.id,
        "run_name": _name(folder, config),
        "root_dir": str(folder.absolute()),
        "resume": "allow",
        "reinit": "create_new",
        "init_timeout": INIT_TIMEOUT_S,
        "finish_timeout": FINISH_TIMEOUT_S,
        "finish_timeout_raises": True,
    }
    package = _import_wandb()
    try:  # what is None is for wandb to choose
        settings = package.Settings(
            **STAYS_HERE, **{key: value for key, value in given.items() if value is not None}
        )
    except (package.errors.UsageError, ValueError) as error:
        raise ExperimentError(f"tracking: {error}") from error
    return Tracker(folder, mark, settings, without_secrets(config))


def chosen_mode(tracking: Wandb) -> str:
    """The mode that was asked for, or else online where there is a key; never asks for one."""
    asked = tracking.mode or os.environ.get("WANDB_MODE")
    if asked not in (None, *MODES):
        raise ExperimentError(f"WANDB_MODE must be one of {', '.join(MODES)}, got {asked!r}")
    if asked in ("offline", "disabled"):
        return asked
    package = _import_wandb()
    try:
        package.setup(package.Settings(silent=True))  # or `login` would ask the server who this is
        has_key = package.login(prompt=False, verify=False)
    except package.errors.Error as error:
        raise ExperimentError(f"tracking: W&B cannot be used: {_in_a_line(error)}") from error
    if asked == "online" and not has_key:
        raise ExperimentError(
            "tracking is online but there is no key of W&B: `wandb login`, set WANDB_API_KEY or "
            "choose tracking.mode=offline"
        )
    return "online" if has_key else "offline"


def without_secrets(config: Any) -> Any:  # Any: nested mappings, lists and plain values
    """The configuration less every key that looks like a secret.

    >>> without_secrets({"seed": 1, "dataset": [{"api_key": "x", "keys": 2, "tokenizer": "bpe"}]})
    {'seed': 1, 'dataset': [{'tokenizer': 'bpe'}]}
    """
    if isinstance(config, Mapping):
        shown = {key: value for key, value in config.items() if not _SECRET.search(str(key))}
        return {key: without_secrets(value) for key, value in shown.items()}
    if isinstance(config, list | tuple):
        return [without_secrets(value) for value in config]
    return config


@dataclass(frozen=True)
class Mark:
    """How far W&B is: kept beside the run, so that a resumed one goes on in the same W&B run.

    The id is drawn, not derived from the experiment: a run that is repeated in the same folder is
    another one, whereas W&B ignores steps that it has.
    """

    id: str
    round: int = 0  # the last one that was logged
    is_complete: bool = False  # with its clusterings, figures and summary


def read_mark(folder: Path) -> Mark:
    path = folder / MARK
    if not path.is_file():
        return Mark(uuid4().hex[:16])
    with reading(path):
        return Mark(**read_json(path))


class Tracker:
    """One W&B run. Every method returns at once, except `close`, which waits a bounded time.

    A tracker that was never asked for anything has written nothing.
    """

    def __init__(
        self, folder: Path, mark: Mark, settings: "wandb.Settings", config: Config
    ) -> None:
        self._directory = RunDirectory(folder)
        self._mark = mark
        self._settings = settings
        self._config = config
        self._run: wandb.Run | None = None
        self._jobs: SimpleQueue[Callable[[wandb.Run], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="tracking", daemon=True)

    @property
    def is_complete(self) -> bool:
        """Has W&B got everything, from this process or an earlier one?"""
        return self._mark.is_complete

    def round(self, row: RoundRow) -> None:
        """Log a round that W&B has not got, after those before it that were recorded."""
        self._ask(partial(self._log_round, row=row))

    def clustering(self, t: int, clustering: ClusteringRecord) -> None:
        """Log who was put together after round t, as a table."""
        import pandas as pd

        columns = {CLIENT: clustering.clients, "cluster": clustering.labels}
        if clustering.groups is not None:
            columns[GROUP] = clustering.groups
        self.table(f"clusterings/round_{t}", pd.DataFrame(columns))

    def images(self, paths: Sequence[Path]) -> None:
        """Log PNG files by their names."""
        if paths:
            self._ask(partial(self._log_images, paths=paths))

    def table(self, name: str, frame: "pd.DataFrame") -> None:
        self._ask(partial(self._log_table, name=name, frame=frame))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the summary, after rounds of the directory that are still missing."""
        self._ask(partial(self._log_summary, summary=summary))

    def close(self, exit_code: int) -> None:
        """End the W&B run, or leave it behind if that takes too long."""
        if self._thread.ident is None:
            return
        self._ask(lambda run: run.finish(exit_code=exit_code))
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("W&B takes more than %s s: %s", CLOSE_TIMEOUT_S, self._where_it_is())

    def _ask(self, job: "Callable[[wandb.Run], None]") -> None:
        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()

    def _work(self) -> None:
        """Do what is asked in order; after a failure listen only."""
        errors, is_on = _errors_of_wandb(), True
        while (job := self._jobs.get()) is not None:
            if not is_on:
                continue
            try:
                self._run = self._run or self._start()
                job(self._run)
            except errors as error:
                is_on = False
                _log.warning("tracking is off (%s): %s", _in_a_line(error), self._where_it_is())

    def _start(self) -> "wandb.Run":
        import wandb

        self._write(self._mark)
        config = self._recorded_config()
        try:
            return wandb.init(settings=self._settings, config=config)
        except _errors_of_wandb() as error:
            if self._settings.mode == "offline":
                raise
            _log.warning("W&B does not answer (%s): %s", _in_a_line(error), self._where_it_is())
        wandb.teardown()  # its service holds on to the id of the run that failed
        self._settings.mode = "offline"
        return wandb.init(settings=self._settings, config=config)

    def _recorded_config(self) -> dict[str, Any]:  # Any: JSON
        """As config.yaml has it, with the block that was chosen; of a sweep, what it was given."""
        if self._directory.holds_run():
            return dict(without_secrets(self._directory.config()))
        return dict(self._config)

    def _where_it_is(self) -> str:
        command = f"wandb sync --include-online {self._directory.path}/wandb/*run-*"
        return f"the run directory holds everything; `{command}` sends it"

    def _log_round(self, run: "wandb.Run", row: RoundRow) -> None:
        t = row[ROUND]
        if t > self._mark.round + 1:  # an earlier process recorded them and could not log them
            for missed in self._directory.rows(self._mark.round):
                if missed[ROUND] < t:
                    self._log_row(run, missed)
        self._log_row(run, row)

    def _log_row(self, run: "wandb.Run", row: RoundRow) -> None:
        if row[ROUND] > self._mark.round:
            values = {name: value for name, value in row.items() if value is not None}
            run.log(values, step=row[ROUND])
            self._write(replace(self._mark, round=row[ROUND]))

    def _log_missing_rows(self, run: "wandb.Run") -> None:
        for row in self._directory.rows(self._mark.round):
            self._log_row(run, row)

    def _log_table(self, run: "wandb.Run", name: str, frame: "pd.DataFrame") -> None:
        import wandb

        self._log_after_the_rounds(run, {name: wandb.Table(dataframe=frame)})

    def _log_images(self, run: "wandb.Run", paths: Sequence[Path]) -> None:
        import wandb

        images = {f"figures/{path.stem}": wandb.Image(str(path)) for path in paths}
        self._log_after_the_rounds(run, images)

    def _log_after_the_rounds(self, run: "wandb.Run", values: dict[str, Any]) -> None:
        self._log_missing_rows(run)
        run.log(values, step=self._mark.round + 1)  # W&B ignores a step that it has closed

    def _log_summary(self, run: "wandb.Run", summary: Mapping[str, Any]) -> None:
        self._log_missing_rows(run)
        run.summary.update(dict(summary))
        self._write(replace(self._mark, is_complete=True))

    def _write(self, mark: Mark) -> None:
        replace_text(self._directory.path / MARK, json.dumps(asdict(mark)) + "\n")
        self._mark = mark


def _errors_of_wandb() -> tuple[type[Exception], ...]:
    """What it raises when its server or its service is gone."""
    import wandb
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return wandb.errors.Error, OSError, HandleAbandonedError, MailboxClosedError


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _import_wandb() -> Any:  # Any: a module
    # Else its reports of its own errors would keep a process from ending: 20 s without a network.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ImportError as error:
        raise ExperimentError(
            f"tracking is wandb, but it cannot be imported ({error}): `pip install wandb`, or set "
            "tracking=none"
        ) from error
    return wandb


def _name(folder: Path, config: Config) -> str:
    """What the W&B run is called: what the experiment is, or else the folder."""
    try:
        algorithm, dataset = config["algorithm"]["name"], config["dataset"]["name"]
    except (KeyError, TypeError):
        return folder.name
    return f"{algorithm} {dataset} seed {config['seed']}"

"""Mirrors of run directories in W&B, TensorBoard and MLflow.

A mirror is never the only copy of a result, and a tracker that fails never stops a run. `tracked`
is what a run uses; the tracker is chosen by the key `tracking` of the experiment.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from flray.columns import CLIENT, GROUP, NAME, ROUND, ScoreColumn, score_column
from flray.config.deciding import Config
from flray.config.experiment import Experiment
from flray.config.tracking import Wandb
from flray.files import read_json, reading, replace_text
from flray.records.clusterings import ClusteringRecord, read_clusterings
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow
from flray.server.loop import ignore
from flray.tracking.loggers import chosen_mode, in_a_line, logger_opener

if TYPE_CHECKING:
    import pandas as pd  # imported for types only: pandas delays a start

Draw = Callable[[Path], Sequence[Path]]  # the figures of a run directory, as PNG files
CLOSE_TIMEOUT_S = 60.0  # longest wait, when a run ends, for the rest to be logged
_SECRET = re.compile(r"(?i)(^|[_-])(api_?key|key|token|passw(or)?d|secret|credentials?)s?$")
_NOT_IN_NAMES = re.compile(r"[^\w/.\- ]")  # characters that MLflow refuses in a name
_log = logging.getLogger(__name__)


def no_figures(_run: Path) -> Sequence[Path]:
    """Draw nothing; the default where no figures are sent to a tracker."""
    return ()


@contextmanager
def tracked(
    experiment: Experiment,
    out: Path,
    on_round: Callable[[RoundRow], None] = ignore,
    draw: Draw = no_figures,
    group: str | None = None,
) -> Iterator[Callable[[RoundRow], None]]:
    """A context whose value is to be called with the row of each round.

    It calls `on_round` and logs the row with the tracker of the experiment. When the block ends and
    the run is done, everything in the directory that was not logged yet is logged; an empty block
    mirrors a run that was finished elsewhere. Rounds are sent by a thread: a slow server delays the
    end of a run by at most `CLOSE_TIMEOUT_S`, and no round.

    Args:
        experiment: Its `tracking` chooses the tracker.
        out: The run directory.
        on_round: Called first with each row.
        draw: Draws the figures of a run directory for W&B.
        group: Group of the run in W&B, unless the experiment names one.

    Raises:
        ExperimentError: The tracker cannot be used; raised before the block begins.
    """
    tracking, plain = experiment.settings.tracking, experiment.plain
    name = f"{plain['algorithm']['name']} {plain['dataset']['name']} seed {plain['seed']}"
    open_logger = logger_opener(tracking, out, name, group)
    if open_logger is None:
        yield on_round
        return
    mark_file = out / f"{type(tracking).__name__.lower()}.json"

    def open_recorded(id: str | None) -> Logger:
        # config.yaml has the block size, which is chosen when the run starts.
        return open_logger(without_secrets(RunDirectory(out).config()), id)

    tracker = Tracker(mark_file, open_recorded)

    def show_and_log(row: RoundRow) -> None:
        on_round(row)
        tracker.round(row)

    status = "failed"
    try:
        yield show_and_log
        summary = RunDirectory(out).summary()
        if summary is not None and not tracker.is_complete:
            figures = draw(out) if isinstance(tracking, Wandb) else ()
            names = RunDirectory(out).client_names()
            tracker.finish(summary, figures, _tables(read_clusterings(out), names))
        status = "success"
    finally:
        tracker.close(status)


def track_table(tracking: object, folder: Path, frame: "pd.DataFrame", config: Config) -> None:
    """Log the table of a sweep, in a W&B run of its own in the group of the sweep's trials.

    Does nothing for other trackers.

    Args:
        tracking: One of the classes of `flray.config.tracking`.
        folder: Folder of the sweep; its name is the name of the run and of the group.
        frame: The table, which W&B calls `rows`.
        config: Configuration to record with it, such as the space.
    """
    open_logger = logger_opener(tracking, folder, folder.name, folder.name)
    if isinstance(tracking, Wandb) and open_logger is not None:
        tracker = Tracker(folder / "wandb.json", partial(open_logger, without_secrets(config)))
        tracker.finish({}, (), {"rows": frame})
        tracker.close("success")


def tracking_remarks(experiment: Experiment) -> Iterator[str]:
    """A remark for the user if the run will be kept offline because there is no key of W&B."""
    tracking = experiment.settings.tracking
    if isinstance(tracking, Wandb) and tracking.mode is None and chosen_mode(tracking) == "offline":
        yield (
            "no key for W&B (WANDB_API_KEY or `wandb login`): the run is kept offline, below "
            "wandb/ in its folder; `wandb sync` sends it later"
        )


def without_secrets(config: Any) -> Any:  # Any: nested mappings, lists and plain values
    """The configuration without keys that look like secrets.

    >>> without_secrets({"seed": 1, "dataset": [{"api_key": "x", "keys": 2, "tokenizer": "bpe"}]})
    {'seed': 1, 'dataset': [{'tokenizer': 'bpe'}]}
    """
    if isinstance(config, Mapping):
        return {
            key: without_secrets(value)
            for key, value in config.items()
            if not _SECRET.search(str(key))
        }
    if isinstance(config, list | tuple):
        return [without_secrets(value) for value in config]
    return config


@dataclass(frozen=True)
class Mark:
    """How far a tracker is, so that a resumed run continues there and logs no round twice.

    Kept in the run directory as wandb.json, tensorboard.json or mlflow.json.
    """

    id: str | None = None  # id of the run in W&B or MLflow
    round: int = 0  # last round that was logged
    is_complete: bool = False  # True: summary, clusterings and figures are logged too


class Tracker:
    """The mirror of a run directory in a logger, which a thread opens, fills and closes.

    Every method returns at once, except `close`, which waits a bounded time. An error of the logger
    is logged as a warning, and nothing more is sent. A tracker that is never used writes nothing.

    Args:
        mark_file: File of the `Mark` in the run directory.
        open_logger: Opens the logger; called with the id of the mark.
    """

    def __init__(self, mark_file: Path, open_logger: Callable[[str | None], Logger]) -> None:
        self._mark = Mark()
        if mark_file.is_file():
            with reading(mark_file):
                self._mark = Mark(**read_json(mark_file))
        self._mark_file = mark_file
        self._open_logger = open_logger
        self._jobs: SimpleQueue[Callable[[Logger], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="tracking", daemon=True)

    @property
    def is_complete(self) -> bool:
        """True if an earlier process has logged everything and nothing was added since."""
        return self._mark.is_complete and self._thread.ident is None

    def round(self, row: RoundRow) -> None:
        """Log the row of a round, unless that round was logged before.

        Only its numbers are logged, under the names of rounds.parquet, in the step of the round.
        Those of a score with a unit other than % end in the unit: `mae_mean kW`.
        """
        self._ask(lambda logger: self._log_rows(logger, [row]))

    def finish(
        self,
        summary: Mapping[str, Any],  # Any: JSON
        figures: Sequence[Path],
        tables: Mapping[str, "pd.DataFrame"],
    ) -> None:
        """Log the summary in the step of the last round; with W&B also figures and tables.

        Args:
            summary: Content of summary.json; other trackers than W&B get its numbers as
                `summary_...`.
            figures: PNG files.
            tables: Data frames by name.
        """

        def log(logger: Logger) -> None:
            step = self._mark.round
            if isinstance(logger, WandbLogger):
                for name, frame in tables.items():
                    logger.log_table(name, dataframe=frame, step=step)
                for path in figures:
                    logger.log_image(f"figures/{path.stem}", [str(path)], step=step)
                logger.experiment.log({}, commit=True)  # an open row would overwrite the summary
                logger.experiment.summary.update(dict(summary))
            else:
                values = {f"summary_{name}": value for name, value in _numbers(summary).items()}
                logger.log_metrics(values, step=step)
            self._write(replace(self._mark, is_complete=True))

        self._ask(log)

    def close(self, status: str) -> None:
        """End with status "success" or "failed"; give up after CLOSE_TIMEOUT_S.

        What could not be sent is sent when the run is resumed, or by the tracker's own means.
        """
        if self._thread.ident is None:
            return
        self._ask(lambda logger: logger.finalize(status))
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn(f"it takes more than {CLOSE_TIMEOUT_S} s")

    def _ask(self, job: Callable[[Logger], None]) -> None:
        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()

    def _work(self) -> None:
        """Open the logger and run the jobs in order, until one fails."""
        setattr(rank_zero_only, "rank", 0)  # noqa: B010  # every task of a SLURM job logs
        try:
            logger = self._open_logger(self._mark.id)
            self._write(replace(self._mark, id=str(logger.version)))
            # Rounds that an earlier process recorded and could not log.
            self._log_rows(logger, RunDirectory(self._mark_file.parent).rows(self._mark.round))
            while (job := self._jobs.get()) is not None:
                job(logger)
        except Exception as error:  # noqa: BLE001  # three libraries and their servers
            self._warn(in_a_line(error))

    def _warn(self, reason: str) -> None:
        folder = self._mark_file.parent
        advice = f"; `wandb sync --include-online {folder}/wandb/*run-*` sends what W&B has kept"
        _log.warning(
            f"tracking is off ({reason}): {folder} holds everything"
            + advice * (folder / "wandb").is_dir()
        )

    def _log_rows(self, logger: Logger, rows: Sequence[RoundRow]) -> None:
        for row in rows:
            if row[ROUND] > self._mark.round:
                logger.log_metrics(self._with_units(_numbers(row)), step=row[ROUND])
                logger.save()
                self._write(replace(self._mark, round=row[ROUND], is_complete=False))

    def _with_units(self, row: Mapping[str, float]) -> dict[str, float]:
        scores = RunDirectory(self._mark_file.parent).scores()
        return {_with_unit(score_column(name, scores)): value for name, value in row.items()}

    def _write(self, mark: Mark) -> None:
        replace_text(self._mark_file, json.dumps(asdict(mark)) + "\n")
        self._mark = mark


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _with_unit(column: str) -> str:
    """The name of a logged column; of a score with the characters of its unit that MLflow allows.

    >>> from flray.columns import ScoreColumns
    >>> load = ScoreColumns("mae", "kW")
    >>> _with_unit(load.mean), _with_unit(load.column("variance")), _with_unit("seconds")
    ('mae_mean kW', 'mae_variance kW²', 'seconds')
    """
    unit = column.score.unit if isinstance(column, ScoreColumn) else ""
    if unit in ("", "%"):
        return column
    square = "²" if column.endswith("_variance") else ""
    return f"{column} {re.sub(_NOT_IN_NAMES, '_', unit)}{square}"


def _tables(
    clusterings: Mapping[int, ClusteringRecord], names: Sequence[str]
) -> dict[str, "pd.DataFrame"]:
    """A table of each clustering: clients, names if they have any, clusters and known groups."""
    import pandas as pd

    tables = {}
    for t, c in clusterings.items():
        owners = [names[i] for i in c.clients] if names else None
        columns = {CLIENT: c.clients, NAME: owners, "cluster": c.labels, GROUP: c.groups}
        tables[f"clusterings/round_{t}"] = pd.DataFrame(columns).dropna(axis="columns")
    return tables

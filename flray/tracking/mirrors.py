"""Mirrors of run directories in W&B, TensorBoard and MLflow: never the only copy of a result."""

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

from flray.columns import CLIENT, GROUP, ROUND
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
    import pandas as pd  # whose import delays a start

Draw = Callable[[Path], Sequence[Path]]  # the figures of a run directory, as PNG files
CLOSE_TIMEOUT_S = 60.0  # for all that is still to be logged when a run ends
_SECRET = re.compile(r"(?i)(^|[_-])(api_?key|key|token|passw(or)?d|secret|credentials?)s?$")
_log = logging.getLogger(__name__)


def no_figures(_run: Path) -> Sequence[Path]:
    """Draw nothing."""
    return ()


@contextmanager
def tracked(
    experiment: Experiment,
    out: Path,
    on_round: Callable[[RoundRow], None] = ignore,
    draw: Draw = no_figures,
    group: str | None = None,
) -> Iterator[Callable[[RoundRow], None]]:
    """What to call after each round, so that the tracker of the experiment gets it too.

    When the block ends and the run is done, everything follows that the directory holds and the
    tracker has not got: an empty block mirrors a run that was finished elsewhere.
    """
    tracking, plain = experiment.settings.tracking, experiment.plain
    name = f"{plain['algorithm']['name']} {plain['dataset']['name']} seed {plain['seed']}"
    open_logger = logger_opener(tracking, out, name, group)
    if open_logger is None:
        yield on_round
        return
    mark_file = out / f"{type(tracking).__name__.lower()}.json"

    def open_recorded(id: str | None) -> Logger:  # config.yaml has the block that was chosen
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
            tracker.finish(summary, figures, _tables(read_clusterings(out)))
        status = "success"
    finally:
        tracker.close(status)


def track_table(
    tracking: object, folder: Path, name: str, frame: "pd.DataFrame", config: Config
) -> None:
    """Log the table of a sweep, in a W&B run of its own that belongs to the sweep's group.

    Args:
        folder: of the sweep, whose name is the group of its trials too.
        config: the configuration to record for the sweep, such as its space.
    """
    open_logger = logger_opener(tracking, folder, folder.name, folder.name)
    if isinstance(tracking, Wandb) and open_logger is not None:
        tracker = Tracker(folder / "wandb.json", partial(open_logger, without_secrets(config)))
        tracker.finish({}, (), {name: frame})
        tracker.close("success")


def tracking_remarks(experiment: Experiment) -> Iterator[str]:
    """What will happen to what is tracked, where it is not sent at once."""
    tracking = experiment.settings.tracking
    if isinstance(tracking, Wandb) and tracking.mode is None and chosen_mode(tracking) == "offline":
        yield (
            "no key for W&B (WANDB_API_KEY or `wandb login`): the run is kept offline, below "
            "wandb/ in its folder; `wandb sync` sends it later"
        )


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
    """How far a tracker is: a resumed run goes on in the same run and logs no round twice."""

    id: str | None = None  # of the run in W&B or MLflow
    round: int = 0  # the last one that was logged
    is_complete: bool = False  # summary, clusterings and figures of that round are logged too


class Tracker:
    """The mirror of a run directory in a logger, which a thread opens, fills and closes.

    Every method returns at once, except `close`, which waits a bounded time. An error of the logger
    is a warning after which nothing more is logged. A tracker that is never used writes nothing.

    Args:
        mark_file: in the run directory, for the `Mark`.
        open_logger: gets the id of the mark.
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
        """True if an earlier process has logged everything and nothing came since."""
        return self._mark.is_complete and self._thread.ident is None

    def round(self, row: RoundRow) -> None:
        """Log a round, unless it was logged before."""
        self._ask(lambda logger: self._log_rows(logger, [row]))

    def finish(
        self,
        summary: Mapping[str, Any],
        figures: Sequence[Path],
        tables: Mapping[str, "pd.DataFrame"],
    ) -> None:
        """Log the summary, in W&B also figures and tables, in the step of the last round."""

        def log(logger: Logger) -> None:
            step = self._mark.round
            if isinstance(logger, WandbLogger):
                for name, frame in tables.items():
                    logger.log_table(name, dataframe=frame, step=step)
                for path in figures:
                    logger.log_image(f"figures/{path.stem}", [str(path)], step=step)
                logger.experiment.log({}, commit=True)  # a row that is open overwrites the summary
                logger.experiment.summary.update(dict(summary))
            else:
                values = {f"summary_{name}": value for name, value in _numbers(summary).items()}
                logger.log_metrics(values, step=step)
            self._write(replace(self._mark, is_complete=True))

        self._ask(log)

    def close(self, status: str) -> None:
        """End with status "success" or "failed", or leave the thread if that takes too long."""
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
        """Do what is asked in order, until something fails."""
        setattr(rank_zero_only, "rank", 0)  # noqa: B010  # else only one task of a SLURM job logs
        try:
            logger = self._open_logger(self._mark.id)
            self._write(replace(self._mark, id=str(logger.version)))
            # What an earlier process recorded and could not log.
            self._log_rows(logger, RunDirectory(self._mark_file.parent).rows(self._mark.round))
            while (job := self._jobs.get()) is not None:
                job(logger)
        except Exception as error:  # noqa: BLE001  # of three libraries and their servers
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
                logger.log_metrics(_numbers(row), step=row[ROUND])
                logger.save()
                self._write(replace(self._mark, round=row[ROUND], is_complete=False))

    def _write(self, mark: Mark) -> None:
        replace_text(self._mark_file, json.dumps(asdict(mark)) + "\n")
        self._mark = mark


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _tables(clusterings: Mapping[int, ClusteringRecord]) -> dict[str, "pd.DataFrame"]:
    """The clients of each clustering with their clusters, and groups if they are known."""
    import pandas as pd

    frames = {
        t: pd.DataFrame({CLIENT: c.clients, "cluster": c.labels, GROUP: c.groups})
        for t, c in clusterings.items()
    }
    return {f"clusterings/round_{t}": f.dropna(axis="columns") for t, f in frames.items()}

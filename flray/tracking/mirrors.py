"""Mirrors of run directories: what to call after each round, so that W&B and others have it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flray.config.deciding import Config
from flray.config.experiment import Experiment
from flray.config.tracking import MLflow, TensorBoard, Wandb
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow
from flray.server.loop import ignore
from flray.tracking.mlflow import in_mlflow
from flray.tracking.tensorboard import in_tensorboard
from flray.tracking.wandb_run import chosen_mode, open_tracker

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start

Draw = Callable[[Path], Sequence[Path]]  # the figures of a run directory, as PNG files


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
    """What to call after each round, so that a mirror learns of it too if the experiment says so.

    When the block ends and the run is done, everything follows that the directory holds and W&B
    has not got: so an empty block mirrors a run that was finished elsewhere.
    """
    tracking = experiment.settings.tracking
    if isinstance(tracking, TensorBoard):
        with in_tensorboard(out, on_round) as show_and_write:
            yield show_and_write
        return
    if isinstance(tracking, MLflow):
        with in_mlflow(tracking, out, on_round) as show_and_write:
            yield show_and_write
        return
    tracker = open_tracker(tracking, out, experiment.plain, tracking_group(tracking, group))
    if tracker is None:
        yield on_round
        return

    def show_and_log(row: RoundRow) -> None:
        on_round(row)
        tracker.round(row)

    exit_code = 1
    try:
        yield show_and_log
        summary = RunDirectory(out).summary()
        if summary is not None and not tracker.is_complete:
            for t, clustering in read_clusterings(out).items():
                tracker.clustering(t, clustering)
            tracker.images(draw(out))
            tracker.finish(summary)
        exit_code = 0
    finally:
        tracker.close(exit_code)


def track_table(
    tracking: object, folder: Path, name: str, frame: "pd.DataFrame", config: Config
) -> None:
    """Log the table of a sweep, in a W&B run of its own that belongs to the sweep's group.

    Args:
        folder: of the sweep, whose name is the group of its trials too.
        config: what to say of the sweep: its space, for instance.
    """
    tracker = open_tracker(tracking, folder, config, tracking_group(tracking, folder.name))
    if tracker is not None:
        tracker.table(name, frame)
        tracker.close(0)


def tracking_remarks(experiment: Experiment) -> Iterator[str]:
    """What will happen to what is tracked, where it is not sent at once."""
    tracking = experiment.settings.tracking
    if isinstance(tracking, Wandb) and tracking.mode is None and chosen_mode(tracking) == "offline":
        yield (
            "no key for W&B (WANDB_API_KEY or `wandb login`): the run is kept offline, below "
            "wandb/ in its folder; `wandb sync` sends it later"
        )


def tracking_group(tracking: object, default: str | None) -> str | None:
    """The group that an experiment asks for, or else the one its sweep has."""
    return (tracking.group if isinstance(tracking, Wandb) else None) or default

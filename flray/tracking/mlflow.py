"""MLflow as a mirror of run directories: configuration, rounds and summary of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flray.columns import ROUND
from flray.config.deciding import leaves
from flray.config.tracking import MLflow
from flray.errors import ExperimentError
from flray.files import replace_text
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow

MARK = "mlflow.id"  # in a run directory: a resumed run goes on in the same run of MLflow


@contextmanager
def in_mlflow(
    tracking: MLflow, out: Path, on_round: Callable[[RoundRow], None]
) -> Iterator[Callable[[RoundRow], None]]:
    """What to call after each round, so that MLflow has it too."""
    mlflow, begun = _import_mlflow(), []

    def begin() -> None:
        """Not before a round is there: a run that is refused leaves nothing."""
        mlflow.set_tracking_uri(tracking.uri)
        mlflow.set_experiment(tracking.experiment)
        held = (out / MARK).read_text(encoding="utf-8") if (out / MARK).is_file() else None
        run = mlflow.start_run(run_id=held, run_name=None if held else out.name)
        replace_text(out / MARK, run.info.run_id)
        if held is None:
            mlflow.log_params(leaves(RunDirectory(out).config()))
        begun.append(run)

    def show_and_log(row: RoundRow) -> None:
        on_round(row)
        if not begun:
            begin()
        mlflow.log_metrics(_numbers(row), step=row[ROUND])

    try:
        yield show_and_log
        summary = RunDirectory(out).summary()
        if begun and summary is not None:
            mlflow.log_metrics({f"summary_{key}": v for key, v in _numbers(summary).items()})
    finally:
        if begun:
            mlflow.end_run()


def _numbers(row: RoundRow) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def _import_mlflow() -> Any:  # Any: the module
    try:
        import mlflow
    except ImportError as error:
        raise ExperimentError(
            "tracking=mlflow needs the package mlflow: pip install mlflow, or choose "
            "tracking=tensorboard or tracking=none"
        ) from error
    return mlflow

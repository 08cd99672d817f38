"""TensorBoard as a mirror of run directories: the numbers of rounds.parquet, by round."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboardX import SummaryWriter

from flray.columns import ROUND
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow

FOLDER = "tensorboard"  # in a run directory


@contextmanager
def in_tensorboard(
    out: Path, on_round: Callable[[RoundRow], None]
) -> Iterator[Callable[[RoundRow], None]]:
    """What to call after each round, so that TensorBoard has it too.

    Rows of a run that was finished elsewhere are written when the block ends.
    """
    writers: list[SummaryWriter] = []
    is_new = not (out / FOLDER).is_dir()

    def write(row: RoundRow) -> None:
        if not writers:  # not before: a run that is refused leaves no folder
            writers.append(SummaryWriter(str(out / FOLDER), purge_step=row[ROUND]))
        for name, value in row.items():
            if isinstance(value, int | float) and name != ROUND:
                writers[0].add_scalar(name, value, row[ROUND])

    def show_and_write(row: RoundRow) -> None:
        on_round(row)
        write(row)

    try:
        yield show_and_write
        if is_new and not writers:
            for row in RunDirectory(out).rows():
                write(row)
    finally:
        for writer in writers:
            writer.close()

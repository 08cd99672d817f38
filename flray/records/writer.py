"""A thread that writes the records of rounds while later rounds are computed."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from types import TracebackType
from typing import Any, Self

from flray.columns import ROUND
from flray.records.checkpoint import CheckpointStore, Snapshot
from flray.records.run_directory import RunDirectory

# Seconds for which a thread may keep the interpreter from others; Python's default of 0.005 is a
# third of a short round.
SWITCH_INTERVAL_S = 0.0005

Row = dict[str, Any]  # Any: one value per column
Write = Callable[[], None]


class RoundWriter:
    """Writes rounds in their order; those that end during a write share the next checkpoint.

    So the next round begins without waiting for a disk, unless a round asks for a checkpoint of its
    own. A kill loses the rounds that were computed during one write, or within `every_s` of the
    last one. Leaving the context, for whatever reason, writes all complete rounds.

    An error of a write is raised by a later call of `add` or on leaving the context.

    Args:
        directory: the run directory.
        store: its checkpoints.
        every_s: shortest time in seconds between two writes that no round asks for.

    >>> from tempfile import mkdtemp
    >>> run = RunDirectory(mkdtemp())
    >>> run.start({"rounds": 1}, environment={}, split_digest="abc")
    >>> with RoundWriter(run, run.store()) as writer:
    ...     writer.add({ROUND: 1}, records=[], state={"w": 1.0})
    >>> run.rounds()[ROUND].tolist(), run.store().load_latest().state
    ([1], {'w': 1.0})
    """

    def __init__(
        self, directory: RunDirectory, store: CheckpointStore, every_s: float = 0.0
    ) -> None:
        self._directory, self._store, self._every_s = directory, store, every_s
        self._begun = monotonic()  # time of the last write, or of the start
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._in_progress: Future[None] | None = None
        self._rows: list[Row] = []  # rows of complete rounds that wait for a checkpoint
        self._records: list[Write] = []
        self._state: object = None  # after the last of them

    def add(self, row: Row, records: Sequence[Write], state: object, at_once: bool = False) -> None:
        """Take a complete round, whose state is never changed in place.

        Args:
            row: its row of rounds.parquet.
            records: functions that write what is recorded of it beside its row.
            state: the algorithm's state after it, for the checkpoint.
            at_once: give it a checkpoint of its own, even if it has to wait for the write before.
        """
        self._rows.append(row)
        self._records += records
        self._state = state
        is_idle = self._in_progress is None or self._in_progress.done()
        if at_once or (is_idle and monotonic() - self._begun >= self._every_s):
            self._start()

    def flush(self) -> None:
        """Return once all rounds that were added are written, with a checkpoint of the last.

        Raises what a write raised.
        """
        self._wait()
        if self._rows:
            self._start()
            self._wait()

    def _start(self) -> None:
        """Begin to write the rounds that wait, after the write before has ended."""
        self._wait()
        self._begun = monotonic()
        snapshot = self._store.snapshot(self._rows[-1][ROUND], self._state)
        round_parts = self._records, self._rows, snapshot
        self._records, self._rows = [], []
        self._in_progress = self._thread.submit(self._commit, *round_parts)

    def _commit(self, records: list[Write], rows: list[Row], snapshot: Snapshot) -> None:
        """The checkpoint comes last: a resumed run drops records that have none."""
        for write in records:
            write()
        self._directory.append_rounds(rows)
        self._store.write(snapshot)

    def _wait(self) -> None:
        """Return once the write in progress has ended; raises its error."""
        before, self._in_progress = self._in_progress, None
        try:
            if before is not None:
                before.result()
        except BaseException:
            self._rows = []  # rounds cannot be written without those before them
            raise

    def __enter__(self) -> Self:
        self._interval_before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            sys.setswitchinterval(self._interval_before)

"""A thread that writes records while the next round is computed."""

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

# Seconds for which a thread may keep the interpreter from others; Python's default of 0.005 is a
# third of a short round.
SWITCH_INTERVAL_S = 0.0005


class Writer:
    """Writes in the order of `submit`, at most one write behind.

    An error of a write is raised by the next call of `submit` or `flush`. Leaving the context waits
    for the write in progress, whatever the reason.

    >>> written = []
    >>> with Writer() as writer:
    ...     writer.submit(lambda: written.append(1))
    ...     writer.submit(lambda: written.append(2))
    >>> written
    [1, 2]
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start a write, once the one before it has ended."""
        self.flush()
        self._pending = self._thread.submit(write)

    def flush(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

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

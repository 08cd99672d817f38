"""SIGTERM as a spot machine sends it before it goes away: a wish to stop, not a death."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = "SIGTERM: stopping after the round in progress"


@contextmanager
def noticing_sigterm(say: Callable[[str], object]) -> Iterator[Callable[[], bool]]:
    """Yield whether SIGTERM has come since the block began; a second one ends the process."""
    came: list[bool] = []

    def notice(_number: int, _frame: FrameType | None) -> None:
        came.append(True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say(NOTICE)

    before = signal.signal(signal.SIGTERM, notice)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)

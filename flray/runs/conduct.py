"""Conduct a run: its lock, its tracker and the ways to stop it, wherever its rounds are computed.

Nothing heavy is imported here: a keeper uses this module and never imports torch.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from flray.errors import plain_if_gpu_is_full
from flray.records.lock import locked

if TYPE_CHECKING:
    from flray.config.experiment import Experiment

STOP_FILE = "stop.wish"  # in a run directory: stop after the round in progress
SIGTERM_NOTICE = "SIGTERM: stopping after the round in progress"

OnRound = Callable[[dict[str, Any]], None]  # Any: one value a column
ShouldStop = Callable[[], bool]
# Computes the rounds of a run that are left; True when all of them are done.
ComputeRounds = Callable[[OnRound, ShouldStop], bool]


@dataclass(frozen=True)
class Monitor:
    """Who follows a run: called after each round, and asked whether to stop before the next.

    >>> rounds = []
    >>> monitor = Monitor(on_round=rounds.append, should_stop=lambda: len(rounds) == 2)
    >>> monitor.on_round({"round": 1})
    >>> monitor.should_stop()
    False
    """

    on_round: OnRound = lambda _row: None
    should_stop: ShouldStop = lambda: False
    draw: Callable[[Path], Sequence[Path]] = lambda _run: ()  # PNG files that W&B gets of a run
    group: str | None = None  # group of the run in W&B, unless the experiment names one


def conduct(
    compute: ComputeRounds, out: Path, monitor: Monitor, experiment: "Experiment | None" = None
) -> bool:
    """Run the rounds that are left of a run; the one way to do it for every launch.

    Holds the lock of the run directory, mirrors rounds to the tracker of the experiment, and lets
    the rounds end early when the monitor or somebody who watches the directory asks for it.

    Args:
        compute: Computes the rounds: here, on actors, as a trial.
        out: The run directory, which is made if it does not exist and nothing refuses the run.
        monitor: Called after each round, and asked whether to stop.
        experiment: Its tracker gets the rounds; None: nothing is tracked, nor imported for it.

    Returns:
        True when all rounds are done, False when the run was stopped before.

    Raises:
        ExperimentError: Another process runs this directory, or the tracker cannot be used.
        ClientFailure: A client failed, or the GPU has no memory left.
    """
    wish = out / STOP_FILE
    with ExitStack() as stack:
        stack.enter_context(locked(out))
        wish.unlink(missing_ok=True)
        stack.callback(wish.unlink, missing_ok=True)
        on_round = monitor.on_round
        if experiment is not None:
            from flray.tracking.mirrors import tracked

            tracker = tracked(experiment, out, on_round, monitor.draw, monitor.group)
            on_round = stack.enter_context(tracker)
        stack.enter_context(plain_if_gpu_is_full())
        return compute(on_round, lambda: monitor.should_stop() or wish.exists())


def ask_to_stop(out: Path) -> None:
    """Ask whoever conducts the run in a directory to end it after the round in progress.

    Writes a file: Ray replaces handlers of signals, and the process may belong to another terminal.
    `conduct` removes the file.
    """
    (out / STOP_FILE).touch()


@contextmanager
def noticing_sigterm(say: Callable[[str], object]) -> Iterator[ShouldStop]:
    """Take SIGTERM, as a spot machine sends it before it goes away, as a wish to stop.

    Yields a function that returns True once the signal has come; a second one ends the process.
    Only for the main thread, where Python handles signals.

    Args:
        say: Called with one line when the signal comes.
    """
    signals: list[int] = []

    def notice(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say(SIGTERM_NOTICE)

    before = signal.signal(signal.SIGTERM, notice)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, before)

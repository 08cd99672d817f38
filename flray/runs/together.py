"""Runs of one command side by side: each in a process of its own, with the bits it has alone.

Python's own work of a round, plans, records and evaluation, takes as long as a small model trains
on a GPU, so one process cannot keep a GPU busy with several runs. The processes are forked once
everything is imported, so they start at once; kernels of different runs share the GPU by CUDA MPS.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from flray.config.experiment import Experiment
from flray.errors import ClientFailure, ExperimentError
from flray.execution.mps import gpu_memory_gib, shared_gpu
from flray.runs.conduct import Monitor
from flray.runs.launch import run_experiment
from flray.server.evaluation import RoundRow

POLL_S = 0.2
RUNS_PER_CORE = 1.5  # about a third of a run is waiting for the GPU
GIB_OF_A_RUN = 4.0  # GPU memory per run: CUDA itself, the data, a block and its graphs


@dataclass(frozen=True)
class ForkedRun:
    """A run that gets a process of its own, and the folder it is recorded in.

    `resume` is that of `run_experiment`.
    """

    experiment: Experiment
    out: Path
    resume: bool = False


def runs_at_a_time(experiments: Sequence[Experiment], asked: int | None) -> int:
    """The number of runs to compute at the same time.

    Args:
        asked: The number that the user asked for; None: as many as the cores can serve and as fit
            on the GPU, and one on a CPU, which a single run keeps busy.

    Raises:
        ExperimentError: Several were asked for, and a run uses Ray.
    """
    executions = [experiment.settings.execution for experiment in experiments]
    are_inline = all(execution.executor == "inline" for execution in executions)
    if asked is not None:
        if asked > 1 and not are_inline:
            raise ExperimentError(
                f"--together is for runs in process, got {asked} with execution.executor=ray; set "
                "execution.executor=inline, or leave it out"
            )
        return min(asked, len(experiments))
    may_use_gpu = all(execution.device != "cpu" for execution in executions)
    may_use_gpu = may_use_gpu and torch.version.cuda is not None
    if len(experiments) == 1 or not are_inline or not may_use_gpu:
        return 1
    fitting = int(gpu_memory_gib() / GIB_OF_A_RUN)
    served = int(RUNS_PER_CORE * len(os.sched_getaffinity(0)))
    return max(1, min(len(experiments), fitting, served))


def run_together(
    runs: Sequence[ForkedRun],
    at_a_time: int,
    show: Callable[[int, RoundRow], None],
    should_stop: Callable[[], bool],
    draw: Callable[[Path], Sequence[Path]] = lambda _run: (),
) -> bool:
    """Compute runs side by side; True when all are done, False if one was stopped before its end.

    The first run that fails stops the others after their rounds in progress, and so does Ctrl-C;
    its error is raised when all have ended. A run has the bits that it has alone.

    Args:
        runs: The runs, which are started in this order.
        at_a_time: Processes at a time.
        show: Called with the position of a run and each of its rounds, in this process.
        should_stop: Asked several times a second; True ends all runs after their current round.
        draw: Draws the figures of a run directory for W&B, in the run's process.
    """
    import pandas  # noqa: F401  # once, not in every process

    uses_gpu = any(run.experiment.settings.execution.device != "cpu" for run in runs)
    with shared_gpu() if uses_gpu else nullcontext():
        return _Processes(runs, at_a_time, draw).run(show, should_stop)


class _Processes:
    """The children of this process: `waiting` are positions of runs, `running` those that run."""

    def __init__(
        self, runs: Sequence[ForkedRun], at_a_time: int, draw: Callable[[Path], Sequence[Path]]
    ) -> None:
        self.runs, self.at_a_time, self.draw = runs, at_a_time, draw
        self.context = multiprocessing.get_context("fork")
        self.stopping = self.context.Event()
        self.waiting = deque(range(len(runs)))
        self.running: dict[Connection, tuple[int, Any]] = {}  # Any: a Process of the context
        self.num_done = 0
        self.error: BaseException | None = None

    def run(self, show: Callable[[int, RoundRow], None], should_stop: Callable[[], bool]) -> bool:
        """Start runs as others end, and pass their rounds on; see `run_together`."""
        try:
            while self.waiting or self.running:
                try:
                    if should_stop() or self.error is not None:
                        self.stopping.set()
                    self._start_waiting()
                    if not self.running:
                        break
                    self._listen(show)
                except KeyboardInterrupt as interrupt:
                    if self.error is not None:
                        raise  # a second one
                    self.error = interrupt
        finally:
            for _, process in self.running.values():
                process.kill()
        if self.error is not None:
            raise self.error
        return self.num_done == len(self.runs)

    def _start_waiting(self) -> None:
        """Fork processes for waiting runs, as long as fewer than `at_a_time` run."""
        threads = max(1, len(os.sched_getaffinity(0)) // self.at_a_time)
        while self.waiting and len(self.running) < self.at_a_time and not self.stopping.is_set():
            position = self.waiting.popleft()
            ours, theirs = self.context.Pipe(duplex=False)
            arguments = self.runs[position], theirs, self.stopping, threads, self.draw
            process = self.context.Process(target=_run_in_child, args=arguments)
            process.start()
            theirs.close()
            self.running[ours] = position, process

    def _listen(self, show: Callable[[int, RoundRow], None]) -> None:
        """Take what children send: rows of rounds, then whether the run is done or an error."""
        for pipe in wait(list(self.running), timeout=POLL_S):
            assert isinstance(pipe, Connection)
            position, process = self.running[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                del self.running[pipe]
                pipe.close()
                process.join()
                if process.exitcode and self.error is None:
                    self.error = ClientFailure(
                        f"the process of {self.runs[position].out} ended with exit code "
                        f"{process.exitcode}; --resume goes on"
                    )
                continue
            if isinstance(message, bool):
                self.num_done += message
            elif isinstance(message, BaseException):
                self.error = self.error or message
            else:
                show(position, message)


def _run_in_child(
    run: ForkedRun,
    pipe: Connection,
    stopping: Any,  # Any: an Event of the context
    threads: int,
    draw: Callable[[Path], Sequence[Path]],
) -> None:
    """Run one experiment and send the parent its rounds and its end."""
    parent = os.getppid()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # threads of tiles, which change no bits

    def should_stop() -> bool:
        return bool(stopping.is_set()) or os.getppid() != parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        monitor = Monitor(pipe.send, should_stop, draw)
        pipe.send(run_experiment(run.experiment, run.out, run.resume, monitor) is not None)
    except (ExperimentError, ClientFailure) as error:
        pipe.send(type(error)(*error.args))  # without what cannot be pickled

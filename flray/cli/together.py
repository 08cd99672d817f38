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

from flray.cli.drawing import draw_figures
from flray.config.experiment import Experiment
from flray.errors import ClientFailure, ExperimentError
from flray.execution.mps import gpu_memory_gib, shared_gpu
from flray.runs.launch import run_experiment
from flray.tracking.mirrors import tracked

POLL_S = 0.2
RUNS_PER_CORE = 1.5  # about a third of a run is waiting for the GPU
GIB_OF_A_RUN = 4.0  # of a GPU's memory: CUDA itself, the data, a block and its graphs

RoundRow = dict[str, Any]  # Any: one value a column
Summary = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class Job:
    """A run and the folder it is recorded in."""

    experiment: Experiment
    out: Path
    resume: bool


@dataclass(frozen=True)
class Running:
    place: int  # among the jobs
    process: Any  # multiprocessing's Process of a context


def runs_at_a_time(experiments: Sequence[Experiment], asked: int | None) -> int:
    """How many of the runs are computed at the same time.

    By default as many as the cores can serve and as fit on the GPU; one on a CPU, which a single
    run keeps busy.
    """
    are_inline = all(each.settings.execution.executor == "inline" for each in experiments)
    if asked is not None:
        if asked > 1 and not are_inline:
            raise ExperimentError(
                f"--together is for runs in process, got {asked} with execution.executor=ray; set "
                "execution.executor=inline, or leave it out"
            )
        return min(asked, len(experiments))
    may_use_gpu = all(each.settings.execution.device != "cpu" for each in experiments)
    may_use_gpu = may_use_gpu and torch.version.cuda is not None
    if len(experiments) == 1 or not are_inline or not may_use_gpu:
        return 1
    fitting = int(gpu_memory_gib() / GIB_OF_A_RUN)
    served = int(RUNS_PER_CORE * len(os.sched_getaffinity(0)))
    return max(1, min(len(experiments), fitting, served))


def run_together(
    jobs: Sequence[Job],
    at_a_time: int,
    show: Callable[[int, RoundRow], None],
    should_stop: Callable[[], bool],
) -> list[Summary | None]:
    """The summaries of the runs in their order; None where one was stopped before its end.

    The first run that fails stops the others after their rounds in progress, and so does Ctrl-C.

    Args:
        show: told the number of a run and each of its rounds.
    """
    import pandas  # noqa: F401  # once, not in every process

    uses_gpu = any(job.experiment.settings.execution.device != "cpu" for job in jobs)
    with shared_gpu() if uses_gpu else nullcontext():
        return _Processes(jobs, at_a_time).run(show, should_stop)


class _Processes:
    def __init__(self, jobs: Sequence[Job], at_a_time: int) -> None:
        self.jobs, self.at_a_time = jobs, at_a_time
        self.context = multiprocessing.get_context("fork")
        self.stopping = self.context.Event()
        self.waiting = deque(range(len(jobs)))
        self.running: dict[Connection, Running] = {}
        self.summaries: list[Summary | None] = [None] * len(jobs)
        self.error: BaseException | None = None

    def run(
        self, show: Callable[[int, RoundRow], None], should_stop: Callable[[], bool]
    ) -> list[Summary | None]:
        try:
            while self.waiting or self.running:
                try:
                    if should_stop() or self.error is not None:
                        self.stopping.set()
                    self._start_some()
                    if not self.running:
                        break
                    self._listen(show)
                except KeyboardInterrupt as interrupt:
                    if self.error is not None:
                        raise  # a second one
                    self.error = interrupt
        finally:
            for each in self.running.values():
                each.process.kill()
        if self.error is not None:
            raise self.error
        return self.summaries

    def _start_some(self) -> None:
        while self.waiting and len(self.running) < self.at_a_time and not self.stopping.is_set():
            place = self.waiting.popleft()
            ours, theirs = self.context.Pipe(duplex=False)
            threads = max(1, len(os.sched_getaffinity(0)) // self.at_a_time)
            told = self.jobs[place], theirs, self.stopping, threads
            process = self.context.Process(target=_run_in_child, args=told)
            process.start()
            theirs.close()
            self.running[ours] = Running(place, process)

    def _listen(self, show: Callable[[int, RoundRow], None]) -> None:
        for pipe in wait(list(self.running), timeout=POLL_S):
            assert isinstance(pipe, Connection)
            place = self.running[pipe].place
            try:
                kind, value = pipe.recv()
            except EOFError:
                self._end(pipe)
                continue
            if kind == "row":
                show(place, value)
            elif kind == "summary":
                self.summaries[place] = value
            else:
                self.error = self.error or value

    def _end(self, pipe: Connection) -> None:
        ended = self.running.pop(pipe)
        pipe.close()
        ended.process.join()
        if ended.process.exitcode and self.error is None:
            out = self.jobs[ended.place].out
            self.error = ClientFailure(
                f"the process of {out} ended with exit code {ended.process.exitcode}; "
                "--resume goes on"
            )


def _run_in_child(job: Job, pipe: Connection, stopping: Any, threads: int) -> None:
    """Run one experiment and tell the parent of its rounds and its end."""
    parent = os.getppid()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for tiles, whose number is no bit's

    def should_stop() -> bool:
        return bool(stopping.is_set()) or os.getppid() != parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        tell = lambda row: pipe.send(("row", row))  # noqa: E731
        with tracked(job.experiment, job.out, tell, draw_figures) as on_round:
            found = run_experiment(job.experiment, job.out, job.resume, on_round, should_stop)
        pipe.send(("summary", found.summary))
    except (ExperimentError, ClientFailure) as error:
        pipe.send(("error", type(error)(*error.args)))  # without what cannot be pickled

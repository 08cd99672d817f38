"""Steps of stacked clients recorded as CUDA graphs.

A step of a small model is many short kernels, and launching them from Python takes longer than they
run.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from flray.engines.engine import Block
from flray.engines.stacked_plan import StackedPlan
from flray.engines.stacked_step import Step

GRAPH_STEPS = 20  # steps per CUDA graph


class GraphedStep(Step):
    """Steps recorded as CUDA graphs, so that the CPU launches one graph instead of many kernels.

    One graph has a single step, another GRAPH_STEPS of them with the gathering of their batches;
    both read the number of the next step from the device. They are recorded at the first `start`,
    and again if a later plan has more steps.
    """

    single: torch.cuda.CUDAGraph | None = None
    several: torch.cuda.CUDAGraph | None = None

    def start(self, block: Block, plan: StackedPlan) -> None:
        """Begin a block as `Step.start` does; the plan is copied to where the graphs read it."""
        if self.single is None or plan.num_steps > self.buffers.num_steps:
            self._record(block, plan)
        # Handovers are read from the caller's plan, not from that of the graphs.
        super().start(block, replace(self.buffers, first=plan.first))
        for buffer, values in zip(self.buffers.tensors, plan.tensors, strict=True):
            buffer[:, : plan.num_steps].copy_(values)

    def advance(self, num_steps: int) -> None:
        """Take the next steps as `Step.advance` does, by replaying graphs."""
        assert self.single is not None  # recorded by `start`
        if self.several is not None:
            for _ in range(num_steps // GRAPH_STEPS):
                self.several.replay()
            num_steps %= GRAPH_STEPS
        for _ in range(num_steps):
            self.single.replay()

    def _record(self, block: Block, plan: StackedPlan) -> None:
        # Some room, since a later cohort may have more steps.
        self.buffers = plan.with_room(plan.num_steps * 5 // 4)
        super().start(block, self.buffers)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # allocates workspaces and the optimiser's state
                self.number.zero_()
                super().advance(1)
        torch.cuda.current_stream().wait_stream(side)
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                if "step" in state:  # Adam's bias correction loses 5 digits to a float32 counter
                    state["step"] = state["step"].double()
        self.number.zero_()
        with _no_garbage_collection():
            self.single = self._recorded(1)
            self.several = self._recorded(GRAPH_STEPS) if plan.num_steps >= GRAPH_STEPS else None

    def _recorded(self, num_steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            super().advance(num_steps)
        return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing an older graph while a new one is recorded would break the recording."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

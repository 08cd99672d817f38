"""A host: what a process keeps to run any client's task. A cache, never an owner of state."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from pytorch_lightning import LightningModule

from flray.data.dataset import Dataset
from flray.data.events import Timeline
from flray.data.pixels import Examples, place_examples
from flray.engines.engine import Engine
from flray.engines.lightning import Lightning, MakeCallback
from flray.engines.loop import Loop
from flray.engines.tracing import is_written_out, write_out_forward
from flray.engines.vectorized import Vectorized, refusal
from flray.engines.written import Written
from flray.models.bank import Params

EngineName = Literal["auto", "loop", "vectorized", "lightning"]

# Measured on two cores: above this size stacking a model with vmap only adds memory traffic.
LARGEST_STACKED_ON_CPU = 300_000  # parameters


@dataclass(frozen=True)
class Host:
    module: LightningModule
    examples: Examples
    timeline: Timeline  # who holds which examples, by round
    engine: Engine
    seed: int
    place: int = 0  # among the hosts of an executor
    # Models of the last trainings, by training and block, for hosts whose models stay.
    kept: dict[str, dict[int, Params]] = field(default_factory=dict)

    @cached_property
    def written_forward(self) -> Written | None:
        """The module's output in evaluation mode over stacked models, where it is written out."""
        return write_out_forward(self.module)


@dataclass(frozen=True)
class HostSettings:
    """What decides the bits of a result on one kind of device."""

    engine: EngineName
    device: str
    dtype: torch.dtype
    num_slots: int
    threads: int  # of a process: they train tiles, or else work inside torch's operators
    seed: int
    callbacks: tuple[MakeCallback, ...] = ()  # of engine lightning


def choose_engine(engine: EngineName, module: LightningModule, device: str) -> EngineName:
    """Resolve `auto` by model and kind of device alone."""
    if engine != "auto":
        return engine
    if refusal(module):
        return "loop"
    num_params = sum(p.numel() for p in module.parameters())
    if device != "cpu" or num_params <= LARGEST_STACKED_ON_CPU:
        return "vectorized"
    return "vectorized" if is_written_out(module) else "loop"


def default_threads(engine: EngineName, module: LightningModule, device: str) -> int:
    """All cores where threads change no bit, which is where a CPU trains in tiles; otherwise 1."""
    in_tiles = choose_engine(engine, module, device) == "vectorized" and is_written_out(module)
    if device != "cpu" or not in_tiles:
        return 1
    return usable_cores()


def usable_cores() -> int:
    """Those that this process may use, or OMP_NUM_THREADS, which Ray sets for its workers."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@contextmanager
def restored_torch_settings() -> Iterator[None]:
    """Give torch's settings of this process, which `start_host` fixes, back as they were."""
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    threads, is_benchmark = torch.get_num_threads(), cudnn.benchmark
    is_deterministic, has_tf32 = cudnn.deterministic, cudnn.allow_tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        cudnn.benchmark, cudnn.deterministic = is_benchmark, is_deterministic
        cudnn.allow_tf32 = has_tf32


def start_host(
    module: LightningModule, dataset: Dataset, timeline: Timeline, settings: HostSettings
) -> Host:
    """Place data and module on the device and fix what else would change bits."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(settings.device)
    module = module.to(device=device, dtype=settings.dtype)
    examples = place_examples(dataset, timeline.at(1), device, settings.dtype)
    engine = _start_engine(module, examples, settings)
    in_tiles = isinstance(engine, Vectorized) and engine.in_tiles and engine.written is not None
    torch.set_num_threads(1 if in_tiles else settings.threads)
    return Host(module, examples, timeline, engine, settings.seed)


def _start_engine(module: LightningModule, examples: Examples, settings: HostSettings) -> Engine:
    name = choose_engine(settings.engine, module, examples.device.type)
    if name == "vectorized":
        return Vectorized(module, examples, settings.num_slots, settings.threads)
    if name == "lightning":
        return Lightning(module, examples, settings.callbacks)
    return Loop(module, examples)

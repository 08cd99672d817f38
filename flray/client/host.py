"""A host: what a process keeps to run the task of any client.

A *task* is a pure function `task(host, bank, job)`: `flray.client.tasks` has those of training and
scoring, other modules of this package those of signatures. Executors send tasks and jobs to hosts.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.client.scores import Score
from flray.cores import usable_cores
from flray.data.dataset import Dataset, Ids
from flray.data.events import Timeline
from flray.data.pixels import Examples, place_examples
from flray.engines.convolutions import form_of
from flray.engines.engine import Engine, InTf32
from flray.engines.lightning import Lightning, MakeCallback
from flray.engines.loop import Loop
from flray.engines.tracing import is_written_out, write_out_forward
from flray.engines.vectorized import Vectorized, refusal
from flray.engines.written import Written
from flray.errors import ExperimentError
from flray.models.bank import Params
from flray.models.predictor import Batch

EngineName = Literal["auto", "loop", "vectorized", "lightning"]

# Measured on two cores: above this size stacking a model with vmap only adds memory traffic.
LARGEST_STACKED_ON_CPU = 300_000  # parameters
EVALUATION_BATCH = 1000  # examples of a forward pass; large, because no gradient is kept


@dataclass(frozen=True)
class Host:
    """What a process keeps to run the task of any client: module, data and engine.

    A host is a cache. All state of clients comes with the jobs, so any host can run any client,
    and a host that is lost is replaced without loss.
    """

    module: LightningModule
    examples: Examples
    timeline: Timeline  # who holds which examples, by round
    engine: Engine
    seed: int
    number: int = 0  # among the hosts of an executor
    scores: tuple[Score, ...] = ()  # computed of predictions, beside right answers and losses
    is_judge: bool = False  # of models while training, by losses; predictions may have any form
    # Models of the last trainings, by training and block, for hosts whose models stay.
    kept: dict[str, dict[int, Params]] = field(default_factory=dict)

    def on_device(self, ids: Ids) -> Tensor:
        """Example ids as a tensor on the device of the examples."""
        return torch.from_numpy(ids).to(self.examples.device)

    @cached_property
    def without_scores(self) -> "Host":
        """The same host for models that are judged while training: scores must not change bits."""
        return replace(self, scores=(), is_judge=True)

    @cached_property
    def written_forward(self) -> Written | None:
        """The module's outputs over stacked models in evaluation mode; None: not written out."""
        form = form_of(self.examples.device.type, self.examples.mean.dtype)
        return write_out_forward(self.module, form)


@dataclass(frozen=True)
class HostSettings:
    """Settings of a host. They decide the bits of a result on one kind of device.

    >>> HostSettings("auto", "cpu", torch.float32, block=10, threads=2, seed=0).callbacks
    ()
    """

    engine: EngineName
    device: str  # cpu, cuda or cuda:N
    dtype: torch.dtype  # precision of models and images
    block: int  # clients of a job
    threads: int  # per process: they train tiles, or else work inside torch's operators
    seed: int
    callbacks: tuple[MakeCallback, ...] = ()  # for engine lightning
    scores: tuple[Score, ...] = ()  # computed of predictions, beside right answers and losses
    tf32: bool = False  # products of local training in TF32, on a GPU
    # Clients of a block that a step trains together, while others wait; None: all of them
    num_slots: int | None = None


@dataclass(frozen=True)
class Payload:
    """All that a process needs to become a host; for actors, put into the object store once.

    It can be pickled, and is not changed by hosts in other processes.
    """

    module: LightningModule
    dataset: Dataset
    timeline: Timeline
    settings: HostSettings


def choose_engine(engine: EngineName, module: LightningModule, device: str) -> EngineName:
    """The engine that `auto` stands for; it depends on model and kind of device alone.

    >>> from flray.models.mlp200 import Mlp200
    >>> choose_engine("auto", Mlp200((1, 28, 28), 10), "cpu")
    'vectorized'
    """
    if engine != "auto":
        return engine
    if refusal(module):
        return "loop"
    num_params = sum(p.numel() for p in module.parameters())
    if device != "cpu" or num_params <= LARGEST_STACKED_ON_CPU:
        return "vectorized"
    return "vectorized" if is_written_out(module) else "loop"


def default_threads(engine: EngineName, module: LightningModule, device: str) -> int:
    """Threads per process: all cores if the model trains in tiles on a CPU, otherwise 1.

    Tiles give the same bits on any number of threads; operators of torch may not.
    """
    cores = usable_cores()
    if device != "cpu" or cores == 1:
        return 1
    in_tiles = choose_engine(engine, module, device) == "vectorized" and is_written_out(module)
    return cores if in_tiles else 1


@contextmanager
def restored_torch_settings() -> Iterator[None]:
    """Restore after the `with` block the settings of torch that `start_host` changes.

    For hosts in a process that does other things afterwards, such as a user's notebook.
    """
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
    """Make this process a host: data and module on the device, and an engine for them.

    Also fixes the settings of torch that would change bits, for the whole process.

    Args:
        module: The module, which is moved to device and dtype in place.
        dataset: All images and labels.
        timeline: The split of every round; all of them share one table of examples.

    Raises:
        ExperimentError: The engine that was asked for cannot run the module.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(settings.device)
    module = module.to(device=device, dtype=settings.dtype)
    examples = place_examples(dataset, timeline.at(1), device, settings.dtype)
    engine = _start_engine(module, examples, settings)
    in_tiles = isinstance(engine, Vectorized) and engine.in_tiles and engine.written is not None
    torch.set_num_threads(1 if in_tiles else settings.threads)
    engine = InTf32(engine) if settings.tf32 else engine
    return Host(module, examples, timeline, engine, settings.seed, scores=settings.scores)


def start_host_of_actor(payload: Payload, number: int) -> Host:
    """The host of a client actor, over a copy of the module.

    The weights in the payload are memory that all actors of the node share: engines write into
    their own.

    Args:
        number: Number of the actor among those of its executor, by which jobs find it again.
    """
    module = copy.deepcopy(payload.module)
    host = start_host(module, payload.dataset, payload.timeline, payload.settings)
    return replace(host, number=number)


def _start_engine(module: LightningModule, examples: Examples, settings: HostSettings) -> Engine:
    name = choose_engine(settings.engine, module, examples.device.type)
    if name == "vectorized":
        return Vectorized(module, examples, settings.num_slots or settings.block, settings.threads)
    if name == "lightning":
        return Lightning(module, examples, settings.callbacks)
    if not module.automatic_optimization and not hasattr(module, "example_losses"):
        raise ExperimentError(
            f"{type(module).__name__} steps its optimizers itself (automatic_optimization is "
            "False), which needs Lightning's Trainer: set execution.engine=lightning, and "
            "train.optimizer=module for optimizers of its own"
        )
    return Loop(module, examples)


def in_evaluation(
    module: LightningModule,
    examples: Examples,
    ids: Tensor,
    compute: Callable[[Batch], Tensor],
) -> list[Tensor]:
    """`compute` of one batch of the examples after another, in evaluation mode.

    Tasks that keep no gradient walk over examples by it, except for scores. Batches have
    `EVALUATION_BATCH` examples, the last one the rest, in the order of `ids`.

    Args:
        module: The module, which is left in evaluation mode.
        examples: Where ids are looked up.
        ids: (n,) example ids on the device of the examples.
        compute: Called with (x, y) of each batch, without gradients.
    """
    module.eval()
    with torch.no_grad():
        return [compute(examples.batch(part)) for part in torch.split(ids, EVALUATION_BATCH)]

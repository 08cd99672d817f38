"""Engine `vectorized`: many clients of a block at once, params stacked along a client axis."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.func import grad_and_value

from flray.data.pixels import Examples
from flray.engines.engine import Block, BlockResult
from flray.engines.losses import BatchLoss
from flray.engines.stacking import (
    BatchParts,
    StackedHook,
    StackedPlan,
    Step,
    elementwise_optimizer,
    fill,
    train_slots,
)
from flray.engines.training import Gradient, LocalBatch, Training
from flray.engines.written_step import PlacedStep, WrittenModule, WrittenStep
from flray.errors import ExperimentError
from flray.models.bank import Params, trainable
from flray.models.dropout import dropout_keys

# Of the models that are computed together on a CPU, which should stay in a core's cache.
TILE_PARAMS = 800_000
LARGEST_TILE = 16

GRAPH_STEPS = 20  # in one CUDA graph
# Beyond that convolutions are cuDNN's, which are slower for small models and keep no patches.
PATCHES_ON_GPU = 4 << 30


def refusal(module: LightningModule) -> str | None:
    """Why this module cannot be stacked, or None if it can."""
    if not hasattr(module, "example_losses"):
        return "it does not define example_losses(batch) -> (B,)"
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            return f"layer {name!r} ({type(layer).__name__}) keeps running statistics"
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            return f"layer {name!r} draws from torch's generator: use flray's KeyedDropout"
    return None


def check_stackable(module: LightningModule) -> None:
    if reason := refusal(module):
        raise ExperimentError(
            f"engine vectorized cannot run {type(module).__name__}: {reason}; "
            "choose execution.engine=loop"
        )


class Vectorized:
    """Trains many models in one step of tensor arithmetic.

    Short blocks are filled with dummies and batches are padded, so that the shape of the work, and
    with it every bit of a client's result, does not depend on its neighbours. On a GPU a step of
    `num_slots` models is recorded once as a CUDA graph and replayed; it is written out where it can
    be, unless patches of convolutions take too much memory. On a CPU a module that can be written
    out is trained in tiles of a few slots, `threads` of them at a time: the number of threads
    changes no bit.
    """

    def __init__(
        self,
        module: LightningModule,
        examples: Examples,
        num_slots: int,
        threads: int = 1,
    ) -> None:
        check_stackable(module)
        self.module = module
        self.examples = examples
        self.num_slots = num_slots
        self.threads = threads
        self.batch_loss = BatchLoss(module)
        self.graphs: dict[tuple[object, ...], GraphedStep] = {}
        self.tile = tile_size(sum(p.numel() for p in module.parameters()), num_slots)
        self.in_tiles = examples.device.type == "cpu"
        self.written = WrittenModule.of(self.batch_loss, examples)

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        self.module.train()
        if not any(plan.num_steps for plan in block.plans):
            unmoved = {name: leaf.clone() for name, leaf in block.w0.items()}
            return BlockResult(unmoved, np.zeros(len(block.plans)))
        result = BlockResult.empty_like(block)
        if self.written is not None and self.in_tiles:
            self._train_tiles(self.written, block, (training, gradient), result)
            return result
        plan = StackedPlan.of(block, self.num_slots, self.examples.device)
        train_slots(self._step(training, gradient, block), block, plan, result)
        return result

    def _train_tiles(
        self,
        written: WrittenModule,
        block: Block,
        how: tuple[Training, Gradient],
        into: BlockResult,
    ) -> None:
        def train_tile(first: int) -> None:
            some = slice(first, first + self.tile)
            part = block.some(some)
            if not any(plan.num_steps for plan in part.plans):
                into.some(some).copy_unmoved(part)
                return
            plan = StackedPlan.of(part, self.tile, self.examples.device)
            with torch.no_grad():
                step = WrittenStep(written, *how, part, self.tile)
                train_slots(step, part, plan, into.some(some))

        tiles = range(0, len(block.plans), self.tile)
        if self.threads == 1 or len(tiles) == 1:
            for first in tiles:
                train_tile(first)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(train_tile, tiles))

    def _step(self, training: Training, gradient: Gradient, block: Block) -> Step:
        if self.examples.device.type != "cuda":
            return StackedStep(self, training, gradient, block)
        # A bound method equals another only if both have the very same object: compare by value.
        hook = (getattr(gradient, "__func__", gradient), getattr(gradient, "__self__", None))
        key = (training, *hook, tuple((n, leaf.shape[1:]) for n, leaf in block.memo.items()))
        if key not in self.graphs:
            self.graphs[key] = GraphedStep(self._placed_step(training, gradient, block))
        return self.graphs[key]

    def _placed_step(
        self, training: Training, gradient: Gradient, block: Block
    ) -> "StackedStep | PlacedStep":
        if self.written is None or self._bytes_of_patches(training) > PATCHES_ON_GPU:
            return StackedStep(self, training, gradient, block)
        return PlacedStep(self.written, training, gradient, block, self.num_slots)

    def _bytes_of_patches(self, training: Training) -> int:
        assert self.written is not None
        w, examples = dict(self.module.named_parameters()), self.examples
        of_image = self.written.main.patch_values(w, examples.images.shape[1:])
        return of_image * training.batch_size * self.num_slots * examples.mean.element_size()


def tile_size(num_params: int, num_slots: int) -> int:
    """Slots in a tile, by model and block alone; the tiles of a block are equally full.

    >>> tile_size(159_010, 20), tile_size(159_010, 17), tile_size(1_663_370, 20), tile_size(10, 50)
    (5, 5, 1, 13)
    """
    largest = max(1, min(LARGEST_TILE, TILE_PARAMS // num_params))
    num_tiles = -(-num_slots // largest)
    return -(-num_slots // num_tiles)


class StackedStep:
    """A step that differentiates the module with `vmap`."""

    def __init__(
        self, engine: Vectorized, training: Training, gradient: Gradient, like: Block
    ) -> None:
        self.engine = engine
        num_slots, device = engine.num_slots, engine.examples.device
        self.w, self.w0, self.memo = (
            {name: leaf.new_empty(num_slots, *leaf.shape[1:]) for name, leaf in leaves.items()}
            for leaves in (like.w0, like.w0, like.memo)
        )
        self.total_loss = torch.zeros(num_slots, dtype=torch.float64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # the step we are at
        self.trained = {name: self.w[name] for name in trainable(engine.module)}
        capturable = device.type == "cuda"
        self.optimizer = elementwise_optimizer(training, engine.module, self.trained, capturable)
        name = type(engine.module).__name__
        self.hook = StackedHook(gradient, self._gradient_at, name)

    def start(self, block: Block, plan: StackedPlan) -> None:
        """Put a block in place."""
        for mine, theirs in ((self.w, block.w0), (self.w0, block.w0), (self.memo, block.memo)):
            for name, leaf in theirs.items():
                fill(mine[name], leaf)
        self.total_loss.zero_()
        self.place.zero_()
        self.ids, self.mask, self.keys = plan.ids, plan.mask, plan.keys

    def advance(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        ids = self.ids.index_select(1, self.place)[:, 0]
        mask = self.mask.index_select(1, self.place)[:, 0]
        key = self.keys.index_select(1, self.place)[:, 0]
        batches = tuple(self._batch(ids[:, b], mask[:, b], key[:, b]) for b in range(ids.shape[1]))
        w0 = {name: self.w0[name] for name in self.trained}
        direction, loss = self.hook(self.trained, w0, self.memo, batches)
        self.total_loss += torch.where(mask[:, 0].any(1), loss.double(), 0.0)
        for name, leaf in self.trained.items():
            leaf.grad = direction[name]
        self.optimizer.step()
        self.place += 1

    def _batch(self, ids: Tensor, mask: Tensor, key: Tensor) -> BatchParts:
        x, y = self.engine.examples.training_batch(ids, key)
        return x, y, mask, dropout_keys(self.engine.module, key)

    def _gradient_at(self, at: Params, batch: LocalBatch) -> tuple[Params, Tensor]:
        found: tuple[Params, Tensor] = grad_and_value(self.engine.batch_loss.at)(at, batch)
        return found


class GraphedStep:
    """Steps recorded as CUDA graphs: one launch instead of hundreds.

    One graph has a single step, another GRAPH_STEPS of them with the gathering of their batches;
    both read the place of the step from the device.
    """

    def __init__(self, step: StackedStep | PlacedStep) -> None:
        self.step = step

    @property
    def w(self) -> Params:
        return self.step.w

    @property
    def total_loss(self) -> Tensor:
        return self.step.total_loss

    def start(self, block: Block, plan: StackedPlan) -> None:
        if not hasattr(self, "single") or plan.num_steps > self.buffers.num_steps:
            self._record(block, plan)
        self.step.start(block, self.buffers)
        for value in self._optimizer_state():
            value.zero_()  # as at the first step
        for mine, theirs in zip(_tensors(self.buffers), _tensors(plan), strict=True):
            mine[:, : plan.num_steps].copy_(theirs)

    def advance(self, num_steps: int) -> None:
        if self.several is not None:
            for _ in range(num_steps // GRAPH_STEPS):
                self.several.replay()
            num_steps %= GRAPH_STEPS
        for _ in range(num_steps):
            self.single.replay()

    def _record(self, block: Block, plan: StackedPlan) -> None:
        ids, mask, keys = (t.clone() for t in _tensors(plan))
        self.buffers = StackedPlan(ids, mask, keys, plan.last_step)
        self.step.start(block, self.buffers)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # allocates workspaces and the optimiser's state
                self.step.place.zero_()
                self.step.advance(1)
        torch.cuda.current_stream().wait_stream(side)
        if self.step.optimizer is not None:
            for state in self.step.optimizer.state.values():
                if "step" in state:  # Adam's bias correction loses 5 digits to a float32 counter
                    state["step"] = state["step"].double()
        self.step.place.zero_()
        with _no_garbage_collection():
            self.single = self._recorded(1)
            self.several = self._recorded(GRAPH_STEPS) if plan.num_steps >= GRAPH_STEPS else None

    def _recorded(self, num_steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step.advance(num_steps)
        return graph

    def _optimizer_state(self) -> list[Tensor]:
        if self.step.optimizer is None:
            return []
        states = self.step.optimizer.state.values()
        return [each for state in states for each in state.values() if isinstance(each, Tensor)]


def _tensors(plan: StackedPlan) -> tuple[Tensor, Tensor, Tensor]:
    return plan.ids, plan.mask, plan.keys


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing an older graph while a new one is recorded would break the recording."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""Engine `vectorized`: many clients of a block at once, params stacked along a client axis."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from pytorch_lightning import LightningModule
from torch import nn, set_num_threads

from flray.data.pixels import Examples
from flray.engines.convolutions import Form, form_of
from flray.engines.cuda_graphs import GraphedStep
from flray.engines.engine import Block, BlockResult
from flray.engines.losses import BatchLoss
from flray.engines.memory import ReusedMemory
from flray.engines.stacked_plan import StackedPlan, lanes_of
from flray.engines.stacked_step import StackedModule, Step, train_lanes, untrained
from flray.engines.tracing import write_out
from flray.engines.training import Gradient, Training
from flray.errors import ExperimentError
from flray.models.bank import Params

# Parameters of the models that are computed together on a CPU, which should stay in a core's cache.
TILE_PARAMS = 800_000
LARGEST_TILE = 16

# Recorded steps in the memory of a GPU: each learning rate of a schedule needs one of its own.
GRAPHS_KEPT = 8

# Bytes for the patches of the clients that a GPU trains together.
PATCHES_ON_GPU = 4 << 30


def refusal(module: LightningModule) -> str | None:
    """The reason why this module cannot be stacked, or None if it can.

    A reason completes the sentence "cannot be stacked, because ...".

    >>> from pytorch_lightning import LightningModule
    >>> refusal(LightningModule())
    'it does not define example_losses(batch) -> (B,)'
    """
    if not hasattr(module, "example_losses"):
        return "it does not define example_losses(batch) -> (B,)"
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            return f"layer {name!r} ({type(layer).__name__}) keeps running statistics"
        if isinstance(layer, nn.RNNBase):
            return f"layer {name!r} ({type(layer).__name__}) is recurrent"
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            return f"layer {name!r} draws from torch's generator: use flray's KeyedDropout"
    return None


def check_stackable(module: LightningModule) -> None:
    """Raise an `ExperimentError` with the reason if this module cannot be stacked."""
    if reason := refusal(module):
        raise ExperimentError(
            f"engine vectorized cannot run {type(module).__name__}: {reason}; "
            "choose execution.engine=loop"
        )


class Vectorized:
    """Trains many models in one step of tensor arithmetic.

    A client whose steps are done leaves its slot to the next, so that clients of different sizes
    cost little more than their steps. Slots left over are filled with dummies and batches are
    padded, so that the shape of the work, and with it every bit of a client's result, does not
    depend on its neighbours. On a GPU a step of `num_slots` models, or as many as there is room for
    the patches of, is recorded once as a CUDA graph and replayed. On a CPU a module that can be
    written out (`write_out`) is trained in tiles of a few slots, `threads` of them at a time: the
    number of threads changes no bit.

    Args:
        module: must define `example_losses(batch)` and have no layers with running statistics;
            `refusal` returns the reason why a module cannot be stacked.
        num_slots: clients that a step trains together, at most.
        threads: tiles trained at a time, on a CPU.
        form: that of convolutions; None: as the kind of device says.
    """

    def __init__(
        self,
        module: LightningModule,
        examples: Examples,
        num_slots: int,
        threads: int = 1,
        form: Form | None = None,
    ) -> None:
        check_stackable(module)
        self.module = module
        self.examples = examples
        self.num_slots = num_slots
        self.threads = threads
        self.graphs: dict[tuple[object, ...], GraphedStep] = {}
        self.memory = ReusedMemory()
        self.tile = tile_size(sum(p.numel() for p in module.parameters()), num_slots)
        form = form or form_of(examples.device.type, examples.mean.dtype)
        classes = examples.labels.dim() == 1 and not examples.labels.is_floating_point()
        self.written = write_out(module, form, classes)
        self.stacked = StackedModule(BatchLoss(module), examples, self.written)
        self.in_tiles = self.written is not None and examples.device.type == "cpu"

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        """Train all clients of a block at once; the contract is that of `Engine.train`.

        Args:
            block: Any number of clients; those beyond the slots follow in them (SGD) or in later
                parts.
            training: Settings of local training; the optimiser must step element by element.
            gradient: The hook, which must run under `torch.func.vmap`.

        Raises:
            ExperimentError: The optimiser or the hook cannot be stacked.
        """
        self.module.train()
        if self.written is not None and self.in_tiles:
            block = replace(block, w0=self.written.laid_out(block.w0))
        result = untrained(block, self._memory_for(block))
        stacked, size = self._stacked_and_size(training)

        def train_part(lanes: list[list[int]]) -> None:
            plan = StackedPlan.of(block, lanes, size, self.examples.device)
            train_lanes(self._step(stacked, training, gradient, block, size), block, plan, result)

        parts = self._parts(block, training, size)
        if self.threads == 1 or len(parts) <= 1:
            for lanes in parts:
                train_part(lanes)
        else:
            # The number of threads inside an operator is a setting of each thread.
            with ThreadPoolExecutor(self.threads, initializer=partial(set_num_threads, 1)) as pool:
                list(pool.map(train_part, parts))
        return result

    def _memory_for(self, block: Block) -> Params:
        """Memory for the trained models of a block, on a CPU as products read them."""
        if self.written is None or not self.in_tiles:
            return {name: leaf.new_empty(leaf.shape) for name, leaf in block.w0.items()}
        return {
            name: self.written.in_layout(name, self.memory.empty(leaf.shape, leaf.dtype))
            for name, leaf in block.w0.items()
        }

    def _parts(self, block: Block, training: Training, size: int) -> list[list[list[int]]]:
        """Lanes of clients in parts of at most `size` lanes, each for a `Step` of its own.

        A lane has several clients only where the optimiser of a slot can begin anew: Adam counts
        the steps of all slots together.
        """
        num_steps = np.array([plan.num_steps for plan in block.plans])
        num = len(num_steps)
        can_begin_anew = training.optimizer == "sgd"
        lanes = lanes_of(num_steps, min(num, size * self.threads) if can_begin_anew else num)
        return [lanes[n : n + size] for n in range(0, len(lanes), size)]

    def _step(
        self,
        stacked: StackedModule,
        training: Training,
        gradient: Gradient,
        block: Block,
        size: int,
    ) -> Step:
        """A step for blocks of this shape: on a GPU the recorded one, on a CPU a new one."""
        if self.examples.device.type == "cpu":
            return Step(stacked, training, gradient, block, size)
        # A bound method equals another only if both have the very same object: compare by value.
        hook = (getattr(gradient, "__func__", gradient), getattr(gradient, "__self__", None))
        leaves = (*block.memo.items(), *block.w0.items())
        is_weighted = block.plans[0].weight is not None
        key = (training, *hook, is_weighted, tuple((n, leaf.shape[1:]) for n, leaf in leaves))
        if key not in self.graphs:
            for oldest in list(self.graphs)[: 1 - GRAPHS_KEPT]:
                del self.graphs[oldest]
            self.graphs[key] = GraphedStep(stacked, training, gradient, block, size)
        return self.graphs[key]

    def _stacked_and_size(self, training: Training) -> tuple[StackedModule, int]:
        """The module, and how many clients a step trains together.

        On a GPU as many as there is room for the patches of. If there is none for one client the
        module is not written out: cuDNN, which is slower, needs no patches.
        """
        if self.written is None:
            return self.stacked, self.num_slots
        if self.in_tiles:
            return self.stacked, self.tile
        w = dict(self.module.named_parameters())
        num_values = self.written.patch_values(w, self.examples.images.shape[1:])
        of_client = num_values * training.batch_size * self.examples.mean.element_size()
        room = PATCHES_ON_GPU // of_client if of_client else self.num_slots
        if not room:
            return replace(self.stacked, written=None), self.num_slots
        return self.stacked, min(room, self.num_slots)


def tile_size(num_params: int, num_slots: int) -> int:
    """The number of slots in a tile, which follows from model and block alone.

    The tiles of a block are equally full, and the models of one should fit into a core's cache.

    >>> tile_size(159_010, 20), tile_size(159_010, 17), tile_size(1_663_370, 20), tile_size(10, 50)
    (5, 5, 1, 13)
    """
    largest = max(1, min(LARGEST_TILE, TILE_PARAMS // num_params))
    num_tiles = -(-num_slots // largest)
    return -(-num_slots // num_tiles)

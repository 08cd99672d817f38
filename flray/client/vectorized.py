"""Engine `vectorized`: all clients of a block at once, their params stacked along a client axis."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from flray.client.engine import Block, BlockResult
from flray.client.losses import BatchLoss
from flray.client.training import ELEMENTWISE, Gradient, LocalBatch, Training
from flray.data.pixels import Examples
from flray.errors import ExperimentError
from flray.models.bank import Params, trainable
from flray.models.dropout import dropout_keys

# x, y, mask and dropout keys of a LocalBatch with a leading client axis: a pytree for vmap.
BatchParts = tuple[Tensor, Tensor, Tensor, Params]


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
    """Trains `num_slots` models in one step of tensor arithmetic.

    Short blocks are filled with dummies and batches are padded, so that the shape of the work, and
    with it every bit of a client's result, does not depend on its neighbours. On a GPU a step is
    recorded once as a CUDA graph and replayed.
    """

    def __init__(self, module: LightningModule, examples: Examples, num_slots: int) -> None:
        check_stackable(module)
        self.module = module
        self.examples = examples
        self.num_slots = num_slots
        self.batch_loss = BatchLoss(module)
        self.graphs: dict[tuple[object, ...], GraphedStep] = {}

    def train(self, block: Block, training: Training, gradient: Gradient) -> BlockResult:
        self.module.train()
        steps = StackedPlan.of(block, self.num_slots, self.examples.device)
        if not steps.num_steps:
            unmoved = {name: leaf.clone() for name, leaf in block.w0.items()}
            return BlockResult(unmoved, np.zeros(len(block.plans)))
        w0 = {name: _filled(leaf, self.num_slots) for name, leaf in block.w0.items()}
        memo = {name: _filled(leaf, self.num_slots) for name, leaf in block.memo.items()}
        step = self._step(training, gradient, w0, memo)
        step.start(w0, memo, steps)
        finishing = steps.clients_by_last_step()
        result = {name: leaf.clone() for name, leaf in w0.items()}
        for s in range(steps.num_steps):
            step.advance()
            if s in finishing:
                # A finished client is frozen: momentum, FedProx or SCAFFOLD would still move it.
                for name, leaf in step.w.items():
                    result[name].index_copy_(0, finishing[s], leaf.detach()[finishing[s]])
        real = len(block.plans)
        count = np.maximum([plan.num_steps for plan in block.plans], 1)
        loss = step.total_loss[:real].cpu().numpy() / count
        return BlockResult({name: leaf[:real] for name, leaf in result.items()}, loss)

    def _step(
        self, training: Training, gradient: Gradient, w0: Params, memo: Params
    ) -> "StackedStep":
        if self.examples.device.type != "cuda":
            return StackedStep(self, training, gradient, (w0, memo))
        # A bound method equals another only if both have the very same object: compare by value.
        hook = (getattr(gradient, "__func__", gradient), getattr(gradient, "__self__", None))
        key = (training, *hook, tuple((name, leaf.shape) for name, leaf in memo.items()))
        if key not in self.graphs:
            self.graphs[key] = GraphedStep(self, training, gradient, (w0, memo))
        return self.graphs[key]


@dataclass(frozen=True)
class StackedPlan:
    """The plans of a block as tensors; K slots, S steps, b batches per step."""

    ids: Tensor  # (K, S, b, B)
    mask: Tensor  # (K, S, b, B)
    keys: Tensor  # (K, S, b)
    last_step: Tensor  # (K,) on the CPU; -1 for a dummy and for a client without steps

    @classmethod
    def of(cls, block: Block, num_slots: int, device: torch.device) -> "StackedPlan":
        batches = block.plans[0].ids.shape[1:]  # (b, B)
        num_steps = max(plan.num_steps for plan in block.plans)
        ids = np.zeros((num_slots, num_steps, *batches), dtype=np.int64)
        mask = np.zeros((num_slots, num_steps, *batches), dtype=np.bool_)
        keys = np.zeros((num_slots, num_steps, batches[0]), dtype=np.int64)
        last = np.full(num_slots, -1, dtype=np.int64)
        for k, plan in enumerate(block.plans):
            ids[k, : plan.num_steps] = plan.ids
            mask[k, : plan.num_steps] = plan.mask
            keys[k, : plan.num_steps] = plan.keys
            last[k] = plan.num_steps - 1
        tensors = [torch.from_numpy(a).to(device) for a in (ids, mask, keys)]
        return cls(tensors[0], tensors[1], tensors[2], torch.from_numpy(last))

    @property
    def num_steps(self) -> int:
        return self.ids.shape[1]

    def clients_by_last_step(self) -> dict[int, Tensor]:
        """Step -> the slots that finish with it."""
        ends = {int(s) for s in self.last_step if s >= 0}
        slots = {s: torch.nonzero(self.last_step == s).flatten() for s in ends}
        return {s: slot.to(self.ids.device) for s, slot in slots.items()}


class StackedStep:
    """One local step of a whole block, on tensors that stay in place from step to step."""

    def __init__(
        self,
        engine: Vectorized,
        training: Training,
        gradient: Gradient,
        like: tuple[Params, Params],
    ) -> None:
        self.engine = engine
        self.gradient = gradient
        self.w = {name: torch.empty_like(leaf) for name, leaf in like[0].items()}
        self.w0 = {name: torch.empty_like(leaf) for name, leaf in like[0].items()}
        self.memo = {name: torch.empty_like(leaf) for name, leaf in like[1].items()}
        device = engine.examples.device
        self.total_loss = torch.zeros(engine.num_slots, dtype=torch.float64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # the step we are at
        trained = {name: self.w[name] for name in trainable(engine.module)}
        capturable = device.type == "cuda"
        self.optimizer = training.make_optimizer(engine.module, trained, capturable)
        if not isinstance(self.optimizer, ELEMENTWISE):
            raise ExperimentError(
                f"engine vectorized cannot use {type(self.optimizer).__name__}: it does not step "
                "element by element; known: SGD, Adam, AdamW; choose execution.engine=loop"
            )
        self.trained = trained

    def start(self, w0: Params, memo: Params, plan: StackedPlan) -> None:
        """Put a block in place."""
        for mine, theirs in ((self.w, w0), (self.w0, w0), (self.memo, memo)):
            for name, leaf in theirs.items():
                mine[name].copy_(leaf)
        self.total_loss.zero_()
        self.place.zero_()
        self.ids, self.mask, self.keys = plan.ids, plan.mask, plan.keys

    def advance(self) -> None:
        ids = self.ids.index_select(1, self.place)[:, 0]
        mask = self.mask.index_select(1, self.place)[:, 0]
        key = self.keys.index_select(1, self.place)[:, 0]
        batches = tuple(self._batch(ids[:, b], mask[:, b], key[:, b]) for b in range(ids.shape[1]))
        w0 = {name: self.w0[name] for name in self.trained}
        direction, loss = self._directions(self.trained, w0, self.memo, batches)
        self.total_loss += torch.where(mask[:, 0].any(1), loss.double(), 0.0)
        for name, leaf in self.trained.items():
            leaf.grad = direction[name]
        self.optimizer.step()
        self.place += 1

    def _batch(self, ids: Tensor, mask: Tensor, key: Tensor) -> BatchParts:
        x, y = self.engine.examples.training_batch(ids, key)
        return x, y, mask, dropout_keys(self.engine.module, key)

    def _directions(
        self, w: Params, w0: Params, memo: Params, batches: tuple[BatchParts, ...]
    ) -> tuple[Params, Tensor]:
        try:
            found: tuple[Params, Tensor] = vmap(self._one_client)(w, w0, memo, batches)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            name = type(self.engine.module).__name__
            first_line = str(error).split("\n")[0]
            raise ExperimentError(
                f"engine vectorized cannot run {name}: {first_line} Choose execution.engine=loop"
            ) from error
        return found

    def _one_client(
        self, w: Params, w0: Params, memo: Params, batches: tuple[BatchParts, ...]
    ) -> tuple[Params, Tensor]:
        losses = []  # of the calls of grad in this step
        first, *second = (LocalBatch(*parts) for parts in batches)
        batch = replace(first, second=second[0]) if second else first

        def grad(at: Params, batch: LocalBatch) -> Params:
            gradients: Params
            gradients, loss = grad_and_value(self.engine.batch_loss.at)(at, batch)
            losses.append(loss)
            return gradients

        direction = self.gradient(grad, w, batch, w0, memo)
        return direction, losses[0]


class GraphedStep(StackedStep):
    """The same step recorded as a CUDA graph: one launch instead of hundreds."""

    def start(self, w0: Params, memo: Params, plan: StackedPlan) -> None:
        if not hasattr(self, "graph") or plan.num_steps > self.capacity:
            self._record(w0, memo, plan)
        super().start(w0, memo, plan)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()  # an optimiser's state at its first step
        self.ids, self.mask, self.keys = self.buffers
        for mine, theirs in zip(self.buffers, (plan.ids, plan.mask, plan.keys), strict=True):
            mine[:, : plan.num_steps].copy_(theirs)

    def advance(self) -> None:
        self.graph.replay()

    def _record(self, w0: Params, memo: Params, plan: StackedPlan) -> None:
        self.capacity = plan.num_steps
        self.buffers = (plan.ids.clone(), plan.mask.clone(), plan.keys.clone())
        super().start(w0, memo, plan)
        self.ids, self.mask, self.keys = self.buffers
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # allocates workspaces and the optimiser's state
                self.place.zero_()
                super().advance()
        torch.cuda.current_stream().wait_stream(side)
        for state in self.optimizer.state.values():
            if "step" in state:  # Adam's bias correction loses 5 digits to a float32 counter
                state["step"] = state["step"].double()
        self.graph = torch.cuda.CUDAGraph()
        self.place.zero_()
        with _no_garbage_collection(), torch.cuda.graph(self.graph):
            super().advance()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing an older graph while a new one is recorded would break the recording."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _filled(leaf: Tensor, num_slots: int) -> Tensor:
    """Repeat the first row for the dummies of a short block."""
    missing = num_slots - len(leaf)
    return torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])]) if missing else leaf

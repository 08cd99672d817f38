"""A step of stacked clients, for modules whose gradient is written out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from flray.data.pixels import Examples
from flray.engines.engine import Block
from flray.engines.losses import BatchLoss
from flray.engines.stacking import StackedHook, StackedPlan, elementwise_optimizer, fill
from flray.engines.training import Gradient, LocalBatch, Training, plain_gradient
from flray.engines.written import Descent, Gradients, Targets, Written, write_out
from flray.models.bank import Params, trainable
from flray.models.dropout import dropout_keys

# Of the images that are gathered for several steps at once.
GATHERED_ON_CPU, GATHERED_ON_GPU = 2 << 20, 64 << 20
ALIGNED = 256  # bytes, at multiples of which the batches of a step begin


@dataclass
class WrittenModule:
    """A module whose `example_losses` is written out, and its other losses where they can be."""

    batch_loss: BatchLoss
    examples: Examples
    main: Written
    others: dict[str, Written | None] = field(default_factory=dict)
    alone: Lock = field(default_factory=Lock)  # torch puts params into a module while it runs

    @classmethod
    def of(cls, batch_loss: BatchLoss, examples: Examples) -> "WrittenModule | None":
        main = write_out(batch_loss.module, "example_losses")
        return None if main is None else cls(batch_loss, examples, main)

    def by_loss(self, loss: str) -> Written | None:
        if loss == "example_losses":
            return self.main
        if loss not in self.others:
            with self.alone:
                self.others[loss] = write_out(self.batch_loss.module, loss)
        return self.others[loss]

    def gradient_at(self, at: Params, batch: LocalBatch) -> tuple[Params, Tensor]:
        """Of one client, inside vmap, which hands all clients to `Written` at once."""
        written = self.by_loss(batch.loss)
        if written is None:
            with self.alone:
                found: tuple[Params, Tensor] = grad_and_value(self.batch_loss.at)(at, batch)
            return found
        names = (tuple(at), tuple(batch.keys))
        tensors = (*at.values(), *batch.keys.values(), batch.x, batch.y, batch.mask)
        *gradients, loss = _WrittenGradient.apply(written, names, *tensors)  # type: ignore[no-untyped-call]  # torch's own
        return dict(zip(at, gradients, strict=True)), loss


class _WrittenGradient(torch.autograd.Function):
    """Gradients and loss by `Written`, for use inside vmap: its rule gets all clients at once."""

    @staticmethod
    def forward(*inputs: Any) -> Any:  # noqa: ARG004  # as torch calls it
        raise AssertionError("the gradient of one client is computed under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing differentiates this."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        written: Written,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        *tensors: Tensor,
    ) -> Any:
        stacked = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        *leaves, x, y, mask = stacked
        num = len(names[0])
        w = dict(zip(names[0], leaves[:num], strict=True))
        keys = dict(zip(names[1], leaves[num:], strict=True))
        found = Gradients(written, w)
        targets = Targets.of(y, mask, written.num_classes, x.dtype)
        loss = written.losses(w, keys, x, targets, found)
        outputs = (*found.of_all().values(), loss)
        return outputs, (0,) * len(outputs)


class WrittenStep:
    """The step of a tile, or of a block; batches of several steps are gathered at once.

    The algorithm's hook runs under `vmap`, the gradient it asks for does not. For the plain
    gradient there is no hook; and SGD needs no optimiser either: each layer takes its step while
    the gradient passes.
    """

    def __init__(
        self,
        module: WrittenModule,
        training: Training,
        gradient: Gradient,
        like: Block,
        num_slots: int,
    ) -> None:
        self.module = module
        self.written = module.main
        self.w = self._in_layout(like.w0, num_slots)
        device = module.examples.device
        self.total_loss = torch.zeros(num_slots, dtype=torch.float64, device=device)
        net = module.batch_loss.module
        self.trained = {name: self.w[name] for name in trainable(net)}
        self.hook = None
        if gradient is not plain_gradient:
            self.hook = StackedHook(gradient, module.gradient_at, type(net).__name__)
            self.w0 = self._in_layout(like.w0, num_slots)
            self.memo = self._in_layout(like.memo, num_slots)
        self.descent: Descent | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if self._layers_step(training):
            moving = self.written.seen_by_sinks(self.trained) if training.momentum else {}
            velocity = {name: torch.empty_like(leaf) for name, leaf in moving.items()}
            options = (training.lr, training.weight_decay, training.momentum)
            self.descent = Descent(*options, velocity)
        else:
            capturable = device.type == "cuda"
            self.optimizer = elementwise_optimizer(training, net, self.trained, capturable)

    def _layers_step(self, training: Training) -> bool:
        """True if each layer takes its step while the gradient passes."""
        if self.hook is not None or training.optimizer != "sgd":
            return False
        if training.weight_decay and self.trained.keys() - self.written.leaves:
            return False  # leaves of no layer decay too
        # With momentum, torch's optimiser steps all leaves in a few kernels of a GPU.
        return not training.momentum or self.module.examples.device.type == "cpu"

    def _in_layout(self, leaves: Params, num_slots: int) -> Params:
        """Empty slots; a leaf of the memo lies as the leaf of the model it is named after."""
        return {
            name: self.written.in_layout(
                name.rpartition("/")[2], leaf.new_empty(num_slots, *leaf.shape[1:])
            )
            for name, leaf in leaves.items()
        }

    def start(self, block: Block, plan: StackedPlan) -> None:
        self._fill(block)
        self.steps = self._batches(plan)

    def _fill(self, block: Block) -> None:
        for name, leaf in block.w0.items():
            fill(self.w[name], leaf)
        if self.descent is not None:
            for v in self.descent.velocity.values():
                v.zero_()
        if self.hook is not None:
            for name, leaf in block.w0.items():
                fill(self.w0[name], leaf)
            for name, leaf in block.memo.items():
                fill(self.memo[name], leaf)

    def advance(self, num_steps: int) -> None:
        for active, batches in islice(self.steps, num_steps):
            self._step(active, batches)

    def _step(self, active: Tensor, batches: "tuple[_Batch, ...]") -> None:
        if self.hook is not None:
            parts = tuple((each.x, each.y, each.mask, each.keys) for each in batches)
            w0 = {name: self.w0[name] for name in self.trained}
            direction, loss = self.hook(self.trained, w0, self.memo, parts)
            self._step_along(direction)
        else:
            first = batches[0]
            sink = self.descent or Gradients(self.written, self.trained)
            loss = self.written.losses(self.w, first.keys, first.x, first.targets, sink)
            if isinstance(sink, Gradients):
                self._step_along(sink.of_all())
        self.total_loss += torch.where(active, loss, 0.0)

    def _step_along(self, direction: Params) -> None:
        assert self.optimizer is not None  # or layers take their steps themselves
        for name, leaf in self.trained.items():
            leaf.grad = direction[name]
        self.optimizer.step()

    def _batches(self, plan: StackedPlan) -> "Iterator[tuple[Tensor, tuple[_Batch, ...]]]":
        """Of each step, which slots take it and its batches."""
        ids, mask, keys = (t.transpose(0, 1) for t in (plan.ids, plan.mask, plan.keys))
        examples, net = self.module.examples, self.module.batch_loss.module
        image = examples.images.shape[1:].numel() * examples.mean.element_size()
        of_step = ids[0].numel() * image
        at_once = max(1, GATHERED_ON_CPU // of_step)
        if examples.device.type == "cuda":  # where the kernel of a product depends on alignment
            at_once = 1 if of_step % ALIGNED else max(1, GATHERED_ON_GPU // of_step)
        for some in (slice(s, s + at_once) for s in range(0, plan.num_steps, at_once)):
            x, y = examples.training_batch(ids[some].flatten(0, 2), keys[some].flatten())
            x, y = (t.view(*ids[some].shape, *t.shape[2:]) for t in (x, y))
            targets = Targets.of(y, mask[some], self.written.num_classes, x.dtype)
            layer_keys = self._drawn(dropout_keys(net, keys[some]), ids.shape[-1])
            of_batch = [
                _each_step(x, y, mask[some], targets, layer_keys, b) for b in range(x.shape[2])
            ]
            yield from zip(mask[some][:, :, 0].any(2), zip(*of_batch, strict=True), strict=True)

    def _drawn(self, keys: Params, batch_size: int) -> Params:
        """What dropout layers are given, for several steps at once: their keys."""
        return keys


class PlacedStep(WrittenStep):
    """The same step for a CUDA graph: which one comes next is read from the device.

    Dropout is drawn for several steps at once, as a GPU waits for each kernel.
    """

    @cached_property
    def place(self) -> Tensor:
        """The step we are at; `start` makes it, before anything is recorded."""
        return torch.zeros(1, dtype=torch.int64, device=self.module.examples.device)

    def start(self, block: Block, plan: StackedPlan) -> None:
        self._fill(block)
        self.plan = plan
        self.total_loss.zero_()
        self.place.zero_()

    def advance(self, num_steps: int) -> None:
        steps = self.place + torch.arange(num_steps, device=self.place.device)
        with torch.no_grad():
            for active, batches in self._batches(self.plan.at(steps)):
                self._step(active, batches)
        self.place += num_steps

    def _drawn(self, keys: Params, batch_size: int) -> Params:
        """A hook may ask for a loss that is not written out and draws from keys."""
        return self.written.drawn(keys, self.w, batch_size) if self.hook is None else keys


@dataclass
class _Batch:
    x: Tensor  # (slots, B, channels, height, width)
    y: Tensor  # (slots, B)
    mask: Tensor
    keys: Params  # leaves (slots,), or (slots, elements) where they were drawn
    targets: Targets


def _each_step(
    x: Tensor, y: Tensor, mask: Tensor, targets: Targets, layer_keys: Params, b: int
) -> list[_Batch]:
    """The b-th batches of some steps, from tensors (steps, slots, batches, ...)."""
    parts = (t[:, :, b].unbind() for t in (x, y, mask, targets.share, targets.labels))
    keys = {name: key[:, :, b] for name, key in layer_keys.items()}
    return [
        _Batch(x, y, mask, {name: key[s] for name, key in keys.items()}, Targets(share, labels))
        for s, (x, y, mask, share, labels) in enumerate(zip(*parts, strict=True))
    ]

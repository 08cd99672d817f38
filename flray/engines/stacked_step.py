"""One local step of many stacked clients: batches gathered, gradient computed, models moved."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import NamedTuple, cast

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.func import grad_and_value, vmap

from flray.data.pixels import Examples
from flray.engines.affine import AffineTerm, factors, is_affine, is_stacked, offsets
from flray.engines.engine import Block, BlockResult
from flray.engines.losses import BatchLoss, along, direction_and_loss
from flray.engines.stacked_plan import Rows, Seats, StackedPlan
from flray.engines.training import ELEMENTWISE, Gradient, LocalBatch, Training, plain_gradient
from flray.engines.written import Descent, Gradients, Targets, Written, WrittenGradient
from flray.errors import ExperimentError
from flray.models.bank import Params, params_of, trainable
from flray.models.dropout import dropout_keys

# Bytes of the images that are gathered for several steps at once.
GATHERED_ON_CPU, GATHERED_ON_GPU = 2 << 20, 64 << 20
ALIGNED = 256  # bytes, at multiples of which the batches of a step begin


class StackedBatch(NamedTuple):
    """A `LocalBatch` of each slot: the same fields with a leading axis, a pytree for `vmap`."""

    x: Tensor  # (slots, B, channels, height, width)
    y: Tensor  # (slots, B)
    mask: Tensor  # (slots, B)
    keys: Params  # (slots,) by dropout layer, or (slots, elements) where masks are drawn already
    weight: tuple[Tensor, ...]  # (slots, B), or none

    def for_hook(self) -> LocalBatch:
        """The batch as a hook receives it, inside `vmap` or with the leading axis."""
        weight = self.weight[0] if self.weight else None
        return LocalBatch(self.x, self.y, self.mask, self.keys, weight=weight)


@dataclass
class StackedModule:
    """A module and its examples, with the gradient of one client or of all slots.

    The gradient is written out where `written` is given; otherwise, and for other losses that a
    hook asks for, the module is differentiated by `torch.func`.
    """

    batch_loss: BatchLoss
    examples: Examples
    written: Written | None  # the written-out form of `example_losses`
    alone: Lock = field(default_factory=Lock)  # torch puts params into a module while it runs

    @property
    def module(self) -> LightningModule:
        """The module whose loss is differentiated."""
        return self.batch_loss.module

    def gradient_at(self, frozen: Params, at: Params, batch: LocalBatch) -> tuple[Params, Tensor]:
        """Gradient and loss of one client at given params; to be called inside `vmap`.

        Threads may call it at the same time: a module that is not written out is used by one of
        them at a time.

        Args:
            frozen: The client's other parameters, and its buffers; a written-out module has none.
        """
        if self.written is None or batch.loss != "example_losses":

            def loss_at(w: Params) -> Tensor:
                return self.batch_loss.at(frozen | w, batch)

            with self.alone:
                result: tuple[Params, Tensor] = grad_and_value(loss_at)(at)
            return result
        names = (tuple(at), tuple(batch.keys))
        tensors = (*at.values(), *batch.keys.values(), batch.x, batch.y, batch.mask)
        weight = () if batch.weight is None else (batch.weight,)
        *gradients, loss = WrittenGradient.apply(self.written, names, *tensors, *weight)  # type: ignore[no-untyped-call]  # torch's own
        return dict(zip(at, gradients, strict=True)), loss

    def gradients_of_step(self) -> Callable[[Params, LocalBatch], tuple[Params, Tensor]]:
        """A function for gradients and losses (K,) of stacked clients at params, leaves (K, ...).

        It computes the targets of a batch once, however many gradients a hook takes of it.
        """
        written, computed = self.written, list[tuple[LocalBatch, Targets]]()
        assert written is not None

        def gradients_at(at: Params, batch: LocalBatch) -> tuple[Params, Tensor]:
            targets = next((targets for other, targets in computed if other is batch), None)
            if targets is None:
                assert batch.mask is not None
                weight = () if batch.weight is None else (batch.weight,)
                classes, dtype = written.num_classes, batch.x.dtype
                targets = Targets.of(batch.y, batch.mask, classes, dtype, *weight)
                computed.append((batch, targets))
            return written.gradients(targets, at, batch.keys, batch.x)

        return gradients_at


class Step:
    """A local step of `num_slots` clients, on tensors that stay in place from step to step.

    The number of the next step is read from the device, so that a CUDA graph can be replayed. A
    hook that is marked (`flray.engines.affine`) is called once for all slots of a written-out
    module, others run under `vmap`. For the plain gradient of a written-out module no hook is
    called; and SGD of all leaves without weight decay needs no optimiser either: each layer moves
    while the gradient passes, by the term of an affine hook too.

    A step is used in this order: `start` with a block, then `advance` as often as steps are left.
    Between two calls of `advance`, `w` and `total_loss` may be read, and other clients may be put
    into slots by `load`.

    Args:
        like: a block whose models and memo have the shapes of all later ones.
        num_slots: clients that are trained together.
    """

    def __init__(
        self,
        stacked: StackedModule,
        training: Training,
        gradient: Gradient,
        like: Block,
        num_slots: int,
    ) -> None:
        self.stacked = stacked
        self.written, self.examples = stacked.written, stacked.examples
        device = self.examples.device
        self.w = self._slots(like.w0, num_slots)
        # Leaves beside the module's, such as APFL's v; all that a hook sees; those that move.
        extra = like.w0.keys() - params_of(stacked.module).keys()
        self.trained = {n: self.w[n] for n in (*trainable(stacked.module), *sorted(extra))}
        self.moved = {n: leaf for n, leaf in self.trained.items() if training.moves(n)}
        self.frozen = {n: leaf for n, leaf in self.w.items() if n not in self.trained}
        self.total_loss = torch.zeros(num_slots, dtype=torch.float64, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # number of the next step
        self.gathered: Tensor | None = None  # memory of the images of a few steps, on a CPU
        self.gradient = gradient
        self.descent = self._descent(training, like, num_slots)
        is_plain = gradient is plain_gradient or self.descent is not None
        self.calls_hook = self.written is None or not is_plain
        self.takes_all_slots = self.written is not None and is_stacked(gradient)
        if self.calls_hook:
            self.w0 = self._slots(like.w0, num_slots)
            self.memo = self._slots(like.memo, num_slots)
        self.optimizer: torch.optim.Optimizer | None = None
        if self.descent is None:
            self.optimizer = _elementwise_optimizer(training, stacked.module, self.trained)

    def _descent(self, training: Training, like: Block, num_slots: int) -> Descent | None:
        """The steps of SGD that layers take themselves; None if an optimiser must take them."""
        is_plain_sgd = training.optimizer == "sgd" and not training.weight_decay
        if self.written is None or not is_plain_sgd:
            return None
        if self.gradient is plain_gradient:
            return Descent(training.eta, self.moved, training.momentum)
        if not is_affine(self.gradient) or self.written.leaves != self.trained.keys():
            return None
        a = factors(self.gradient, self.trained, self.moved, like.memo)
        # Offsets that all clients share lie in one slot; a recorded step must take any block.
        leaves = (*like.w0.values(), *like.memo.values())
        on_cpu = self.number.device.type == "cpu"
        self.shares_offsets = on_cpu and not any(leaf.stride(0) for leaf in leaves)
        num = 1 if self.shares_offsets else num_slots
        self.offsets = self._slots({name: like.w0[name] for name in a}, num)
        as_moved = {name: self.written.matrix(name, u) for name, u in self.offsets.items()}
        return Descent(training.eta, self.moved, training.momentum, AffineTerm(a, as_moved))

    def _slots(self, leaves: Params, num_slots: int) -> Params:
        """Uninitialised slots; `u/NAME` of a memo lies in memory as the model's leaf NAME."""
        empty = {n: leaf.new_empty(num_slots, *leaf.shape[1:]) for n, leaf in leaves.items()}
        if self.written is None:
            return empty
        return {
            name: self.written.in_layout(name.rpartition("/")[2], leaf)
            for name, leaf in empty.items()
        }

    def start(self, block: Block, plan: StackedPlan) -> None:
        """Put the first clients of a plan into the slots, and begin with its first step.

        Slots without a client get the first client's model.
        """
        self.plan = plan
        self.number.zero_()
        self.load(block, plan.first)

    def load(self, block: Block, seats: Seats) -> None:
        """Put clients of a block into slots; their momentum and loss begin at 0."""
        w0, memo = (
            {name: seats.clients.of(leaf) for name, leaf in leaves.items()}
            for leaves in (block.w0, block.memo)
        )
        _put(self.w, w0, seats.slots)
        begun_anew = [self.total_loss]
        if self.descent is not None:
            begun_anew += self.descent.velocity.values()
            if (term := self.descent.term) is not None:
                self._put_offsets(term, w0, memo, seats)
        if self.calls_hook:
            _put(self.w0, w0, seats.slots)
            _put(self.memo, memo, seats.slots)
        if self.optimizer is not None:
            states = self.optimizer.state.values()
            begun_anew += [v for state in states for v in state.values() if isinstance(v, Tensor)]
        for values in begun_anew:
            if values.dim():
                seats.slots.clear(values)
            else:  # Adam counts the steps of all slots, which begin together
                values.zero_()

    def _put_offsets(self, term: AffineTerm, w0: Params, memo: Params, seats: Seats) -> None:
        """Put what the clients' affine terms are relative to into their slots."""
        if not self.shares_offsets:
            _put(self.offsets, offsets(self.gradient, term.a, w0, memo), seats.slots)
        elif seats is self.plan.first:
            u = offsets(self.gradient, term.a, w0, memo)
            _put(self.offsets, {name: leaf[:1] for name, leaf in u.items()}, Rows(slice(1)))

    @torch.no_grad()
    def advance(self, num_steps: int) -> None:
        """Take the next steps of all slots.

        Finished clients and dummies go on with batches whose mask is False, which only their own
        slots see: read a client out after its last step.
        """
        steps = self.number + torch.arange(num_steps, device=self.number.device)
        for batches, targets in self._batches(steps):
            if targets is not None:  # no hook is called
                loss = self._move_plainly(batches[0], targets)
            else:
                loss = self._move_by_hook(batches)
            self.total_loss += torch.where(batches[0].mask.any(1), loss.double(), 0.0)
        self.number += num_steps

    def _move_by_hook(self, batches: tuple[StackedBatch, ...]) -> Tensor:
        """Move all slots along the directions of the hook; (slots,) the losses of the step."""
        w0 = {name: self.w0[name] for name in self.trained}
        compute = self._direction if self.takes_all_slots else vmap(self._direction)
        try:
            direction, loss = compute(self.trained, self.frozen, w0, self.memo, batches)
        except RuntimeError as error:
            words = ("vmap", "Batching rule", "transform")  # of messages of torch.func
            if not any(word in str(error) for word in words):
                raise
            first_line = str(error).split("\n")[0]
            raise ExperimentError(
                f"engine vectorized cannot run {type(self.stacked.module).__name__}: {first_line} "
                "Choose execution.engine=loop"
            ) from error
        self._move_along(direction)
        return cast(Tensor, loss)

    def _direction(
        self,
        w: Params,
        frozen: Params,
        w0: Params,
        memo: Params,
        batches: tuple[StackedBatch, ...],
    ) -> tuple[Params, Tensor]:
        """The direction of the hook and the loss of the step, of one client inside `vmap`.

        Of all clients, with a leading axis, for a hook that is marked as stacked.
        """
        first, *second = (batch.for_hook() for batch in batches)
        batch = replace(first, second=second[0]) if second else first
        stacked = self.stacked
        gradient_at = (
            stacked.gradients_of_step()
            if self.takes_all_slots
            else partial(stacked.gradient_at, frozen)
        )
        return direction_and_loss(self.gradient, gradient_at, w, batch, w0, memo)

    def _move_plainly(self, batch: StackedBatch, targets: Targets) -> Tensor:
        """Move all slots along the written-out gradient; (slots,) the losses of the step."""
        assert self.written is not None  # a module that is not written out has a hook
        if self.descent is not None:
            return self.written.losses(self.w, batch.keys, batch.x, targets, self.descent)
        gradients = Gradients(self.written, self.moved)
        loss = self.written.losses(self.w, batch.keys, batch.x, targets, gradients)
        self._move_along(gradients.of_all())
        return loss

    def _move_along(self, direction: Params) -> None:
        assert self.optimizer is not None  # or layers move themselves
        for name, leaf in self.moved.items():  # the optimiser passes over the others
            leaf.grad = along(direction, name, self.gradient)
        self.optimizer.step()

    def _batches(self, steps: Tensor) -> Iterator[tuple[tuple[StackedBatch, ...], Targets | None]]:
        """The batches of each step and, without a hook, the targets of the first.

        Args:
            steps: numbers of the steps, on the device.
        """
        tensors = [t.index_select(1, steps).transpose(0, 1) for t in self.plan.tensors]
        size = self._steps_gathered(tensors[0][0].numel())
        for ids, mask, keys, *weight in zip(*(torch.split(t, size) for t in tensors), strict=True):
            ids_of_batches = ids.flatten(0, 2)
            memory = self._memory_for(ids_of_batches)
            x, y = self.examples.training_batch(ids_of_batches, keys.flatten(), memory)
            x, y = (t.view(*ids.shape, *t.shape[2:]) for t in (x, y))  # (steps, slots, b, B, ...)
            weight = [factors.to(x.dtype) for factors in weight]
            layer_keys = self._layer_keys(keys, ids.shape[-1])
            targets: list[Targets] | list[None] = [None] * len(ids)
            if self.written is not None and not self.calls_hook:
                of_first = [factors[:, :, 0] for factors in weight]
                targets = self.written.targets(y[:, :, 0], mask[:, :, 0], x.dtype, *of_first)
            for s, targets_of_step in enumerate(targets):
                batches = tuple(
                    StackedBatch(
                        x[s, :, b],
                        y[s, :, b],
                        mask[s, :, b],
                        {name: key[s, :, b] for name, key in layer_keys.items()},
                        tuple(factors[s, :, b] for factors in weight),
                    )
                    for b in range(ids.shape[2])
                )
                yield batches, targets_of_step

    def _memory_for(self, ids: Tensor) -> Tensor | None:
        """Memory for the images of ids (batches, B), whose former images are no longer needed.

        Freed memory of this size goes back to the system, which takes a page fault per 4 KB.
        """
        if ids.device.type != "cpu":
            return None
        if self.gathered is None or len(self.gathered) < len(ids):
            shape = (*ids.shape, *self.examples.images.shape[1:])
            self.gathered = self.examples.mean.new_empty(shape)
        return self.gathered[: len(ids)]

    def _steps_gathered(self, num_examples: int) -> int:
        """Steps whose images are gathered at once, for so many examples in a step."""
        examples = self.examples
        num_bytes = num_examples * examples.images.shape[1:].numel() * examples.mean.element_size()
        if examples.device.type == "cpu":
            return max(1, GATHERED_ON_CPU // num_bytes)
        # The kernel that a GPU chooses for a product depends on the alignment of its factors.
        return 1 if num_bytes % ALIGNED else max(1, GATHERED_ON_GPU // num_bytes)

    def _layer_keys(self, keys: Tensor, batch_size: int) -> Params:
        """Keys of the dropout layers; a GPU draws the masks of several steps at once.

        A hook may ask for a loss that is not written out, which draws from the keys.
        """
        layer_keys = dropout_keys(self.stacked.module, keys)
        if self.calls_hook or self.written is None or keys.device.type == "cpu":
            return layer_keys
        return self.written.drawn(layer_keys, self.w, batch_size)


def untrained(block: Block, memory: Params) -> BlockResult:
    """A result to be written into by `train_lanes`: clients without steps keep their models.

    Args:
        memory: That of the models, leaves (K, ...).
    """
    result = BlockResult(memory, np.zeros(len(block.plans)))
    if not all(plan.num_steps for plan in block.plans):
        for name, leaf in block.w0.items():
            result.params[name].copy_(leaf)
    return result


def train_lanes(step: Step, block: Block, plan: StackedPlan, into: BlockResult) -> None:
    """Train the clients of a plan and write their models and losses into `into`.

    A client is read out after its last step, so clients with more steps do not change it, and the
    next client of its lane takes the slot.

    Args:
        step: A step whose slots are free; it is left with the last models in them.
        block: The clients, some of which the plan may leave out.
        plan: Their plans, with as many slots as the step has.
        into: Receives models and losses at the clients' positions.
    """
    step.start(block, plan)
    totals = step.total_loss.new_zeros(len(block.plans))
    num_taken = 0
    for handover in plan.handovers:
        step.advance(handover.step + 1 - num_taken)
        num_taken = handover.step + 1
        done = handover.done
        # A finished client is frozen: momentum, FedProx or SCAFFOLD would still move it.
        for name, leaf in step.w.items():
            done.clients.put(into.params[name], done.slots.of(leaf.detach()))
        done.clients.put(totals, done.slots.of(step.total_loss))
        if handover.following is not None:
            step.load(block, handover.following)
    for k, total in enumerate(totals.tolist()):
        if total:
            into.loss[k] = total / block.plans[k].num_steps


def _put(slots: Params, leaves: Params, rows: Rows) -> None:
    for name, leaf in leaves.items():
        rows.put(slots[name], leaf)


def _elementwise_optimizer(
    training: Training, module: LightningModule, leaves: Params
) -> torch.optim.Optimizer:
    """An optimiser that moves a stack of models as it moves each one."""
    capturable = next(iter(leaves.values())).device.type == "cuda"
    optimizer = training.make_optimizer(module, leaves, capturable)
    if not isinstance(optimizer, ELEMENTWISE):
        raise ExperimentError(
            f"engine vectorized cannot use {type(optimizer).__name__}: it does not step "
            "element by element; known: SGD, Adam, AdamW; choose execution.engine=loop"
        )
    return optimizer

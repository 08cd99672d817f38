"""A chain of layers and cross-entropy over stacked clients, with its gradient written out.

`flray.engines.tracing.write_out` makes one of a module that computes such a chain.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flray.engines.affine import AffineTerm
from flray.engines.chains import backward_through, forward_through, leaves_of, unnested
from flray.engines.stacked_layers import (
    Convolution,
    Dropout,
    Layer,
    Linear,
    MaxPool,
    Sink,
    num_parts,
    sum_of_products,
)
from flray.models.bank import Params
from flray.randomness import keep_mask


@dataclass(frozen=True)
class Targets:
    """What the logits of K clients are compared with; all zero for an example that is padding."""

    share: Tensor  # (K, B, 1) weight of each example in the mean of its client
    labels: Tensor  # (K, B, classes) that weight at the label, zero elsewhere

    @classmethod
    def of(
        cls, y: Tensor, mask: Tensor, num_classes: int, dtype: torch.dtype, *weight: Tensor
    ) -> "Targets":
        """Targets of labels (..., K, B), of which the mask says which are not padding.

        Args:
            weight: (..., K, B) by which losses are multiplied; not given: all count alike.
        """
        kept = mask.to(dtype)
        share = (kept / kept.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        for factors in weight:
            share = share * factors.to(dtype).unsqueeze(-1)
        labels = share.new_zeros(*y.shape, num_classes)
        return cls(share, labels.scatter_(-1, y.unsqueeze(-1), share))


def _channels_last(x: Tensor) -> Tensor:
    """Images (K, B, height, width, channels); other inputs, which only linear layers take, flat."""
    return x.permute(0, 1, 3, 4, 2) if x.dim() == 5 else x.flatten(2)


@dataclass(frozen=True)
class Written:
    """A module's loss over stacked clients, with its gradient: layers, then cross-entropy.

    Leaves have the names and shapes of the module's parameters, with a leading client axis K.

    >>> from flray.engines.tracing import write_out
    >>> from flray.models.mlp200 import Mlp200
    >>> module = Mlp200((1, 8, 8), 10)
    >>> written = write_out(module)
    >>> w = {name: p.detach().expand(2, *p.shape) for name, p in module.named_parameters()}
    >>> written.outputs(w, torch.zeros(2, 5, 1, 8, 8)).shape
    torch.Size([2, 5, 10])
    """

    layers: tuple[Layer, ...]
    num_classes: int
    # By name of a leaf that is a weight, the kind of its layer, which knows how the leaf lies.
    weights: dict[str, type[Linear] | type[Convolution]]

    def in_layout(self, name: str, memory: Tensor) -> Tensor:
        """Contiguous memory of a leaf (K, ...), as a leaf that lies there as products read it."""
        kind = self.weights.get(name)
        if kind is None:
            return memory
        shape = kind.matrix(memory[:0]).shape[1:]
        return kind.leaf(memory.view(len(memory), *shape), memory)

    def laid_out(self, leaves: Params) -> Params:
        """Leaves (K, ...) whose rows share their memory, in a copy that lies as products read it.

        Leaves with a row for each client are returned as they are.
        """
        first = {name: leaf[:1] for name, leaf in leaves.items() if not leaf.stride(0)}
        rows = {
            n: self.in_layout(n, torch.empty(leaf.shape, dtype=leaf.dtype))
            for n, leaf in first.items()
        }
        return leaves | {n: row.copy_(first[n]).expand_as(leaves[n]) for n, row in rows.items()}

    def matrix(self, name: str, leaf: Tensor) -> Tensor:
        """A leaf as its layer moves it: the matrix of a weight, a bias as it is."""
        kind = self.weights.get(name)
        return leaf if kind is None else kind.matrix(leaf)

    @property
    def leaves(self) -> set[str]:
        """Names of the parameters that the loss depends on."""
        return set(leaves_of(self.layers))

    @property
    def is_dense(self) -> bool:
        """True for a chain of linear layers, without convolutions and pools."""
        return not any(isinstance(layer, Convolution | MaxPool) for layer in unnested(self.layers))

    def patch_values(self, w: Mapping[str, Tensor], image_shape: Sequence[int]) -> int:
        """Numbers in the patches of one image that are held while its gradient is computed.

        Patches of all inputs are held together, those of gradients one layer at a time.

        Args:
            w: leaves of one model.
            image_shape: (channels, height, width)
        """
        channels, *size = image_shape
        kept, passing = 0, 0
        for layer in unnested(self.layers):
            if isinstance(layer, Convolution):
                kernel = math.prod(layer.kernel) if layer.has_patches else 0
                out = len(w[layer.weight])
                before, size = size, layer.output_size(size)
                if kept:  # the images themselves have no gradient
                    passing = max(passing, math.prod(before) * kernel * out)
                kept += math.prod(size) * kernel * channels
                channels = out
            elif isinstance(layer, MaxPool):
                size = [side // by for side, by in zip(size, layer.size, strict=True)]
        return kept + passing

    def drawn(self, keys: Params, w: Params, batch_size: int) -> Params:
        """Masks (..., elements) of the dropout layers after linear ones, drawn from keys (...).

        For dropout layers before the first linear one, the keys are returned as they are.
        """
        drawn, width = dict(keys), 0
        for layer in unnested(self.layers):
            if isinstance(layer, Linear):
                width = w[layer.weight].shape[1]
            elif isinstance(layer, Dropout) and width:
                key = keys[layer.key].unsqueeze(-1)
                drawn[layer.key] = keep_mask(key, batch_size * width, layer.p)
        return drawn

    def outputs(self, w: Params, x: Tensor) -> Tensor:
        """Outputs (K, B, outputs) of inputs (K, B, ...), without dropout."""
        y = _channels_last(x)
        for layer in self.layers:
            y, _ = layer.forward(w, {}, y)
        return y

    def targets(
        self, y: Tensor, mask: Tensor, dtype: torch.dtype, *weight: Tensor
    ) -> list[Targets]:
        """The targets of each step, from labels, mask and, if given, weights (steps, K, B)."""
        steps = Targets.of(y, mask, self.num_classes, dtype, *weight)
        return [Targets(*of_step) for of_step in zip(steps.share, steps.labels, strict=True)]

    def losses(self, w: Params, keys: Params, x: Tensor, targets: Targets, sink: Sink) -> Tensor:
        """(K,) the clients' mean losses; the gradients of their parameters go to the sink.

        Args:
            w: leaves (K, ...).
            keys: keys or masks of the dropout layers, by name of the key buffer.
            x: inputs (K, B, ...).
        """
        y, saved = forward_through(self.layers, w, keys, _channels_last(x))
        log_p = torch.log_softmax(y, -1)
        loss = (log_p * targets.labels).sum((1, 2)).neg_()
        dy = log_p.exp_().mul_(targets.share).sub_(targets.labels)
        backward_through(self.layers, w, saved, dy, sink, needs_dx=False)
        return loss

    def gradients(
        self, targets: Targets, w: Params, keys: Params, x: Tensor
    ) -> tuple[Params, Tensor]:
        """The gradients of the leaves in w, (K, ...), and (K,) the clients' mean losses."""
        sink = Gradients(self, w)
        loss = self.losses(w, keys, x, targets, sink)
        return sink.of_all(), loss


@dataclass
class Gradients:
    """A sink that collects the gradients of the leaves in w, in their shapes."""

    written: Written
    w: Params
    collected: Params = field(default_factory=dict)

    def product(self, name: str, matrix: Tensor, inputs: Tensor, dy: Tensor) -> None:
        if name in self.w:
            gradient = sum_of_products(inputs, dy, num_parts(inputs, dy))
            self.collected[name] = self.written.weights[name].leaf(gradient, self.w[name])

    def vector(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        """Collect a gradient that a layer has computed."""
        kind = self.written.weights.get(name)
        if name in self.w:
            self.collected[name] = gradient if kind is None else kind.leaf(gradient, self.w[name])

    def of_all(self) -> Params:
        """Gradients in the order of w; zero where the loss does not depend on a leaf."""
        return {
            name: self.collected[name] if name in self.collected else torch.zeros_like(leaf)
            for name, leaf in self.w.items()
        }


@dataclass(frozen=True)
class Descent:
    """A sink that takes the step of SGD at once: v <- momentum v + g, w <- w - lr v.

    The product that computes the gradient g of a weight adds it to v; without momentum there is no
    v, and the product moves w. Only a gradient that is a sum of several products is computed first.
    An affine term of a hook counts as a part of g. Leaves that are not among the `moved` stay.
    """

    lr: float
    moved: Container[str]
    momentum: float = 0.0
    term: AffineTerm | None = None
    velocity: Params = field(default_factory=dict)  # v of matrices and vectors, made when needed

    def product(self, name: str, matrix: Tensor, inputs: Tensor, dy: Tensor) -> None:
        """Move a weight along inputs^T dy, which is not computed by itself where possible."""
        if name not in self.moved:
            return
        parts = num_parts(inputs, dy)
        if parts > 1:
            self.vector(name, matrix, sum_of_products(inputs, dy, parts))
        elif self.momentum:
            v = self._velocity(name, matrix)
            v.baddbmm_(inputs.transpose(1, 2), dy, beta=self.momentum)
            self._move_along(name, matrix, v)
        else:
            if self.term is not None:
                self.term.move(name, matrix, self.lr)
            matrix.baddbmm_(inputs.transpose(1, 2), dy, alpha=-self.lr)

    def vector(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        """Move a leaf along its gradient."""
        if name not in self.moved:
            return
        if self.momentum:
            gradient = self._velocity(name, leaf).mul_(self.momentum).add_(gradient)
        self._move_along(name, leaf, gradient)

    def _move_along(self, name: str, leaf: Tensor, direction: Tensor) -> None:
        if self.term is not None:
            self.term.add_to(name, direction, leaf)
        leaf.sub_(direction, alpha=self.lr)

    def _velocity(self, name: str, leaf: Tensor) -> Tensor:
        if name not in self.velocity:
            self.velocity[name] = torch.zeros_like(leaf)
        return self.velocity[name]


class WrittenGradient(torch.autograd.Function):
    """Gradients and loss by `Written`, for use inside vmap: its rule gets all clients at once.

    `apply(written, names, *tensors)` takes the names of leaves and dropout keys, then their
    tensors, x, y, mask and, if there are any, weights of one client, and returns the gradient of
    each leaf, then the loss.
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:  # noqa: ARG004  # as torch calls it
        """Never called: gradients are asked for inside `vmap` only."""
        raise AssertionError("the gradient of one client is computed under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing differentiates this."""

    @staticmethod
    def vmap(
        info: Any,  # Any: as torch calls it
        in_dims: tuple[Any, ...],
        written: Written,
        names: tuple[tuple[str, ...], tuple[str, ...]],
        *tensors: Tensor,
    ) -> Any:
        """The gradients of all clients; what does not differ between clients is expanded."""
        stacked = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        num, num_leaves = len(names[0]), len(names[0]) + len(names[1])
        w = dict(zip(names[0], stacked[:num], strict=True))
        keys = dict(zip(names[1], stacked[num:num_leaves], strict=True))
        x, y, mask, *weight = stacked[num_leaves:]
        targets = Targets.of(y, mask, written.num_classes, x.dtype, *weight)
        gradients, loss = written.gradients(targets, w, keys, x)
        outputs = (*gradients.values(), loss)
        return outputs, (0,) * len(outputs)

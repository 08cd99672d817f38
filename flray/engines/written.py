"""Modules whose training step can be written out: a chain of known layers and cross-entropy.

`write_out` traces what the module computes with torch.fx and translates it layer by layer. A module
that computes anything else is not written out, and its engine differentiates it with `vmap`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, cast

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flray.engines.stacked_layers import (
    Convolution,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    Relu,
    Sink,
    num_parts,
    sum_of_products,
)
from flray.models.bank import Params
from flray.models.dropout import KeyedDropout
from flray.randomness import keep_mask

# While torch.fx traces a module, calls of every module of the process go through its tracer.
TRACING = Lock()

# What a user's own code may raise when it is run on placeholders instead of tensors.
NOT_TRACEABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
WITH_WEIGHTS = Linear | Convolution


@dataclass(frozen=True)
class Targets:
    """What cross-entropy compares with; all zero for an example that is padding."""

    share: Tensor  # (K, B, 1) of each example in the mean of its client
    labels: Tensor  # (K, B, classes) that share at the label, zero elsewhere

    @classmethod
    def of(cls, y: Tensor, mask: Tensor, num_classes: int, dtype: torch.dtype) -> "Targets":
        """Of labels (..., B); with leading axes beside the clients', that of several steps."""
        kept = mask.to(dtype)
        share = (kept / kept.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        labels = share.new_zeros(*y.shape, num_classes)
        return cls(share, labels.scatter_(-1, y.unsqueeze(-1), share))


@dataclass(frozen=True)
class Written:
    """A module's loss over stacked clients, with its gradient."""

    layers: tuple[Layer, ...]
    num_classes: int
    weights: dict[str, type[Linear] | type[Convolution]]  # how each leaf that is a weight lies

    def in_layout(self, name: str, leaf: Tensor) -> Tensor:
        """An empty leaf of this shape, its memory in the order in which products read it."""
        kind = self.weights.get(name)
        if kind is None:
            return torch.empty_like(leaf, memory_format=torch.contiguous_format)
        matrix = kind.matrix(torch.empty_like(leaf, memory_format=torch.contiguous_format))
        return kind.leaf(torch.empty_like(matrix, memory_format=torch.contiguous_format), leaf)

    @property
    def leaves(self) -> set[str]:
        """Names of the leaves that the loss depends on."""
        found = [(each.weight, each.bias) for each in self.layers if isinstance(each, WITH_WEIGHTS)]
        return {name for pair in found for name in pair if name is not None}

    def seen_by_sinks(self, w: Params) -> Params:
        """The leaves that the loss depends on, weights as matrices."""
        kinds = self.weights
        return {n: kinds[n].matrix(w[n]) if n in kinds else w[n] for n in w if n in self.leaves}

    @property
    def is_dense(self) -> bool:
        """True for a chain of linear layers."""
        return not any(isinstance(each, Convolution | MaxPool) for each in self.layers)

    def patch_values(self, w: Mapping[str, Tensor], image_shape: Sequence[int]) -> int:
        """Numbers in the patches of one image while its gradient is computed.

        Those of inputs are kept until then, those of the gradient of an output are not.

        Args:
            w: leaves of one model.
            image_shape: (channels, height, width)
        """
        channels, *size = image_shape
        kept, passing = 0, 0
        for layer in self.layers:
            if isinstance(layer, Convolution):
                kernel = math.prod(layer.kernel)
                out = len(w[layer.weight])
                before, size = size, layer.output_size(size)
                if kept:  # the images themselves have no gradient
                    passing = max(passing, math.prod(before) * kernel * out)
                kept += math.prod(size) * kernel * channels
                channels = out
            elif isinstance(layer, MaxPool):
                size = [each // by for each, by in zip(size, layer.size, strict=True)]
        return kept + passing

    def drawn(self, keys: Params, w: Params, batch_size: int) -> Params:
        """What is kept of dropout layers after linear ones, (..., elements), from keys (...).

        A layer before the first linear one keeps its keys.
        """
        found, width = dict(keys), 0
        for layer in self.layers:
            if isinstance(layer, Linear):
                width = w[layer.weight].shape[1]
            elif isinstance(layer, Dropout) and width:
                key = keys[layer.key].unsqueeze(-1)
                found[layer.key] = keep_mask(key, batch_size * width, layer.p)
        return found

    def outputs(self, w: Params, x: Tensor) -> Tensor:
        """Logits (K, B, classes) of images (K, B, channels, height, width), without dropout."""
        return self._forward(w, {}, x)[0]

    def losses(self, w: Params, keys: Params, x: Tensor, targets: Targets, sink: Sink) -> Tensor:
        """(K,) the clients' mean losses; their gradients go into the sink."""
        logits, saved = self._forward(w, keys, x)
        log_p = torch.log_softmax(logits, -1)
        loss = (log_p * targets.labels).sum((1, 2)).neg_()
        dy: Tensor | None = log_p.exp_().mul_(targets.share).sub_(targets.labels)
        first = self._first_with_weights
        for n in range(len(self.layers) - 1, first - 1, -1):
            dy = self.layers[n].backward(w, saved[n], cast(Tensor, dy), sink, n > first)
        return loss

    def _forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, list[Any]]:
        y = x.permute(0, 1, 3, 4, 2)
        saved = []
        for layer in self.layers:
            y, kept = layer.forward(w, keys, y)
            saved.append(kept)
        return y, saved

    @property
    def _first_with_weights(self) -> int:
        return next(n for n, each in enumerate(self.layers) if hasattr(each, "weight"))


@dataclass
class Gradients:
    """A sink that keeps the gradients, shaped as their leaves."""

    written: Written
    w: Params
    found: Params = field(default_factory=dict)

    def product(self, name: str, matrix: Tensor, inputs: Tensor, dy: Tensor) -> None:
        kind = self.written.weights[name]
        gradient = sum_of_products(inputs, dy, num_parts(inputs, dy))
        self.found[name] = kind.leaf(gradient, self.w[name])

    def vector(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        self.found[name] = gradient

    def of_all(self) -> Params:
        """In the order of w; zero where the loss does not depend on a leaf."""
        return {
            name: self.found[name] if name in self.found else torch.zeros_like(leaf)
            for name, leaf in self.w.items()
        }


@dataclass(frozen=True)
class Descent:
    """A sink that takes the step of SGD at once: v <- momentum v + g + decay w, w <- w - lr v.

    The product that computes the gradient g of a weight adds it to v; without momentum there is no
    v, and the product steps w. Only a gradient that is a sum of several products is computed first.
    """

    lr: float
    weight_decay: float
    momentum: float = 0.0
    velocity: Params = field(default_factory=dict)  # v of matrices and vectors, with momentum

    def product(self, name: str, matrix: Tensor, inputs: Tensor, dy: Tensor) -> None:
        parts = num_parts(inputs, dy)
        if parts > 1:
            self.vector(name, matrix, sum_of_products(inputs, dy, parts))
        elif self.momentum:
            v = self.velocity[name]
            v.baddbmm_(inputs.transpose(1, 2), dy, beta=self.momentum)
            self._step(matrix, v)
        else:
            kept = 1 - self.lr * self.weight_decay
            matrix.baddbmm_(inputs.transpose(1, 2), dy, beta=kept, alpha=-self.lr)

    def vector(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        if self.momentum:
            self._step(leaf, self.velocity[name].mul_(self.momentum).add_(gradient))
            return
        if self.weight_decay:
            leaf.mul_(1 - self.lr * self.weight_decay)
        leaf.sub_(gradient, alpha=self.lr)

    def _step(self, leaf: Tensor, v: Tensor) -> None:
        if self.weight_decay:
            v.add_(leaf, alpha=self.weight_decay)
        leaf.sub_(v, alpha=self.lr)


def write_out(module: LightningModule, loss: str) -> Written | None:
    """The written-out form of one of the module's losses, or None if it is not such a chain."""
    if not hasattr(module, loss) or not all(p.requires_grad for p in module.parameters()):
        return None
    with _mode(module, training=True):
        nodes = _trace(_Loss(module, loss))
        if len(nodes) < 5:
            return None
        x, y, *chain, entropy, output = nodes
        is_loss = y.op == "placeholder" and output.args == (entropy,)
        if not is_loss or not _is_cross_entropy(entropy, chain[-1], y):
            return None
        return _Translation(module).of(x, chain)


def write_out_forward(module: LightningModule) -> Written | None:
    """The written-out form of the module's output in evaluation mode."""
    with _mode(module, training=False):
        nodes = _trace(_Forward(module))
        if len(nodes) < 3 or nodes[-1].args != (nodes[-2],):
            return None
        return _Translation(module).of(nodes[0], nodes[1:-1])


@contextmanager
def _mode(module: LightningModule, training: bool) -> Iterator[None]:
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def _trace(computation: nn.Module) -> list[fx.Node]:
    """The nodes of what is computed, none if it cannot be traced."""
    try:
        with TRACING:
            return list(_Tracer().trace(computation).nodes)
    except NOT_TRACEABLE:
        return []


def is_written_out(module: LightningModule) -> bool:
    """True if the module's training step can be written out."""
    return write_out(module, "example_losses") is not None


class _Loss(nn.Module):
    def __init__(self, module: LightningModule, loss: str) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = getattr(self.module, self.loss)((x, y))
        return found


class _Forward(nn.Module):
    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x)
        return output


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, KeyedDropout) or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class _Translation:
    """From the nodes of a trace to layers; None as soon as one is not known."""

    module: LightningModule

    def of(self, x: fx.Node, chain: list[fx.Node]) -> Written | None:
        layers: list[Layer] = []
        before = x
        for node in chain:
            layer = self._layer(node) if _continues(node, before) else None
            if layer is None:
                return None
            layers.extend(layer)
            before = node
        return self._written(_pooled_before_relu(layers))

    def _written(self, layers: list[Layer]) -> Written | None:
        with_weights = [n for n, each in enumerate(layers) if isinstance(each, WITH_WEIGHTS)]
        if not with_weights or any(isinstance(each, Relu) for each in layers[: with_weights[0]]):
            return None  # Relu overwrites its input, which must not be the images
        last = layers[with_weights[-1]]
        names = [each.weight for each in layers if isinstance(each, WITH_WEIGHTS)]
        if not isinstance(last, Linear) or len(set(names)) < len(names) or not _shapes_fit(layers):
            return None
        kinds = {each.weight: type(each) for each in layers if isinstance(each, WITH_WEIGHTS)}
        num_classes = len(dict(self.module.named_parameters())[last.weight])
        return Written(tuple(layers), num_classes, kinds)

    def _layer(self, node: fx.Node) -> list[Layer] | None:
        if node.op == "call_module":
            name = str(node.target).removeprefix("module").removeprefix(".")
            return self._of_module(name, self.module.get_submodule(name))
        if node.target in FUNCTIONS and node.op in ("call_function", "call_method"):
            return FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
        return None

    def _of_module(self, name: str, module: nn.Module) -> list[Layer] | None:
        prefix = f"{name}." if name else ""
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
        if type(module) is nn.Linear:
            return [Linear(f"{prefix}weight", _bias(prefix, module))]
        if type(module) is nn.Conv2d:
            return _convolution(prefix, module)
        if type(module) is nn.MaxPool2d:
            options = (module.kernel_size, module.stride, module.padding, module.dilation)
            return _max_pool(*options, module.ceil_mode, module.return_indices)
        if type(module) is nn.ReLU:
            return [Relu()]
        if type(module) is nn.Flatten:
            return _flatten(module.start_dim, module.end_dim)
        if type(module) is KeyedDropout:
            is_active = module.training and module.p > 0
            return [Dropout(f"{prefix}key", module.p)] if is_active else []
        return [] if type(module) is nn.Identity else None


def _shapes_fit(layers: list[Layer]) -> bool:
    """True if images come before Flatten and vectors after it, as the stacked layers expect."""
    flat = False
    for layer in layers:
        flat = flat or isinstance(layer, Flatten)
        if isinstance(layer, Linear) and not flat:
            return False
        if isinstance(layer, Convolution | MaxPool) and flat:
            return False
    return True


def _continues(node: fx.Node, before: fx.Node) -> bool:
    """True if the node's only tensor is the output of the node before it."""
    return node.all_input_nodes == [before] and node.args[:1] == (before,)


def _bias(prefix: str, module: nn.Linear | nn.Conv2d) -> str | None:
    return None if module.bias is None else f"{prefix}bias"


def _convolution(prefix: str, module: nn.Conv2d) -> list[Layer] | None:
    rows, columns = module.kernel_size
    plain = module.stride == module.dilation == (1, 1) and module.groups == 1
    if not plain or module.padding_mode != "zeros":
        return None
    if module.padding == "same":
        if not rows % 2 or not columns % 2:
            return None
        padding = (rows // 2, columns // 2)
    else:
        padding = (0, 0) if module.padding == "valid" else cast(tuple[int, int], module.padding)
    if padding[0] >= rows or padding[1] >= columns:
        return None
    weight = f"{prefix}weight"
    return [Convolution(weight, _bias(prefix, module), (rows, columns), padding)]


def _max_pool(
    kernel_size: Any,  # Any: as nn.MaxPool2d and F.max_pool2d take them
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> list[Layer] | None:
    size = _pair(kernel_size)
    disjoint = stride is None or _pair(stride) == size
    plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    return [MaxPool(size)] if disjoint and plain and not ceil_mode and not return_indices else None


def _pair(value: Any) -> tuple[int, int]:  # Any: int, or a pair of them
    return (value, value) if isinstance(value, int) else tuple(value)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> list[Layer] | None:
    return [Flatten()] if (start_dim, end_dim) == (1, -1) else None


def _relu(inplace: bool = False) -> list[Layer] | None:  # noqa: ARG001
    return [Relu()]


FUNCTIONS: dict[Any, Callable[..., list[Layer] | None]] = {  # Any: a function or a method's name
    F.relu: _relu,
    torch.relu: _relu,
    "relu": _relu,
    F.max_pool2d: _max_pool,
    torch.flatten: _flatten,
    "flatten": _flatten,
}


def _is_cross_entropy(node: fx.Node, logits: fx.Node, y: fx.Node) -> bool:
    defaults = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None}
    asked = {**defaults, "label_smoothing": 0.0, **node.kwargs}
    plain = asked == {**defaults, "label_smoothing": 0.0, "reduction": "none"}
    return node.target is F.cross_entropy and node.args == (logits, y) and plain


def _pooled_before_relu(layers: list[Layer]) -> list[Layer]:
    """Relu of a maximum is the maximum of relus, gradients too, and has fewer elements."""
    ordered = list(layers)
    for n in range(len(ordered) - 1):
        if isinstance(ordered[n], Relu) and isinstance(ordered[n + 1], MaxPool):
            ordered[n], ordered[n + 1] = ordered[n + 1], ordered[n]
    return ordered

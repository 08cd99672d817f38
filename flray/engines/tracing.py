"""From a module to its written-out form: trace it with torch.fx, translate layer by layer.

A module that computes anything but a chain of known layers and cross-entropy is not translated,
and its engine differentiates it with `vmap`.
"""

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flray.engines.chains import Residual, leaves_of, unnested
from flray.engines.convolutions import WIDEST, DirectConvolution, Form
from flray.engines.stacked_layers import (
    Convolution,
    Dropout,
    Flatten,
    GroupNorm,
    Layer,
    Linear,
    MaxPool,
    Relu,
)
from flray.engines.written import Written
from flray.models.dropout import KeyedDropout
from flray.models.predictor import Predictor

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


def write_out(
    module: LightningModule, form: Form = "patches", classes: bool = False
) -> Written | None:
    """The written-out form of the module's `example_losses`, or None if it is not such a chain.

    None also for a module with frozen parameters, hooks or shared weights. The module is not
    changed. Threads may call it at the same time.

    Args:
        module: A LightningModule.
        form: That of convolutions.
        classes: Targets are one class for each example, with which the loss of a `Predictor` is
            the cross-entropy of its output.

    >>> from flray.models.mlp200 import Mlp200
    >>> written = write_out(Mlp200((1, 8, 8), 10))
    >>> [type(layer).__name__ for layer in written.layers]
    ['Flatten', 'Linear', 'Relu', 'Linear']
    """
    if not hasattr(module, "example_losses") or not all(
        p.requires_grad for p in module.parameters()
    ):
        return None
    with _mode(module, training=True):
        if classes and _has_losses_of_predictor(module):
            return _written_output(module, form)
        nodes = _trace(_Loss(module))
        if len(nodes) < 5:
            return None
        x, y, *chain, entropy, output = nodes
        is_loss = y.op == "placeholder" and output.args == (entropy,)
        if not is_loss or not _is_cross_entropy(entropy, chain[-1], y):
            return None
        return _Translation(module, form).of(x, chain)


def write_out_forward(module: LightningModule, form: Form = "patches") -> Written | None:
    """The written-out form of the module's output in evaluation mode, without dropout.

    None if the output is not such a chain; `form` as in `write_out`.
    """
    with _mode(module, training=False):
        return _written_output(module, form)


def _written_output(module: LightningModule, form: Form) -> Written | None:
    nodes = _trace(_Forward(module))
    if len(nodes) < 3 or nodes[-1].args != (nodes[-2],):
        return None
    return _Translation(module, form).of(nodes[0], nodes[1:-1])


def _has_losses_of_predictor(module: LightningModule) -> bool:
    """True for a `Predictor` whose class defines no loss of its own."""
    names = ("losses", "example_losses")
    return all(getattr(type(module), n, None) is getattr(Predictor, n) for n in names)


@contextmanager
def _mode(module: LightningModule, training: bool) -> Iterator[None]:
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def _trace(computation: nn.Module) -> list[fx.Node]:
    """The nodes of what is computed; none if it cannot be traced."""
    try:
        with TRACING:
            # A copy: what a module writes to its buffers would be left in it.
            return list(_Tracer().trace(copy.deepcopy(computation)).nodes)
    except NOT_TRACEABLE:
        return []


def is_written_out(module: LightningModule) -> bool:
    """True if the module's training step can be written out; its engine then needs no `vmap`."""
    return write_out(module) is not None


class _Loss(nn.Module):
    """A module whose forward is a loss, since torch.fx traces forwards."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Losses (B,) of a batch."""
        losses: Tensor = cast(Any, self.module).example_losses((x, y))  # Any: a user's module
        return losses


class _Forward(nn.Module):
    """A module whose forward is that of another, so that names of layers begin alike in both."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for a batch of images."""
        output: Tensor = self.module(x)
        return output


class _Tracer(fx.Tracer):
    """Traces a module down to torch's layers, and no further into dropout."""

    proxy_buffer_attributes = True  # a loss that writes to a buffer is no chain of layers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True for layers that are translated as a whole."""
        return isinstance(m, KeyedDropout) or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class _Translation:
    """From the nodes of a trace to layers; None as soon as one is not known.

    A node is a layer of the output of the node before it, or adds to it the output of an earlier
    node: then the layers between the two become a `Residual`.
    """

    module: LightningModule
    form: Form = "patches"

    def of(self, x: fx.Node, chain: list[fx.Node]) -> Written | None:
        """The layers from x along the chain."""
        layers: list[Layer] = []
        lengths = {x: 0}  # numbers of layers before the outputs that may be added to a later one
        before = x
        for node in chain:
            if _continues(node, before):
                layer = self._layer(node)
            else:
                start = _start_of_sum(node, before, lengths)
                if start is None:
                    return None
                layer = self._residual(layers[start:])
                # Traces do not tell x + y from x += y, after which x is another tensor.
                lengths = {n: length for n, length in lengths.items() if length < start}
                layers = layers[:start]
            if layer is None:
                return None
            layers.extend(layer)
            lengths[node] = len(layers)
            before = node
        return self._written(layers)

    def _residual(self, layers: list[Layer]) -> list[Layer] | None:
        """x + layers(x); None if the layers overwrite x or do not keep its shape."""
        inside = list(unnested(layers))
        if not inside or any(isinstance(layer, Flatten | MaxPool) for layer in inside):
            return None
        growth = [layer.output_size((0, 0)) for layer in inside if isinstance(layer, Convolution)]
        keeps_size = not any(map(sum, zip(*growth, strict=True)))
        weighted = [layer for layer in inside if isinstance(layer, Linear | Convolution)]
        ends = [(weighted[0].weight, 1), (weighted[-1].weight, 0)] if weighted else []
        widths = {self.module.get_parameter(name).shape[axis] for name, axis in ends}
        keeps_x = not isinstance(inside[0], Relu)
        return [Residual(tuple(layers))] if keeps_x and keeps_size and len(widths) < 2 else None

    def _written(self, layers: list[Layer]) -> Written | None:
        """The written-out form of known layers, unless they break a rule of the stacked ones."""
        leaves, names = dict(self.module.named_parameters()), leaves_of(layers)
        if len(set(names)) < len(names) or not leaves.keys() >= set(names):
            return None  # two layers share a leaf
        if self.form == "fused":
            from flray.engines.fused import fused  # Triton is there for GPUs only

            too_wide = {name for name in names if leaves[name].shape[1:2] > (WIDEST,)}
            layers = fused(layers, too_wide)
        inside = list(unnested(layers))
        weighted = [layer for layer in inside if isinstance(layer, Linear | Convolution)]
        if not weighted or not isinstance(weighted[-1], Linear) or not _shapes_fit(inside):
            return None
        before = inside[: inside.index(weighted[0])]
        if any(isinstance(layer, Relu) for layer in before):
            return None  # Relu overwrites its input, which must not be the images
        kinds = {layer.weight: type(layer) for layer in weighted}
        return Written(tuple(layers), len(leaves[weighted[-1].weight]), kinds)

    def _layer(self, node: fx.Node) -> list[Layer] | None:
        if node.op == "call_module":
            name = str(node.target).removeprefix("module").removeprefix(".")
            return self._of_module(name, self.module.get_submodule(name))
        if node.target in FUNCTIONS and node.op in ("call_function", "call_method"):
            return FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
        return None

    def _of_module(self, name: str, module: nn.Module) -> list[Layer] | None:
        """The layers that a submodule stands for: one, or none for an identity; None: unknown."""
        prefix = f"{name}." if name else ""
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
        if type(module) is nn.Linear:
            return [Linear(f"{prefix}weight", _leaf(prefix, module, "bias"))]
        if type(module) is nn.Conv2d:
            return _convolution(prefix, module, self.form)
        if type(module) is nn.GroupNorm:
            weight, bias = (_leaf(prefix, module, name) for name in ("weight", "bias"))
            return [GroupNorm(weight, bias, module.num_groups, module.eps)]
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
        if isinstance(layer, Convolution | GroupNorm | MaxPool) and flat:
            return False
    return True


def _continues(node: fx.Node, before: fx.Node) -> bool:
    """True if the node's only tensor is the output of the node before it."""
    return node.all_input_nodes == [before] and node.args[:1] == (before,)


def _start_of_sum(node: fx.Node, before: fx.Node, lengths: dict[fx.Node, int]) -> int | None:
    """For the sum of the output before a node and an earlier one, the length up to the latter."""
    is_sum = node.op in ("call_function", "call_method") and node.target in SUMS
    if not is_sum or len(node.args) != 2 or node.kwargs not in ({}, {"alpha": 1}):
        return None
    others = [n for n in node.args if n is not before and isinstance(n, fx.Node)]
    return lengths.get(others[0]) if len(others) == 1 and before in node.args else None


def _leaf(prefix: str, module: nn.Module, name: str) -> str | None:
    return None if getattr(module, name) is None else f"{prefix}{name}"


def _convolution(prefix: str, module: nn.Conv2d, form: Form) -> list[Layer] | None:
    """A convolution with stride 1 and zero padding smaller than its kernel; None: any other."""
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
    kind = DirectConvolution if form == "direct" else Convolution
    return [kind(f"{prefix}weight", _leaf(prefix, module, "bias"), (rows, columns), padding)]


def _max_pool(
    kernel_size: Any,  # Any: as nn.MaxPool2d and F.max_pool2d take them
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> list[Layer] | None:
    """A pool of disjoint windows without padding; None: any other."""
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

SUMS = (operator.add, torch.add, "add")


def _is_cross_entropy(node: fx.Node, logits: fx.Node, y: fx.Node) -> bool:
    """True if a node is the cross-entropy of logits and labels, per example and without options."""
    defaults = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None}
    options = {**defaults, "label_smoothing": 0.0, **node.kwargs}
    plain = options == {**defaults, "label_smoothing": 0.0, "reduction": "none"}
    return node.target is F.cross_entropy and node.args == (logits, y) and plain

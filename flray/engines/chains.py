"""Chains of stacked layers: forward and backward through them, and residual connections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flray.engines.stacked_layers import Layer, Saved, Sink
from flray.models.bank import Params


@dataclass(frozen=True)
class Residual:
    """x + layers(x), whose first layer must leave x as it is."""

    layers: tuple[Layer, ...]

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """A tensor like x, in memory of its own, and what the layers need for `backward`."""
        change, saved = forward_through(self.layers, w, keys, x)
        return change + x, saved

    def backward(
        self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """dy, which passes unchanged, plus the gradient through the layers."""
        dx = backward_through(self.layers, w, saved, dy, sink, needs_dx)
        return None if dx is None else dx.add_(dy)


def forward_through(
    layers: Sequence[Layer], w: Params, keys: Params, x: Tensor
) -> tuple[Tensor, list[Saved]]:
    """The output of layers one after another, and what each of them needs for `backward`."""
    saved = []
    for layer in layers:
        x, needed = layer.forward(w, keys, x)
        saved.append(needed)
    return x, saved


def backward_through(
    layers: Sequence[Layer], w: Params, saved: list[Saved], dy: Tensor, sink: Sink, needs_dx: bool
) -> Tensor | None:
    """The gradient of what the first layer was given, if needed; parameters' go to the sink."""
    first = 0 if needs_dx else next(n for n, layer in enumerate(layers) if leaves_of([layer]))
    for n in range(len(layers) - 1, first - 1, -1):
        dx = layers[n].backward(w, saved[n], dy, sink, needs_dx or n > first)
        if dx is None:
            return None
        dy = dx
    return dy


def unnested(layers: Sequence[Layer]) -> Iterator[Layer]:
    """The layers in the order of `forward`, with those inside of a `Residual` in its place.

    >>> from flray.engines.stacked_layers import Flatten, Relu
    >>> [type(layer).__name__ for layer in unnested([Residual((Flatten(),)), Relu()])]
    ['Flatten', 'Relu']
    """
    for layer in layers:
        yield from unnested(layer.layers) if isinstance(layer, Residual) else (layer,)


def leaves_of(layers: Sequence[Layer]) -> list[str]:
    """Names of the leaves of layers; a name comes twice if two layers share a leaf."""
    kinds = ("weight", "bias")
    names = [getattr(layer, kind, None) for layer in unnested(layers) for kind in kinds]
    return [name for name in names if name is not None]

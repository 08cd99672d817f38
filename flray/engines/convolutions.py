"""Convolutions of stacked clients by the CPU's own kernels, and which form a convolution takes.

`Convolution` is a product of patches with weights. `DirectConvolution` calls the convolution of
torch for one client after another, which is oneDNN's on a CPU.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flray.engines.stacked_layers import Convolution, Saved, Sink
from flray.models.bank import Params


def is_direct(device: str, machine: str | None = None) -> bool:
    """True where convolutions are the CPU's own: on x86, where all shapes are faster so.

    It follows from the kind of device alone, and is a part of what makes two devices of one kind:
    forms agree to rounding, not bit by bit. On ARM no shape of `benchmarks/convolutions.py` is
    faster direct, on x86 every one.

    Args:
        device: "cpu" or "cuda".
        machine: Instruction set of the CPU; None: that of this machine.

    >>> is_direct("cpu", "x86_64"), is_direct("cpu", "aarch64"), is_direct("cuda", "x86_64")
    (True, False, False)
    """
    return device == "cpu" and (machine or platform.machine()) in ("x86_64", "AMD64")


@dataclass(frozen=True)
class DirectConvolution(Convolution):
    """Stride 1, one group: torch's own convolution, client by client. Leaves lie as in a module."""

    @staticmethod
    def matrix(leaf: Tensor) -> Tensor:
        """The leaf itself: no product reads it."""
        return leaf

    @staticmethod
    def leaf(matrix: Tensor, like: Tensor) -> Tensor:  # noqa: ARG004  # as of other layers
        """The leaf itself."""
        return matrix

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """(K, B, out rows, out columns, out), and x for `backward`."""
        images = x.permute(0, 1, 4, 2, 3)  # channels last in memory
        biases = [None] * len(x) if self.bias is None else w[self.bias].unbind()
        of_clients = zip(images, w[self.weight], biases, strict=True)
        y = [torch.conv2d(*of_client, padding=self.padding) for of_client in of_clients]
        return _channels_last(y), images

    def backward(
        self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """The gradient of x, if it is needed; the sink gets those of weight and bias."""
        leaf = w[self.weight]
        geometry = ([1, 1], self.padding, [1, 1], False, [0, 0], 1)
        options = ([leaf.shape[1]], *geometry, [needs_dx, True, self.bias is not None])
        of_clients = zip(dy.permute(0, 1, 4, 2, 3), saved, leaf, strict=True)
        backward = torch.ops.aten.convolution_backward
        gradients = [backward(*of_client, *options) for of_client in of_clients]
        dx, dw, db = zip(*gradients, strict=True)
        sink.vector(self.weight, leaf, torch.stack(dw))
        if self.bias is not None:
            sink.vector(self.bias, w[self.bias], torch.stack(db))
        return _channels_last(dx) if needs_dx else None


def _channels_last(images: Sequence[Tensor]) -> Tensor:
    """(K, B, height, width, channels) of K tensors (B, channels, height, width), contiguous."""
    of_clients = [y.permute(0, 2, 3, 1) for y in images]
    if len(of_clients) == 1:  # often without a copy
        return of_clients[0].contiguous().unsqueeze(0)
    return torch.stack(of_clients)

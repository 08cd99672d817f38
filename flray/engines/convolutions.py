"""Convolutions of stacked clients by the CPU's own kernels, and which form a convolution takes.

`Convolution` is a product of patches with weights. `DirectConvolution` calls the convolution of
torch for one client after another, which is oneDNN's on a CPU. `FusedConvolution`, in a module of
its own, is a kernel for GPUs, of a convolution with the ReLU and the pool that follow it.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flray.engines.stacked_layers import Convolution, Saved, Sink
from flray.models.bank import Params
from flray.models.kernels import compiles_kernels

Form = Literal["patches", "direct", "fused"]
WIDEST = 128  # input channels of a fused convolution: its kernel holds so many in shared memory


def form_of(device: str, dtype: torch.dtype = torch.float32, machine: str | None = None) -> Form:
    """The form of convolutions, which follows from the kind of device and the precision alone.

    It is a part of what makes two devices of one kind: forms agree to rounding, not bit by bit. On
    ARM no shape of `benchmarks/convolutions.py` is faster direct, on x86 every one.

    Args:
        device: "cpu" or "cuda".
        machine: Instruction set of the CPU; None: that of this machine.

    >>> form_of("cpu", machine="x86_64"), form_of("cpu", machine="aarch64")
    ('direct', 'patches')
    """
    if device == "cuda":
        return "fused" if dtype == torch.float32 and compiles_kernels() else "patches"
    return "direct" if (machine or platform.machine()) in ("x86_64", "AMD64") else "patches"


@dataclass(frozen=True)
class DirectConvolution(Convolution):
    """Stride 1, one group: torch's own convolution, client by client."""

    has_patches: ClassVar[bool] = False

    @staticmethod
    def matrix(leaf: Tensor) -> Tensor:
        """(K, out, rows, columns, in) of a weight (K, out, in, rows, columns), channels last."""
        return leaf.permute(0, 1, 3, 4, 2)

    @staticmethod
    def leaf(matrix: Tensor, like: Tensor) -> Tensor:
        """The weight over the same memory; oneDNN takes one channel for the first, not the last."""
        return matrix.permute(0, 1, 4, 2, 3) if like.shape[2] > 1 else matrix.view(like.shape)

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
        sink.vector(self.weight, self.matrix(leaf), self.matrix(torch.stack(dw)))
        if self.bias is not None:
            sink.vector(self.bias, w[self.bias], torch.stack(db))
        return _channels_last(dx) if needs_dx else None


def _channels_last(images: Sequence[Tensor]) -> Tensor:
    """(K, B, height, width, channels) of K tensors (B, channels, height, width), contiguous."""
    of_clients = [y.permute(0, 2, 3, 1) for y in images]
    if len(of_clients) == 1:  # often without a copy
        return of_clients[0].contiguous().unsqueeze(0)
    return torch.stack(of_clients)

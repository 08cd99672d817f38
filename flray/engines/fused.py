"""Convolution, ReLU and max-pool of stacked clients as one kernel each way, for GPUs (Triton).

What `Convolution`, `Relu` and `MaxPool` compute one after another, without patches and without the
images between them in memory: a forward kernel writes the pooled maxima and which entry of its
window each is; both kernels of the gradient read these two. Sums are taken in an order that does
not depend on the number of clients.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from flray.engines.chains import Residual
from flray.engines.fused_kernels import forward, input_gradient, weight_gradient
from flray.engines.stacked_layers import (
    Convolution,
    GroupNorm,
    Layer,
    MaxPool,
    Relu,
    Saved,
    Sink,
    padded,
)
from flray.models.bank import Params

# Tiles of the kernels, measured on an H200; with few channels a tile has several kernel entries.
BLOCK = 32  # channels at a time, where there are as many
FORWARD = {"BM": 64, "BK": BLOCK, "num_warps": 4, "num_stages": 2}
FORWARD_OF_FEW = {"BM": 128, "BK": BLOCK, "num_warps": 4, "num_stages": 1}
INPUTS = {"BM": 64, "BK": BLOCK, "num_warps": 4, "num_stages": 1}
WEIGHTS = {"BM": 64, "BK": BLOCK, "num_warps": 4, "num_stages": 1}
WEIGHTS_OF_FEW = {"BM": 16, "BK": BLOCK, "num_warps": 2, "num_stages": 1}
# A GPU computes few sums by few of its cores, however long they are: they are taken in parts.
PART = 64  # windows
ENOUGH_TILES = 8  # of a client, from which on its sums are not divided


@dataclass(frozen=True)
class FusedConvolution(Convolution):
    """A convolution, ReLU if asked for, and the maxima of disjoint windows: one layer of a chain.

    Only for float32 on a GPU.
    """

    pool: tuple[int, int] = (1, 1)
    relu: bool = False

    has_patches: ClassVar[bool] = False

    @staticmethod
    def matrix(leaf: Tensor) -> Tensor:
        """(K, out, rows x columns x in) of a weight (K, out, in, rows, columns)."""
        return leaf.permute(0, 1, 3, 4, 2).flatten(2)

    @staticmethod
    def leaf(matrix: Tensor, like: Tensor) -> Tensor:
        """A weight (K, out, in, rows, columns) of a matrix (K, out, rows x columns x in)."""
        num, outputs, inputs, rows, columns = like.shape
        return matrix.view(num, outputs, rows, columns, inputs).permute(0, 1, 4, 2, 3)

    def followed_by(self, layer: Layer) -> "FusedConvolution | None":
        """The convolution with one more layer taken into it; None: it cannot be."""
        if isinstance(layer, Relu):
            return replace(self, relu=True)
        if isinstance(layer, MaxPool) and self.pool == (1, 1):
            fits = math.prod(layer.size) in (1, 2, 4, 8, 16)
            return replace(self, pool=layer.size) if fits else None
        return None

    def output_size(self, size: Sequence[int]) -> list[int]:
        """Height and width of what comes out of the pool."""
        sides = zip(super().output_size(size), self.pool, strict=True)
        return [side // by for side, by in sides]

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """(K, B, rows, columns, out) of the pool; padded images and winners for `backward`."""
        kernel = self.matrix(w[self.weight])
        out = (*self.output_size(x.shape[2:4]), kernel.shape[1])
        x = padded(x, self.padding)
        y = x.new_empty(*x.shape[:2], *out)
        winners = torch.empty_like(y, dtype=torch.uint8)
        num_windows = y.shape[1] * out[0] * out[1]
        tile = _tile(out[2])
        settings = FORWARD_OF_FEW if x.shape[4] % BLOCK else FORWARD
        num_tiles = _ceil(num_windows * math.prod(self.pool), settings["BM"])
        bias = None if self.bias is None else w[self.bias].contiguous()
        forward[len(x) * num_tiles, _ceil(out[2], tile)](
            *(x, kernel, bias, y, winners, kernel.stride(0), num_windows),
            **self._sizes(x, y),
            RELU=self.relu,
            BN=tile,
            **settings,
        )
        return y, (x, winners)

    def backward(
        self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """The gradient of x, if it is needed; the sink gets those of weight and bias."""
        x, winners = saved
        dy, leaf = dy.contiguous(), w[self.weight]
        dx = self._of_inputs(leaf, x, winners, dy) if needs_dx else None
        dw, db = self._of_weights(x, winners, dy)
        sink.vector(self.weight, self.matrix(leaf), dw)
        if self.bias is not None:
            sink.vector(self.bias, w[self.bias], db)
        return dx

    def _of_inputs(self, leaf: Tensor, x: Tensor, winners: Tensor, dy: Tensor) -> Tensor:
        """The gradient of images, without their padding."""
        turned = leaf.permute(0, 2, 3, 4, 1).flatten(2)  # (K, in, rows columns out)
        rows, columns = (
            side - 2 * around for side, around in zip(x.shape[2:4], self.padding, strict=True)
        )
        dx = x.new_empty(*x.shape[:2], rows, columns, x.shape[4])
        num_pixels = x.shape[1] * rows * columns
        tile = _tile(x.shape[4])
        num_tiles = _ceil(num_pixels, INPUTS["BM"])
        input_gradient[len(x) * num_tiles, _ceil(x.shape[4], tile)](
            *(dy, winners, turned, dx, turned.stride(0), num_pixels),
            **self._sizes(dx, dy),
            PADDING=self.padding,
            BN=tile,
            **INPUTS,
        )
        return dx

    def _of_weights(self, x: Tensor, winners: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of matrix and bias."""
        entries, outputs = math.prod(self.kernel) * x.shape[4], dy.shape[4]
        num_windows = math.prod(dy.shape[1:4])
        tile = _tile(outputs)
        num_tiles = _ceil(entries, BLOCK) * _ceil(outputs, tile)
        parts = 1 if num_tiles >= ENOUGH_TILES else _ceil(num_windows, PART)
        dw = x.new_empty(len(x), parts, outputs, entries)
        db = x.new_empty(len(x), parts, outputs)
        weight_gradient[len(x), num_tiles, parts](
            *(x, dy, winners, dw, db, num_windows, _ceil(num_windows, parts)),
            **self._sizes(x, dy),
            BN=tile,
            **(WEIGHTS_OF_FEW if x.shape[4] % BLOCK else WEIGHTS),
        )
        return (dw[:, 0], db[:, 0]) if parts == 1 else (dw.sum(1), db.sum(1))

    def _sizes(self, x: Tensor, y: Tensor) -> dict[str, object]:
        """What all kernels are compiled for: rows, columns and channels, and their precision.

        TF32 takes products on tensor cores as they come; else three of them have the digits of
        float32.
        """
        precision = "tf32" if torch.get_float32_matmul_precision() == "high" else "tf32x3"
        sizes = {"X": tuple(x.shape[2:]), "Y": tuple(y.shape[2:])}
        return {**sizes, "KERNEL": self.kernel, "POOL": self.pool, "PRECISION": precision}


def fused(layers: Sequence[Layer], too_wide: Container[str] = ()) -> list[Layer]:
    """The same chain, with ReLU and max-pool after a convolution taken into it, in either order.

    A pool with a window of other than 1, 2, 4, 8 or 16 entries stays a layer of its own. So do
    convolutions before a group norm, which gain nothing, and those whose weights are `too_wide`.
    """
    chain: list[Layer] = []
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        last = chain[-1] if chain else None
        stays = isinstance(following, GroupNorm) or getattr(layer, "weight", None) in too_wide
        if isinstance(layer, Residual):
            layer = Residual(tuple(fused(layer.layers, too_wide)))
        elif type(layer) is Convolution and not stays:
            layer = FusedConvolution(layer.weight, layer.bias, layer.kernel, layer.padding)
        elif isinstance(last, FusedConvolution):
            joined = last.followed_by(layer)
            if joined is not None:
                chain.pop()
                layer = joined
        chain.append(layer)
    return chain


def _tile(channels: int) -> int:
    """Channels that a program takes: 16, 32 or 64."""
    return 16 if channels <= 16 else 32 if channels <= 32 else 64


def _ceil(number: int, by: int) -> int:
    return -(-number // by)

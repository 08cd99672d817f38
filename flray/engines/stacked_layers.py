"""Layers over stacked clients, forward and backward written out as batched matrix products.

K clients, each with weights of its own; images are (K, B, height, width, channels), so that a
convolution is one product of patches with weights. A leaf keeps the shape its module gives it, with
a leading client axis; only its strides are chosen (`Written.in_layout`), so that the product reads
it as it lies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from flray.models.bank import Params
from flray.randomness import keep_mask

Saved = Any  # Any: what a layer's backward needs of its forward, known to that layer alone


class Sink(Protocol):
    """Where the gradients of the parameters go: collected, or applied to the weights at once."""

    def product(self, name: str, matrix: Tensor, inputs: Tensor, dy: Tensor) -> None:
        """The gradient inputs^T dy of a weight, whose matrix (K, n, m) is a view of the leaf."""
        ...

    def vector(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        """The gradient of a leaf as its layer moves it: of a bias, or of the matrix of a weight."""
        ...


class Layer(Protocol):
    """A layer of K stacked models; weights and dropout keys are looked up by name.

    `forward` and `backward` are called in pairs, the latter in reverse order of layers. Only the
    forward of `Relu` overwrites the tensor it is given.
    """

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """The output for x (K, B, ...), and what `backward` needs of it."""
        ...

    def backward(
        self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """The gradient of x, if needed, from that of the output; parameters' go to the sink."""
        ...


# A GPU computes a product of few elements by few of its cores, however long the sums are.
FEW_ELEMENTS = 8192
LONG_SUM = 1024
MOST_PARTS = 32


def num_parts(inputs: Tensor, dy: Tensor) -> int:
    """The number of parts in which a GPU sums up inputs^T dy, the gradient of a weight.

    1 on a CPU, and where the product has enough elements to keep a GPU busy. It divides the rows.
    """
    num = inputs.shape[1]
    is_thin = inputs.shape[2] * dy.shape[2] <= FEW_ELEMENTS and num >= LONG_SUM
    return math.gcd(num, MOST_PARTS) if is_thin and inputs.device.type == "cuda" else 1


def sum_of_products(inputs: Tensor, dy: Tensor, parts: int) -> Tensor:
    """inputs^T dy as (K, n, m), its sums over rows taken in `parts`, which divide the rows.

    >>> sum_of_products(torch.ones(1, 4, 2), torch.ones(1, 4, 3), parts=2)
    tensor([[[4., 4., 4.],
             [4., 4., 4.]]])

    Args:
        inputs: (K, rows, n).
        dy: (K, rows, m).
    """
    if parts == 1:
        return torch.bmm(inputs.transpose(1, 2), dy)
    num_clients, num_rows = inputs.shape[:2]
    shape = (num_clients * parts, num_rows // parts, -1)
    products = torch.bmm(inputs.reshape(shape).transpose(1, 2), dy.reshape(shape))
    return products.view(num_clients, parts, *products.shape[1:]).sum(1)


@dataclass(frozen=True)
class Linear:
    """Inputs (K, B, in) times weights, plus bias: (K, B, out)."""

    weight: str
    bias: str | None

    @staticmethod
    def matrix(leaf: Tensor) -> Tensor:
        """(K, in, out) of a weight (K, out, in)."""
        return leaf.transpose(1, 2)

    @staticmethod
    def leaf(matrix: Tensor, like: Tensor) -> Tensor:  # noqa: ARG004  # a convolution needs it
        """A weight (K, out, in) of a matrix (K, in, out), over the same memory."""
        return matrix.transpose(1, 2)

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """(K, B, out), and x itself for `backward`."""
        return _affine(w, self.bias, x, self.matrix(w[self.weight])), x

    def backward(
        self, w: Params, saved: Tensor, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """dy W, if it is needed; the sink gets x^T dy and the sum of dy over examples."""
        matrix = self.matrix(w[self.weight])
        dx = _times_transposed(dy, matrix) if needs_dx else None  # before w is stepped
        sink.product(self.weight, matrix, saved, dy)
        if self.bias is not None:
            sink.vector(self.bias, w[self.bias], dy.sum(1))
        return dx


@dataclass(frozen=True)
class Convolution:
    """Stride 1, one group: patches (K, B pixels, kernel) times weights.

    Images are (K, B, height, width, channels); `padding` rows and columns of zeros lie around them.
    """

    weight: str
    bias: str | None
    kernel: tuple[int, int]
    padding: tuple[int, int]

    has_patches: ClassVar[bool] = True  # held in memory until the gradient is computed

    @staticmethod
    def matrix(leaf: Tensor) -> Tensor:
        """(K, rows x columns x in, out) of a weight (K, out, in, rows, columns)."""
        return leaf.permute(0, 3, 4, 2, 1).flatten(1, 3)

    @staticmethod
    def leaf(matrix: Tensor, like: Tensor) -> Tensor:
        """A weight (K, out, in, rows, columns) of a matrix (K, rows x columns x in, out)."""
        num, outputs, inputs, rows, columns = like.shape
        return matrix.view(num, rows, columns, inputs, outputs).permute(0, 4, 3, 1, 2)

    def output_size(self, size: Sequence[int]) -> list[int]:
        """Height and width of what comes out of images of height and width `size`."""
        grown = zip(size, self.kernel, self.padding, strict=True)
        return [side + 2 * around - k + 1 for side, k, around in grown]

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """(K, B, out rows, out columns, out), and the patches for `backward`."""
        patches = _patches(padded(_once(x), self.padding), self.kernel)
        patches = patches.expand(len(x), *patches.shape[1:])
        y = _affine(w, self.bias, patches.flatten(1, 3), self.matrix(w[self.weight]))
        return y.view(*patches.shape[:4], -1), patches.flatten(1, 3)

    def backward(
        self, w: Params, saved: Tensor, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """dy convolved with the turned kernel, if it is needed; the sink gets patches^T dy."""
        dx = self._input_gradient(w[self.weight], dy) if needs_dx else None
        by_pixel = dy.flatten(1, 3)
        sink.product(self.weight, self.matrix(w[self.weight]), saved, by_pixel)
        if self.bias is not None:
            sink.vector(self.bias, w[self.bias], by_pixel.sum(1))
        return dx

    def _input_gradient(self, leaf: Tensor, dy: Tensor) -> Tensor:
        """The convolution of dy with the kernel turned by 180 degrees."""
        outside = (self.kernel[0] - 1 - self.padding[0], self.kernel[1] - 1 - self.padding[1])
        patches = _patches(padded(dy, outside), self.kernel)
        turned = leaf.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)  # (K, rows cols out, in)
        return torch.bmm(patches.flatten(1, 3), turned).view(*patches.shape[:4], -1)


@dataclass(frozen=True)
class Relu:
    """max(x, 0), in the memory of x."""

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """x with negative entries set to 0 in place, and the same for `backward`."""
        y = x.clamp_(min=0)  # x is the output of the layer before and nobody else's
        return y, y

    def backward(self, w: Params, saved: Tensor, dy: Tensor, sink: Sink, needs_dx: bool) -> Tensor:
        """dy where the output was positive, else 0."""
        dx: Tensor = torch.ops.aten.threshold_backward(dy, saved, 0)
        return dx


@dataclass(frozen=True)
class GroupNorm:
    """Images standardised by example and group of channels, times weight, plus bias.

    y = w z + b with z = (x - m) r; m is the mean of the n numbers of a group, v their variance, and
    r = 1 / sqrt(v + eps).

    >>> w = {"w": torch.tensor([[1.0, 1.0, 2.0, 2.0]]), "b": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}
    >>> x = torch.tensor([3.0, 5.0, 1.0, 9.0]).view(1, 1, 1, 1, 4)
    >>> GroupNorm("w", "b", groups=2, eps=0.0).forward(w, {}, x)[0].flatten()
    tensor([-1.,  1., -2., 11.])
    """

    weight: str | None
    bias: str | None
    groups: int
    eps: float

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """y, in memory of its own, and x, m, r and w r for `backward`."""
        x = self._by_group(x)  # (K, B, height, width, groups, channels of a group)
        v, m = torch.var_mean(x, (2, 3, 5), correction=0, keepdim=True)
        r = (v + self.eps).rsqrt_()
        wr = r if self.weight is None else r * self._of_channels(w[self.weight])
        b = 0.0 if self.bias is None else self._of_channels(w[self.bias])
        return torch.addcmul(b - m * wr, x, wr).flatten(4), (x, m, r, wr)

    def backward(
        self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool
    ) -> Tensor | None:
        """r (w dy - mean(w dy) - z mean(w dy z)), with means over a group, if it is needed.

        The sink gets the sums of dy z and dy over examples and pixels.
        """
        x, m, r, wr = saved
        dy = self._by_group(dy)
        sum_dy = dy.sum((2, 3), keepdim=True)  # (K, B, 1, 1, groups, channels of a group)
        sum_dyz = ((dy * x).sum((2, 3), keepdim=True) - m * sum_dy) * r
        if self.weight is not None:
            sink.vector(self.weight, w[self.weight], sum_dyz.sum(1).flatten(1))
        if self.bias is not None:
            sink.vector(self.bias, w[self.bias], sum_dy.sum(1).flatten(1))
        if not needs_dx:
            return None
        n = math.prod(x.shape[axis] for axis in (2, 3, 5))
        slope = (wr * sum_dyz).sum(5, keepdim=True) * r / -n
        offset = (wr * sum_dy).sum(5, keepdim=True) / -n - m * slope
        return torch.addcmul(offset, x, slope).addcmul_(dy, wr).flatten(4)

    def _by_group(self, values: Tensor) -> Tensor:
        return values.view(*values.shape[:-1], self.groups, -1)

    def _of_channels(self, leaf: Tensor) -> Tensor:
        """(K, 1, 1, 1, groups, channels of a group) of a leaf (K, channels)."""
        return self._by_group(leaf)[:, None, None, None]


@dataclass(frozen=True)
class MaxPool:
    """Maxima of disjoint windows of images (K, B, height, width, channels).

    Rows and columns that do not fill a window are left out, as torch does.
    """

    size: tuple[int, int]

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """The maxima, and which entries they are for `backward`."""
        images = x.flatten(0, 1).permute(0, 3, 1, 2)  # channels last in memory
        y, winners = F.max_pool2d(images, self.size, return_indices=True)
        return _channels_last(y, len(x)), (images, winners)

    def backward(self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool) -> Tensor:
        """dy at the entries that were maxima, else 0; to the same bits on both devices."""
        images, winners = saved
        if dy.device.type == "cuda":  # windows are disjoint, so entries are written once
            num, channels, height, width = images.shape
            dx = dy.new_zeros(num, height * width, channels)
            dx.scatter_(1, winners.permute(0, 2, 3, 1).flatten(1, 2), dy.view(num, -1, channels))
            return dx.view(*dy.shape[:2], height, width, channels)
        dx = torch.ops.aten.max_pool2d_with_indices_backward(
            dy.flatten(0, 1).permute(0, 3, 1, 2),
            images,
            self.size,
            self.size,
            [0, 0],
            [1, 1],
            False,
            winners,
        )
        return _channels_last(dx, len(dy))


@dataclass(frozen=True)
class Flatten:
    """Images to vectors, in the order channels, rows, columns that weights after it expect."""

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """(K, B, values) of images; vectors are returned as they are."""
        if x.dim() == 3:
            return x, None
        channels_first = x.permute(0, 1, 4, 2, 3)
        return channels_first.flatten(2), channels_first.shape

    def backward(self, w: Params, saved: Saved, dy: Tensor, sink: Sink, needs_dx: bool) -> Tensor:
        """dy in the shape and memory layout of the images."""
        if saved is None:
            return dy
        return dy.view(saved).permute(0, 1, 3, 4, 2).contiguous()


@dataclass(frozen=True)
class Dropout:
    """`KeyedDropout`, whose masks count elements in the order channels, rows, columns."""

    key: str
    p: float

    def forward(self, w: Params, keys: Params, x: Tensor) -> tuple[Tensor, Saved]:
        """x / (1 - p) where the mask keeps it, else 0; and the mask for `backward`."""
        images = x.dim() == 5
        shape = x.permute(0, 1, 4, 2, 3).shape if images else x.shape
        keep = keys[self.key]
        if keep.dim() == 1:  # keys, and not what was drawn from them
            keep = keep_mask(keep[:, None], shape[1:].numel(), self.p)
        keep = keep.view(shape)
        keep = keep.permute(0, 1, 3, 4, 2) if images else keep
        return self._kept(x, keep), keep

    def backward(self, w: Params, saved: Tensor, dy: Tensor, sink: Sink, needs_dx: bool) -> Tensor:
        """dy / (1 - p) where the mask kept x, else 0."""
        return self._kept(dy, saved)

    def _kept(self, x: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, x / (1 - self.p), 0.0)


def _affine(w: Params, bias: str | None, x: Tensor, matrix: Tensor) -> Tensor:
    """x matrix + bias, (K, rows, m), by the fastest product for how the weights lie in memory."""
    if matrix.stride(-1) != 1 and x.device.type == "cpu":  # a leaf as its module has it
        columns = _once(x).transpose(1, 2).contiguous().expand(len(x), -1, -1)
        y = torch.bmm(matrix.transpose(1, 2), columns).transpose(1, 2)
        return y if bias is None else y.add_(w[bias][:, None, :])
    if bias is None:
        return torch.bmm(x, matrix)
    return torch.baddbmm(w[bias][:, None, :], x, matrix)


def _once(x: Tensor) -> Tensor:
    """x itself; (1, ...) of an input that is expanded, because all models share it."""
    return x if x.stride(0) else x[:1]


def _times_transposed(dy: Tensor, matrix: Tensor) -> Tensor:
    """dy matrix^T as (matrix dy^T)^T, which moves the small factor instead of the weights.

    On some CPUs oneDNN takes over products with a transposed second factor, with its own threads.
    Tensor cores take dy matrix^T itself, since a batch may have any number of examples.
    """
    if dy.device.type == "cuda" and torch.get_float32_matmul_precision() == "high":
        return torch.bmm(dy, matrix.transpose(1, 2))
    product = torch.bmm(matrix, dy.transpose(1, 2).contiguous())
    return product.transpose(1, 2).contiguous()


def padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """Images (K, B, height, width, channels) with zeros around them, contiguous."""
    rows, columns = padding
    return F.pad(x, (0, 0, columns, columns, rows, rows)) if rows or columns else x.contiguous()


def _patches(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """(K, B, out rows, out columns, kernel x channels): what a kernel sees at each pixel.

    >>> _patches(torch.arange(9.0).view(1, 1, 3, 3, 1), (2, 2))[0, 0, 0]
    tensor([[0., 1., 3., 4.],
            [1., 2., 4., 5.]])
    """
    num, batch, rows, columns, channels = x.shape
    shape = (num, batch, rows - kernel[0] + 1, columns - kernel[1] + 1)
    image, row, column = rows * columns * channels, columns * channels, channels
    # A row of the kernel is contiguous in memory: columns x channels.
    view = x.as_strided(
        (*shape, kernel[0], kernel[1] * channels),
        (batch * image, image, row, column, row, 1),
        x.storage_offset(),
    )
    return _copied(view).reshape(*shape, -1)


def _copied(view: Tensor) -> Tensor:
    """A contiguous copy; a GPU moves 16 bytes at a time if all strides allow it."""
    width = 16 // view.element_size()
    steps = (*view.stride()[:-1], view.shape[-1], view.storage_offset())
    if view.device.type == "cpu" or any(step % width for step in steps):
        return view.contiguous()
    wide: Tensor = view.view(torch.complex128)
    return wide.contiguous().view(view.dtype)


def _channels_last(images: Tensor, num_clients: int) -> Tensor:
    """(K, B, height, width, channels) of K B images in channels-last memory."""
    last = images.permute(0, 2, 3, 1)
    return last.reshape(num_clients, -1, *last.shape[1:])

"""Kernels in Triton of a convolution, ReLU and max-pool of stacked clients, forward and backward.

Images are (K, B, rows, columns, channels); a *window* is an output of the pool, its *entries* are
the outputs of the convolution that it is the maximum of. Sizes in capitals are compiled in: X and Y
are (rows, columns, channels) of inputs and outputs, BM x BN the tile of a program, whose sums run
over BK kernel entries at a time.
"""

import triton
import triton.language as tl

NOBODY = tl.constexpr(255)  # the winner of a window whose maximum ReLU set to 0


@triton.jit
def forward(
    x,
    w,
    bias,  # or None
    y,
    winners,
    w_stride,
    num_windows,
    X: tl.constexpr,
    Y: tl.constexpr,
    KERNEL: tl.constexpr,
    POOL: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of windows x output channels of one client."""
    WINDOW: tl.constexpr = POOL[0] * POOL[1]
    CHANNELS: tl.constexpr = X[2]
    ENTRIES: tl.constexpr = KERNEL[0] * KERNEL[1] * CHANNELS
    tiles = tl.cdiv(num_windows * WINDOW, BM)
    k = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * (BM // WINDOW)
    x += k * (num_windows // (Y[0] * Y[1])) * (X[0] * X[1] * X[2])
    m = tl.arange(0, BM)
    corner = _corner(first + m // WINDOW, m % WINDOW, num_windows, X, Y, POOL)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    w += k * w_stride
    of_channel = tl.where(n < Y[2], n, 0) * ENTRIES
    sums = tl.zeros((BM, BN), tl.float32)
    if CHANNELS % BK == 0:
        for entry in range(KERNEL[0] * KERNEL[1]):
            offset = (entry // KERNEL[1] * X[1] + entry % KERNEL[1]) * CHANNELS
            for start in tl.static_range(0, CHANNELS, BK):
                c = start + tl.arange(0, BK)
                a = tl.load(x + offset + corner[:, None] + c[None, :])
                kernel = tl.load(w + entry * CHANNELS + of_channel[None, :] + c[:, None])
                sums = tl.dot(a, kernel, sums, input_precision=PRECISION)
    else:
        for start in range(0, ENTRIES, BK):
            q = start + tl.arange(0, BK)
            a = tl.load(x + corner[:, None] + _offset(q, X, KERNEL)[None, :])
            is_entry = (q < ENTRIES)[:, None]
            kernel = tl.load(w + of_channel[None, :] + q[:, None], mask=is_entry, other=0.0)
            sums = tl.dot(a, kernel, sums, input_precision=PRECISION)
    if bias is not None:
        sums += tl.load(bias + k * Y[2] + n, mask=n < Y[2], other=0.0)[None, :]
    if WINDOW > 1:
        in_windows = tl.reshape(sums, (BM // WINDOW, WINDOW, BN))
        is_number = in_windows == in_windows
        best, winner = tl.max(
            tl.where(is_number, in_windows, float("-inf")), 1, return_indices=True
        )
        best = tl.where(tl.sum(is_number.to(tl.int32), 1) == WINDOW, best, float("nan"))
    else:
        best, winner = sums, tl.zeros((BM, BN), tl.int32)
    if RELU:
        winner = tl.where(best <= 0, NOBODY, winner)
        best = tl.where(best <= 0, 0.0, best)
    window = first + tl.arange(0, BM // WINDOW)
    at = (k * num_windows + window)[:, None] * Y[2] + n[None, :]
    mask = (window < num_windows)[:, None] & (n < Y[2])[None, :]
    tl.store(y + at, best, mask=mask)
    tl.store(winners + at, winner.to(tl.uint8), mask=mask)


@triton.jit
def _corner(window, entry, num_windows, X: tl.constexpr, Y: tl.constexpr, POOL: tl.constexpr):
    """Where in images (B, H, W, C) the patch of an entry of a window begins; 0: no such window."""
    b, row, column = window // (Y[0] * Y[1]), window // Y[1] % Y[0], window % Y[1]
    row, column = row * POOL[0] + entry // POOL[1], column * POOL[1] + entry % POOL[1]
    return tl.where(window < num_windows, ((b * X[0] + row) * X[1] + column) * X[2], 0)


@triton.jit
def _offset(q, X: tl.constexpr, KERNEL: tl.constexpr):
    """Where in images, from the corner of a patch, kernel entry q lies; 0 beyond the last one."""
    row, column_and_channel = q // (KERNEL[1] * X[2]), q % (KERNEL[1] * X[2])
    return tl.where(row < KERNEL[0], row * X[1] * X[2] + column_and_channel, 0)


@triton.jit
def input_gradient(
    dy,
    winners,
    w,
    dx,
    w_stride,
    num_pixels,
    X: tl.constexpr,
    Y: tl.constexpr,
    KERNEL: tl.constexpr,
    PADDING: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of pixels x input channels of one client: dy convolved with the turned kernel."""
    CHANNELS: tl.constexpr = Y[2]
    ENTRIES: tl.constexpr = KERNEL[0] * KERNEL[1] * CHANNELS
    tiles = tl.cdiv(num_pixels, BM)
    k = (tl.program_id(0) // tiles).to(tl.int64)
    m = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    of_client = k * (num_pixels // (X[0] * X[1])) * (Y[0] * Y[1] * Y[2])
    dy += of_client
    winners += of_client
    w += k * w_stride
    b = m // (X[0] * X[1])
    i, j = m // X[1] % X[0] + PADDING[0], m % X[1] + PADDING[1]
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    of_channel = tl.where(c < X[2], c, 0) * ENTRIES
    sums = tl.zeros((BM, BN), tl.float32)
    if CHANNELS % BK == 0:
        for entry in range(KERNEL[0] * KERNEL[1]):
            row, column = i - entry // KERNEL[1], j - entry % KERNEL[1]
            inside = (row >= 0) & (row < Y[0] * POOL[0]) & (column >= 0)
            inside = inside & (column < Y[1] * POOL[1]) & (m < num_pixels)
            window = (b * Y[0] + row // POOL[0]) * Y[1] + column // POOL[1]
            of_window = tl.where(inside, window * CHANNELS, 0)
            in_window = (row % POOL[0]) * POOL[1] + column % POOL[1]
            in_window = tl.where(inside, in_window, NOBODY - 1).to(tl.uint8)
            for start in tl.static_range(0, CHANNELS, BK):
                n = start + tl.arange(0, BK)
                at = of_window[:, None] + n[None, :]
                won = tl.load(winners + at) == in_window[:, None]
                a = tl.where(won, tl.load(dy + at), 0.0)
                kernel = tl.load(w + entry * CHANNELS + of_channel[None, :] + n[:, None])
                sums = tl.dot(a, kernel, sums, input_precision=PRECISION)
    else:
        for start in range(0, ENTRIES, BK):
            q = start + tl.arange(0, BK)
            entry, n = q // CHANNELS, q % CHANNELS
            row, column = (
                i[:, None] - (entry // KERNEL[1])[None, :],
                j[:, None] - (entry % KERNEL[1])[None, :],
            )
            inside = (row >= 0) & (row < Y[0] * POOL[0]) & (column >= 0)
            inside = (
                inside
                & (column < Y[1] * POOL[1])
                & (m < num_pixels)[:, None]
                & (q < ENTRIES)[None, :]
            )
            window = (b[:, None] * Y[0] + row // POOL[0]) * Y[1] + column // POOL[1]
            at = window * CHANNELS + n[None, :]
            in_window = (row % POOL[0]) * POOL[1] + column % POOL[1]
            won = tl.load(winners + at, mask=inside, other=NOBODY) == in_window.to(tl.uint8)
            a = tl.where(won, tl.load(dy + at, mask=inside, other=0.0), 0.0)
            is_entry = (q < ENTRIES)[:, None]
            kernel = tl.load(w + of_channel[None, :] + q[:, None], mask=is_entry, other=0.0)
            sums = tl.dot(a, kernel, sums, input_precision=PRECISION)
    at = (k * num_pixels + m)[:, None] * X[2] + c[None, :]
    tl.store(dx + at, sums, mask=(m < num_pixels)[:, None] & (c < X[2])[None, :])


@triton.jit
def weight_gradient(
    x,
    dy,
    winners,
    dw,
    db,
    num_windows,
    part_size,
    X: tl.constexpr,
    Y: tl.constexpr,
    KERNEL: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of kernel entries x output channels of one client, summed over a part of its windows.

    Programs of the first entries also sum dy itself, the gradient of the bias.
    """
    WINDOW: tl.constexpr = POOL[0] * POOL[1]
    CHANNELS: tl.constexpr = X[2]
    ENTRIES: tl.constexpr = KERNEL[0] * KERNEL[1] * CHANNELS
    k, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    tiles_n = tl.cdiv(Y[2], BN)
    tile_q = tl.program_id(1) // tiles_n
    x += k * (num_windows // (Y[0] * Y[1])) * (X[0] * X[1] * X[2])
    dy += k * num_windows * Y[2]
    winners += k * num_windows * Y[2]
    if CHANNELS % BK == 0:  # one entry of the kernel: offsets are contiguous
        of_kernel = tile_q // (CHANNELS // BK)
        x += (of_kernel // KERNEL[1] * X[1] + of_kernel % KERNEL[1]) * CHANNELS
        offset = tile_q % (CHANNELS // BK) * BK + tl.arange(0, BK)
    else:
        offset = _offset(tile_q * BK + tl.arange(0, BK), X, KERNEL)
    n = tl.program_id(1) % tiles_n * BN + tl.arange(0, BN)
    sums = tl.zeros((BN, BK), tl.float32)
    of_bias = tl.zeros((BN,), tl.float32)
    for start in range(0, part_size, BM):
        window = part * part_size + start + tl.arange(0, BM)
        valid = (window < num_windows) & (start + tl.arange(0, BM) < part_size)
        at = tl.where(valid, window, 0)[:, None] * Y[2] + n[None, :]
        is_entry = valid[:, None] & (n < Y[2])[None, :]
        winner = tl.load(winners + at, mask=is_entry, other=NOBODY)
        g = tl.load(dy + at, mask=is_entry, other=0.0)
        of_bias += tl.sum(tl.where(winner == NOBODY, 0.0, g), 0)
        for in_window in tl.static_range(WINDOW):
            corner = _corner(window, in_window, num_windows, X, Y, POOL)
            a = tl.load(x + corner[:, None] + offset[None, :])
            here = tl.where(winner == in_window, g, 0.0)
            sums = tl.dot(tl.trans(here), a, sums, input_precision=PRECISION)
    row = tl.num_programs(2) * k + part
    q = tile_q * BK + tl.arange(0, BK)
    at = (row * Y[2] + n)[:, None] * ENTRIES + q[None, :]
    tl.store(dw + at, sums, mask=(n < Y[2])[:, None] & (q < ENTRIES)[None, :])
    if tile_q == 0:
        tl.store(db + row * Y[2] + n, of_bias, mask=n < Y[2])

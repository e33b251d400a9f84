"""Convolutions that cuDNN is slow at, as Triton kernels: those of kernel size 1, and the first one, of three colours.

Both are small matrix products of pixels that are read in place. We do not use cuBLAS for two reasons: no pixel is
copied first; and cuBLAS's bfloat16 products leave part of their result unwritten in a process that may use only a share
of the GPU (NVIDIA MPS; seen with CUDA 13.0 on an H200).

Sums over many rows are split and finished in a second small kernel: no atomics, so always the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from efcil.network.fast.operations import SHORTEST

_MANY_PROGRAMS = 264  # two for every multiprocessor of a large card
_ROWS_PER_SPLIT = 512
_MOST_SPLITS = 1024


ABSENT, WHOLE, HALVED = 0, 1, 2


def kind(other: Tensor | None, like: Tensor) -> int:
    """Return whether a second gradient is absent, as large as the first, or of every other row and column."""
    if other is None:
        return ABSENT
    return WHOLE if other.shape == like.shape else HALVED


@triton.jit
def halved(pixel, H, W):
    """Return which pixels are on even rows and columns, and which pixel of the halved map each of those is."""
    column = pixel % W
    row = pixel // W % H
    there = (row % 2 == 0) & (column % 2 == 0)
    return there, (pixel // (W * H) * ((H + 1) // 2) + row // 2) * ((W + 1) // 2) + column // 2


@triton.jit
def _seen(x, row, k, rows, K, H, W, HO, WO, stride, padding, side: tl.constexpr):
    """Return the values that pixels `row` of an HO x WO map read at positions `k` of their window in the H x W map.

    A window of side 1 is a pixel, and `k` a channel; a larger one is of three colours, and `k` (down, across, colour).
    """
    image = (row // (WO * HO)).to(tl.int64)[:, None]
    line = (row // WO % HO * stride - padding)[:, None]
    column = (row % WO * stride - padding)[:, None]
    inside = (row < rows)[:, None] & (k < K)[None, :]
    if side == 1:
        return tl.load(x + ((image * H + line) * W + column) * K + k[None, :], inside, other=0.0)
    line += (k // 3 // side)[None, :]
    column += (k // 3 % side)[None, :]
    inside = inside & (line >= 0) & (line < H) & (column >= 0) & (column < W)
    return tl.load(x + ((image * H + line) * W + column) * 3 + (k % 3)[None, :], inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "H", "W", "HO", "WO", "stride", "padding"])
def _product(
    x, w, b, y, rows, H, W, HO, WO, stride, padding, K, N, by_k, by_n,
    side: tl.constexpr, HAS_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        left = _seen(x, row, k, rows, K, H, W, HO, WO, stride, padding, side)
        right = tl.load(w + k[:, None] * by_k + n[None, :] * by_n, (k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_B:
        total = tl.maximum(total + tl.load(b + n, n < N, other=0.0)[None, :], 0.0)
    place = y + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, total.to(y.dtype.element_ty), (row < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["rows", "per_split", "H", "W", "HO", "WO", "stride", "padding"])
def _partial_weight(
    g, x, part, rows, per_split, H, W, HO, WO, stride, padding, K, N,
    side: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    start = split * per_split
    stop = tl.minimum(start + per_split, rows)
    total = tl.zeros([BN, BK], tl.float32)
    for first in range(start, stop, BM):
        row = first + tl.arange(0, BM)
        a = tl.load(g + row.to(tl.int64)[:, None] * N + n[None, :], (row < stop)[:, None] & (n < N)[None, :], other=0.0)
        b = _seen(x, row, k, stop, K, H, W, HO, WO, stride, padding, side)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    tl.store(part + (split * N + n)[:, None] * K + k[None, :], total, (n < N)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _add_parts(part, y, n, splits, BS: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BS, BLOCK], tl.float32)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        place = part + split[:, None] * n + offset[None, :]
        total += tl.load(place, (split < splits)[:, None] & (offset < n)[None, :], other=0.0)
    tl.store(y + offset, tl.sum(total, 0).to(y.dtype.element_ty), offset < n)


@triton.jit(do_not_specialize=["rows", "H", "W"])
def _masked_product(
    g, a, o, w, y, rows, H, W, K, N: tl.constexpr, OTHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    total = tl.zeros([BM, BK], tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        inside = (row < rows)[:, None] & (n < N)[None, :]
        place = row[:, None] * N + n[None, :]
        value = tl.load(g + place, inside, other=0.0).to(tl.float32)
        if OTHER == 1:
            value += tl.load(o + place, inside, other=0.0).to(tl.float32)
        if OTHER == 2:
            there, pixel = halved(row, H, W)
            source = o + pixel[:, None] * N + n[None, :]
            value += tl.load(source, inside & there[:, None], other=0.0).to(tl.float32)
        value = tl.where(tl.load(a + place, inside, other=0.0) > 0, value, 0.0).to(g.dtype.element_ty)
        weight = tl.load(w + n[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(value, weight, total, input_precision="ieee")
    place = y + row.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(place, total.to(y.dtype.element_ty), (row < rows)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["n", "H", "W", "HO", "WO", "stride", "padding"])
def _gather_windows(p, y, n, H, W, HO, WO, stride, padding, side: tl.constexpr, BLOCK: tl.constexpr):
    """Add up, for every value of an image, what all windows that cover its pixel have for it."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    colour = offset % 3
    column = offset // 3 % W + padding
    line = offset // 3 // W % H + padding
    image = (offset // 3 // W // H).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for down in tl.static_range(side):
        for across in tl.static_range(side):
            top, left = line - down, column - across
            there = inside & (top >= 0) & (left >= 0) & (top % stride == 0) & (left % stride == 0)
            there = there & (top // stride < HO) & (left // stride < WO)
            place = (image * HO + top // stride) * WO + left // stride
            total += tl.load(p + (place * side * side + down * side + across) * 3 + colour, there, other=0.0).to(
                tl.float32
            )
    tl.store(y + offset, total, inside)


@triton.jit
def _descend(x, g, y, n, length, shortest, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * n
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        slope = tl.load(g + start + offset, offset < n, other=0.0)
        squares += slope * slope
    norm = tl.sqrt(tl.sum(squares, 0))
    factor = length / tl.maximum(norm, shortest)
    for first in range(0, n, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        inside = offset < n
        slope = tl.load(g + start + offset, inside, other=0.0)
        value = tl.load(x + start + offset, inside, other=0.0) - slope * factor
        tl.store(x + start + offset, value, inside)
        tl.store(y + start + offset, value.to(y.dtype.element_ty), inside)


@triton.jit
def _turn(w, y, N, K, taps, BN: tl.constexpr, BK: tl.constexpr):
    tap = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    value = tl.load(w + (n[:, None] * taps + tap) * K + k[None, :], inside, other=0.0)
    place = y + (k[:, None] * taps + taps - 1 - tap) * N + n[None, :]
    tl.store(place, tl.trans(value), (k < K)[:, None] & (n < N)[None, :])


def _tile(size: int) -> int:
    """Return the side of a tile for `size` rows or columns; matrix units want at least 16."""
    return max(16, min(64, triton.next_power_of_2(size)))


def dense(x: Tensor) -> Tensor:
    """Return a tensor in dense channels-last order; the tensor itself if it already is."""
    return x.contiguous(memory_format=torch.channels_last)


def _multiply(
    x: Tensor,
    weight: Tensor,
    strides: tuple[int, int],
    outputs: int,
    side: int = 1,
    stride: int = 1,
    padding: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the product of the windows of `x` and a matrix (k, outputs) stored in `weight` with `strides`."""
    batch, channels, height, width = x.shape
    size = [(length + 2 * padding - side) // stride + 1 for length in (height, width)]
    out = torch.empty(batch, *size, outputs, device=x.device, dtype=x.dtype)
    rows, k = batch * size[0] * size[1], channels * side * side
    tiles = (128, 128 if outputs >= 128 else _tile(outputs))
    if triton.cdiv(rows, tiles[0]) * triton.cdiv(outputs, tiles[1]) < _MANY_PROGRAMS:
        tiles = (64, _tile(outputs))
    _product[(triton.cdiv(rows, tiles[0]), triton.cdiv(outputs, tiles[1]))](
        x, weight, weight if bias is None else bias, out, rows, height, width, *size, stride, padding, k, outputs,
        *strides, side, bias is not None, *tiles, _tile(k), num_warps=8 if tiles == (128, 128) else 4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def _weight_gradient(gradient: Tensor, x: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """Return the gradient (outputs, inputs, side, side) of the weight of a convolution, from that of its output."""
    gradient, x = dense(gradient), dense(x)
    batch, outputs, high, wide = gradient.shape
    k, rows = x.shape[1] * side * side, batch * high * wide
    per_split = max(_ROWS_PER_SPLIT, 64 * triton.cdiv(rows, 64 * _MOST_SPLITS))
    splits, tiles = triton.cdiv(rows, per_split), (_tile(outputs), _tile(k))
    part = torch.empty(splits, outputs, k, device=x.device, dtype=torch.float32)
    _partial_weight[(splits, triton.cdiv(outputs, tiles[0]), triton.cdiv(k, tiles[1]))](
        gradient, x, part, rows, per_split, *x.shape[2:], high, wide, stride, padding, k, outputs, side, 64, *tiles,
        num_warps=4,
    )  # fmt: skip
    out = torch.empty(outputs, side, side, x.shape[1], device=x.device, dtype=x.dtype)
    _add_parts[(triton.cdiv(out.numel(), 64),)](part, out, out.numel(), splits, 64, 64)
    return out.permute(0, 3, 1, 2)


def stem(images: Tensor, weight: Tensor, stride: int, padding: int, bias: Tensor | None) -> Tensor:
    """See operations.stem."""
    outputs, inputs, side, _ = weight.shape
    across = (1, inputs * side * side)
    return _multiply(dense(images), dense(weight), across, outputs, side, stride, padding, bias)


def stem_weight(gradient: Tensor, images: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """See operations.stem_weight."""
    return _weight_gradient(gradient, images, side, stride, padding)


def stem_input(
    gradient: Tensor,
    activation: Tensor,
    other: Tensor | None,
    weight: Tensor,
    size: Sequence[int],
    stride: int,
    padding: int,
) -> Tensor:
    """See operations.stem_input. What every window has for its pixels is rounded to the type of the gradient."""
    gradient, activation, weight = dense(gradient), dense(activation), dense(weight)
    o = gradient if other is None else dense(other)
    batch, outputs, high, wide = gradient.shape
    side = weight.shape[2]
    rows, k = batch * high * wide, 3 * side * side
    part = torch.empty(rows, k, device=gradient.device, dtype=gradient.dtype)
    width = _tile(k)
    _masked_product[(triton.cdiv(rows, 128), triton.cdiv(k, width))](
        gradient, activation, o, weight, part, rows, high, wide, k, outputs, kind(other, gradient), 128,
        _tile(outputs), width, num_warps=4, num_stages=1,
    )  # fmt: skip  # one stage: three operands of float32 in flight would not fit the shared memory
    out = torch.empty(batch, *size, 3, device=gradient.device, dtype=torch.float32)
    _gather_windows[(triton.cdiv(out.numel(), 512),)](
        part, out, out.numel(), *size, high, wide, stride, padding, side, 512, num_warps=4
    )
    return out.permute(0, 3, 1, 2)


def descend(images: Tensor, gradient: Tensor, working: Tensor, length: float) -> None:
    """See operations.descend; all three are dense channels-last tensors."""
    n = images[0].numel()
    _descend[(len(images),)](images, gradient, working, n, length, SHORTEST, 1024, num_warps=4)


def project(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """See operations.project."""
    outputs, inputs = weight.shape[:2]
    return _multiply(dense(x), weight.flatten(1).contiguous(), (1, inputs), outputs, stride=stride)


def project_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """See operations.project_input."""
    inputs = weight.shape[1]
    return _multiply(dense(gradient), weight.flatten(1).contiguous(), (inputs, 1), inputs)


def project_weight(gradient: Tensor, x: Tensor, stride: int) -> Tensor:
    """See operations.project_weight."""
    return _weight_gradient(gradient, x, 1, stride, 0)


def turn(weight: Tensor, into: Tensor) -> None:
    """See operations.turn; both are channels-last."""
    n, k, high, wide = weight.shape
    tiles = (_tile(n), _tile(k))
    grid = (high * wide, triton.cdiv(n, tiles[0]), triton.cdiv(k, tiles[1]))
    _turn[grid](weight, into, n, k, high * wide, *tiles, num_warps=4)

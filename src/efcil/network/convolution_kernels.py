"""Convolutions that cuDNN is slow at, as Triton kernels: those of kernel size 1, and the first one, of three colours.

Both are small matrix products of pixels that are read where they lie. They are ours, and not cuBLAS's, for two reasons:
no pixel is copied first; and cuBLAS's bfloat16 products leave part of their result unwritten in a process that may use
only a share of the GPU (NVIDIA MPS; seen with CUDA 13.0 on an H200).

Sums over many rows are split and finished in a second small kernel: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MANY_PROGRAMS = 264  # two for every multiprocessor of a large card
_ROWS_PER_SPLIT = 512
_MOST_SPLITS = 1024


@triton.jit
def _source(row, H, W, HO, WO, stride):
    """Return which pixel of an H x W map pixel `row` of the HO x WO one is made from."""
    column = row % WO
    line = row // WO % HO
    return ((row // (WO * HO)).to(tl.int64) * H + line * stride) * W + column * stride


@triton.jit(do_not_specialize=["rows", "H", "W", "HO", "WO", "stride"])
def _product(
    x, w, y, rows, H, W, HO, WO, stride, K, N, by_k, by_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    source = _source(row, H, W, HO, WO, stride)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a = tl.load(x + source[:, None] * K + k[None, :], (row < rows)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(w + k[:, None] * by_k + column[None, :] * by_n, (k < K)[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = y + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, total.to(y.dtype.element_ty), (row < rows)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["rows", "per_split", "H", "W", "HO", "WO", "stride"])
def _partial_weight(
    g, x, part, rows, per_split, H, W, HO, WO, stride, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
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
        source = _source(row, H, W, HO, WO, stride)
        b = tl.load(x + source[:, None] * K + k[None, :], (row < stop)[:, None] & (k < K)[None, :], other=0.0)
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


def _added(part: Tensor, out: Tensor) -> Tensor:
    """Write the sum of the parts (splits, ...) into `out`."""
    splits, size = len(part), out.numel()
    _add_parts[(triton.cdiv(size, 64),)](part, out, size, splits, 64, 64)
    return out


@triton.jit
def _patch(x, row, k, rows, K, H, W, HO, WO, stride, padding, side: tl.constexpr):
    """Return what output pixels `row` see at places `k` (down, across, colour) of their side x side window."""
    column = row % WO
    line = row // WO % HO
    down = line[:, None] * stride - padding + (k // 3 // side)[None, :]
    across = column[:, None] * stride - padding + (k // 3 % side)[None, :]
    seen = (down >= 0) & (down < H) & (across >= 0) & (across < W) & (row < rows)[:, None] & (k < K)[None, :]
    pixel = ((row // (WO * HO)).to(tl.int64)[:, None] * H + down) * W + across
    return tl.load(x + pixel * 3 + (k % 3)[None, :], seen, other=0.0)


@triton.jit(do_not_specialize=["rows", "H", "W", "HO", "WO", "stride", "padding"])
def _stem(
    x, w, b, y, rows, H, W, HO, WO, stride, padding, N, side: tl.constexpr, K: tl.constexpr,
    HAS_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a = _patch(x, row, k, rows, K, H, W, HO, WO, stride, padding, side)
        weight = tl.load(w + n[None, :] * K + k[:, None], (k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(a, weight, total, input_precision="ieee")
    if HAS_B:
        total = tl.maximum(total + tl.load(b + n, n < N, other=0.0)[None, :], 0.0)
    place = y + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, total.to(y.dtype.element_ty), (row < rows)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["rows", "per_split", "H", "W", "HO", "WO", "stride", "padding"])
def _partial_stem_weight(
    g, x, part, rows, per_split, H, W, HO, WO, stride, padding, N, side: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
        b = _patch(x, row, k, stop, K, H, W, HO, WO, stride, padding, side)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    tl.store(part + (split * N + n)[:, None] * K + k[None, :], total, (n < N)[:, None] & (k < K)[None, :])


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


def _per_split(rows: int) -> int:
    """Return how many rows are added up together: whole tiles, and not too many parts to keep."""
    return max(_ROWS_PER_SPLIT, 64 * triton.cdiv(rows, 64 * _MOST_SPLITS))


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _multiply(x: Tensor, stride: int, size: tuple[int, int], weight: Tensor, by_k: int, by_n: int, n: int) -> Tensor:
    """Return the product of the pixels that `stride` leaves of `x` and a matrix (k, n) with the given strides."""
    batch, k, height, width = x.shape
    out = torch.empty(batch, *size, n, device=x.device, dtype=x.dtype)
    rows = batch * size[0] * size[1]
    tiles = (128, min(128, 2 * _tile(n))) if n >= 128 else (128, _tile(n))
    if triton.cdiv(rows, tiles[0]) * triton.cdiv(n, tiles[1]) < _MANY_PROGRAMS:
        tiles = (64, _tile(n))
    grid = (triton.cdiv(rows, tiles[0]), triton.cdiv(n, tiles[1]))
    _product[grid](
        x, weight, out, rows, height, width, *size, stride, k, n, by_k, by_n, *tiles, _tile(k),
        num_warps=8 if tiles[0] == 128 else 4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def project(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """See operations.project."""
    x, weight = _dense(x), weight.flatten(1).contiguous()
    size = (triton.cdiv(x.shape[2], stride), triton.cdiv(x.shape[3], stride))
    return _multiply(x, stride, size, weight, 1, weight.shape[1], weight.shape[0])


def project_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """See operations.project_input."""
    gradient, weight = _dense(gradient), weight.flatten(1).contiguous()
    size = (gradient.shape[2], gradient.shape[3])
    return _multiply(gradient, 1, size, weight, weight.shape[1], 1, weight.shape[1])


def project_weight(gradient: Tensor, x: Tensor, stride: int) -> Tensor:
    """See operations.project_weight."""
    gradient, x = _dense(gradient), _dense(x)
    batch, n, high, wide = gradient.shape
    k, rows = x.shape[1], batch * high * wide
    per_split = _per_split(rows)
    splits = triton.cdiv(rows, per_split)
    part = torch.empty(splits, n, k, device=x.device, dtype=torch.float32)
    tiles = (_tile(n), _tile(k))
    grid = (splits, triton.cdiv(n, tiles[0]), triton.cdiv(k, tiles[1]))
    _partial_weight[grid](
        gradient, x, part, rows, per_split, *x.shape[2:], high, wide, stride, k, n, 64, *tiles, num_warps=4
    )
    return _added(part, torch.empty(n, k, 1, 1, device=x.device, dtype=x.dtype))


def turn(weight: Tensor, into: Tensor) -> None:
    """See operations.turn; both are channels-last."""
    n, k, high, wide = weight.shape
    tiles = (_tile(n), _tile(k))
    grid = (high * wide, triton.cdiv(n, tiles[0]), triton.cdiv(k, tiles[1]))
    _turn[grid](weight, into, n, k, high * wide, *tiles, num_warps=4)


def stem(images: Tensor, weight: Tensor, stride: int, padding: int, bias: Tensor | None) -> Tensor:
    """See operations.stem."""
    images, weight = _dense(images), _dense(weight)
    batch, _, height, width = images.shape
    n, _, side, _ = weight.shape
    high, wide = ((size + 2 * padding - side) // stride + 1 for size in (height, width))
    out = torch.empty(batch, high, wide, n, device=images.device, dtype=images.dtype)
    rows, tile = batch * high * wide, _tile(n)
    _stem[(triton.cdiv(rows, 128), triton.cdiv(n, tile))](
        images, weight, weight if bias is None else bias, out, rows, height, width, high, wide, stride, padding, n,
        side, 3 * side * side, bias is not None, 128, tile, 32, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def stem_weight(gradient: Tensor, images: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """See operations.stem_weight."""
    gradient, images = _dense(gradient), _dense(images)
    batch, n, high, wide = gradient.shape
    k, rows = 3 * side * side, batch * high * wide
    per_split = _per_split(rows)
    splits = triton.cdiv(rows, per_split)
    part = torch.empty(splits, n, k, device=images.device, dtype=torch.float32)
    tile = _tile(n)
    _partial_stem_weight[(splits, triton.cdiv(n, tile), triton.cdiv(k, 32))](
        gradient, images, part, rows, per_split, *images.shape[2:], high, wide, stride, padding, n,
        side, k, 64, tile, 32, num_warps=4,
    )  # fmt: skip
    out = torch.empty(n, side, side, 3, device=images.device, dtype=images.dtype)
    return _added(part, out).permute(0, 3, 1, 2)

"""The operations of operations.py as Triton kernels, for CUDA devices.

All activations are dense channels-last tensors, so a tensor is a row-major matrix (batch * h * w, channels).
Reductions are split over rows and finished in a second small kernel: no atomics, so always the same bits. Arguments
that take many values, such as numbers of rows, are not specialised on: a multiple of 16 does not trigger a compilation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from efcil.network.fast.convolution_kernels import (
    dense,
    descend,
    halved,
    kind,
    project,
    project_input,
    project_weight,
    stem,
    stem_input,
    stem_weight,
    turn,
)

__all__ = [
    "adam",
    "batch_statistics",
    "bias_relu",
    "descend",
    "mask",
    "max_pool",
    "normalise_backward",
    "normalise_relu",
    "pool",
    "pool_mask",
    "project",
    "project_input",
    "project_weight",
    "sgd",
    "stem",
    "stem_input",
    "stem_weight",
    "turn",
    "unpool",
]

# Measured on an H200 for the shapes of a ResNet-18 at batch 256.
_BLOCK = 2048
_FINISHED_CHANNELS = 4


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


@triton.jit
def _bias_relu(x, r, b, y, n, C: tl.constexpr, HAS_R: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    value = tl.load(x + offset, inside, other=0.0).to(tl.float32) + tl.load(b + offset % C)
    if HAS_R:
        value += tl.load(r + offset, inside, other=0.0).to(tl.float32)
    tl.store(y + offset, tl.maximum(value, 0.0).to(y.dtype.element_ty), inside)


def bias_relu(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """See operations.bias_relu; works in place on `x`, which the caller owns."""
    x = dense(x)
    r = x if residual is None else dense(residual)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    _bias_relu[grid](x, r, bias, x, x.numel(), x.shape[1], residual is not None, _BLOCK, num_warps=8)
    return x


@triton.jit
def _mask(g, a, o, y, n, H, W, C: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    value = tl.load(g + offset, inside, other=0.0).to(tl.float32)
    if OTHER == 1:
        value += tl.load(o + offset, inside, other=0.0).to(tl.float32)
    if OTHER == 2:
        there, pixel = halved(offset // C, H, W)
        value += tl.load(o + pixel * C + offset % C, inside & there, other=0.0).to(tl.float32)
    active = tl.load(a + offset, inside, other=0.0) > 0
    tl.store(y + offset, tl.where(active, value, 0.0).to(y.dtype.element_ty), inside)


def mask(gradient: Tensor, activation: Tensor, other: Tensor | None = None) -> Tensor:
    """See operations.mask; works in place on `gradient`, which the caller owns."""
    gradient, activation = dense(gradient), dense(activation)
    o = gradient if other is None else dense(other)
    _, channels, height, width = gradient.shape
    grid = (triton.cdiv(gradient.numel(), _BLOCK),)
    _mask[grid](
        gradient, activation, o, gradient, gradient.numel(), height, width, channels, kind(other, gradient), _BLOCK,
        num_warps=8,
    )  # fmt: skip
    return gradient


@triton.jit
def _pool(a, y, area, C, inverse, BC: tl.constexpr):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < C
    total = tl.zeros([BC], tl.float32)
    for position in range(0, area):
        total += tl.load(a + (row * area + position) * C + channel, inside, other=0.0).to(tl.float32)
    tl.store(y + row * C + channel, total * inverse, inside)


def pool(activation: Tensor) -> Tensor:
    """See operations.pool."""
    activation = dense(activation)
    batch, channels, height, width = activation.shape
    out = torch.empty(batch, channels, device=activation.device, dtype=torch.float32)
    area = height * width
    _pool[(batch, triton.cdiv(channels, 128))](activation, out, area, channels, 1.0 / area, 128, num_warps=4)
    return out


@triton.jit
def _pool_mask(g, a, y, n, area, C, inverse, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    source = offset // (area * C) * C + offset % C
    value = tl.load(g + source, inside, other=0.0) * inverse
    active = tl.load(a + offset, inside, other=0.0) > 0
    tl.store(y + offset, tl.where(active, value, 0.0).to(y.dtype.element_ty), inside)


def pool_mask(gradient: Tensor, activation: Tensor) -> Tensor:
    """See operations.pool_mask."""
    activation, gradient = dense(activation), gradient.contiguous()
    out = torch.empty_like(activation)
    channels, area = activation.shape[1], activation.shape[2] * activation.shape[3]
    grid = (triton.cdiv(out.numel(), 1024),)
    _pool_mask[grid](gradient, activation, out, out.numel(), area, channels, 1.0 / area, 1024, num_warps=4)
    return out


@triton.jit
def _max_pool(x, y, places, n, H, W, HO, WO, C: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    channel, pixel = offset % C, offset // C
    line, column, image = pixel // WO % HO * 2 - 1, pixel % WO * 2 - 1, pixel // (WO * HO)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32)
    for tap in tl.static_range(9):
        row, place = line + tap // 3, column + tap % 3
        there = inside & (row >= 0) & (row < H) & (place >= 0) & (place < W)
        source = ((image * H + row) * W + place) * C + channel
        value = tl.load(x + source, there, other=-float("inf")).to(tl.float32)
        chosen = tl.where(value > largest, tap, chosen)
        largest = tl.maximum(value, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + offset, largest.to(y.dtype.element_ty), inside)
    tl.store(places + offset, chosen.to(tl.uint8), inside)


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """See operations.max_pool; the second result says which of the nine pixels of a window it was."""
    x = dense(x)
    batch, channels, height, width = x.shape
    high, wide = (height + 1) // 2, (width + 1) // 2
    out = torch.empty(batch, high, wide, channels, device=x.device, dtype=x.dtype).permute(0, 3, 1, 2)
    places = torch.empty_like(out, dtype=torch.uint8)
    grid = (triton.cdiv(out.numel(), 1024),)
    _max_pool[grid](x, out, places, out.numel(), height, width, high, wide, channels, 1024, num_warps=4)
    return out, places


@triton.jit
def _unpool(g, o, p, places, y, n, H, W, HO, WO, C: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    channel, pixel = offset % C, offset // C
    line, column, image = pixel // W % H + 1, pixel % W + 1, pixel // (W * H)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(9):
        top, left = line - tap // 3, column - tap % 3
        there = inside & (top >= 0) & (left >= 0) & (top % 2 == 0) & (left % 2 == 0)
        there = there & (top // 2 < HO) & (left // 2 < WO)
        window = (image * HO + top // 2) * WO + left // 2
        source = window * C + channel
        # Loads depend on the pixel alone, not on what was chosen there: so they are of several channels at once.
        chosen = tl.load(places + source, there, other=9).to(tl.int32) == tap
        chosen = chosen & (tl.load(p + source, there, other=0.0) > 0)
        value = tl.load(g + source, there, other=0.0).to(tl.float32)
        if OTHER == 1:
            value += tl.load(o + source, there, other=0.0).to(tl.float32)
        if OTHER == 2:
            even, halved_pixel = halved(window, HO, WO)
            value += tl.load(o + halved_pixel * C + channel, there & even, other=0.0).to(tl.float32)
        total += tl.where(chosen, value, 0.0)
    tl.store(y + offset, total.to(y.dtype.element_ty), inside)


def unpool(gradient: Tensor, other: Tensor | None, pooled: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """See operations.unpool."""
    gradient, pooled, x = dense(gradient), dense(pooled), dense(x)
    o = gradient if other is None else dense(other)
    out = torch.empty_like(x)
    grid = (triton.cdiv(out.numel(), 1024),)
    _unpool[grid](
        gradient, o, pooled, places, out, out.numel(), *x.shape[2:], *pooled.shape[2:], x.shape[1],
        kind(other, gradient), 1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "SPLITS"])
def _partial_statistics(
    x, part, rows, C: tl.constexpr, SPLITS,
    BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BM, BC], tl.float32)
    square = tl.zeros([BM, BC], tl.float32)
    # All programs together read from the beginning to the end, so that the cache has the end for the next pass.
    for first in tl.range(split * BM, rows, SPLITS * BM, num_stages=STAGES):
        row = first + tl.arange(0, BM)
        inside = (row < rows)[:, None] & (channel < C)[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], inside, other=0.0).to(tl.float32)
        total += value
        square += value * value
    tl.store(part + split * C + channel, tl.sum(total, 0), channel < C)
    tl.store(part + (SPLITS + split) * C + channel, tl.sum(square, 0), channel < C)


@triton.jit(do_not_specialize=["splits"])
def _finish_statistics(
    part, gamma, beta, running_mean, running_variance, out, count, momentum, epsilon, C, splits,
    BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.arange(0, BS)
    inside = (split < splits)[:, None] & (channel < C)[None, :]
    place = part + split[:, None] * C + channel[None, :]
    mean = tl.sum(tl.load(place, inside, other=0.0), 0) / count
    square = tl.sum(tl.load(place + splits * C, inside, other=0.0), 0) / count
    variance = tl.maximum(square - mean * mean, 0.0)
    ok = channel < C
    old_mean = tl.load(running_mean + channel, ok, other=0.0)
    old_variance = tl.load(running_variance + channel, ok, other=0.0)
    unbiased = variance * (count / tl.maximum(count - 1.0, 1.0))
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), ok)
    tl.store(running_variance + channel, old_variance + momentum * (unbiased - old_variance), ok)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    scale = tl.load(gamma + channel, ok, other=0.0) * inverse
    tl.store(out + channel, mean, ok)
    tl.store(out + C + channel, inverse, ok)
    tl.store(out + 2 * C + channel, scale, ok)
    tl.store(out + 3 * C + channel, tl.load(beta + channel, ok, other=0.0) - mean * scale, ok)


class _Reduction(NamedTuple):
    """How a sum over rows is split: at most `most` programs read tiles of `rows` in turn."""

    rows: int
    most: int
    warps: int
    stages: int

    def programs(self, rows: int) -> int:
        """Return how many programs share the rows, none of them more than one tile ahead of another."""
        tiles = triton.cdiv(rows, self.rows)
        return triton.cdiv(tiles, triton.cdiv(tiles, self.most))


def _reduction(channels: int, dtype: torch.dtype) -> _Reduction:
    """Return the split that was fastest on an H200 with six streams: wide layers have few rows, so few pieces.

    Four tensors are read three tiles ahead, but two in float32: smaller cards have 99 KB for that.
    """
    if channels <= 128:
        return _Reduction(rows=64, most=256, warps=4, stages=3 if dtype.itemsize < 4 else 2)
    # Not more rows: with 128, a thread of the backward pass needs more registers than there are.
    return _Reduction(rows=64, most=512, warps=4, stages=1)


def batch_statistics(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """See operations.batch_statistics."""
    x = dense(x)
    rows, channels = _rows(x), x.shape[1]
    cut = _reduction(channels, x.dtype)
    splits = cut.programs(rows)
    width = min(64, triton.next_power_of_2(channels))
    part = torch.empty(2, splits, channels, device=x.device, dtype=torch.float32)
    grid = (splits, triton.cdiv(channels, width))
    _partial_statistics[grid](x, part, rows, channels, splits, cut.rows, width, cut.stages, num_warps=cut.warps)
    out = torch.empty(4, channels, device=x.device, dtype=torch.float32)
    _finish_statistics[(triton.cdiv(channels, _FINISHED_CHANNELS),)](
        part, gamma, beta, running_mean, running_variance, out, float(rows), momentum, epsilon, channels, splits,
        cut.most, _FINISHED_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _normalise_relu(x, s, r, t, y, n, C: tl.constexpr, HAS_R: tl.constexpr, HAS_T: tl.constexpr, BLOCK: tl.constexpr):
    # From the end, which the previous pass read last: it may still be in the cache.
    offset = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    channel = offset % C
    value = tl.load(x + offset, inside, other=0.0).to(tl.float32)
    value = value * tl.load(s + 2 * C + channel) + tl.load(s + 3 * C + channel)
    if HAS_R:
        residual = tl.load(r + offset, inside, other=0.0).to(tl.float32)
        if HAS_T:
            residual = residual * tl.load(t + 2 * C + channel) + tl.load(t + 3 * C + channel)
        value += residual
    tl.store(y + offset, tl.maximum(value, 0.0).to(y.dtype.element_ty), inside)


def normalise_relu(
    x: Tensor, statistics: Tensor, residual: Tensor | None = None, residual_statistics: Tensor | None = None
) -> Tensor:
    """See operations.normalise_relu."""
    x = dense(x)
    out = torch.empty_like(x)
    r = x if residual is None else dense(residual)
    t = statistics if residual_statistics is None else residual_statistics
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    _normalise_relu[grid](
        x, statistics, r, t, out, x.numel(), x.shape[1], residual is not None, residual_statistics is not None, _BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "SPLITS"])
def _partial_gradients(
    g, a, o, x, s, part, rows, H, W, C: tl.constexpr, SPLITS,
    HAS_A: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = channel < C
    mean = tl.load(s + channel, ok, other=0.0)[None, :]
    inverse = tl.load(s + C + channel, ok, other=0.0)
    scale = tl.load(s + 2 * C + channel, ok, other=0.0)[None, :]
    shift = tl.load(s + 3 * C + channel, ok, other=0.0)[None, :]
    total = tl.zeros([BM, BC], tl.float32)
    weighted = tl.zeros([BM, BC], tl.float32)
    for first in tl.range(split * BM, rows, SPLITS * BM, num_stages=STAGES):
        row = first + tl.arange(0, BM)
        inside = (row < rows)[:, None] & ok[None, :]
        place = row[:, None] * C + channel[None, :]
        gradient = tl.load(g + place, inside, other=0.0).to(tl.float32)
        value = tl.load(x + place, inside, other=0.0).to(tl.float32)
        if RELU:
            gradient = tl.where(value * scale + shift > 0, gradient, 0.0)
        # The next pass reads `g` and `x` again, but not these: they are the first to leave the cache.
        if OTHER == 1:
            gradient += tl.load(o + place, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if OTHER == 2:
            there, pixel = halved(row, H, W)
            source = o + pixel[:, None] * C + channel[None, :]
            gradient += tl.load(source, inside & there[:, None], other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
        if HAS_A:
            active = tl.load(a + place, inside, other=0.0, eviction_policy="evict_first") > 0
            gradient = tl.where(active, gradient, 0.0)
            tl.store(g + place, gradient.to(g.dtype.element_ty), inside)
        total += gradient
        weighted += gradient * (value - mean)
    tl.store(part + split * C + channel, tl.sum(total, 0), ok)
    tl.store(part + (SPLITS + split) * C + channel, tl.sum(weighted, 0) * inverse, ok)


@triton.jit(do_not_specialize=["splits"])
def _finish_gradients(
    part, s, gamma, gamma_gradient, beta_gradient, out, count, C, splits, BS: tl.constexpr, BC: tl.constexpr
):
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.arange(0, BS)
    ok = channel < C
    inside = (split < splits)[:, None] & ok[None, :]
    place = part + split[:, None] * C + channel[None, :]
    total = tl.sum(tl.load(place, inside, other=0.0), 0)
    weighted = tl.sum(tl.load(place + splits * C, inside, other=0.0), 0)
    tl.store(gamma_gradient + channel, weighted, ok)
    tl.store(beta_gradient + channel, total, ok)
    mean = tl.load(s + channel, ok, other=0.0)
    inverse = tl.load(s + C + channel, ok, other=0.0)
    factor = tl.load(gamma + channel, ok, other=0.0) * inverse
    slope = -factor * inverse * weighted / count
    tl.store(out + channel, factor, ok)
    tl.store(out + C + channel, slope, ok)
    tl.store(out + 2 * C + channel, -factor * total / count - slope * mean, ok)


@triton.jit
def _normalise_backward(g, x, s, k, y, n, C: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr):
    # From the end, as above.
    offset = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    channel = offset % C
    gradient = tl.load(g + offset, inside, other=0.0).to(tl.float32)
    value = tl.load(x + offset, inside, other=0.0).to(tl.float32)
    if RELU:
        sign = value * tl.load(s + 2 * C + channel) + tl.load(s + 3 * C + channel)
        gradient = tl.where(sign > 0, gradient, 0.0)
    out = gradient * tl.load(k + channel) + value * tl.load(k + C + channel) + tl.load(k + 2 * C + channel)
    tl.store(y + offset, out.to(y.dtype.element_ty), inside)


def normalise_backward(
    gradient: Tensor,
    x: Tensor,
    statistics: Tensor,
    gamma: Tensor,
    gamma_gradient: Tensor,
    beta_gradient: Tensor,
    activation: Tensor | None = None,
    other: Tensor | None = None,
    plain_relu: bool = False,
) -> tuple[Tensor, Tensor]:
    """See operations.normalise_backward; masks `gradient` in place, which the caller owns, unless `plain_relu`."""
    gradient, x = dense(gradient), dense(x)
    if plain_relu:
        activation = None
    a = x if activation is None else dense(activation)
    o = x if other is None else dense(other)
    rows, channels = _rows(x), x.shape[1]
    cut = _reduction(channels, x.dtype)
    splits = cut.programs(rows)
    width = min(64, triton.next_power_of_2(channels))
    part = torch.empty(2, splits, channels, device=x.device, dtype=torch.float32)
    grid = (splits, triton.cdiv(channels, width))
    _partial_gradients[grid](
        gradient, a, o, x, statistics, part, rows, *x.shape[2:], channels, splits,
        activation is not None, kind(other, x), plain_relu, cut.rows, width, cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    coefficients = torch.empty(3, channels, device=x.device, dtype=torch.float32)
    _finish_gradients[(triton.cdiv(channels, _FINISHED_CHANNELS),)](
        part, statistics, gamma, gamma_gradient, beta_gradient, coefficients, float(rows), channels, splits,
        cut.most, _FINISHED_CHANNELS, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(x)
    flat = (triton.cdiv(x.numel(), _BLOCK),)
    _normalise_backward[flat](
        gradient, x, statistics, coefficients, out, x.numel(), channels, plain_relu, _BLOCK, num_warps=8
    )
    return out, gradient


@triton.jit
def _adam_rule(master, gradient, first, second, h, beta1, beta2, epsilon, decay):
    gradient += decay * master
    first += (gradient - first) * (1.0 - beta1)
    second = second * beta2 + gradient * gradient * (1.0 - beta2)
    return master - tl.load(h) * first / (tl.sqrt(second) * tl.load(h + 1) + epsilon), first, second


@triton.jit
def _sgd_rule(master, gradient, first, h, momentum, decay):
    gradient += decay * master
    first = first * momentum + gradient
    return master - tl.load(h) * first, first


@triton.jit
def _adam(
    w, g, m, v, h, s, k, n, row, beta1, beta2, epsilon, decay,
    HAS_S: tl.constexpr, HAS_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    master = tl.load(w + offset, inside, other=0.0)
    gradient = tl.load(g + offset, inside, other=0.0).to(tl.float32)
    if HAS_S:
        scale = tl.load(s + offset // row, inside, other=0.0)
        gradient *= scale
    first = tl.load(m + offset, inside, other=0.0)
    second = tl.load(v + offset, inside, other=0.0)
    master, first, second = _adam_rule(master, gradient, first, second, h, beta1, beta2, epsilon, decay)
    tl.store(w + offset, master, inside)
    tl.store(m + offset, first, inside)
    tl.store(v + offset, second, inside)
    if HAS_K:
        if HAS_S:
            tl.store(k + offset, (master * scale).to(k.dtype.element_ty), inside)
        else:
            tl.store(k + offset, master.to(k.dtype.element_ty), inside)


@triton.jit
def _update_turned(
    w, g, m, v, h, s, k, y, N, K, taps, beta1, beta2, epsilon, decay, momentum,
    ADAM: tl.constexpr, HAS_S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Update a tile (outputs, inputs) of one tap, and write it into the turned weight too (see _turn)."""
    tap = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.program_id(2) * BK + tl.arange(0, BK)
    inside = (n < N)[:, None] & (c < K)[None, :]
    offset = (n[:, None] * taps + tap) * K + c[None, :]
    master = tl.load(w + offset, inside, other=0.0)
    gradient = tl.load(g + offset, inside, other=0.0).to(tl.float32)
    if HAS_S:
        scale = tl.load(s + n, n < N, other=0.0)[:, None]
        gradient *= scale
    first = tl.load(m + offset, inside, other=0.0)
    if ADAM:
        second = tl.load(v + offset, inside, other=0.0)
        master, first, second = _adam_rule(master, gradient, first, second, h, beta1, beta2, epsilon, decay)
        tl.store(v + offset, second, inside)
    else:
        master, first = _sgd_rule(master, gradient, first, h, momentum, decay)
    tl.store(w + offset, master, inside)
    tl.store(m + offset, first, inside)
    if HAS_S:
        master *= scale
    working = master.to(k.dtype.element_ty)
    tl.store(k + offset, working, inside)
    place = y + (c[:, None] * taps + taps - 1 - tap) * N + n[None, :]
    tl.store(place, tl.trans(working), (c < K)[:, None] & (n < N)[None, :])


_TURNED_TILE = (32, 64)


def _turned_grid(turned: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid of `_update_turned`, and the outputs, inputs and taps of the weight."""
    inputs, outputs, high, wide = turned.shape
    grid = (high * wide, triton.cdiv(outputs, _TURNED_TILE[0]), triton.cdiv(inputs, _TURNED_TILE[1]))
    return grid, (outputs, inputs, high * wide)


def adam(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    hyper: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    scale: Tensor | None,
    working: Tensor | None,
    turned: Tensor | None = None,
) -> None:
    """See operations.adam."""
    s = master if scale is None else scale
    k = master if working is None else working
    if turned is not None:
        grid, sizes = _turned_grid(turned)
        _update_turned[grid](
            master, gradient, first, second, hyper, s, k, turned, *sizes,
            betas[0], betas[1], epsilon, weight_decay, 0.0, True, scale is not None, *_TURNED_TILE, num_warps=4,
        )  # fmt: skip
        return
    flat = (triton.cdiv(master.numel(), 1024),)
    _adam[flat](
        master, gradient, first, second, hyper, s, k, master.numel(), master.numel() // s.numel(),
        betas[0], betas[1], epsilon, weight_decay,
        scale is not None, working is not None, 1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def _sgd(w, g, m, h, s, k, n, row, momentum, decay, HAS_S: tl.constexpr, HAS_K: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    master = tl.load(w + offset, inside, other=0.0)
    gradient = tl.load(g + offset, inside, other=0.0).to(tl.float32)
    if HAS_S:
        scale = tl.load(s + offset // row, inside, other=0.0)
        gradient *= scale
    master, first = _sgd_rule(master, gradient, tl.load(m + offset, inside, other=0.0), h, momentum, decay)
    tl.store(w + offset, master, inside)
    tl.store(m + offset, first, inside)
    if HAS_K:
        if HAS_S:
            tl.store(k + offset, (master * scale).to(k.dtype.element_ty), inside)
        else:
            tl.store(k + offset, master.to(k.dtype.element_ty), inside)


def sgd(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    hyper: Tensor,
    momentum: float,
    weight_decay: float,
    scale: Tensor | None,
    working: Tensor | None,
    turned: Tensor | None = None,
) -> None:
    """See operations.sgd."""
    s = master if scale is None else scale
    k = master if working is None else working
    if turned is not None:
        grid, sizes = _turned_grid(turned)
        _update_turned[grid](
            master, gradient, first, first, hyper, s, k, turned, *sizes,
            0.0, 0.0, 0.0, weight_decay, momentum, False, scale is not None, *_TURNED_TILE, num_warps=4,
        )  # fmt: skip
        return
    flat = (triton.cdiv(master.numel(), 1024),)
    _sgd[flat](
        master, gradient, first, hyper, s, k, master.numel(), master.numel() // s.numel(), momentum, weight_decay,
        scale is not None, working is not None, 1024, num_warps=4,
    )  # fmt: skip

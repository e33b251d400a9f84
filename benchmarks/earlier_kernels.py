"""Kernels as they were before they were replaced, for benchmarks/kernels.py only; see network/fast/kernels.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from efcil.network.fast import kernels
from efcil.network.fast.convolution_kernels import dense, halved, kind
from efcil.network.fast.kernels import (
    _BLOCK,
    _FINISHED_CHANNELS,
    _finish_gradients,
    _finish_statistics,
    _normalise_backward,
    _Reduction,
    _rows,
)

#: The functions that are different here.
CHANGED = ("batch_statistics", "normalise_backward", "adam", "sgd")


def _reduction(channels: int) -> _Reduction:
    if channels <= 128:
        return _Reduction(rows=64, most=256, warps=4, stages=3)
    return _Reduction(rows=128, most=512, warps=4, stages=1)


def _pieces(cut: _Reduction, rows: int) -> tuple[int, int]:
    """Return the number of stretches (of whole tiles) and the rows of each."""
    per_piece = triton.cdiv(triton.cdiv(rows, cut.most), cut.rows) * cut.rows
    return triton.cdiv(rows, per_piece), per_piece


@triton.jit(do_not_specialize=["rows", "per_program", "SPLITS"])
def _partial_statistics(
    x, part, rows, per_program, C: tl.constexpr, SPLITS,
    BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BM, BC], tl.float32)
    square = tl.zeros([BM, BC], tl.float32)
    start = split * per_program
    stop = tl.minimum(start + per_program, rows)
    for first in tl.range(start, stop, BM, num_stages=STAGES):
        row = first + tl.arange(0, BM)
        inside = (row < stop)[:, None] & (channel < C)[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], inside, other=0.0).to(tl.float32)
        total += value
        square += value * value
    tl.store(part + split * C + channel, tl.sum(total, 0), channel < C)
    tl.store(part + (SPLITS + split) * C + channel, tl.sum(square, 0), channel < C)


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
    cut = _reduction(channels)
    splits, per_program = _pieces(cut, rows)
    width = min(64, triton.next_power_of_2(channels))
    part = torch.empty(2, splits, channels, device=x.device, dtype=torch.float32)
    grid = (splits, triton.cdiv(channels, width))
    _partial_statistics[grid](
        x, part, rows, per_program, channels, splits, cut.rows, width, cut.stages, num_warps=cut.warps
    )
    out = torch.empty(4, channels, device=x.device, dtype=torch.float32)
    _finish_statistics[(triton.cdiv(channels, _FINISHED_CHANNELS),)](
        part, gamma, beta, running_mean, running_variance, out, float(rows), momentum, epsilon, channels, splits,
        cut.most, _FINISHED_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "per_program", "SPLITS"])
def _partial_gradients(
    g, a, o, x, s, part, rows, per_program, H, W, C: tl.constexpr, SPLITS,
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
    start = split * per_program
    stop = tl.minimum(start + per_program, rows)
    for first in tl.range(start, stop, BM, num_stages=STAGES):
        row = first + tl.arange(0, BM)
        inside = (row < stop)[:, None] & ok[None, :]
        place = row[:, None] * C + channel[None, :]
        gradient = tl.load(g + place, inside, other=0.0).to(tl.float32)
        value = tl.load(x + place, inside, other=0.0).to(tl.float32)
        if RELU:
            gradient = tl.where(value * scale + shift > 0, gradient, 0.0)
        if OTHER == 1:
            gradient += tl.load(o + place, inside, other=0.0).to(tl.float32)
        if OTHER == 2:
            there, pixel = halved(row, H, W)
            source = o + pixel[:, None] * C + channel[None, :]
            gradient += tl.load(source, inside & there[:, None], other=0.0).to(tl.float32)
        if HAS_A:
            gradient = tl.where(tl.load(a + place, inside, other=0.0) > 0, gradient, 0.0)
            tl.store(g + place, gradient.to(g.dtype.element_ty), inside)
        total += gradient
        weighted += gradient * (value - mean)
    tl.store(part + split * C + channel, tl.sum(total, 0), ok)
    tl.store(part + (SPLITS + split) * C + channel, tl.sum(weighted, 0) * inverse, ok)


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
    cut = _reduction(channels)
    splits, per_program = _pieces(cut, rows)
    width = min(64, triton.next_power_of_2(channels))
    part = torch.empty(2, splits, channels, device=x.device, dtype=torch.float32)
    grid = (splits, triton.cdiv(channels, width))
    _partial_gradients[grid](
        gradient, a, o, x, statistics, part, rows, per_program, *x.shape[2:], channels, splits,
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


def adam(*arguments: Any) -> None:
    """The update, then the turned weight in a kernel of its own."""
    kernels.adam(*arguments[:10])
    _turn(*arguments[9:])


def sgd(*arguments: Any) -> None:
    """The update, then the turned weight in a kernel of its own."""
    kernels.sgd(*arguments[:8])
    _turn(*arguments[7:])


def _turn(working: Tensor | None, turned: Tensor | None = None) -> None:
    if working is not None and turned is not None:
        inputs, outputs, high, wide = turned.shape
        kernels.turn(working.view(outputs, high, wide, inputs).permute(0, 3, 1, 2), turned)


@triton.jit
def _loss_rows(logits, targets, weights, losses, gradient, old, size, C, BC: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BC)
    first = tl.where(row < size, old, 0)
    weight = tl.load(weights + tl.maximum(row - size, 0), row >= size, other=0.0)
    weight = tl.where(row < size, 1.0 / size, weight)
    seen = (column >= first) & (column < C)
    value = tl.load(logits + row * C + column, seen, other=-float("inf"))
    largest = tl.max(value, 0)
    exponential = tl.where(seen, tl.exp(value - largest), 0.0)
    total = tl.sum(exponential, 0)
    target = tl.load(targets + row)
    chosen = tl.load(logits + row * C + target)
    tl.store(losses + row, weight * (tl.log(total) + largest - chosen))
    out = exponential / total - tl.where(column == target, 1.0, 0.0)
    tl.store(gradient + row * C + column, out * weight, column < C)


def weighted_rows(
    logits: Tensor, targets: Tensor, replay_weights: Tensor, old_classes: int, size: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every row, and its gradient."""
    logits, rows, classes = logits.contiguous(), *logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=logits.dtype)
    gradient = torch.empty_like(logits)
    width = triton.next_power_of_2(classes)
    _loss_rows[(rows,)](
        logits, targets, replay_weights, losses, gradient, old_classes, size, classes, width,
        num_warps=1 if width <= 128 else 4,
    )  # fmt: skip
    return losses, gradient


def terms(
    logits: Tensor, targets: Tensor, replay: Tensor, old_classes: int, size: int, delta: Tensor, pulled: Tensor
) -> tuple[Any, Tensor]:
    """The terms of EFC's loss, summed by PyTorch."""
    losses, gradient = weighted_rows(logits, targets, replay, old_classes, size)
    drift = torch.dot(pulled.view(-1), delta.view(-1)) / size
    return (drift, losses[:size].sum(), losses[size:].sum()), gradient


def scaled(gradient: Tensor, current: Tensor, replay: Tensor, size: int) -> Tensor:
    """The gradient of the logits, scaled by PyTorch."""
    return torch.cat([gradient[:size] * current, gradient[size:] * replay])


def with_earlier(*names: str) -> SimpleNamespace:
    """Return the operations of today, those called `names` as they were before."""
    return SimpleNamespace(
        **{name: globals()[name] if name in names else getattr(kernels, name) for name in kernels.__all__}
    )

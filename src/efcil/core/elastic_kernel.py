"""The terms of EFC's loss, row by row, and the gradient of the logits as Triton kernels. See core/elastic.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows(
    logits, targets, weights, delta, pulled, losses, drifts, gradient, old, size, C, F,
    BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
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
    if row < size:
        feature = tl.arange(0, BF)
        there = feature < F
        moved = tl.load(delta + row * F + feature, there, other=0.0)
        tl.store(drifts + row, tl.sum(moved * tl.load(pulled + row * F + feature, there, other=0.0), 0))


@triton.jit
def _totals(losses, drifts, out, size, rows, BLOCK: tl.constexpr):
    drift = tl.zeros([BLOCK], tl.float32)
    current = tl.zeros([BLOCK], tl.float32)
    replay = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        drift += tl.load(drifts + row, row < size, other=0.0)
        loss = tl.load(losses + row, row < rows, other=0.0)
        current += tl.where(row < size, loss, 0.0)
        replay += tl.where(row < size, 0.0, loss)
    tl.store(out, tl.sum(drift, 0) / size)
    tl.store(out + 1, tl.sum(current, 0))
    tl.store(out + 2, tl.sum(replay, 0))


@triton.jit
def _scaled(gradient, current, replay, out, first, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    factor = tl.where(offset < first, tl.load(current), tl.load(replay))
    tl.store(out + offset, tl.load(gradient + offset, inside, other=0.0) * factor, inside)


def terms(
    logits: Tensor,
    targets: Tensor,
    replay_weights: Tensor,
    old_classes: int,
    size: int,
    delta: Tensor,
    pulled: Tensor,
) -> tuple[Tensor, Tensor]:
    """See core.elastic.terms."""
    logits, rows, classes = logits.contiguous(), *logits.shape
    delta, pulled, features = delta.contiguous(), pulled.contiguous(), delta.shape[1]
    losses = torch.empty(2, rows, device=logits.device, dtype=logits.dtype)
    gradient = torch.empty_like(logits)
    width, length = triton.next_power_of_2(classes), triton.next_power_of_2(features)
    _rows[(rows,)](
        logits, targets, replay_weights, delta, pulled, losses[0], losses[1], gradient, old_classes, size, classes,
        features, width, length, num_warps=1 if max(width, length // 4) <= 128 else 4,
    )  # fmt: skip
    out = torch.empty(3, device=logits.device, dtype=logits.dtype)
    _totals[(1,)](losses[0], losses[1], out, size, rows, 256, num_warps=2)
    return out, gradient


def scaled(gradient: Tensor, current: Tensor, replay: Tensor, size: int) -> Tensor:
    """See core.elastic.scaled."""
    out = torch.empty_like(gradient)
    grid = (triton.cdiv(out.numel(), 1024),)
    _scaled[grid](gradient, current, replay, out, size * out.shape[1], out.numel(), 1024, num_warps=4)
    return out

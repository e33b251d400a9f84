"""Cross-entropy and its gradient, row by row, as one Triton kernel. See core/elastic.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows(logits, targets, weights, losses, gradient, old, size, C, BC: tl.constexpr):
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
    """See core.elastic.weighted_rows."""
    logits, rows, classes = logits.contiguous(), *logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=logits.dtype)
    gradient = torch.empty_like(logits)
    width = triton.next_power_of_2(classes)
    _rows[(rows,)](
        logits, targets, replay_weights, losses, gradient, old_classes, size, classes, width,
        num_warps=1 if width <= 128 else 4,
    )  # fmt: skip
    return losses, gradient

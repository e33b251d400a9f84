"""The loss of EFC as one differentiable operation: drift penalty and PR-ACE, with their gradient written out.

Composed from elementary operations this loss takes some ninety small kernels forwards and backwards, a tenth of a
training step on a GPU. All of it is known in closed form, so here it takes ten.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from efcil.compiled import compiled


def elastic_loss(
    features: Tensor,
    weight: Tensor,
    old_features: Tensor,
    penalty: Tensor,
    prototypes: Tensor,
    targets: Tensor,
    replay_weights: Tensor,
    old_classes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three terms (drift, current, replay) of EFC's loss.

    features (B + P, n): those of the batch, then those of the P images of the previous step; old_features (B, n);
    prototypes (Q, n); weight (m, n): all heads; penalty (n, n), symmetric: strength * E + damping * I;
    targets (B + P + Q,) in 0..m-1; replay_weights (P + Q,), summing to one.

        drift   = mean over the batch of (f - f_old)^T penalty (f - f_old)
        current = mean over the batch of the cross-entropy among the new classes, old_classes..m-1
        replay  = weighted sum over the P + Q other rows of the cross-entropy among all m classes
    """
    return _Elastic.apply(features, weight, old_features, penalty, prototypes, targets, replay_weights, old_classes)


class _Elastic(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        old_features: Tensor,
        penalty: Tensor,
        prototypes: Tensor,
        targets: Tensor,
        replay_weights: Tensor,
        old_classes: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = len(old_features)
        rows = torch.cat([features, prototypes])
        delta = features[:size] - old_features
        pulled = delta @ penalty
        ctx.functions = _on(rows.device)
        terms, gradient = ctx.functions.terms(
            rows @ weight.T, targets, replay_weights, old_classes, size, delta, pulled
        )
        ctx.save_for_backward(rows, weight, gradient, pulled)
        ctx.images = len(features)
        return terms[0], terms[1], terms[2]

    @staticmethod
    def backward(ctx: Any, drift: Tensor, current: Tensor, replay: Tensor) -> tuple[Any, ...]:
        rows, weight, gradient, pulled = ctx.saved_tensors
        size = len(pulled)
        gradient = ctx.functions.scaled(gradient, current, replay, size)
        for_features = gradient[: ctx.images] @ weight
        for_features[:size].addcmul_(pulled, drift, value=2.0 / size)
        return for_features, gradient.T @ rows, None, None, None, None, None, None


def _on(device: torch.device) -> Any:
    """Return what has `terms` and `scaled` for a device: the kernels, if they can be compiled, else this module."""
    if not compiled(device):
        return sys.modules[__name__]
    from efcil.core import elastic_kernel

    return elastic_kernel


def terms(
    logits: Tensor,
    targets: Tensor,
    replay_weights: Tensor,
    old_classes: int,
    size: int,
    delta: Tensor,
    pulled: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return drift, current and replay (3,), and the gradient of the last two with respect to the logits.

    `delta` (size, n) is how far features have moved, `pulled` the same times the penalty matrix.
    """
    losses, gradient = weighted_rows(logits, targets, replay_weights, old_classes, size)
    drift = torch.dot(pulled.view(-1), delta.view(-1)) / size
    return torch.stack([drift, losses[:size].sum(), losses[size:].sum()]), gradient


def scaled(gradient: Tensor, current: Tensor, replay: Tensor, size: int) -> Tensor:
    """Return the gradient of the logits, its first `size` rows times `current`, the others times `replay`."""
    return torch.cat([gradient[:size] * current, gradient[size:] * replay])


def weighted_rows(
    logits: Tensor, targets: Tensor, replay_weights: Tensor, old_classes: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return weight * cross-entropy of every row, and its gradient with respect to the logits.

    The first `size` rows count 1 / size each and include only classes from `old_classes` on; the others have
    `replay_weights` and include all classes.
    """
    weights = torch.cat([replay_weights.new_full((size,), 1.0 / size), replay_weights])
    logits = logits.clone()
    logits[:size, :old_classes] = -torch.inf
    logarithm = torch.log_softmax(logits, dim=1)
    losses = -weights * logarithm.gather(1, targets[:, None])[:, 0]
    gradient = logarithm.exp()
    gradient.scatter_add_(1, targets[:, None], -torch.ones_like(losses)[:, None])
    return losses, gradient * weights[:, None]

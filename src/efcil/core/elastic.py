"""The loss of EFC as one differentiable operation: drift penalty and PR-ACE, with their gradient written out.

Composed from elementary operations this loss takes some ninety small kernels forwards and backwards, a tenth of a
training step on a GPU. All of it is known in closed form, so here it takes a dozen.
"""

from __future__ import annotations

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
        losses, gradient = weighted_rows(rows @ weight.T, targets, replay_weights, old_classes, size)
        delta = features[:size] - old_features
        pulled = delta @ penalty
        ctx.save_for_backward(rows, weight, gradient, pulled)
        ctx.images = len(features)
        return torch.dot(pulled.view(-1), delta.view(-1)) / size, losses[:size].sum(), losses[size:].sum()

    @staticmethod
    def backward(ctx: Any, drift: Tensor, current: Tensor, replay: Tensor) -> tuple[Any, ...]:
        rows, weight, gradient, pulled = ctx.saved_tensors
        size = len(pulled)
        gradient = torch.cat([gradient[:size] * current, gradient[size:] * replay])
        for_features = gradient[: ctx.images] @ weight
        for_features[:size].addcmul_(pulled, drift, value=2.0 / size)
        return for_features, gradient.T @ rows, None, None, None, None, None, None


def weighted_rows(
    logits: Tensor, targets: Tensor, replay_weights: Tensor, old_classes: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return weight * cross-entropy of every row, and its gradient with respect to the logits.

    The first `size` rows count 1 / size each and include only classes from `old_classes` on; the others have
    `replay_weights` and include all classes.
    """
    if compiled(logits.device):
        from efcil.core.elastic_kernel import weighted_rows as fast

        return fast(logits, targets, replay_weights, old_classes, size)
    weights = torch.cat([replay_weights.new_full((size,), 1.0 / size), replay_weights])
    logits = logits.clone()
    logits[:size, :old_classes] = -torch.inf
    logarithm = torch.log_softmax(logits, dim=1)
    losses = -weights * logarithm.gather(1, targets[:, None])[:, 0]
    gradient = logarithm.exp()
    gradient.scatter_add_(1, targets[:, None], -torch.ones_like(losses)[:, None])
    return losses, gradient * weights[:, None]

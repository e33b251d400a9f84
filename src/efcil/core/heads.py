"""Training a bias-free linear softmax head on features that already lie on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.errors import TrainingError


@torch.no_grad()
def softmax_epoch(
    weight: Tensor,
    velocity: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    learning_rate: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> None:
    """One epoch of SGD on the mean cross-entropy of softmax(features @ weight^T); changes weight and velocity.

    weight and velocity (m, n), features (N, n) in the order in which they are to be seen, labels (N). The last batch
    may be short. The steps are those of torch.optim.SGD with coupled weight decay; the gradient, (p - e_y)^T f / B, is
    written out, so that a step is a handful of kernels and never waits for the device.
    """
    if features.shape[1] != weight.shape[1] or len(features) != len(labels):
        raise TrainingError(
            f"A head of shape {tuple(weight.shape)} cannot be trained on features of shape {tuple(features.shape)} "
            f"with {len(labels)} labels; give one row of {weight.shape[1]} features per label."
        )
    classes = torch.arange(len(weight), device=weight.device)
    for start in range(0, len(features), batch_size):
        rows, targets = features[start : start + batch_size], labels[start : start + batch_size]
        error = torch.softmax(rows @ weight.T, dim=1)
        error -= (targets[:, None] == classes).to(error.dtype)
        velocity.addmm_(error.T, rows, beta=momentum, alpha=1.0 / len(rows))
        velocity.add_(weight, alpha=weight_decay)
        weight.add_(velocity, alpha=-learning_rate)

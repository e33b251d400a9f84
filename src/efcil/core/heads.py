"""Training a bias-free linear softmax head on features that are already on the device, or drawn from Gaussians."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from efcil.core import gaussians, prototypes
from efcil.errors import TrainingError

_EPOCHS, _RATE, _MOMENTUM, _BATCH, _JITTER = 50, 1e-3, 0.9, 256, 1e-5
#: Features drawn of every class, and at least of all together, so that a few classes get enough steps too.
_SAMPLES, _LEAST = 100, 5120
#: Epochs after which they are drawn again.
_REDRAWN = 10


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

    weight and velocity (m, n), features (N, n) in the order of training, labels (N). The last batch
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


@torch.no_grad()
def fit_to_gaussians(
    weight: Tensor,
    means: Tensor,
    covariances: Tensor,
    covariance_of: Tensor,
    generator: Callable[[int], torch.Generator],
    *,
    weight_decay: float = 0.0,
) -> Tensor:
    """Return re-balanced heads (C, n): `weight`, trained further on samples of every class's Gaussian.

    Every class has equally many samples, whatever its number of images; `generator` returns the one of an epoch. That
    number is fixed; rate, momentum, batch size and epochs are those of EFC++.
    """
    factors = prototypes.cholesky_factors(covariances, _JITTER)
    weight = weight.detach().clone()
    velocity = torch.zeros_like(weight)
    counts = [max(_SAMPLES, -(-_LEAST // len(means)))] * len(means)
    for epoch in range(_EPOCHS):
        random = generator(epoch)
        if epoch % _REDRAWN == 0:
            features, labels = gaussians.sample_classes(means, factors, covariance_of, counts, random)
        order = torch.randperm(len(labels), generator=random, device=random.device)
        softmax_epoch(
            weight, velocity, features[order].to(weight.dtype), labels[order],
            batch_size=_BATCH, learning_rate=_RATE, momentum=_MOMENTUM, weight_decay=weight_decay,
        )  # fmt: skip
    return weight

"""Softmax heads without bias, linear or cosine: their scores, and training them on features or on Gaussians.

The scores of linear heads are W f. Those of cosine heads are s cos(w_c, f): features and rows of W count by their
direction alone, and the scale s says how sure a softmax over such scores can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from efcil.activity import next_piece
from efcil.core import gaussians, prototypes
from efcil.errors import TrainingError

_EPOCHS, _RATE, _MOMENTUM, _BATCH, _JITTER = 50, 1e-3, 0.9, 256, 1e-5
#: Features drawn of every class, and at least of all together, so that a few classes get enough steps too.
_SAMPLES, _LEAST = 100, 5120
#: Epochs after which they are drawn again.
_REDRAWN = 10
#: Vectors are not divided by less than this, as in PyTorch's `normalize`.
_SHORTEST = 1e-12


def new_rows(classes: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Untrained rows (classes, size) on the CPU, uniform in +-1/sqrt(size), as PyTorch draws a linear layer."""
    bound = 1.0 / math.sqrt(size)
    return torch.empty(classes, size).uniform_(-bound, bound, generator=generator)


def cosine_logits(features: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Scores (N, m) of features (N, n) by cosine heads: `scale` times the cosines with the rows of `weight` (m, n)."""
    return scale * functional.linear(functional.normalize(features, dim=1), functional.normalize(weight, dim=1))


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
    scale: Tensor | None = None,
) -> None:
    """One epoch of SGD on the mean cross-entropy of softmax(features @ weight^T); changes weight and velocity.

    weight and velocity (m, n), features (N, n) in the order of training, labels (N). The last batch
    may be short. The steps are those of torch.optim.SGD with coupled weight decay; the gradient, (p - e_y)^T f / B, is
    written out, so that a step is a handful of kernels and never waits for the device. With `scale`, the heads are
    cosine heads of that scale, which stays as it is.
    """
    if features.shape[1] != weight.shape[1] or len(features) != len(labels):
        raise TrainingError(
            f"A head of shape {tuple(weight.shape)} cannot be trained on features of shape {tuple(features.shape)} "
            f"with {len(labels)} labels; give one row of {weight.shape[1]} features per label."
        )
    next_piece()
    classes = torch.arange(len(weight), device=weight.device)
    if scale is not None:
        features = functional.normalize(features, dim=1)
    for start in range(0, len(features), batch_size):
        rows, targets = features[start : start + batch_size], labels[start : start + batch_size]
        logits = rows @ weight.T if scale is None else scale * rows @ functional.normalize(weight, dim=1).T
        error = torch.softmax(logits, dim=1)
        error -= (targets[:, None] == classes).to(error.dtype)
        if scale is None:
            velocity.addmm_(error.T, rows, beta=momentum, alpha=1.0 / len(rows))
        else:
            slope = across(error.T @ rows * (scale / len(rows)), weight)
            velocity.mul_(momentum).add_(slope)
        velocity.add_(weight, alpha=weight_decay)
        weight.add_(velocity, alpha=-learning_rate)


def across(slope: Tensor, vectors: Tensor) -> Tensor:
    """The gradient (m, n) with respect to vectors (m, n) of a function of their directions, which has this `slope`."""
    length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp(min=_SHORTEST)
    unit = vectors / length
    return (slope - (slope * unit).sum(dim=1, keepdim=True) * unit) / length


@torch.no_grad()
def fit_to_gaussians(
    weight: Tensor,
    means: Tensor,
    covariances: Tensor,
    covariance_of: Tensor,
    generator: Callable[[int], torch.Generator],
    *,
    weight_decay: float = 0.0,
    scale: Tensor | None = None,
) -> Tensor:
    """Return re-balanced heads (C, n): `weight`, trained further on samples of every class's Gaussian.

    Every class has equally many samples, whatever its number of images; `generator` returns the one of an epoch. That
    number is fixed; rate, momentum, batch size and epochs are those of EFC++. `scale` is that of cosine heads.
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
            scale=scale,
        )  # fmt: skip
    return weight

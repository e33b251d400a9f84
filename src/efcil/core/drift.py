"""Prototype drift compensation: how far stored class means moved, estimated from images of the current task.

The current task's images pass through the old and the new backbone. A class mean is moved by a weighted average of
their drifts, where images that were close to the mean in the old feature space count most.
Distances are computed in float64: expanding the quadratic form into matrix products subtracts nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from efcil.errors import TrainingError

# Numbers per intermediate table (classes or features times samples) held at a time: 128 MiB of float64.
_TABLE_ENTRIES = 1 << 24


def compensate(
    prototypes: Tensor,
    old_features: Tensor,
    new_features: Tensor,
    matrix: Tensor,
    sigma: float = 0.2,
    rows: int | None = None,
) -> Tensor:
    """Moved prototypes p^c + sum_i w_i^c (f_i^new - f_i^old) / sum_i w_i^c.

    prototypes (C, n), old and new features (N, n) of the same images, E (n, n); gives (C, n). The weight of sample i
    for class c is w_i^c = exp(-d / (2 sigma^2)), where d is (f_i - p^c)^T E (f_i - p^c) of the old features, scaled to
    [0, 1] with one minimum and one maximum over all classes and samples. If all distances are equal (up to rounding),
    so are all weights. The table of weights is never in memory as a whole: `rows` samples are taken at a time (default:
    as many as fit a fixed amount of memory).
    """
    _check(old_features, prototypes, sigma)
    rows = _rows(prototypes, rows)
    ranges = [distance.aminmax(dim=1) for _, distance in _distance_chunks(old_features, prototypes, matrix, rows)]
    # Per class: a factor on all weights of a class has no effect, and without it the weights of a class far from all
    # samples would vanish in floating point.
    nearest = torch.stack([lowest for lowest, _ in ranges]).amin(dim=0)
    largest = torch.stack([highest for _, highest in ranges]).max()
    spread = _spread(largest - nearest.min(), old_features, prototypes, matrix)
    moved = torch.zeros_like(prototypes, dtype=torch.float64)
    total = torch.zeros(len(prototypes), 1, dtype=torch.float64, device=prototypes.device)
    for part, distance in _distance_chunks(old_features, prototypes, matrix, rows):
        weights = torch.exp(-(distance - nearest[:, None]) / spread / (2 * sigma**2))
        moved += weights @ (new_features[part].double() - old_features[part].double())
        total += weights.sum(dim=1, keepdim=True)
    return (prototypes.double() + moved / total).to(prototypes.dtype)


def euclidean_weights(old_features: Tensor, prototypes: Tensor, sigma: float) -> Tensor:
    """Weights of semantic drift compensation (C, N): exp(-||f_i - p^c||^2 / (2 sigma^2)), scaled per class.

    The largest weight of each class is 1: a factor per class does not change a weighted mean, and without it all
    weights of a class far from every sample would vanish in floating point.
    """
    _check(old_features, prototypes, sigma)
    identity = torch.eye(prototypes.shape[1], dtype=torch.float64, device=prototypes.device)
    chunks = _distance_chunks(old_features, prototypes, identity, _rows(prototypes, None))
    distances = torch.cat([distance for _, distance in chunks], dim=1)
    nearest = distances.min(dim=1, keepdim=True).values
    return torch.exp(-(distances - nearest) / (2 * sigma**2)).to(prototypes.dtype)


def move(prototypes: Tensor, weights: Tensor, displacements: Tensor) -> Tensor:
    """p^c + sum_i w_i^c v_i / sum_i w_i^c, for prototypes (C, n), weights (C, N) and displacements (N, n)."""
    weights = weights.double()
    average = weights @ displacements.double() / weights.sum(dim=1, keepdim=True)
    return (prototypes.double() + average).to(prototypes.dtype)


def _distance_chunks(features: Tensor, prototypes: Tensor, matrix: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield, for each run of `rows` samples, its slice and the float64 distances (C, rows)."""
    form = matrix.double()
    # Distances do not depend on the origin; an origin near the data keeps the terms that cancel small.
    origin = prototypes.double().mean(dim=0)
    centres = prototypes.double() - origin
    projected = centres @ form
    centre_energy = (projected * centres).sum(dim=1, keepdim=True)
    for start in range(0, len(features), rows):
        part = slice(start, min(start + rows, len(features)))
        samples = features[part].double() - origin
        energy = ((samples @ form) * samples).sum(dim=1)
        yield part, centre_energy + energy - 2.0 * projected @ samples.T


def _spread(spread: Tensor, features: Tensor, prototypes: Tensor, matrix: Tensor) -> Tensor:
    """The divisor of the scaling: max - min, or infinity (all weights 1) if it is only rounding."""
    origin = prototypes.double().mean(dim=0)
    reach = torch.maximum(
        (features.double() - origin).square().sum(dim=1).max(), (prototypes.double() - origin).square().sum(dim=1).max()
    )
    # Frobenius norm bounds the largest eigenvalue, so this bounds the size of each term of the expanded form.
    rounding = 64 * torch.finfo(torch.float64).eps * reach * torch.linalg.matrix_norm(matrix.double())
    return torch.where(spread > rounding, spread, torch.full_like(spread, torch.inf))


def _rows(prototypes: Tensor, rows: int | None) -> int:
    """How many samples to take at a time."""
    return max(1, _TABLE_ENTRIES // max(prototypes.shape)) if rows is None else rows


def _check(features: Tensor, prototypes: Tensor, sigma: float) -> None:
    """Refuse inputs without a weighted mean."""
    if len(features) == 0 or len(prototypes) == 0:
        raise TrainingError(
            f"Drift compensation needs samples and prototypes, but got {len(features)} samples and {len(prototypes)} "
            "prototypes; call it from the second task on, with that task's images."
        )
    if not sigma > 0:
        raise TrainingError(f"The width sigma of the drift weights must be positive, but it is {sigma}.")

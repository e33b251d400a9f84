"""Class statistics moved from the old feature space to the new one by a map learned from the current task's images.

Kernel-weighted drift (core/drift.py) moves each mean separately. Here one affine map, fitted to features of the same
images before and after a task, moves everything: a Gaussian stays a Gaussian under it, so means and covariances move
in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.errors import TrainingError

#: Lengths are not divided by less than this.
_SHORTEST = 1e-12


@dataclass(frozen=True)
class AffineMap:
    """x -> A x + b with A (n, n) and b (n), and the covariance (n, n) of what it leaves unexplained; all float64."""

    matrix: Tensor
    shift: Tensor
    residual: Tensor

    def points(self, points: Tensor) -> Tensor:
        """Moved points (K, n), in their own type."""
        return (points.double() @ self.matrix.T + self.shift).to(points.dtype)

    def covariances(self, covariances: Tensor, residual: bool = False) -> Tensor:
        """A S A^T for covariances S (G, n, n), in their own type; with `residual`, plus the residual covariance."""
        moved = torch.empty_like(covariances)
        for row, covariance in enumerate(covariances):  # one at a time: a float64 copy of all would be large
            image = self.matrix @ covariance.double() @ self.matrix.T
            moved[row] = (image + self.residual if residual else image).to(covariances.dtype)
        return moved


def ridge_map(
    before: Tensor, after: Tensor, strength: float = 0.01, *, intercept: bool = True, metric: Tensor | None = None
) -> AffineMap:
    """The map that takes old features (N, n) to new ones (N, n) of the same images, pulled towards the identity.

    A = I + B minimises mean ||x + B x + b - y||^2 + s ||B||_F^2 over centred features; s is `strength` times the mean
    variance of the old features. Without `intercept`, b is 0 and nothing is centred, so that it is their mean square.
    In directions without data (fewer images than features, or features that are always 0), the map is the identity.

    With a `metric` M (n, n), the penalty is `strength` times tr(B M B^T) instead. If M is the covariance of old
    classes, this is how far their features would move about their mean: the ridge in the space in which M is white.
    """
    if len(before) != len(after) or len(before) == 0:
        raise TrainingError(
            f"A map between feature spaces needs the same images in both, but there are {len(before)} old and "
            f"{len(after)} new features."
        )
    old, new = before.double(), after.double()
    old_mean, new_mean = (old.mean(dim=0), new.mean(dim=0)) if intercept else (old.new_zeros(()), old.new_zeros(()))
    source, moved = old - old_mean, (new - new_mean) - (old - old_mean)
    gram = source.T @ source / len(source)
    penalty = strength * gram.diagonal().mean() if metric is None else 0.0
    identity = torch.eye(old.shape[1], dtype=torch.float64, device=old.device)
    # eigh instead of solve: without a penalty, directions that no image has stay unchanged and do not blow up.
    values, vectors = torch.linalg.eigh(gram if metric is None else gram + strength * metric.double())
    kept = values > values.max() * len(values) * torch.finfo(torch.float64).eps
    inverse = torch.where(kept, 1.0 / torch.where(kept, values + penalty, 1.0), 0.0)
    correction = (vectors * inverse) @ (vectors.T @ (source.T @ moved / len(source)))
    error = moved - source @ correction
    matrix = identity + correction.T
    shift = new_mean - matrix @ old_mean if intercept else old.new_zeros(old.shape[1])
    return AffineMap(matrix, shift, error.T @ error / len(error))


@torch.no_grad()
def learned_map(
    views: Iterable[tuple[Tensor, Tensor]],
    size: int,
    *,
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    device: torch.device | str = "cpu",
) -> AffineMap:
    """A linear map without intercept, learned by Adam on the mean squared error, one epoch per view.

    A view is the old and new features (N, n) of all images in the order to be seen. The map starts as the identity.
    """
    weight = torch.eye(size, device=device)
    optimiser = torch.optim.Adam([weight], lr=learning_rate)
    residual = torch.zeros(size, size, dtype=torch.float64, device=device)
    for before, after in views:
        for start in range(0, len(before), batch_size):
            rows, targets = before[start : start + batch_size], after[start : start + batch_size]
            weight.grad = 2.0 / targets.numel() * (rows @ weight.T - targets).T @ rows
            optimiser.step()
        error = after.double() - before.double() @ weight.T.double()
        residual = error.T @ error / len(error)
    return AffineMap(weight.double(), torch.zeros(size, dtype=torch.float64, device=device), residual)


@torch.no_grad()
def learned_maps(
    before: Tensor,
    after: Tensor,
    counts: Tensor,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    generator: torch.Generator,
) -> Tensor:
    """A map of its own for every class, learned by Adam on the mean distance |W x + b - y|: matrices W (C, n, n).

    before and after (C, K, n) are features of the same images in the old and the new space; class c has the first
    counts[c] of its rows, at least one. An epoch shows them in a new order; a class with fewer of them has fewer steps.
    All classes learn side by side. A map starts as the identity.
    """
    classes, _, size = before.shape
    weight = torch.eye(size, device=before.device).repeat(classes, 1, 1)
    adam = _Adam([weight, torch.zeros(classes, 1, size, device=before.device)], learning_rate)
    place = torch.arange(before.shape[1], device=before.device)
    most = int(counts.max())
    for _ in range(epochs):
        chance = torch.rand(before.shape[:2], generator=generator, device=generator.device).to(before.device)
        # Rows that a class does not have come last.
        order = torch.where(place < counts[:, None], chance, 2.0).argsort(dim=1)[:, :most, None].expand(-1, -1, size)
        rows, targets = before.gather(1, order), after.gather(1, order)
        for start in range(0, most, batch_size):
            some, wanted = rows[:, start : start + batch_size], targets[:, start : start + batch_size]
            there = (place[start : start + batch_size][: some.shape[1]] < counts[:, None]).to(weight.dtype)[:, :, None]
            error = torch.baddbmm(adam.values[1], some, weight.transpose(1, 2)) - wanted
            length = torch.linalg.vector_norm(error, dim=2, keepdim=True).clamp(min=_SHORTEST)
            slope = error / length * there / there.sum(dim=1, keepdim=True).clamp(min=1.0)
            adam.step([slope.transpose(1, 2) @ some, slope.sum(dim=1, keepdim=True)], there[:, 0, 0] > 0)
    return weight


class _Adam:
    """Adam over tensors with a row for every class, each of which counts its own steps and may leave some out."""

    betas, epsilon = (0.9, 0.999), 1e-8

    def __init__(self, values: list[Tensor], learning_rate: float) -> None:
        self.values, self.learning_rate = values, learning_rate
        self.first, self.second = ([torch.zeros_like(value) for value in values] for _ in range(2))
        self.steps = torch.zeros(len(values[0]), 1, 1, device=values[0].device, dtype=torch.float64)

    def step(self, gradients: list[Tensor], active: Tensor) -> None:
        """Update the rows of `active` classes (C) by their gradients."""
        moves = active[:, None, None]
        self.steps += moves
        counted = self.steps.clamp(min=1.0)
        rate = torch.where(moves, self.learning_rate / (1 - self.betas[0] ** counted), 0.0).float()
        root = (1 - self.betas[1] ** counted).rsqrt().float()
        new = [torch.where(moves, 1.0 - beta, 0.0).float() for beta in self.betas]
        for value, gradient, first, second in zip(self.values, gradients, self.first, self.second, strict=True):
            first.addcmul_(gradient - first, new[0])
            second.addcmul_(gradient.square() - second, new[1])
            value.addcdiv_(first * -rate, second.sqrt().mul_(root).add_(self.epsilon))


def relational_update(prototypes: Tensor, before: Tensor, after: Tensor, strength: float = 0.01) -> Tensor:
    """Old class means (C, n), moved by their relation to the new classes, whose means (q, n) are `before` and `after`.

    Each old mean is written as the average of the new ones plus a ridge-regressed combination of their deviations from
    it, from before the task; the remainder is kept. The same combination of the new means after the task gives the
    moved mean. If all new means move by v, so does every old one.
    """
    old, new = before.double(), after.double()
    deviations = old - old.mean(dim=0)
    gram = deviations @ deviations.T
    spread = gram.diagonal().mean()
    penalty = torch.where(spread > 0, strength * spread, 1.0)  # a single new class has no deviation
    identity = torch.eye(len(old), dtype=torch.float64, device=old.device)
    relation = torch.linalg.solve(gram + penalty * identity, deviations @ (prototypes.double() - old.mean(dim=0)).T).T
    moves = new - old
    # Deviations sum to zero, and so do the rows of the relation: a shift shared by all new means has no effect on it.
    return (prototypes.double() + moves.mean(dim=0) + relation @ moves).to(prototypes.dtype)

"""What noise in feature space does to predictions: along directions that matter to a feature matrix, and others.

The feature matrix is W^T (diag(p) - p p^T) W on average, so a direction v in its null space has the same score W v in
every class, and a move along it changes no probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.errors import TrainingError

PRINCIPAL, NON_PRINCIPAL = "principal", "non-principal"
#: Share of the largest eigenvalue above which a direction is principal. A matrix of rank r that is kept in float32 has
#: n - r eigenvalues of up to about 1e-8 of the largest.
CUT_OFF = 1e-6


@dataclass(frozen=True)
class Change:
    """What noise of standard deviation `sigma` along some directions did.

    `change` is the mean over features of the total variation between the probabilities before and after: half the sum
    of their absolute changes, from 0 (none) to 1 (all moved to other classes). Accuracies are in percent.
    """

    sigma: float
    directions: str
    change: float
    accuracy: float
    unperturbed: float


def split(matrix: Tensor, cut_off: float = CUT_OFF) -> tuple[Tensor, Tensor]:
    """Orthonormal bases (n, k) and (n, n - k) of the principal and the other directions of a matrix (n, n), in float64.

    Principal are the eigenvectors whose eigenvalue is above `cut_off` times the largest.
    """
    values, vectors = torch.linalg.eigh(matrix.detach().double().cpu())
    if not float(values[-1]) > 0.0:
        raise TrainingError("The feature matrix has no positive eigenvalue, so no direction is principal.")
    chosen = values > cut_off * values[-1]
    return vectors[:, chosen], vectors[:, ~chosen]


def perturb(
    features: Tensor,
    labels: Tensor,
    heads: Tensor,
    matrix: Tensor,
    sigmas: Sequence[float],
    generator: torch.Generator,
    cut_off: float = CUT_OFF,
    answers: Tensor | None = None,
) -> list[Change]:
    """Change features (N, n) of known labels (N) by Gaussian noise in each of the two subspaces of a matrix (n, n).

    `heads` (m, n) are the weights of the softmax. Noise has the standard deviation sigma along every direction of the
    subspace, and none outside. All sigmas and both subspaces share one draw per feature, from `generator` (CPU), so
    that a result does not depend on which others are asked for. Everything is computed in float64. Where classes share
    an answer, `answers` (m) has its number for each of them: the probability of an answer is the sum of theirs, and the
    answer that is right or wrong is that of the most probable class.
    """
    points, weight = features.detach().double().cpu(), heads.detach().double().cpu()
    numbers = torch.arange(len(weight)) if answers is None else answers
    truth = numbers[labels.cpu()]
    noise = torch.randn(points.shape, generator=generator, dtype=torch.float64)
    logits = points @ weight.T
    before = torch.softmax(logits, dim=1)
    unperturbed = _accuracy(before, numbers, truth)
    found = []
    for name, basis in zip((PRINCIPAL, NON_PRINCIPAL), split(matrix, cut_off), strict=True):
        # Scores are linear in the features, so that noise is added to them.
        moved = (noise @ basis) @ (weight @ basis).T
        for sigma in sigmas:
            after = torch.softmax(logits + sigma * moved, dim=1)
            difference = after - before
            if answers is not None:
                difference = torch.zeros_like(difference).index_add_(1, answers, difference)
            change = float(difference.abs().sum(dim=1).mean() / 2)
            found.append(Change(sigma, name, change, _accuracy(after, numbers, truth), unperturbed))
    return found


def _accuracy(probabilities: Tensor, answers: Tensor, truth: Tensor) -> float:
    return 100.0 * float((answers[probabilities.argmax(dim=1)] == truth).double().mean())

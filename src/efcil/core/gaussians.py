"""Classes as Gaussians in feature space: features gathered, whole classes drawn, infinite sampling in closed form.

Statistics and the factors to sample with come from core/prototypes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core import prototypes
from efcil.core.covariance import is_factored, traces, weighted_sum
from efcil.core.growing import GrowingRows

#: Features that are added to a scatter matrix together.
_ROWS_TOGETHER = 1024


def collect(features: Callable[[Tensor], Tensor], pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Features (N, n) and labels (N) of all (images, labels) pieces, in their order."""
    found, where = GrowingRows(), []
    for images, labels in pieces:
        found.add(features(images))
        where.append(labels)
    return found.tensor, torch.cat(where)


def perturbation_radius(covariances: Tensor) -> Tensor:
    """The standard deviation of one feature, sqrt(mean over classes of trace(S) / n), of covariances (C, n, n).

    They may be factors (see core/covariance.py).
    """
    if is_factored(covariances):
        return (traces(covariances).mean() / covariances.shape[1]).sqrt()
    return covariances.diagonal(dim1=1, dim2=2).mean().sqrt()


def mixture_covariance(means: Tensor, covariances: Tensor, covariance_of: Tensor) -> Tensor:
    """The covariance (n, n), in float64, of features of all classes together, of which each has the same weight.

    It is the mean covariance plus the covariance of the means (C, n). Covariances (G, n, n) may be factors.
    """
    share = torch.bincount(covariance_of, minlength=len(covariances)).double() / len(means)
    centred = means.double() - means.double().mean(dim=0)
    return weighted_sum(covariances, share) + centred.T @ centred / len(means)


def sample_classes(
    means: Tensor, factors: Tensor, factor_of: Tensor, counts: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw counts[c] features of every class c: features (K, n) and labels (K), class after class.

    means (C, n), factors (G, n, r), and which factor each class uses, factor_of (C).
    """
    device = means.device
    repeats = torch.tensor(list(counts), device=device)
    labels = torch.repeat_interleave(torch.arange(len(means), device=device), repeats, output_size=sum(counts))
    noise = torch.randn(
        len(labels), factors.shape[2], generator=generator, device=generator.device, dtype=means.dtype
    ).to(device)
    drawn = torch.zeros(len(factors), device=device, dtype=torch.int64).index_add_(0, factor_of, repeats)
    coloured = prototypes.coloured_noise(factors, factor_of[labels], noise, int(drawn.max()))
    return means[labels] + coloured, labels


@dataclass(frozen=True)
class Within:
    """Features of classes about the means of their classes, in float64: means (C, n), scatter (n, n), counts (C)."""

    means: Tensor
    scatter: Tensor
    counts: Tensor

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance (n, n), which all classes share; zero if every class has a single feature."""
        return self.scatter / max(int(self.counts.sum()) - len(self.counts), 1)


def within_classes(features: Tensor, labels: Tensor, classes: Sequence[int]) -> Within:
    """Measure the features (N, n) of `classes`; `labels` (N) may hold others too. No matrix is made for every class."""
    means, counts, scatter = [], [], features.new_zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    waiting: list[Tensor] = []
    for place, label in enumerate(classes):
        rows = features[labels == label].double()
        prototypes.refuse_empty(label, len(rows))
        means.append(rows.mean(dim=0))
        counts.append(len(rows))
        waiting.append(rows - means[-1])
        # The matrix is large, and few rows change all of it: those of several classes do so together.
        if place == len(classes) - 1 or sum(map(len, waiting)) >= _ROWS_TOGETHER:
            centred = torch.cat(waiting)
            scatter.addmm_(centred.T, centred)
            waiting.clear()
    return Within(torch.stack(means), scatter, torch.tensor(counts, device=features.device))


def blend(first: tuple[Tensor, Tensor, int], second: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased covariance of two samples taken together, each given as mean (n), covariance (n, n), count."""
    (mean, covariance, count), (other, other_covariance, more) = first, second
    total, shift = count + more, (other - mean).double()
    scatter = max(count - 1, 0) * covariance.double() + max(more - 1, 0) * other_covariance.double()
    scatter += torch.outer(shift, shift) * (count * more / total)
    return mean + (shift * (more / total)).to(mean), (scatter / max(total - 1, 1)).to(covariance)


def semantic_logits(weight: Tensor, means: Tensor, covariances: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Logits (K, m) whose cross-entropy bounds that of infinitely many samples of N(p^c, scale * S^c) from above.

    z_j = w_j . p^c + scale / 2 (w_j - w_c)^T S^c (w_j - w_c), for the head W (m, n), means (C, n), covariances
    (C, n, n) and the class c of each row, `labels` (K).
    """
    difference = weight[None] - weight[labels][:, None]
    spread = (torch.bmm(difference, covariances[labels]) * difference).sum(dim=2)
    return means[labels] @ weight.T + 0.5 * scale * spread

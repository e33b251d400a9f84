"""The empirical feature matrix: how strongly a move of a feature vector changes the predicted probabilities.

For one feature f with p = softmax(W f) the matrix is sum_y p_y (W^T(e_y - p)) (W^T(e_y - p))^T, which equals
W^T (diag(p) - p p^T) W. It is linear in diag(p) and p p^T, so the mean over a task needs only the mean of p and of
p p^T: one m x m accumulation over the data and two products at the end. With more classes than features, the sum of
(W^T p) (W^T p)^T is accumulated instead, which is n x n: 10,000 classes would need 800 MB for the other one.

The scores of cosine heads change with the direction of f alone. There W is replaced by s U (I - f f^T / |f|^2) / |f|
with the rows of U of unit length, which differs from feature to feature, so that n x n matrices are accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from efcil.errors import TrainingError

#: Numbers of a chunk of samples of cosine heads that are held at a time.
_LARGEST = 1 << 24
_SHORTEST = 1e-12


@dataclass(frozen=True)
class FeatureMatrixSum:
    """What has been seen so far: sum of p (m), sum of p p^T (m, m), both float64, and the number of samples.

    Where `head` (m, n) is given, in float64, the second sum is that of (W^T p) (W^T p)^T (n, n).
    Of cosine heads it is `whole`, the sum of the feature matrices (n, n) themselves.
    """

    probability: Tensor
    outer: Tensor
    count: int
    whole: Tensor | None = None
    head: Tensor | None = None

    @classmethod
    def empty(cls, classes: int, device: torch.device | str = "cpu") -> FeatureMatrixSum:
        """The sum over no sample, for `classes` seen classes."""
        zeros = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        return cls(zeros[0].clone(), zeros, 0)

    @classmethod
    def of_head(cls, weight: Tensor) -> FeatureMatrixSum:
        """The sum over no sample, for the head `weight` (m, n), in the smaller of the two forms."""
        classes, size = weight.shape
        if classes <= size:
            return cls.empty(classes, weight.device)
        zeros = torch.zeros(classes, dtype=torch.float64, device=weight.device)
        return cls(zeros, zeros.new_zeros(size, size), 0, head=weight.double())

    def matrix(self, weight: Tensor) -> Tensor:
        """The feature matrix (n, n) of all samples accumulated, for the head `weight` (m, n)."""
        if self.count == 0:
            raise TrainingError(
                "The feature matrix is a mean over images, but no image was seen; give it a task's data."
            )
        if self.whole is not None:
            return ((self.whole + self.whole.T) / (2 * self.count)).to(weight.dtype)
        if self.head is None:
            return feature_matrix(weight, self.probability / self.count, self.outer / self.count)
        scaled = self.head * (self.probability / self.count)[:, None]
        matrix = self.head.T @ scaled - self.outer / self.count
        return ((matrix + matrix.T) / 2).to(weight.dtype)


def accumulate(total: FeatureMatrixSum, logits: Tensor) -> FeatureMatrixSum:
    """Add the samples of one chunk, given their `logits` (B, m) over all seen classes; returns a new sum."""
    probabilities = torch.softmax(logits.double(), dim=1)
    rows = probabilities if total.head is None else probabilities @ total.head
    return replace(
        total,
        probability=total.probability + probabilities.sum(dim=0),
        outer=total.outer + rows.T @ rows,
        count=total.count + len(logits),
    )


def accumulate_cosine(total: FeatureMatrixSum, features: Tensor, weight: Tensor, scale: Tensor) -> FeatureMatrixSum:
    """Add the samples of one chunk of features (B, n) for cosine heads (m, n) of a scale; returns a new sum."""
    size = features.shape[1]
    whole = total.whole if total.whole is not None else weight.new_zeros(size, size, dtype=torch.float64)
    rows = functional.normalize(weight.double(), dim=1)
    step = max(1, _LARGEST // max(weight.numel(), 1))
    for some in features.double().split(step):
        length = torch.linalg.vector_norm(some, dim=1, keepdim=True).clamp(min=_SHORTEST)
        unit = some / length
        cosines = unit @ rows.T
        probabilities = torch.softmax(scale.double() * cosines, dim=1)
        # How each score changes with the feature (B, m, n), less the mean over classes, weighted by their roots.
        slopes = (rows - cosines[:, :, None] * unit[:, None, :]) * (scale.double() / length)[:, :, None]
        slopes = slopes - (probabilities[:, :, None] * slopes).sum(dim=1, keepdim=True)
        weighted = (probabilities.sqrt()[:, :, None] * slopes).flatten(0, 1)
        whole = whole + weighted.T @ weighted
    return replace(total, count=total.count + len(features), whole=whole)


def feature_matrix(weight: Tensor, mean_probability: Tensor, mean_outer: Tensor) -> Tensor:
    """E = W^T (diag(mean p) - mean p p^T) W, for W (m, n), mean p (m), mean p p^T (m, m); gives (n, n).

    Computed in float64, because the two parts of the middle matrix nearly cancel for confident predictions, and
    returned symmetric in the type of `weight`. E is positive semi-definite with rank at most m - 1.
    """
    head = weight.double()
    middle = torch.diag(mean_probability.double()) - mean_outer.double()
    matrix = head.T @ middle @ head
    return ((matrix + matrix.T) / 2).to(weight.dtype)


def spectrum(matrix: Tensor) -> Tensor | None:
    """The eigenvalues (n) of a symmetric matrix (n, n), largest first, in float64; None if it is not finite.

    Computed on the host: for some hundred features that takes milliseconds, less than a GPU needs.
    """
    exact = matrix.detach().double().cpu()
    return torch.linalg.eigvalsh(exact).flip(0) if bool(exact.isfinite().all()) else None


def quadratic_drift(delta: Tensor, matrix: Tensor, strength: float, damping: float) -> Tensor:
    """Mean over the batch of d^T (strength * E + damping * I) d, for drifts `delta` (B, n) and E (n, n); a scalar."""
    elastic = ((delta @ matrix) * delta).sum(dim=1)
    return (strength * elastic + damping * delta.square().sum(dim=1)).mean()

"""Classifiers that need no training images: they are built, at test time, from what is stored about every class.

Each builder takes `ClassStatistics` and returns a function from features (N, n) to scores (N, C); the largest score
gives the class. Work that does not depend on the features is done once, in float64, when the classifier is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import gaussians, prototypes, svm
from efcil.core.covariance import is_factored, low_rank, shrink, traces, weighted_sum, whole
from efcil.core.heads import cosine_logits, fit_to_gaussians
from efcil.errors import SettingsError, unknown

Classifier = Callable[[Tensor], Tensor]

OWN, ALL, HEADS, AUTO = "own", "all", "heads", "auto"
_JITTER, _SMALLEST_JITTER = 1e-6, 1e-12
# Share of the mean trace up to which a covariance counts as zero up to rounding.
_NO_SPREAD = 1e-6
_SVM_SAMPLES = 200
# Features drawn of every class to compare how sure two classifiers are.
_BOTH_SAMPLES = 20
# Temperatures for scores of size 1 are sought between exp(-12) and exp(12); halved so often, that is known to 2e-8.
_TEMPERATURES, _HALVINGS = 12.0, 30
_REBALANCING_DECAY = 5e-4


@dataclass(frozen=True)
class ClassStatistics:
    """What is stored about the classes seen: means (C, n), covariances (G, n, n) and which of them each class has (C).

    `heads` (C, n) are the weights of a linear classifier of the same features, if there is one; with `head_scale`, of
    cosine heads of that scale.
    """

    means: Tensor
    covariances: Tensor | None = None
    covariance_of: Tensor | None = None
    heads: Tensor | None = None
    head_scale: Tensor | None = None

    def spread(self) -> tuple[Tensor, Tensor]:
        """Covariances and which of them each class has; an error if none are kept."""
        if self.covariances is None:
            raise SettingsError("This classifier needs class covariances, but only class means are kept.")
        if self.covariance_of is None:
            return self.covariances, torch.arange(len(self.means), device=self.means.device)
        return self.covariances, self.covariance_of


def nearest_mean(statistics: ClassStatistics, normalise: bool = False) -> Classifier:
    """Minus the squared distance to every class mean; with `normalise`, between vectors of unit length."""
    means = functional.normalize(statistics.means, dim=1) if normalise else statistics.means

    def scores(features: Tensor) -> Tensor:
        features = functional.normalize(features, dim=1) if normalise else features
        return -_squared_distances(features, means)

    return scores


def mahalanobis(
    statistics: ClassStatistics, diagonal: float = 1.0, off_diagonal: float = 1.0, normalise: bool = True
) -> Classifier:
    """Minus the squared Mahalanobis distance to every class, as in FeCAM, which shrinks by more than these defaults.

    A covariance S is shrunk to S + diagonal * v I + off_diagonal * u (1 - I), with v the mean of its diagonal and u
    that of the rest, and with `normalise` turned into a correlation matrix; features and means then have unit length.
    """
    covariances, group_of = _with_spread(*statistics.spread())
    means = functional.normalize(statistics.means, dim=1) if normalise else statistics.means
    whitening = means.new_empty(len(covariances), means.shape[1], means.shape[1])
    for row, each in enumerate(covariances):  # one after the other: float64 copies of all would be large
        whitening[row] = _whitening(shrunk_towards_mean(whole(each).double(), diagonal, off_diagonal, normalise))
    distances = _whitened_distances(means, whitening, group_of)
    return lambda features: -distances(functional.normalize(features, dim=1) if normalise else features)


def bayes(statistics: ClassStatistics, shrinkage: float = 0.1) -> Classifier:
    """Log-density, up to a constant, of one Gaussian per class, each covariance shrunk towards a multiple of I."""
    covariances, group_of = _with_spread(*statistics.spread())
    means = statistics.means
    whitening = means.new_empty(len(covariances), means.shape[1], means.shape[1])
    diagonals = means.new_empty(len(covariances), means.shape[1], dtype=torch.float64)
    for row, each in enumerate(covariances):
        matrix = _whitening(shrink(whole(each).double(), shrinkage))
        whitening[row], diagonals[row] = matrix, matrix.diagonal()
    # The whitening is triangular, and its determinant is that of the covariance to the power of -1/2.
    volume = diagonals.log().sum(dim=1)[group_of].to(means.dtype)
    distances = _whitened_distances(means, whitening, group_of)
    return lambda features: volume - 0.5 * distances(features)


def discriminant(statistics: ClassStatistics, shrinkage: float = 0.1) -> Classifier:
    """Linear discriminant analysis: `bayes` with the average covariance for all classes."""
    covariances, group_of = statistics.spread()
    share = torch.bincount(group_of, minlength=len(covariances)).to(covariances.dtype) / len(group_of)
    pooled = weighted_sum(covariances, share)[None]
    return bayes(ClassStatistics(statistics.means, pooled, torch.zeros_like(group_of)), shrinkage)


def ridge(statistics: ClassStatistics, strength: float = 0.01) -> Classifier:
    """Ridge regression onto one-hot targets, as if every class had equally many rows of its mean and covariance.

    `strength` times the mean of the Gram matrix's diagonal is the penalty; class weights are scaled to unit length.
    """
    covariances, group_of = statistics.spread()
    means = statistics.means.double()
    share = torch.bincount(group_of, minlength=len(covariances)).double()
    gram = weighted_sum(covariances, share) + means.T @ means
    weight = ridge_weight(gram, means, strength * float(gram.diagonal().mean())).to(statistics.means.dtype)
    return lambda features: features @ weight.T


def ridge_weight(gram: Tensor, sums: Tensor, penalty: float) -> Tensor:
    """Rows w_c = (G + penalty I)^-1 s_c, scaled to unit length (C, n), for the Gram matrix (n, n) and sums (C, n)."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return functional.normalize(torch.linalg.solve(gram + penalty * identity, sums.T).T, dim=1)


def machines(statistics: ClassStatistics) -> Classifier:
    """Linear support vector machines fitted to features drawn from every class's Gaussian, scaled to unit length."""
    covariances, group_of = statistics.spread()
    if len(statistics.means) == 1:
        return lambda features: features.new_zeros(len(features), 1)  # there is no other class
    factors = prototypes.cholesky_factors(covariances)
    generator = torch.Generator().manual_seed(0)  # the CPU's: the same classifier on every device
    counts = [_SVM_SAMPLES] * len(statistics.means)
    drawn, labels = gaussians.sample_classes(statistics.means, factors, group_of, counts, generator)
    fitted = svm.fit(functional.normalize(drawn, dim=1), labels, len(counts))
    return lambda features: fitted.decision(functional.normalize(features, dim=1))


def rebalanced(statistics: ClassStatistics) -> Classifier:
    """The heads trained further on features drawn from every class's Gaussian, equally many of each, as in EFC++."""
    covariances, group_of = statistics.spread()
    if statistics.heads is None:
        raise SettingsError("This classifier needs trained heads, and there are none.")
    weight = fit_to_gaussians(
        statistics.heads,
        statistics.means,
        covariances,
        group_of,
        lambda epoch: torch.Generator().manual_seed(epoch),  # the CPU's: the same classifier on every device
        weight_decay=_REBALANCING_DECAY,
        scale=statistics.head_scale,
    )
    if statistics.head_scale is not None:
        scale = statistics.head_scale.detach()
        return lambda features: cosine_logits(features, weight, scale)
    return lambda features: features @ weight.T


def both(statistics: ClassStatistics) -> Classifier:
    """The log-probabilities of `rebalanced` heads plus those of `mahalanobis`: high where both agree.

    Distances have a scale of their own. They are divided by the temperature with which their softmax is on average as
    sure (has the same entropy) as that of the heads, over features drawn from every class's Gaussian.
    """
    heads, distances = rebalanced(statistics), mahalanobis(statistics)
    covariances, group_of = statistics.spread()
    factors = prototypes.cholesky_factors(covariances)
    generator = torch.Generator().manual_seed(0)  # the CPU's: the same classifier on every device
    counts = [_BOTH_SAMPLES] * len(statistics.means)
    drawn, _ = gaussians.sample_classes(statistics.means, factors, group_of, counts, generator)
    temperature = as_sure(distances(drawn), entropy(heads(drawn)))

    def scores(features: Tensor) -> Tensor:
        return heads(features).log_softmax(dim=1) + (distances(features) / temperature).log_softmax(dim=1)

    return scores


def entropy(scores: Tensor) -> float:
    """The mean entropy of the softmax of scores (N, C)."""
    logarithms = scores.double().log_softmax(dim=1)
    return float(-(logarithms.exp() * logarithms).sum(dim=1).mean())


def as_sure(scores: Tensor, wanted: float) -> float:
    """The temperature with which scores (N, C) have the mean entropy `wanted`, found by halving an interval of it."""
    size = float((scores - scores.mean(dim=1, keepdim=True)).abs().max())
    if size == 0.0:  # they are equally unsure with any temperature
        return 1.0
    low, high = math.log(size) - _TEMPERATURES, math.log(size) + _TEMPERATURES
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if entropy(scores / math.exp(middle)) > wanted else (middle, high)
    return math.exp((low + high) / 2)


#: Name -> (what must be kept, builder).
CLASSIFIERS: dict[str, tuple[tuple[str, ...], Callable[[ClassStatistics], Classifier]]] = {
    "rebalanced": ((HEADS, "covariances"), rebalanced),
    "nearest-mean": (("means",), nearest_mean),
    "mahalanobis": (("covariances",), mahalanobis),
    "bayes": (("covariances",), bayes),
    "lda": (("covariances",), discriminant),
    "ridge": (("covariances",), ridge),
    "svm": (("covariances",), machines),
    "both": ((HEADS, "covariances"), both),
}
NAMES = (OWN, AUTO, HEADS, *CLASSIFIERS, ALL)


def possible(keeps: Collection[str]) -> tuple[str, ...]:
    """Return the classifiers that a method which keeps `keeps` (heads, means, covariances) can be tested with."""
    heads = (HEADS,) if HEADS in keeps else ()
    return (OWN, *heads, *(name for name, (needed, _) in CLASSIFIERS.items() if set(needed) <= set(keeps)))


def automatic(keeps: Collection[str]) -> str:
    """Return what `auto` means for a method that classifies with its heads: rebalanced if it keeps what that needs.

    Tasks of a model are small, often of one class. Heads then hardly learn to separate it from others; Gaussians do.
    """
    return "rebalanced" if "rebalanced" in possible(keeps) else OWN


def check(name: str, method: str, keeps: Collection[str]) -> None:
    """Raise unless the classifier called `name` can be built from what `method` keeps."""
    if name not in NAMES:
        raise unknown("classifier", name, NAMES)
    if name not in (ALL, AUTO) and name not in possible(keeps):
        needed = (HEADS,) if name == HEADS else CLASSIFIERS[name][0]
        missing = " and ".join(each for each in needed if each not in keeps)
        raise SettingsError(
            f"Classifier {name!r} needs class {missing}, which method {method!r} does not keep. "
            f"Possible with {method}: {', '.join(possible(keeps))}."
        )


def shrunk_towards_mean(covariance: Tensor, diagonal: float, off_diagonal: float, correlation: bool) -> Tensor:
    """S + diagonal * v I + off_diagonal * u (1 - I) of S (n, n), and the correlation matrix of that if asked for."""
    size = len(covariance)
    variance = covariance.diagonal().mean()
    rest = (covariance.sum() - covariance.diagonal().sum()) / max(size * (size - 1), 1)
    identity = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    shrunk = covariance + diagonal * variance * identity + off_diagonal * rest * (1.0 - identity)
    if not correlation:
        return shrunk
    # A feature that never varies correlates with none.
    deviation = torch.where(shrunk.diagonal() > 0.0, shrunk.diagonal().clamp(min=0.0).sqrt(), torch.inf)
    return shrunk / (deviation[:, None] * deviation)


def _with_spread(covariances: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor]:
    """The same, but a covariance that is zero up to rounding is replaced by the mean of the others.

    A class of one image has such a covariance: with it, no other image could ever belong to that class.
    """
    spread = traces(covariances)
    known = spread > _NO_SPREAD * spread.mean()
    if bool(known.all()) or not bool(known.any()):
        return covariances, group_of
    if is_factored(covariances):
        average = weighted_sum(covariances, known.double() / known.sum())
        leading = low_rank(average[None], 1.0)[0, :, : covariances.shape[2]].to(covariances.dtype)
        covariances = covariances.clone()
        covariances[~known] = functional.pad(leading, (0, covariances.shape[2] - leading.shape[1]))
        return covariances, group_of
    return torch.where(known[:, None, None], covariances, covariances[known].mean(dim=0)), group_of


def _whitening(covariance: Tensor) -> Tensor:
    """W (n, n), upper triangular, with W W^T = S^-1, so that ||x W|| is the Mahalanobis length of the row x."""
    # If no class has any spread, the floor keeps distances finite.
    jitter = max(_JITTER * float(covariance.diagonal().mean()), _SMALLEST_JITTER)
    factor = prototypes.cholesky_factors(covariance[None], jitter)[0]
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False).T


def _whitened_distances(means: Tensor, whitening: Tensor, group_of: Tensor) -> Classifier:
    """Return a function from features to squared distances to all means, each after the whitening of its group.

    The groups are fixed here, so that scoring is one fixed computation, which can be exported.
    """
    members = [(group_of == group).nonzero()[:, 0] for group in range(len(whitening))]
    groups = [(matrix, means[rows] @ matrix) for matrix, rows in zip(whitening, members, strict=True) if len(rows)]
    place = torch.cat(members).argsort()

    def distances(features: Tensor) -> Tensor:
        columns = [_squared_distances(features @ matrix, centres) for matrix, centres in groups]
        return torch.cat(columns, dim=1)[:, place]

    return distances


def _squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """||x - c||^2 (N, C) by products, around the centres' mean so that the terms that cancel are small."""
    origin = centres.mean(dim=0)
    points, centres = points - origin, centres - origin
    return points.square().sum(dim=1, keepdim=True) + centres.square().sum(dim=1) - 2.0 * points @ centres.T

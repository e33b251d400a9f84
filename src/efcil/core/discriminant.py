"""Linear classifiers of classes that share a covariance, made for few images and for classes of unequal size.

The covariance is shrunk as if a spherical one had been seen in some images before the first. The means of classes
with few images are uncertain, which makes them look further away than they are; `noise` is what to subtract for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core import prototypes
from efcil.core.classifiers import Classifier
from efcil.core.covariance import shrink

#: The squared length of a class mean is at least this share of what it seems to be, once its noise is subtracted: with
#: two images, little more than noise may be left, and a class that is divided by it wins everywhere.
_SMALLEST_SHARE = 0.4
_JITTER = 1e-10
# Without a prior, and with fewer images than features, nothing is left of the denominator.
_SMALLEST_REST = 0.05


@dataclass(frozen=True)
class SharedGaussians:
    """Class means (C, n), the covariance of all images (n, n) with its degrees of freedom, and images per class (C)."""

    means: Tensor
    covariance: Tensor
    freedom: int
    counts: Tensor


def amount(freedom: int, features: int, prior: float) -> float:
    """The shrinkage in [0, 1] of a covariance with so many degrees of freedom; the prior is worth prior * n images."""
    return prior * features / (prior * features + freedom) if prior > 0 else 0.0


def cosine(classes: SharedGaussians, prior: float = 1.0) -> Classifier:
    """The cosine between a feature and every class mean, whitened and seen from the centre of the means.

    It is not divided by the length of the feature, which all classes share; so it is linear. What counts is the
    direction: a class whose mean is far from the centre, or only seems so because it has few images, gains nothing.
    """
    weight, centre, length, noise = _whitened(classes, prior)
    number = len(weight)
    squared = length - (noise * (1.0 - 2.0 / number) + noise.mean() / number)
    usable = torch.maximum(squared, _SMALLEST_SHARE * length).clamp(min=torch.finfo(length.dtype).tiny).sqrt()
    # The noise of the means is in the centre too: of a class with few images the most.
    offset = (noise - noise.mean()) / number - weight @ centre
    # All are scaled alike, so that scores have the size of logarithms of densities.
    scale = usable.mean() / usable
    return _linear(weight * scale[:, None], offset * scale, classes.means)


def bayes(classes: SharedGaussians, prior: float = 1.0) -> Classifier:
    """Linear discriminant analysis: logarithms of densities, up to a term that all classes share, for equal priors."""
    weight, centre, length, noise = _whitened(classes, prior)
    return _linear(weight, -0.5 * (length - noise) - weight @ centre, classes.means)


def _whitened(classes: SharedGaussians, prior: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights S^-1 (m_c - m) (C, n), the centre m (n), squared lengths of whitened means (C) and their noise (C)."""
    means, covariance = classes.means.double(), classes.covariance.double()
    if not bool(covariance.diagonal().sum() > 0):
        # Every class has one image: nothing is known about the spread, so it is alike in all directions.
        covariance = torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
        known = torch.zeros_like(covariance)
    else:
        known = covariance
    strength = amount(classes.freedom, means.shape[1], prior)
    shrunk = shrink(covariance, strength)
    # Without a prior the covariance may be singular.
    jitter = _JITTER * float(shrunk.diagonal().mean())
    inverse = torch.cholesky_inverse(prototypes.cholesky_factors(shrunk[None], jitter)[0])
    centre = means.mean(dim=0)
    centred = means - centre
    weight = centred @ inverse
    noise = _unseen_length(inverse, known, strength, classes.freedom) / classes.counts.clamp(min=1).double()
    return weight, centre, (weight * centred).sum(dim=1), noise


def _unseen_length(inverse: Tensor, covariance: Tensor, strength: float, freedom: int) -> Tensor:
    """The mean squared length, after whitening, of the deviation of an image that the covariance was not measured on.

    For those it was measured on it is the trace of the product. Leaving one image out of the covariance raises it, by
    the formula of Sherman and Morrison, as if all images had the mean length.
    """
    seen = (inverse * covariance).sum()
    return seen / (1.0 - (1.0 - strength) * seen / max(freedom, 1)).clamp(min=_SMALLEST_REST)


def _linear(weight: Tensor, offset: Tensor, like: Tensor) -> Classifier:
    weight, offset = weight.to(like), offset.to(like)
    return lambda features: features @ weight.T + offset

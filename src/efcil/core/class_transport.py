"""Transport of class statistics by a map for every class: corrections of one common map, fitted on images near a class.

The common map (core/transport.py) is right on average over the images it was fitted on. Where features bend, it errs
alike for images that lie near each other. So what it leaves unexplained is fitted again for every class, on images
weighted by their nearness to it. A class with few images near it keeps the common map.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from efcil.core import prototypes
from efcil.core.classifiers import ClassStatistics
from efcil.core.covariance import shrink, whole
from efcil.core.transport import AffineMap

#: As in the classifier `bayes`.
_SHRINKAGE = 0.1
#: In mean variances of a feature: keeps distances to a class without any spread finite.
_JITTER = 1e-6


def nearness(features: Tensor, mean: Tensor, covariance: Tensor, temperature: float) -> Tensor:
    """How near features (N, n) are to a Gaussian, between 0 and 1 (N), in float64.

    It is exp(-max(0, m - 1) / 2 temperature), where m is the squared Mahalanobis distance for every feature. That is 1
    on average for the features of the class itself. So it is the density, tempered by the number of features and cut
    off where it is as high as for the class itself; without that, only the very nearest image would count.
    """
    centred = features.double() - mean.double()
    jitter = max(_JITTER * float(centred.square().mean()), torch.finfo(torch.float64).tiny)
    factor = prototypes.cholesky_factors(shrink(covariance.double(), _SHRINKAGE)[None], jitter)[0]
    whitened = torch.linalg.solve_triangular(factor, centred.T, upper=False)
    return (-(whitened.square().mean(dim=0) - 1.0).clamp(min=0.0) / (2.0 * temperature)).exp()


def class_maps(
    before: Tensor,
    after: Tensor,
    common: AffineMap,
    classes: ClassStatistics,
    *,
    temperature: float = 0.3,
    pull: float = 30.0,
    only_shift: bool = False,
) -> Iterator[AffineMap]:
    """Yield a map for every class: the common one x -> A x + b plus a correction D (x - mean) + d of it.

    With e = y - A x - b for old features x and new features y (N, n) of the same images and w their nearness to the
    class, D and d minimise sum_x w ||D (x - mean) + d - e||^2 + pull (v ||D||_F^2 + ||d||^2), where v is the mean
    variance of the old features. So `pull` counts as so many images near the class that the common map explains. With
    `only_shift`, D is 0. The residual is the average of what is left near the class and of the common one likewise.
    """
    old = before.double()
    error = after.double() - common.points(old)
    scale = (old - old.mean(dim=0)).square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    covariances, covariance_of = classes.spread()
    for mean, place in zip(classes.means.double(), covariance_of.tolist(), strict=True):
        weight = nearness(old, mean, whole(covariances[place]), temperature)[:, None]
        rows = torch.ones_like(weight)
        if not only_shift:
            rows = torch.cat([(old - mean) / scale, rows], dim=1)
        gram = rows.T @ (weight * rows)
        gram.diagonal().add_(pull)
        found = torch.linalg.solve(gram, rows.T @ (weight * error))
        left = error - rows @ found
        residual = (left.T @ (weight * left) + pull * common.residual) / (weight.sum() + pull)
        turn = torch.zeros_like(common.matrix) if only_shift else found[:-1].T / scale
        yield AffineMap(common.matrix + turn, common.shift + found[-1] - turn @ mean, residual)

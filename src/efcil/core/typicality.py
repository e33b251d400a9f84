"""How typical an image is of the classes seen, from the stored class means: low for classes that were never seen.

Closeness is the cosine between an image's features and the nearest class mean, both seen from a point most of the way
to the centre of all means. It compares directions, not distances, and has no unit, so that values measured in one task
compare with those of another. docs/answers.md compares it with Mahalanobis distances and logits.

Images that a model has learned from are closer than others, so the closeness of an image becomes a share only through
images that were held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

#: How far the point that directions are seen from lies on the way from the origin to the centre of the class means.
#: From 0.5 to 0.9 it hardly matters; 0 is worse with similar classes, 1 with few classes.
CENTRING = 0.75
#: With fewer images than this, chance decides which share of others is called untypical.
FEWEST = 10

Closeness = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spread:
    """The closeness of images that were not learned from: how many images, their mean and their variance."""

    images: int
    mean: float
    variance: float


@torch.no_grad()
def closeness(means: Tensor) -> Closeness:
    """Return the function from features (N, n) to how close they are to a class mean (C, n), from -1 to 1."""
    point = CENTRING * means.mean(dim=0)
    directions = functional.normalize(means - point, dim=1)
    return lambda features: (functional.normalize(features - point, dim=1) @ directions.T).amax(dim=1)


def spread_of(values: np.ndarray) -> Spread | None:
    """Return mean and variance of the closeness of held-out images; None if there are none.

    A single image has no variance; together with others (`pooled`) it counts all the same.
    """
    if not len(values) or not np.isfinite(values).all():
        return None
    return Spread(len(values), float(values.mean()), float(values.var(ddof=1)) if len(values) > 1 else 0.0)


def pooled(parts: Sequence[Spread]) -> Spread | None:
    """Return mean and variance of several sets of images taken together; None if there are none."""
    count = sum(part.images for part in parts)
    if count < 2:
        return parts[0] if parts else None
    mean = math.fsum(part.images * part.mean for part in parts) / count
    within = math.fsum((part.images - 1) * part.variance for part in parts)
    between = math.fsum(part.images * (part.mean - mean) ** 2 for part in parts)
    return Spread(count, mean, (within + between) / (count - 1))


def share_as_untypical(values: np.ndarray, known: Spread) -> np.ndarray:
    """Return, for each closeness, the expected share of images of known classes that are no closer (N), in [0, 1].

    The distribution of a new image's closeness, given mean and variance of `known.images` others, is Student's. They
    must be at least two.
    """
    from scipy.special import stdtr  # type: ignore[import-untyped]

    deviation = max(math.sqrt(known.variance * (1.0 + 1.0 / known.images)), 1e-12)
    return np.asarray(stdtr(known.images - 1, (values.astype(np.float64) - known.mean) / deviation))

"""Pseudo-old images: images of the current task, changed until the old network takes them for an old class.

An image x is moved towards a point of an old class in the feature space of the old network f: a few steps of gradient
descent on ||f(x) - target||^2, each of a fixed length per image. Which images become which classes is decided by
distances alone; the caller gives the random numbers, and a function that returns the gradient with respect to images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

#: Returns the gradient (K, 3, h, w), up to a positive factor per image, of images and targets (K, n).
Gradient = Callable[[Tensor, Tensor], Tensor]


def standardised_distances(features: Tensor, means: Tensor) -> Tensor:
    """Euclidean distances (N, C) of features (N, n) to class means (C, n), standardised per class.

    Over the images, those to every class have mean 0 and variance 1. So a class that is near to all images is chosen no
    more often than others. Where all distances to a class are equal, they are 0.
    """
    distances = torch.cdist(features.double(), means.double())
    centred = distances - distances.mean(dim=0)
    spread = centred.square().mean(dim=0).sqrt()
    # Below this, a spread is only the rounding of equal distances.
    negligible = 1e-9 * distances.amax(dim=0)
    return torch.where(spread > negligible, centred / spread.clamp(min=1e-300), 0.0).to(features.dtype)


def choose_classes(distances: Tensor, noise: Tensor | None = None) -> Tensor:
    """A class (N) for every image, by its standardised distances (N, C): the one with the largest score -d.

    With Gumbel `noise` (N, C) added, class c is drawn with probability proportional to exp(-d).
    """
    return (-distances if noise is None else noise - distances).argmax(dim=1)


def choose_sources(distances: Tensor, labels: Tensor, noise: Tensor | None = None) -> Tensor:
    """An image (K) for every wanted class (K), likewise: among all N images, the one with the largest score -d.

    distances (N, C), Gumbel `noise` (K, N). Without noise, all that want a class get the same image.
    """
    scores = -distances.T[labels]
    return (scores if noise is None else noise + scores).argmax(dim=1)


def step_lengths(steps: int, length: float, falling: bool) -> tuple[float, ...]:
    """The lengths of so many steps: all equal, or falling in equal parts from `length` towards zero."""
    return tuple(length * (1 - step / steps if falling else 1.0) for step in range(steps))


def gumbel(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise (rows, columns), float32, on the generator's device."""
    exponential = torch.empty(rows, columns, device=generator.device).exponential_(generator=generator)
    return -exponential.clamp(min=torch.finfo(torch.float32).tiny).log()


def descend(
    images: Tensor,
    targets: Tensor,
    gradient: Gradient,
    lengths: Sequence[float],
    *,
    group: int = 1,
    limits: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Images (K, 3, h, w) after steps of these `lengths` down the gradient towards their targets (K, n).

    A length is that of the whole image as a vector; an image whose gradient is zero stays. Values are not clamped,
    unless there are `limits`. With a `group`, so many consecutive images share a length: it is the root mean square
    over them, and an image that is far from its target moves further than one that is near. The gradient must then be
    known up to one factor for all. Steps add up in float32 at least; the gradient sees images in their own type.
    """
    moved = images.to(_wide(images.dtype))
    for length in lengths:
        slope = gradient(moved.to(images.dtype), targets)
        norm = torch.linalg.vector_norm(slope, dim=(1, 2, 3), keepdim=True, dtype=_wide(slope.dtype))
        if group > 1:
            norm = _over_groups(norm.flatten(), group).view_as(norm)
        moved = moved - length * (slope / norm.clamp(min=torch.finfo(norm.dtype).tiny))
        moved = moved if limits is None else moved.clamp(*limits)
    return moved.to(images.dtype)


def _over_groups(norms: Tensor, group: int) -> Tensor:
    """The root mean square (K) over each group of so many consecutive norms (K); the last group may be smaller."""
    squares = functional.pad(norms.square(), (0, -len(norms) % group)).view(-1, group).sum(dim=1)
    squares = squares.repeat_interleave(group)[: len(norms)]
    # Full groups but for the last one.
    sizes = torch.full_like(norms, float(group))
    if len(norms) % group:
        sizes[-(len(norms) % group) :] = len(norms) % group
    return (squares / sizes).sqrt()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

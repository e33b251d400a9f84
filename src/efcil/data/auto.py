"""AutoAugment for batches: every image is changed by one of 25 sub-policies, drawn at random.

A sub-policy is two operations, one after the other, each with a probability and a fixed strength; only whether it is
applied and its sign are drawn. The tables are those that Cubuk and others found for CIFAR-10 and for ImageNet (2019).
Images are moved with the nearest pixel, and grey appears where there is no image.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from efcil.data.operations import NUMBER, Scale, brightened

#: Strengths are evenly spaced, from nothing to the most.
LEVELS = 10
MOST_SHEAR = 0.3
MOST_TRANSLATION = 150 / 331  # of the side of the image
MOST_ROTATION = 30.0  # degrees
MOST_BLEND = 0.9
FEWEST_BITS = 4
FILL = 128.0

#: An operation, its probability in tenths, and its level.
Step = tuple[str, int, int]

CIFAR: tuple[tuple[Step, Step], ...] = (
    (("invert", 1, 7), ("contrast", 2, 6)),
    (("rotate", 7, 2), ("translate-x", 3, 9)),
    (("sharpness", 8, 1), ("sharpness", 9, 3)),
    (("shear-y", 5, 8), ("translate-y", 7, 9)),
    (("auto-contrast", 5, 8), ("equalise", 9, 2)),
    (("shear-y", 2, 7), ("posterise", 3, 7)),
    (("colour", 4, 3), ("brightness", 6, 7)),
    (("sharpness", 3, 9), ("brightness", 7, 9)),
    (("equalise", 6, 5), ("equalise", 5, 1)),
    (("contrast", 6, 7), ("sharpness", 6, 5)),
    (("colour", 7, 7), ("translate-x", 5, 8)),
    (("equalise", 3, 7), ("auto-contrast", 4, 8)),
    (("translate-y", 4, 3), ("sharpness", 2, 6)),
    (("brightness", 9, 6), ("colour", 2, 8)),
    (("solarise", 5, 2), ("invert", 0, 3)),
    (("equalise", 2, 0), ("auto-contrast", 6, 0)),
    (("equalise", 2, 8), ("equalise", 6, 4)),
    (("colour", 9, 9), ("equalise", 6, 6)),
    (("auto-contrast", 8, 4), ("solarise", 2, 8)),
    (("brightness", 1, 3), ("colour", 7, 0)),
    (("solarise", 4, 5), ("auto-contrast", 9, 3)),
    (("translate-y", 9, 9), ("translate-y", 7, 9)),
    (("auto-contrast", 9, 2), ("solarise", 8, 3)),
    (("equalise", 8, 8), ("invert", 1, 3)),
    (("translate-y", 7, 9), ("auto-contrast", 9, 1)),
)
IMAGENET: tuple[tuple[Step, Step], ...] = (
    (("posterise", 4, 8), ("rotate", 6, 9)),
    (("solarise", 6, 5), ("auto-contrast", 6, 5)),
    (("equalise", 8, 8), ("equalise", 6, 3)),
    (("posterise", 6, 7), ("posterise", 6, 6)),
    (("equalise", 4, 7), ("solarise", 2, 4)),
    (("equalise", 4, 4), ("rotate", 8, 8)),
    (("solarise", 6, 3), ("equalise", 6, 7)),
    (("posterise", 8, 5), ("equalise", 10, 2)),
    (("rotate", 2, 3), ("solarise", 6, 8)),
    (("equalise", 6, 8), ("posterise", 4, 6)),
    (("rotate", 8, 8), ("colour", 4, 0)),
    (("rotate", 4, 9), ("equalise", 6, 2)),
    (("equalise", 0, 7), ("equalise", 8, 8)),
    (("invert", 6, 4), ("equalise", 10, 8)),
    (("colour", 6, 4), ("contrast", 10, 8)),
    (("rotate", 8, 8), ("colour", 10, 2)),
    (("colour", 8, 8), ("solarise", 8, 7)),
    (("sharpness", 4, 7), ("invert", 6, 8)),
    (("shear-x", 6, 5), ("equalise", 10, 9)),
    (("colour", 4, 0), ("equalise", 6, 3)),
    (("equalise", 4, 7), ("solarise", 2, 4)),
    (("solarise", 6, 5), ("auto-contrast", 6, 5)),
    (("invert", 6, 4), ("equalise", 10, 8)),
    (("colour", 6, 4), ("contrast", 10, 8)),
    (("equalise", 8, 8), ("equalise", 6, 3)),
)
POLICIES = {"cifar": CIFAR, "imagenet": IMAGENET}


def strength(operation: str, level: int, negative: bool, size: int) -> float:
    """Return what `level` means for an operation: a shear, pixels, degrees, a factor, bits or a threshold."""
    share = level / (LEVELS - 1)
    sign = -1.0 if negative else 1.0
    if operation.startswith("shear"):
        return sign * MOST_SHEAR * share
    if operation.startswith("translate"):
        return sign * MOST_TRANSLATION * size * share
    if operation == "rotate":
        return sign * MOST_ROTATION * share
    if operation == "posterise":
        return 8 - round((8 - FEWEST_BITS) * share)
    if operation == "solarise":
        return 256.0 - 256.0 * share
    return 1.0 + sign * MOST_BLEND * share


SCALE = Scale(LEVELS, strength, FILL)


@cache
def _table(policy: str, device: torch.device) -> Tensor:
    """Return operation, probability in tenths and level of every step (sub-policies, 2, 3); made once."""
    steps = [[(NUMBER[name], tenths, level) for name, tenths, level in pair] for pair in POLICIES[policy]]
    return torch.tensor(steps, device=device)


def draw(policy: str, count: int, generator: torch.Generator, jitter: float = 0.0) -> dict[str, Tensor]:
    """Return the two operations of each of `count` images, their levels and signs (count, 2 each).

    An operation that is not applied is the identity. With `jitter`, also the factor of brightness that comes before
    them, uniform in 1 - jitter to 1 + jitter.
    """
    device = generator.device
    chosen = torch.randint(0, len(POLICIES[policy]), (count,), generator=generator, device=device)
    operation, tenths, level = _table(policy, device)[chosen].unbind(dim=2)
    # Whole numbers, because 0.1 cannot be written in binary and one in ten can.
    applied = torch.randint(0, 10, (count, 2), generator=generator, device=device) < tenths
    draws = {
        "operation": torch.where(applied, operation, NUMBER["identity"]),
        "level": level,
        "negative": torch.randint(0, 2, (count, 2), generator=generator, device=device),
    }
    if jitter:
        draws["jitter"] = 1.0 + jitter * (2.0 * torch.rand(count, generator=generator, device=device) - 1.0)
    return draws


def changed(
    pixels: Tensor,
    operation: Tensor,
    level: Tensor,
    negative: Tensor,
    jitter: Tensor | None = None,
    everywhere: bool | None = None,
) -> Tensor:
    """Return pixels (batch, 3, size, size; whole numbers 0..255 as float32), each image under its two operations."""
    if jitter is not None:
        pixels = brightened(pixels, jitter)
    for place in range(2):
        pixels = SCALE.changed(pixels, operation[:, place], level[:, place], negative[:, place], everywhere)
    return pixels

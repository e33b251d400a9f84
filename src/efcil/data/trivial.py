"""TrivialAugment for batches: every image is changed by one random operation of random strength.

The operations and their ranges are those of the wide set of TrivialAugment (Mueller and Hutter, 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.data.operations import OPERATIONS as ALL
from efcil.data.operations import Scale

OPERATIONS = tuple(name for name in ALL if name != "invert")
#: Strengths are evenly spaced, from nothing to the most.
LEVELS = 31
MOST_SHEAR = 0.99
MOST_TRANSLATION = 32.0  # pixels, whatever the size of the image
MOST_ROTATION = 135.0  # degrees
MOST_BLEND = 0.99
FEWEST_BITS = 2


def strength(operation: str, level: int, negative: bool, size: int = 0) -> float:
    """Return what `level` means for an operation: a shear, pixels, degrees, a factor, bits or a threshold."""
    share = level / (LEVELS - 1)
    sign = -1.0 if negative else 1.0
    if operation.startswith("shear"):
        return sign * MOST_SHEAR * share
    if operation.startswith("translate"):
        return sign * MOST_TRANSLATION * share
    if operation == "rotate":
        return sign * MOST_ROTATION * share
    if operation == "posterise":
        return 8 - round((8 - FEWEST_BITS) * share)
    if operation == "solarise":
        return 255.0 - 255.0 * level / (LEVELS - 1)  # exact in float32 too
    return 1.0 + sign * MOST_BLEND * share


SCALE = Scale(LEVELS, strength)


def draw(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return operation, level and sign of `count` images; all are equally frequent."""
    device = generator.device
    return {
        "operation": torch.randint(0, len(OPERATIONS), (count,), generator=generator, device=device),
        "level": torch.randint(0, LEVELS, (count,), generator=generator, device=device),
        "negative": torch.randint(0, 2, (count,), generator=generator, device=device),
    }


def changed(
    pixels: Tensor, operation: Tensor, level: Tensor, negative: Tensor, everywhere: bool | None = None
) -> Tensor:
    """Return pixels (batch, 3, size, size; whole numbers 0..255 as float32), each image under its operation."""
    return SCALE.changed(pixels, operation, level, negative, everywhere)

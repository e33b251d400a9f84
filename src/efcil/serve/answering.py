"""What a model says about images: probabilities, and how typical an image is of what it knows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from efcil.model.in_memory import Model
from efcil.network.memo import remembered_features


@dataclass(frozen=True)
class Scored:
    """Probabilities (N, classes), and the typicality (N,) where the method keeps class statistics."""

    probabilities: np.ndarray
    typicality: np.ndarray | None

    def part(self, start: int, stop: int) -> Scored:
        """Return the rows from `start` to `stop`."""
        typicality = None if self.typicality is None else self.typicality[start:stop]
        return Scored(self.probabilities[start:stop], typicality)


def score(model: Model, pixels: np.ndarray) -> Scored:
    """Score uint8 images N x size x size x 3."""
    with remembered_features(model.ready.network):  # both questions need them
        return Scored(model.probabilities(pixels), model.typicality(pixels))

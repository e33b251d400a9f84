"""Probabilities that mean what they say: one temperature for the scores, chosen on images that were not learned from.

Scores are logits, log-densities or minus squared distances; their scale says nothing about how often the best one is
right. The softmax of scores / T does, with the temperature T that makes the true classes of held-out images likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: Natural logarithms of the smallest and the largest temperature; scores of images are far from needing either.
COLDEST, HOTTEST = -20.0, 20.0
_GRID, _ROUNDS = 41, 6


@dataclass(frozen=True)
class Temperature:
    """What some images say about the temperature: the logarithm of the likeliest one, and how sharply it shows.

    `information` is the second derivative of the negative log-likelihood with respect to that logarithm. The two
    describe the likelihood near its maximum, so that those of several tasks can be added up without their images.
    """

    images: int
    logarithm: float
    information: float


def softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the softmax of scores / temperature (N, classes) in float64."""
    shifted = scores.astype(np.float64)
    shifted = np.exp((shifted - shifted.max(axis=1, keepdims=True)) / temperature)
    return shifted / shifted.sum(axis=1, keepdims=True)


def fit_temperature(scores: np.ndarray, labels: np.ndarray) -> Temperature | None:
    """Return the temperature under which the true classes `labels` (N) of scores (N, classes) are likeliest.

    None where there is nothing to learn from: no image, fewer than two classes, or equal scores. If every image is
    right, the likeliest temperature would be zero. Therefore every image also counts, with a weight of 1 / (N + 2),
    as one of its best wrong class, as if two more images had been seen, one of them wrong.
    """
    count = len(labels)
    if count == 0 or scores.shape[1] < 2:
        return None
    shifted = scores.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    rows = np.arange(count)
    wrong = shifted.copy()
    wrong[rows, labels] = -np.inf
    doubt = 1.0 / (count + 2)
    target = (1.0 - doubt) * shifted[rows, labels] + doubt * wrong.max(axis=1)
    if not np.isfinite(shifted).all() or not shifted.any():
        return None

    def cost(logarithm: float) -> float:
        scaled = shifted / math.exp(logarithm)
        return float((np.log(np.exp(scaled).sum(axis=1)) - target / math.exp(logarithm)).sum())

    best = _minimum(cost)
    return Temperature(count, best, _information(shifted, best))


def pooled(parts: Sequence[Temperature]) -> float:
    """Return the temperature that several sets of images agree on; 1 if there are none.

    Logarithms are averaged with their information as weights: the maximum of the sum of the likelihoods, each of
    which is a parabola near its own maximum.
    """
    weight = math.fsum(part.information for part in parts)
    if weight <= 0.0:
        return 1.0
    return math.exp(math.fsum(part.information * part.logarithm for part in parts) / weight)


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy over equally wide bins."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(float((confidence[place == each] - right[place == each]).sum())) for each in range(bins)]
    return math.fsum(gaps) / max(len(labels), 1)


def _minimum(cost: Callable[[float], float]) -> float:
    """Return where a function of one variable with one minimum is smallest, between COLDEST and HOTTEST."""
    low, high = COLDEST, HOTTEST
    for _ in range(_ROUNDS):
        grid = np.linspace(low, high, _GRID)
        best = int(np.argmin([cost(float(each)) for each in grid]))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _GRID - 1)])
    return (low + high) / 2


def _information(shifted: np.ndarray, logarithm: float) -> float:
    """Return the expected second derivative of the cost with respect to the logarithm: the variance of the scores."""
    chances = softmax(shifted, math.exp(logarithm))
    scaled = np.maximum(shifted / math.exp(logarithm), -745.0)  # beyond it, exp is zero
    mean = (chances * scaled).sum(axis=1, keepdims=True)
    return float((chances * (scaled - mean) ** 2).sum())

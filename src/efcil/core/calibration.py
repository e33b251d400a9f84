"""Probabilities that mean what they say: one temperature for the scores, chosen on images that were not learned from.

Scores are logits, log-densities or minus squared distances; their scale says nothing about how often the best one is
right. The softmax of scores / T does, with the temperature T that makes the true classes of held-out images likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Logarithms of the temperatures that are compared; scores of images are far from needing the first or the last.
GRID = tuple(0.5 * step for step in range(-20, 25))
#: How many mistakes every set of images is thought to have besides its own. Without any, images that are all right
#: would want a temperature of zero.
DOUBT = 0.1


@dataclass(frozen=True)
class Likelihood:
    """What some images say about the temperature: minus the log-likelihood of their classes, for every one of GRID.

    It is all that is needed of the images: the curves of several tasks add up to that of their images together.
    """

    images: int
    curve: tuple[float, ...]


def softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the softmax of scores / temperature (N, classes) in float64."""
    shifted = scores.astype(np.float64)
    shifted = np.exp((shifted - shifted.max(axis=1, keepdims=True)) / temperature)
    return shifted / shifted.sum(axis=1, keepdims=True)


def likelihood(scores: np.ndarray, labels: np.ndarray, doubt: float = DOUBT) -> Likelihood | None:
    """Return what scores (N, classes) of images of the classes `labels` (N) say about the temperature.

    None where they say nothing: no image, fewer than two classes, or scores that are not finite. `doubt` images in all
    count as images of their best wrong class instead.
    """
    count = len(labels)
    if count == 0 or scores.shape[1] < 2 or not np.isfinite(scores).all():
        return None
    shifted = scores.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    rows = np.arange(count)
    wrong = shifted.copy()
    wrong[rows, labels] = -np.inf
    doubted = doubt / (count + doubt)
    target = (1.0 - doubted) * shifted[rows, labels] + doubted * wrong.max(axis=1)

    def cost(logarithm: float) -> float:
        cold = math.exp(-logarithm)
        return float((np.log(np.exp(shifted * cold).sum(axis=1)) - target * cold).sum())

    return Likelihood(count, tuple(float(f"{cost(each):.6g}") for each in GRID))


def temperature(parts: Sequence[Likelihood], weights: Sequence[float] | None = None) -> float:
    """Return the temperature that is likeliest for several sets of images together; 1 if there are none.

    `weights` say how much each set counts; the default is alike. Between the points of GRID, the parabola
    through the best one and its neighbours is used.
    """
    if not parts:
        return 1.0
    curves = np.array([part.curve for part in parts])
    curve = np.average(curves, axis=0, weights=weights)
    best = int(np.argmin(curve))
    if not 0 < best < len(GRID) - 1:
        return 1.0  # equal scores: no temperature is better than another
    before, here, after = curve[best - 1 : best + 2]
    bend = before - 2.0 * here + after
    shift = 0.5 * (before - after) / bend if bend > 0.0 else 0.0
    return math.exp(GRID[best] + float(np.clip(shift, -0.5, 0.5)) * (GRID[1] - GRID[0]))

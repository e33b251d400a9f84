"""Weights of images: how many times each counts, as whole numbers of repetitions.

Repeating images works for everything that is learned from them: training steps, statistics of classes, and heads that
are fitted to these. Only the ratio of weights matters: equal ones change nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from efcil.model.images import InputError, Pictures, sorted_classes

#: Most repetitions together, as a multiple of the number of images: they cost time and memory.
MOST = 10


def weighted(
    pictures: Pictures, labels: list[Hashable], weights: Any
) -> tuple[Pictures, list[Hashable], np.ndarray | None]:
    """Return images of positive weight, their labels, and how many times each counts; None if that is once."""
    if weights is None:
        return pictures, labels, None
    checked = check_weights(weights, len(labels))
    rows = np.flatnonzero(checked > 0)
    if len(rows) < len(labels):
        pictures, labels = pictures.chosen(rows.tolist()), [labels[row] for row in rows]
    return pictures, labels, repetitions(checked[rows], labels)


def check_weights(weights: Any, count: int) -> np.ndarray:
    """Return weights as float64, one per image; anything else raises a sentence. A number stands for equal weights."""
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("sample_weight must hold numbers, one weight per image.") from None
    if found.ndim == 0:
        found = np.full(count, found)
    if found.ndim != 1:
        raise InputError(f"Sample weights must be 1D array or scalar: one per image, not of shape {found.shape}.")
    if len(found) != count:
        raise InputError(f"There are {count} images but {len(found)} weights (sample_weight). Give one per image.")
    if not np.isfinite(found).all():
        raise InputError("sample_weight contains NaN or infinity. Give finite weights; 0 leaves an image out.")
    if (found < 0).any():
        raise InputError("Negative values in data passed to sample_weight. Give weights of 0 or more.")
    if not (found > 0).any():
        raise InputError("Sample weights must contain at least one non-zero number: all images are left out.")
    return found


def repetitions(weights: np.ndarray, labels: Sequence[Hashable]) -> np.ndarray | None:
    """Return how many times each image counts, at least once, at most ten times the number of images together.

    Whole numbers without a common divisor are repetitions as they are. Others are divided by the smallest one and
    rounded such that the sum over the images of a class is right to one repetition. None means once each.
    """
    unit = float(weights.min())
    if (weights == np.floor(weights)).all() and weights.max() < 1 << 53:
        unit = float(np.gcd.reduce(weights.astype(np.int64)))
    most = MOST * len(weights)
    with np.errstate(over="ignore"):
        scaled = weights / unit
    if not scaled.sum() <= most:  # each image once, and the others as often as their weights allow
        share = weights / weights.max()
        scaled = share * ((most - len(weights)) / share.sum())
    counts = np.maximum(1, _rounded(scaled, labels))
    return None if (counts == 1).all() else counts


def _rounded(values: np.ndarray, labels: Sequence[Hashable]) -> np.ndarray:
    """Round values to whole numbers, carrying what rounding leaves over to the next image of the same class."""
    place = {label: number for number, label in enumerate(sorted_classes(labels))}
    classes = np.array([place[label] for label in labels])
    counts = np.empty(len(values), np.int64)
    for number in range(len(place)):
        rows = np.flatnonzero(classes == number)
        ends = np.floor(np.cumsum(values[rows]) + 0.5).astype(np.int64)
        counts[rows] = np.diff(ends, prepend=0)
    return counts

"""How good the answers of a classifier are: pure functions of labels, answers and probabilities.

Classes are numbers from 0; labels and answers are integer arrays with one entry per image. Shares are between 0 and 1.
What nothing was counted for is None (a number) or NaN (in an array), never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efcil.evaluation.metrics import MetricsError

BINS = 10
_TWO_SIDED_95 = 1.959964

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """Answers whose probability is above `low` and at most `high`: how many, how sure, and how often right."""

    low: float
    high: float
    images: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    """Whether probabilities mean what they say: the expected calibration error, and the bins it comes from."""

    expected_error: float
    mean_confidence: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True, eq=False)
class Confusion:
    """How many images of which class were answered with which.

    `pairs` (P, 3) has (true class, answer, images) of every pair that occurs, in order: of 10,000 classes, a matrix
    would take 800 MB.
    """

    classes: int
    pairs: Integers

    @classmethod
    def of(cls, labels: Any, answers: Any, classes: int) -> Confusion:
        """Count the answers to images with these labels."""
        truth, given = _checked(labels, classes), _checked(answers, classes)
        if truth.shape != given.shape:
            raise MetricsError(f"There are {len(truth)} labels but {len(given)} answers. Give one answer per label.")
        cells, often = np.unique(truth * classes + given, return_counts=True)
        return cls(classes, np.stack([cells // classes, cells % classes, often], axis=1))

    @property
    def images(self) -> Integers:
        """The images of every class."""
        return self._summed(self.pairs, 0)

    @property
    def answered(self) -> Integers:
        """The images that are answered with each class."""
        return self._summed(self.pairs, 1)

    @property
    def right(self) -> Integers:
        """The images of every class that are answered rightly."""
        return self._summed(self.pairs[self.pairs[:, 0] == self.pairs[:, 1]], 0)

    def matrix(self, places: Sequence[int] | None = None) -> Integers:
        """Return the numbers of images, of some classes or of all: rows are true classes, columns answers."""
        chosen = np.arange(self.classes) if places is None else np.asarray(places, np.int64)
        row = np.full(self.classes, -1)
        row[chosen] = np.arange(len(chosen))
        truth, answer = row[self.pairs[:, 0]], row[self.pairs[:, 1]]
        both = (truth >= 0) & (answer >= 0)
        found = np.zeros((len(chosen), len(chosen)), np.int64)
        found[truth[both], answer[both]] = self.pairs[both, 2]
        return found

    def _summed(self, pairs: Integers, column: int) -> Integers:
        found = np.zeros(self.classes, np.int64)
        np.add.at(found, pairs[:, column], pairs[:, 2])
        return found


def accuracy(confusion: Confusion) -> float | None:
    """Return the share of right answers."""
    total = int(confusion.images.sum())
    return int(confusion.right.sum()) / total if total else None


def recall(confusion: Confusion) -> Floats:
    """Return, per class, the share of its images that are answered rightly; NaN for a class without images."""
    return _ratio(confusion.right, confusion.images)


def precision(confusion: Confusion) -> Floats:
    """Return, per class, the share of right answers among all that name it; NaN where no answer does."""
    return _ratio(confusion.right, confusion.answered)


def f1(confusion: Confusion) -> Floats:
    """Return, per class, the harmonic mean of precision and recall; NaN for a class without images and answers."""
    return _ratio(2 * confusion.right, confusion.answered + confusion.images)


def mean_over_present(values: Floats, confusion: Confusion) -> float | None:
    """Return the mean over the classes that have images, NaN counting as 0: each class counts once.

    Of the recall this is the balanced accuracy. A precision is NaN where a class that has images is never answered.
    """
    present = confusion.images > 0
    return float(np.nan_to_num(values[present]).mean()) if present.any() else None


def wilson(correct: int, total: int) -> tuple[float, float] | None:
    """Return Wilson's 95 % confidence interval of a share; it is sensible for few images, and at 0 and 1 too."""
    if not 0 <= correct <= total:
        raise MetricsError(f"{correct} of {total} is not a share. Give at most as many right answers as images.")
    if total == 0:
        return None
    low, high = wilson_of_share(correct / total, total)
    # At 0 and 1 the exact bound is the share itself; rounding must not move it beyond.
    return (0.0 if correct == 0 else low), (1.0 if correct == total else high)


def wilson_of_share(share: float, total: int) -> tuple[float, float]:
    """Return the same of a share that need not be one of whole images; rounding may move a bound beyond 0 and 1."""
    square = _TWO_SIDED_95**2 / total
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return centre - half, centre + half


def ranks(probabilities: Floats, labels: Any) -> Integers:
    """Return the place of the true class of every image (N) when its classes are sorted by probability, best 0.

    Equal probabilities are sorted by the number of the class, as in the answers.
    """
    truth = _checked(labels, probabilities.shape[1])
    own = probabilities[np.arange(len(truth)), truth][:, None]
    before = np.arange(probabilities.shape[1])[None, :] < truth[:, None]
    return ((probabilities > own) | ((probabilities == own) & before)).sum(axis=1)


def calibration(confidences: Any, right: Any, bins: int = BINS) -> Calibration | None:
    """Return how the probabilities of the answers (N) agree with whether these are right (N), in bins of equal width.

    The expected calibration error is the mean distance between confidence and accuracy over bins, weighted by images.
    """
    sure, hits = np.asarray(confidences, np.float64), np.asarray(right, bool)
    if sure.shape != hits.shape or sure.ndim != 1:
        raise MetricsError(f"{sure.shape} probabilities do not fit {hits.shape} answers. Give one of each per image.")
    if not ((sure >= 0) & (sure <= 1 + 1e-9)).all():
        raise MetricsError("A probability is outside 0 to 1. Give the probabilities of the answers.")
    if len(sure) == 0:
        return None
    place = np.clip(np.ceil(sure * bins - 1e-12).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    confidence = _ratio(np.bincount(place, sure, bins), counts)
    share = _ratio(np.bincount(place, hits, bins), counts)
    error = float(np.nansum(np.abs(confidence - share) * counts) / len(sure))
    made = tuple(
        Bin(index / bins, (index + 1) / bins, int(counts[index]), number(confidence[index]), number(share[index]))
        for index in range(bins)
    )
    return Calibration(error, float(sure.mean()), made)


def auroc(known: Any, unknown: Any) -> float | None:
    """Return the area under the ROC curve: how often a known image scores above an unknown one, ties counting half."""
    low, high = np.sort(np.asarray(unknown, np.float64)), np.asarray(known, np.float64)
    if not np.isfinite(low).all() or not np.isfinite(high).all():
        raise MetricsError("A score is not a finite number, so images cannot be sorted by it. Check the model.")
    if len(low) == 0 or len(high) == 0:
        return None
    below = np.searchsorted(low, high, "left") + np.searchsorted(low, high, "right")
    return float(below.sum() / (2 * len(low) * len(high)))


def most_confused(confusion: Confusion) -> list[tuple[int, int, int]]:
    """Return (true class, answer, images) of all wrong answers, most frequent first."""
    wrong = [(truth, answer, images) for truth, answer, images in confusion.pairs.tolist() if truth != answer]
    return sorted(wrong, key=lambda pair: -pair[2])


def number(value: float) -> float | None:
    """Return a number of Python, None for NaN."""
    return None if math.isnan(value) else float(value)


def _ratio(parts: Any, totals: Any) -> Floats:
    wholes = np.asarray(totals, np.float64)
    return np.divide(parts, wholes, out=np.full(wholes.shape, np.nan), where=wholes > 0)


def _checked(labels: Any, classes: int) -> Integers:
    array = np.asarray(labels, np.int64) if len(labels) else np.zeros(0, np.int64)
    if array.ndim != 1 or (len(array) and not (array.min() >= 0 and array.max() < classes)):
        raise MetricsError(f"Labels and answers are numbers of classes from 0 to {classes - 1}, one per image.")
    return array

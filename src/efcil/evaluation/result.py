"""What an evaluation of a model has found, for reports and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from efcil.evaluation import classification
from efcil.evaluation.classification import Calibration, Confusion

#: Of more classes, a confusion matrix is neither written nor drawn: it would have more cells than a screen has pixels,
#: and most of them are zero. Pairs of classes are listed.
MOST_IN_FULL = 2000
#: Besides the first answer: whether the true class is among the first so many.
TOP = (3, 5)


@dataclass(frozen=True)
class ClassResult:
    """One class of the model. Shares are None where nothing was counted for them."""

    name: str
    label: Any  # as JSON
    task: int  # in which it was learned, from 1
    images: int
    answered: int  # how many images of the known classes are answered with it
    correct: int
    precision: float | None
    recall: float | None
    f1: float | None
    interval: tuple[float, float] | None  # of the recall

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        facts = {key: value for key, value in asdict(self).items() if key not in ("name", "label", "interval")}
        return {"class": self.label, **facts, "recall_interval": _listed(self.interval)}


@dataclass(frozen=True)
class TaskResult:
    """The classes learned in one task, together: early ones may have been forgotten since."""

    task: int
    classes: int
    images: int
    accuracy: float | None


@dataclass(frozen=True)
class Mistake:
    """A wrong answer. Classes are positions in `Evaluation.classes`."""

    image: str
    truth: int
    answer: int
    probability: float  # of the answer
    probability_of_truth: float


@dataclass(frozen=True)
class UnknownClass:
    """A class that the model does not know: what its images are answered as, most frequent first.

    Images that are recognised as unknown are not among `answers`.
    """

    name: str
    label: Any  # as JSON
    images: int
    answers: tuple[tuple[int, int], ...]  # (position of the class, images)
    mean_confidence: float
    recognised: int | None  # as unknown; None where that was not asked for
    resembles: str | None = None  # a class of the model whose name differs in capitals or spaces alone


@dataclass(frozen=True)
class Rejection:
    """What is answered as unknown: every image whose typicality is below `share`."""

    share: float
    known_images: int
    known_rejected: int
    accepted_accuracy: float | None  # of the images of known classes that are not answered as unknown
    unknown_images: int
    unknown_recognised: int
    auroc: float | None  # of the typicality, known against unknown classes


@dataclass(frozen=True)
class Unreadable:
    """An image that could not be read, and why; it counts nowhere."""

    image: str
    reason: str


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model against labelled images. Images of classes that it does not know count in `unknown_classes` alone."""

    model: str
    data: str
    images: int  # of known classes
    correct: int
    accuracy: float | None
    interval: tuple[float, float] | None  # Wilson's, 95 %
    balanced_accuracy: float | None
    macro_f1: float | None
    top: tuple[tuple[int, float], ...]  # (k, share of images whose true class is among the first k answers)
    calibration: Calibration | None
    classes: tuple[ClassResult, ...]
    tasks: tuple[TaskResult, ...]
    pairs: Confusion
    mistakes: tuple[Mistake, ...]  # all, most confident first
    unknown_classes: tuple[UnknownClass, ...]
    confidence_auroc: float | None  # of the answer's probability, known against unknown classes
    rejection: Rejection | None
    unreadable: tuple[Unreadable, ...]

    @property
    def without_images(self) -> list[ClassResult]:
        """The classes of the model that no image was there for."""
        return [each for each in self.classes if each.images == 0]

    @property
    def confusion(self) -> np.ndarray:
        """Numbers of images (classes, classes): rows are true classes, columns answers. Made from `pairs`."""
        return self.pairs.matrix()

    @cached_property
    def confusions(self) -> list[tuple[int, int, int]]:
        """(True class, answer, images) of all wrong answers, most frequent first."""
        return classification.most_confused(self.pairs)

    @cached_property
    def taken_for(self) -> dict[int, tuple[str, int]]:
        """True class -> name of the class that its images are most often taken for, and how many of them are."""
        return {truth: (self.classes[answer].name, images) for truth, answer, images in reversed(self.confusions)}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON; classes are named by their labels."""
        labels = [each.label for each in self.classes]
        return {
            "model": self.model,
            "data": self.data,
            "images": self.images,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "accuracy_interval": _listed(self.interval),
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "top_accuracy": {str(count): share for count, share in self.top},
            "calibration": None if self.calibration is None else _calibration(self.calibration),
            "classes": [each.to_json() for each in self.classes],
            "classes_without_images": [each.label for each in self.without_images],
            "tasks": [asdict(each) for each in self.tasks],
            "confusion_matrix": {
                "rows": "true class",
                "columns": "answer",
                "classes": labels,
                "images": self.confusion.tolist() if len(labels) <= MOST_IN_FULL else None,
            },
            "confusions": [
                {"class": labels[truth], "answer": labels[answer], "images": images}
                for truth, answer, images in self.confusions
            ],
            "mistakes": [
                {**asdict(each), "truth": labels[each.truth], "answer": labels[each.answer]} for each in self.mistakes
            ],
            "unknown_classes": [_unknown_class(each, labels) for each in self.unknown_classes],
            "confidence_auroc": self.confidence_auroc,
            "rejection": None if self.rejection is None else asdict(self.rejection),
            "unreadable": [asdict(each) for each in self.unreadable],
        }


def _listed(pair: tuple[float, float] | None) -> list[float] | None:
    return None if pair is None else list(pair)


def _calibration(found: Calibration) -> dict[str, Any]:
    return {
        "expected_calibration_error": found.expected_error,
        "mean_confidence": found.mean_confidence,
        "bins": [asdict(each) for each in found.bins],
    }


def _unknown_class(found: UnknownClass, labels: list[Any]) -> dict[str, Any]:
    return {
        "class": found.label,
        "images": found.images,
        "answers": [{"class": labels[place], "images": images} for place, images in found.answers],
        "mean_confidence": found.mean_confidence,
        "recognised": found.recognised,
        "resembles": found.resembles,
    }

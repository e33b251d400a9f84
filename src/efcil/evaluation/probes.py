"""What a run measures besides its accuracies, as tables: every class, the confusion, the spectrum of a feature matrix.

Tasks count from 1, as in all files of a run. Classes are positions in the class order, from 0.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from efcil.errors import printable
from efcil.evaluation.classification import Confusion
from efcil.output import cell, csv_line

CLASSES, CONFUSION, SPECTRUM = "classes.csv", "confusion.csv", "spectrum.csv"
#: What a run writes, with the columns.
COLUMNS = {
    CLASSES: ("task", "class", "name", "images", "right"),
    CONFUSION: ("true", "predicted", "count"),
    SPECTRUM: ("task", "index", "value"),
}
#: Made from a finished run, so that it is no part of it.
PERTURBATION = "perturbation.csv"
PERTURBATION_COLUMNS = ("task", "sigma", "directions", "change", "accuracy", "unperturbed")


@dataclass(frozen=True)
class ClassCount:
    """How many test images of a class there are, and how many were answered right after a task."""

    task: int
    #: Position in the class order, from 0.
    position: int
    #: As it is shown; summary.json has the exact names.
    name: str
    images: int
    right: int

    @property
    def accuracy(self) -> float:
        """Share of right answers in percent; NaN without test images."""
        return 100.0 * self.right / self.images if self.images else math.nan


@dataclass(frozen=True)
class Perturbation:
    """What noise of standard deviation `sigma` along principal or non-principal directions of feature space did.

    `change` is the mean total variation between probabilities before and after, from 0 to 1; accuracies are in percent.
    """

    task: int
    sigma: float
    directions: str
    change: float
    accuracy: float
    unperturbed: float


@dataclass
class Probes:
    """What was measured so far: numbers of images and of right answers by task, eigenvalues by task, the confusion."""

    classes: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    spectrum: dict[int, Sequence[float]] = field(default_factory=dict)
    #: (True class, predicted class, number of images) after the last task.
    confusion: Sequence[tuple[int, int, int]] | None = None

    @classmethod
    def of_lines(cls, lines: Iterable[Mapping[str, Any]]) -> Probes:
        """Return what lines of metrics.jsonl say."""
        found = cls()
        for line in lines:
            found.add(line)
        return found

    def add(self, line: Mapping[str, Any]) -> None:
        """Add what a line of metrics.jsonl says of the end of a task; nothing if it does not."""
        task = line["task"]
        if "classes" in line:
            self.classes[task] = line["classes"]["images"], line["classes"]["right"]
        if "spectrum" in line:
            self.spectrum[task] = line["spectrum"]
        if "confusion" in line:
            self.confusion = [(true, predicted, count) for true, predicted, count in line["confusion"]]

    def files(self, names: Sequence[str]) -> dict[str, str]:
        """Return the content of the files that these measurements make; `names` are those of all classes, in order."""
        found = {}
        if self.classes:
            counts = [
                (task, position, printable(names[position]), images, right)
                for task, both in sorted(self.classes.items())
                for position, (images, right) in enumerate(zip(*both, strict=True))
            ]
            found[CLASSES] = _table(CLASSES, counts)
        if self.confusion is not None:
            found[CONFUSION] = _table(CONFUSION, self.confusion)
        if self.spectrum:
            values = [
                (task, index, value)
                for task, spectrum in sorted(self.spectrum.items())
                for index, value in enumerate(spectrum, start=1)
            ]
            found[SPECTRUM] = _table(SPECTRUM, values)
        return found


def line_of(
    confusion: Sequence[Sequence[int]],
    images: Sequence[int],
    right: Sequence[int],
    spectrum: Sequence[float] | None,
    last: bool,
) -> dict[str, Any]:
    """Return what metrics.jsonl records at the end of a task; the confusion after the last one only."""
    line: dict[str, Any] = {"classes": {"images": list(images), "right": list(right)}}
    if spectrum is not None:
        line["spectrum"] = list(spectrum)
    if last:
        line["confusion"] = [list(each) for each in confusion]
    return line


def read_classes(text: str) -> list[ClassCount]:
    """Return the rows of classes.csv; text that is none raises a ValueError."""
    found = [ClassCount(int(a), int(b), _name(c), int(d), int(e)) for a, b, c, d, e in _rows(CLASSES, text)]
    if any(each.task < 1 or each.position < 0 or not 0 <= each.right <= each.images for each in found):
        raise ValueError("a class has more right answers than images, or a negative number")
    return found


def read_confusion(text: str, classes: int) -> Confusion:
    """Return what confusion.csv counts for so many classes; wrong text: ValueError."""
    found: dict[tuple[int, int], int] = {}
    for row in _rows(CONFUSION, text):
        true, predicted, count = map(int, row)
        if not (0 <= true < classes and 0 <= predicted < classes and count > 0):
            raise ValueError("it counts a class that there is not, or less than one image")
        found[true, predicted] = count
    pairs = [(*pair, found[pair]) for pair in sorted(found)]
    return Confusion(classes, np.array(pairs, np.int64).reshape(-1, 3))


def read_spectrum(text: str) -> dict[int, np.ndarray]:
    """Return the eigenvalues of spectrum.csv, largest first, by task from 1; text that is none raises a ValueError."""
    found: dict[int, list[float]] = {}
    for task, index, value in _rows(SPECTRUM, text):
        values = found.setdefault(int(task), [])
        values.append(float(value))
        if int(index) != len(values) or not math.isfinite(values[-1]):
            raise ValueError("its values are not numbered from 1, or not finite")
    return {task: np.array(values) for task, values in found.items()}


def perturbation_csv(rows: Iterable[Perturbation]) -> str:
    """Return the text of perturbation.csv."""
    return _table(PERTURBATION, map(astuple, rows))


def read_perturbation(text: str) -> list[Perturbation]:
    """Return the rows of perturbation.csv; text that is none raises a ValueError."""
    rows = _rows(PERTURBATION, text)
    return [Perturbation(int(task), float(sigma), name, *map(float, others)) for task, sigma, name, *others in rows]


def _columns(file: str) -> tuple[str, ...]:
    return PERTURBATION_COLUMNS if file == PERTURBATION else COLUMNS[file]


def _table(file: str, rows: Iterable[Sequence[object]]) -> str:
    return "".join(map(csv_line, [_columns(file), *rows]))


def _rows(file: str, text: str) -> list[list[str]]:
    try:
        head, *rows = csv.reader(io.StringIO(text, newline=""))
    except csv.Error as error:
        raise ValueError(str(error)) from None
    if tuple(head) != _columns(file) or any(len(row) != len(head) for row in rows):
        raise ValueError(f"its columns are not {', '.join(_columns(file))}")
    return rows


def _name(written: str) -> str:
    """Return a name without the apostrophe that keeps a spreadsheet from reading it as a formula."""
    return written[1:] if written.startswith("'") and cell(written[1:]) == written else written

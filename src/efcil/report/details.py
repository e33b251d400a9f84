"""What the files of a row's runs say besides its means, read once. A file that cannot be read counts as not there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from efcil.errors import EfcilError
from efcil.evaluation.metrics import average_forgetting
from efcil.evaluation.result import MOST_IN_FULL
from efcil.evaluation.storage import StoredBytes, stored_bytes
from efcil.report.table import Row, mapping

Value = TypeVar("Value")
#: Where summary.json has a metric after every task.
_PER_TASK = {
    "A_step": "A_step_per_task",
    "A_inc": "A_step_per_task",
    "task_mean": "task_mean_per_task",
    "task_aware_A_step": "task_aware_A_step_per_task",
}


@dataclass(frozen=True)
class ClassAccuracy:
    """A class by its name after the last task: its accuracy in percent over all seeds, and its test images."""

    name: str
    accuracy: float
    images: int


class Details:
    """The runs of a row, read when asked for."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.problem = ""

    @cached_property
    def summaries(self) -> list[dict[str, Any]]:
        """The summaries, in the order of the seeds."""
        return [quietly(run.read_summary, {}) for run in self.row.runs]

    @cached_property
    def matrices(self) -> list[np.ndarray]:
        """The task-agnostic accuracy matrices of all seeds; none if one cannot be read or the seeds differ in tasks."""
        found = []
        for run in self.row.runs:
            try:
                found.append(run.read_accuracy()[0])
            except EfcilError as error:
                self.problem = str(error)
                return []
        if len({matrix.shape for matrix in found}) > 1:
            self.problem = "The seeds have different tasks, so there is no average accuracy matrix."
            return []
        return found

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of classes of the tasks."""
        return quietly(lambda: self.row.runs[0].read_accuracy()[2], [])

    def per_task(self, metric: str) -> list[list[float]]:
        """Return a metric after every task, for every seed; none where it was not recorded or the seeds differ."""
        if metric == "forgetting":
            found = [[_forgotten(matrix, task) for task in range(len(matrix))] for matrix in self.matrices]
        else:
            found = [floats(summary.get(_PER_TASK.get(metric, ""))) for summary in self.summaries]
        if metric == "A_inc":
            found = [[_mean(values[: task + 1]) for task in range(len(values))] for values in found]
        return found if found and all(found) and len(set(map(len, found))) == 1 else []

    def forgetting_per_task(self) -> list[list[float]]:
        """Return the forgetting of every task but the last, for every seed."""
        found = [floats(summary.get("forgetting_per_task")) for summary in self.summaries]
        return found if found and all(found) and len(set(map(len, found))) == 1 else []

    def old_and_new(self) -> tuple[list[list[float]], list[list[float]]]:
        """Return after every task the accuracy on classes of earlier tasks and on those of this one, for every seed."""
        old, new, sizes = [], [], np.array(self.sizes, dtype=float)
        for matrix in self.matrices:
            old.append(
                [float(np.average(matrix[k, :k], weights=sizes[:k])) if k else math.nan for k in range(len(matrix))]
            )
            new.append([float(value) for value in matrix.diagonal()])
        return old, new

    @cached_property
    def losses(self) -> list[list[tuple[int, dict[str, Any]]]]:
        """For every seed: task and terms of the loss of every epoch."""
        found = []
        for run in self.row.runs:
            nothing: list[dict[str, Any]] = []
            lines = [line for line in quietly(run.read_metrics, nothing) if line.get("kind") == "epoch"]
            found.append([(_whole(line.get("task")), mapping(line, "losses")) for line in lines])
        return found

    @cached_property
    def classes(self) -> tuple[np.ndarray, tuple[str, ...], list[ClassAccuracy]] | None:
        """Accuracies (classes x tasks, mean over seeds), names in that order, and the classes by name.

        Where seeds have different class orders, what a position is called differs too: the names are numbers then.
        """
        counts = [each for run in self.row.runs if (each := quietly(run.classes, None))]
        if not counts:
            return None
        shape = 1 + max(c.position for each in counts for c in each), max(c.task for each in counts for c in each)
        seeds: list[np.ndarray] = []
        right: dict[str, int] = {}
        images: dict[str, int] = {}
        names = [["" for _ in range(shape[0])] for _ in counts]
        for named, each in zip(names, counts, strict=True):
            matrix = np.full(shape, math.nan)
            for count in each:
                named[count.position] = count.name
                if count.images:
                    matrix[count.position, count.task - 1] = 100.0 * count.right / count.images
                if count.task == shape[1]:
                    right[count.name] = right.get(count.name, 0) + count.right
                    images[count.name] = images.get(count.name, 0) + count.images
            seeds.append(matrix)
        by_name = [ClassAccuracy(n, 100.0 * right[n] / images[n], images[n]) for n in right if images[n]]
        by_name.sort(key=lambda one: (one.accuracy, one.name))
        return np.mean(seeds, axis=0), _positions(names), by_name

    @cached_property
    def confusion(self) -> tuple[np.ndarray, tuple[str, ...], list[tuple[str, str, int]]] | None:
        """Shares in percent (true x predicted, over all seeds), names as in `classes`, and frequent confusions.

        The confusions are (true class, answer, images over all seeds), the most frequent first. Classes that share
        their answer are not confused with each other. Of very many classes there are no shares.
        """
        found: list[np.ndarray] = []
        names: list[list[str]] = []
        pairs: dict[tuple[str, str], int] = {}
        for run, summary in zip(self.row.runs, self.summaries, strict=True):
            counts = quietly(run.confusion_pairs, None)
            known = summary.get("class_names")
            if counts is None or not isinstance(known, list) or len(known) != counts.classes:
                continue
            found.append(counts.matrix().astype(float) if counts.classes <= MOST_IN_FULL else np.zeros((0, 0)))
            names.append([str(name) for name in known])
            shared = summary.get("answers")
            answers = shared if isinstance(shared, list) and len(shared) == len(known) else range(len(known))
            for true, answer, images in counts.pairs.tolist():
                if answers[true] == answers[answer]:
                    continue
                pair = (names[-1][true], names[-1][answer])
                pairs[pair] = pairs.get(pair, 0) + images
        if not found or len({each.shape for each in found}) > 1:
            return None
        total = np.sum(found, axis=0)
        shares = 100.0 * total / np.maximum(1.0, total.sum(axis=1, keepdims=True))
        often = sorted(((true, answer, count) for (true, answer), count in pairs.items()), key=lambda each: -each[2])
        return shares, _positions(names), often

    def spectrum(self) -> dict[int, np.ndarray]:
        """Return the eigenvalues of the feature matrix by task, largest first, averaged over seeds."""
        found = [each for run in self.row.runs if (each := quietly(run.spectrum, None))]
        tasks = sorted(set.intersection(*(set(each) for each in found))) if found else []
        alike = [task for task in tasks if len({len(each[task]) for each in found}) == 1]
        return {task: np.mean([each[task] for each in found], axis=0) for task in alike}

    def noise(self) -> dict[str, dict[float, list[float]]]:
        """Return how much noise changed the probabilities after the last task: by directions, sigma and seed."""
        found: dict[str, dict[float, list[float]]] = {}
        for run in self.row.runs:
            rows = quietly(run.perturbation, None) or []
            for row in rows:
                if row.task == max(each.task for each in rows):
                    found.setdefault(row.directions, {}).setdefault(row.sigma, []).append(row.change)
        return found

    @cached_property
    def stored(self) -> StoredBytes | None:
        """What the method of the first seed stores, None if that was not recorded."""
        return stored_bytes(self.summaries[0])


def spread(per_seed: Sequence[Sequence[float]]) -> tuple[list[float], list[float | None], list[float | None]]:
    """Return means, and mean minus and plus one standard deviation where there are at least two seeds."""
    means: list[float] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for values in zip(*per_seed, strict=True):
        means.append(_mean(values))
        known = len(values) > 1 and all(map(math.isfinite, values))
        deviation = statistics.stdev(values) if known else None
        low.append(None if deviation is None else means[-1] - deviation)
        high.append(None if deviation is None else means[-1] + deviation)
    return means, low, high


def quietly(read: Callable[[], Value], otherwise: Value) -> Value:
    """Return what `read` reads, or something empty: the table already reports runs that cannot be read."""
    try:
        return read()
    except EfcilError:
        return otherwise


def floats(values: Any) -> list[float]:
    """Return a list of JSON as numbers; what is none is NaN."""
    numbers = values if isinstance(values, list) else []
    return [float(v) if isinstance(v, int | float) and not isinstance(v, bool) else math.nan for v in numbers]


def _positions(names: Sequence[Sequence[str]]) -> tuple[str, ...]:
    first = list(names[0])
    same = all(list(other) == first for other in names)
    return tuple(first) if same else tuple(str(place + 1) for place in range(len(first)))


def _forgotten(matrix: np.ndarray, task: int) -> float:
    return average_forgetting(matrix[: task + 1, : task + 1]) if task else math.nan


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0

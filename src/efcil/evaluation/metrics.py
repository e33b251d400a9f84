"""Metrics of class-incremental learning. Every accuracy is a percentage, from 0 to 100.

The accuracy matrix a is K x K: a[k, i] is the accuracy on the test images of task i after training task k. Entries
that were not measured are NaN, in particular all above the diagonal (tasks not yet learned). What depends on an entry
that is missing is NaN itself; nothing is silently left out of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from efcil.errors import EfcilError


class MetricsError(EfcilError):
    """Predictions or accuracies that do not fit together or are not percentages."""


@dataclass(frozen=True)
class Metrics:
    """The summary of one run, in percent. Values per task are tuples in task order.

    `step_accuracy[k]` and `task_mean[k]` are after task k; `forgetting[i]` is of task i, for all tasks but the last.
    The fields that begin with `aware_` are the same with the task of each image known, or None if not measured.
    """

    step_accuracy: tuple[float, ...]
    last_step_accuracy: float
    average_incremental_accuracy: float
    task_mean: tuple[float, ...]
    forgetting: tuple[float, ...]
    average_forgetting: float
    aware_step_accuracy: tuple[float, ...] | None = None
    aware_last_step_accuracy: float | None = None
    aware_average_incremental_accuracy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and floats, ready to be written as JSON; a value that is NaN becomes None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def summarise(matrix: ArrayLike, task_sizes: Sequence[int], aware_matrix: ArrayLike | None = None) -> Metrics:
    """All metrics of an accuracy matrix (K, K) and the numbers of classes per task (K)."""
    accuracies = step_accuracy(matrix, task_sizes)
    per_task = forgetting(matrix)
    aware = None if aware_matrix is None else step_accuracy(aware_matrix, task_sizes)
    return Metrics(
        step_accuracy=_floats(accuracies),
        last_step_accuracy=float(accuracies[-1]),
        average_incremental_accuracy=float(accuracies.mean()),
        task_mean=_floats(task_mean(matrix)),
        forgetting=_floats(per_task),
        average_forgetting=average_forgetting(matrix),
        aware_step_accuracy=None if aware is None else _floats(aware),
        aware_last_step_accuracy=None if aware is None else float(aware[-1]),
        aware_average_incremental_accuracy=None if aware is None else float(aware.mean()),
    )


def step_accuracy(matrix: ArrayLike, task_sizes: Sequence[int]) -> NDArray[np.float64]:
    """A_step after each task (K): sum_{i<=k} |C_i| a[k, i] / sum_{i<=k} |C_i|; NaN where an entry is missing."""
    accuracies = _checked(matrix)
    sizes = _checked_sizes(task_sizes, len(accuracies)).astype(np.float64)
    return np.array(
        [np.dot(accuracies[k, : k + 1], sizes[: k + 1]) / sizes[: k + 1].sum() for k in range(len(accuracies))]
    )


def average_incremental_accuracy(matrix: ArrayLike, task_sizes: Sequence[int]) -> float:
    """A_inc: the mean of A_step over all K tasks, the first included; NaN if any entry is missing."""
    return float(step_accuracy(matrix, task_sizes).mean())


def task_mean(matrix: ArrayLike) -> NDArray[np.float64]:
    """Mean accuracy over the tasks seen, each task counting once whatever its size, after each task (K)."""
    accuracies = _checked(matrix)
    return np.array([accuracies[k, : k + 1].mean() for k in range(len(accuracies))])


def forgetting(matrix: ArrayLike) -> NDArray[np.float64]:
    """Per task but the last (K - 1): its best accuracy after any earlier task, minus its accuracy at the end.

    Negative where a task is better at the end than ever before.
    """
    accuracies = _checked(matrix)
    last = len(accuracies) - 1
    return np.array([accuracies[i:last, i].max() - accuracies[last, i] for i in range(last)], dtype=np.float64)


def average_forgetting(matrix: ArrayLike) -> float:
    """Mean forgetting over all tasks but the last; NaN for a single task, which had no time to be forgotten."""
    per_task = forgetting(matrix)
    return float(per_task.mean()) if len(per_task) else math.nan


def accuracy_rows(correct: ArrayLike, total: ArrayLike) -> NDArray[np.float64]:
    """Percentages from numbers of correct answers (..., K) and of test images per task (K); NaN for a task without."""
    hits = np.asarray(correct, dtype=np.float64)
    images = np.asarray(total, dtype=np.float64)
    if images.ndim != 1 or hits.shape[-1:] != images.shape:
        raise MetricsError(
            f"Correct answers of shape {hits.shape} need one number of test images per task, but these have shape "
            f"{images.shape}."
        )
    # Comparisons with NaN are false, so rows not measured yet pass.
    if (images < 0).any() or (hits < 0).any() or (hits > images).any():
        raise MetricsError("The number of correct answers of a task must lie between 0 and its number of test images.")
    return np.divide(100.0 * hits, images, out=np.full(hits.shape, np.nan), where=images > 0)


def correct_counts(
    predictions: ArrayLike, labels: ArrayLike, task_sizes: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of correct answers and of images, per task (K), from predicted and true classes (N)."""
    answers, truth = np.asarray(predictions), np.asarray(labels)
    if answers.shape != truth.shape or truth.ndim != 1:
        raise MetricsError(
            f"Predictions and labels must be two lists of equal length, but their shapes are {answers.shape} and "
            f"{truth.shape}."
        )
    tasks = _tasks_of(truth, task_sizes)
    right = np.bincount(tasks[answers == truth], minlength=len(task_sizes))
    return right.astype(np.int64), np.bincount(tasks, minlength=len(task_sizes)).astype(np.int64)


def task_aware_mask(labels: ArrayLike, task_sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Which classes belong to the true task of each sample: labels (N) -> (N, C)."""
    tasks = _tasks_of(np.asarray(labels), task_sizes)
    task_of_class = np.repeat(np.arange(len(task_sizes)), np.asarray(task_sizes))
    return np.asarray(tasks[:, None] == task_of_class[None, :], dtype=np.bool_)


def task_aware_predictions(scores: ArrayLike, labels: ArrayLike, task_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Best class (N) among those of the true task of each sample, from scores (N, C) of all seen classes."""
    values = np.asarray(scores, dtype=np.float64)
    mask = task_aware_mask(labels, task_sizes)
    if values.shape != mask.shape:
        raise MetricsError(
            f"Scores of shape {values.shape} do not fit {mask.shape[0]} labels and {mask.shape[1]} classes; give one "
            "row per label and one column per class of the tasks named."
        )
    return np.where(mask, values, -np.inf).argmax(axis=1)


def _tasks_of(labels: NDArray[Any], task_sizes: Sequence[int]) -> NDArray[np.int64]:
    """The task of each label, where tasks are consecutive blocks of classes."""
    ends = np.cumsum(_checked_sizes(task_sizes, len(task_sizes)))
    if labels.size and (labels.min() < 0 or labels.max() >= ends[-1]):
        raise MetricsError(
            f"Labels run from {labels.min()} to {labels.max()}, but the tasks have classes 0 to {ends[-1] - 1}."
        )
    return np.searchsorted(ends, labels, side="right").astype(np.int64)


def _checked(matrix: ArrayLike) -> NDArray[np.float64]:
    """The accuracy matrix as float64, or an error that says what is wrong with it."""
    accuracies = np.asarray(matrix, dtype=np.float64)
    if accuracies.ndim != 2 or accuracies.shape[0] != accuracies.shape[1] or accuracies.size == 0:
        raise MetricsError(
            f"An accuracy matrix has one row and one column per task, but its shape is {accuracies.shape}."
        )
    if not np.isnan(accuracies[np.triu_indices(len(accuracies), k=1)]).all():
        raise MetricsError(
            "An accuracy matrix has a value above the diagonal, where tasks are not learned yet; put NaN there, and "
            "check that rows are training steps and columns the tasks tested."
        )
    if (accuracies < 0).any() or (accuracies > 100).any():
        raise MetricsError("An accuracy matrix holds values outside 0 to 100; accuracies are percentages.")
    return accuracies


def _checked_sizes(task_sizes: Sequence[int], tasks: int) -> NDArray[np.int64]:
    """The numbers of classes per task as an array, or an error."""
    sizes = np.asarray(task_sizes)
    if sizes.shape != (tasks,) or tasks == 0 or not np.issubdtype(sizes.dtype, np.integer) or (sizes < 1).any():
        raise MetricsError(
            f"{tasks} tasks need {tasks} numbers of classes, each a whole number of at least 1, but got "
            f"{list(task_sizes)}."
        )
    return sizes.astype(np.int64)


def _floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    """A tuple of Python floats."""
    return tuple(float(value) for value in values)


def _plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and np.isnan(value) else value

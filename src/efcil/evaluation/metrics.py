"""Metrics of class-incremental learning. Every accuracy is a percentage, from 0 to 100.

The accuracy matrix a is K x K: a[k, i] is the accuracy on the test images of task i after training task k. Entries
that were not measured are NaN, in particular all above the diagonal (tasks not yet learned). A result that depends on a
missing entry is NaN too; nothing is silently left out of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from efcil.errors import EfcilError


class MetricsError(EfcilError):
    """Predictions or accuracies that do not fit together or are not percentages."""


def results(matrix: ArrayLike, task_sizes: Sequence[int], aware_matrix: ArrayLike) -> dict[str, Any]:
    """Return all metrics of a run by their names in summary.json, from its two accuracy matrices (K, K).

    Values per task are tuples: `A_step` and `task_mean` after each task, `forgetting` for all tasks but the last.
    """
    steps, means, lost = step_accuracy(matrix, task_sizes), task_mean(matrix), forgetting(matrix)
    aware = step_accuracy(aware_matrix, task_sizes)
    return {
        "A_step": float(steps[-1]),
        "A_inc": float(steps.mean()),
        "A_step_per_task": _floats(steps),
        "task_mean": float(means[-1]),
        "task_mean_per_task": _floats(means),
        "forgetting": average_forgetting(matrix),
        "forgetting_per_task": _floats(lost),
        "task_aware_A_step": float(aware[-1]),
        "task_aware_A_inc": float(aware.mean()),
        "task_aware_A_step_per_task": _floats(aware),
    }


def step_accuracy(matrix: ArrayLike, task_sizes: Sequence[int]) -> NDArray[np.float64]:
    """A_step after each task (K): sum_{i<=k} |C_i| a[k, i] / sum_{i<=k} |C_i|; NaN where an entry is missing."""
    accuracies = _checked(matrix)
    sizes = _checked_sizes(task_sizes, len(accuracies)).astype(np.float64)
    return np.array(
        [np.dot(accuracies[k, : k + 1], sizes[: k + 1]) / sizes[: k + 1].sum() for k in range(len(accuracies))]
    )


def task_mean(matrix: ArrayLike) -> NDArray[np.float64]:
    """Mean accuracy over the tasks seen, each task counting once whatever its size, after each task (K)."""
    accuracies = _checked(matrix)
    return np.array([accuracies[k, : k + 1].mean() for k in range(len(accuracies))])


def forgetting(matrix: ArrayLike) -> NDArray[np.float64]:
    """Per task but the last (K - 1): its best accuracy after any earlier task, minus its accuracy at the end.

    Negative if a task is better at the end than ever before.
    """
    accuracies = _checked(matrix)
    last = len(accuracies) - 1
    return np.array([accuracies[i:last, i].max() - accuracies[last, i] for i in range(last)], dtype=np.float64)


def average_forgetting(matrix: ArrayLike) -> float:
    """Mean forgetting over all tasks but the last; NaN for a single task, which had no time to be forgotten."""
    per_task = forgetting(matrix)
    return float(per_task.mean()) if len(per_task) else math.nan


def accuracy_rows(correct: ArrayLike, total: ArrayLike) -> NDArray[np.float64]:
    """Percentages from numbers of correct answers (..., K) and of test images per task (K); NaN without images."""
    hits = np.asarray(correct, dtype=np.float64)
    images = np.asarray(total, dtype=np.float64)
    if images.ndim != 1 or hits.shape[-1:] != images.shape:
        raise MetricsError(
            f"Correct answers of shape {hits.shape} need one number of test images per task, but these have shape "
            f"{images.shape}."
        )
    # Comparisons with NaN are false, so rows not measured yet pass.
    if (images < 0).any() or (hits < 0).any() or (hits > images).any():
        raise MetricsError("The number of correct answers of a task must be between 0 and its number of test images.")
    return np.divide(100.0 * hits, images, out=np.full(hits.shape, np.nan), where=images > 0)


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

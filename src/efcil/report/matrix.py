"""The accuracy matrix as text: a row after every task, a column for every task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from efcil.evaluation.metrics import step_accuracy


def matrix_text(matrix: Any, task_sizes: Sequence[int]) -> str:
    """Write an accuracy matrix (K x K, percent, NaN where not measured) with A_step at the end of every row.

    While a run is training, the rows of later tasks are all NaN; they are left out.
    """
    values = np.asarray(matrix, dtype=float)
    steps = step_accuracy(values, task_sizes)
    heading = "after task" + "".join(f"{f'{i + 1}':>7}" for i in range(len(task_sizes))) + " |  A_step"
    lines = [heading, "classes   " + "".join(f"{size:>7}" for size in task_sizes) + " |", "-" * len(heading)]
    for k, row in enumerate(values):
        if np.isnan(row).all():
            continue
        cells = "".join(f"{_cell(value):>7}" for value in row)
        lines.append(f"{k + 1:>10}{cells} | {_cell(steps[k], 2):>7}")
    return "\n".join(lines)


def _cell(value: float, decimals: int = 1) -> str:
    return "" if math.isnan(value) else f"{value:.{decimals}f}"

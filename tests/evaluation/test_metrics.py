from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efcil.errors import EfcilError
from efcil.evaluation.metrics import (
    accuracy_rows,
    average_forgetting,
    forgetting,
    results,
    step_accuracy,
    task_mean,
)

NAN = math.nan
MATRIX = [[80.0, NAN, NAN], [60.0, 70.0, NAN], [65.0, 40.0, 90.0]]
SIZES = [50, 10, 40]


def test_hand_computed_metrics_of_unequal_tasks() -> None:
    np.testing.assert_allclose(
        step_accuracy(MATRIX, SIZES), [80.0, (50 * 60 + 10 * 70) / 60, (50 * 65 + 10 * 40 + 40 * 90) / 100]
    )
    expected = (80.0 + 3700 / 60 + 72.5) / 3
    assert results(MATRIX, SIZES, MATRIX)["A_inc"] == pytest.approx(expected)
    np.testing.assert_allclose(task_mean(MATRIX), [80.0, 65.0, 65.0])
    # The best of task 0 is 80 after task 0, that of task 1 is 70.
    np.testing.assert_allclose(forgetting(MATRIX), [15.0, 30.0])
    assert average_forgetting(MATRIX) == pytest.approx(22.5)


def test_forgetting_takes_the_best_earlier_step_and_may_be_negative() -> None:
    matrix = [[50.0, NAN, NAN], [70.0, 30.0, NAN], [60.0, 45.0, 10.0]]
    np.testing.assert_allclose(forgetting(matrix), [10.0, -15.0])
    assert average_forgetting(matrix) == pytest.approx(-2.5)


def test_one_task() -> None:
    metrics = results([[87.5]], [20], [[90.0]])
    assert metrics["A_step_per_task"] == metrics["task_mean_per_task"] == (87.5,)
    assert metrics["A_step"] == metrics["A_inc"] == metrics["task_mean"] == 87.5
    assert metrics["task_aware_A_step"] == 90.0
    assert metrics["forgetting_per_task"] == ()
    assert math.isnan(metrics["forgetting"])


def test_what_was_not_measured_is_not_averaged_away() -> None:
    matrix = np.array(MATRIX)
    matrix[1, 0] = NAN
    assert np.isnan(step_accuracy(matrix, SIZES)).tolist() == [False, True, False]
    assert math.isnan(results(matrix, SIZES, MATRIX)["A_inc"])
    assert np.isnan(task_mean(matrix)).tolist() == [False, True, False]
    assert np.isnan(forgetting(matrix)).tolist() == [True, False]
    assert math.isnan(average_forgetting(matrix))
    assert results(matrix, SIZES, MATRIX)["A_step"] == pytest.approx(72.5)


def test_results_with_known_tasks() -> None:
    aware = [[90.0, NAN, NAN], [80.0, 90.0, NAN], [75.0, 85.0, 95.0]]
    metrics = results(MATRIX, SIZES, aware)
    assert metrics["task_aware_A_step"] == pytest.approx((50 * 75 + 10 * 85 + 40 * 95) / 100)
    assert metrics["task_aware_A_inc"] == pytest.approx((90.0 + 4900 / 60 + 84.0) / 3)
    assert metrics["A_step"] == pytest.approx(72.5)
    assert metrics["forgetting_per_task"] == (15.0, 30.0)
    assert metrics["task_mean_per_task"] == (80.0, 65.0, 65.0)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    per_class=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_step_accuracy_is_pooled_accuracy_for_balanced_tests(sizes: list[int], per_class: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    classes = sum(sizes)
    labels = random.permutation(np.repeat(np.arange(classes), per_class))
    predictions = np.where(random.random(len(labels)) < 0.5, labels, random.integers(0, classes, len(labels)))
    matrix = np.full((len(sizes), len(sizes)), NAN)
    tasks = np.repeat(np.arange(len(sizes)), sizes)[labels]
    correct = np.bincount(tasks[predictions == labels], minlength=len(sizes))
    matrix[-1] = accuracy_rows(correct, np.bincount(tasks))
    pooled = 100.0 * float((predictions == labels).mean())
    assert step_accuracy(matrix, sizes)[-1] == pytest.approx(pooled)


def test_accuracy_rows_are_percentages_with_nan_for_nothing() -> None:
    np.testing.assert_array_equal(accuracy_rows([1, 3, 0], [2, 4, 0]), [50.0, 75.0, NAN])
    np.testing.assert_array_equal(accuracy_rows([[1.0, NAN], [2.0, 1.0]], [2, 4]), [[50.0, NAN], [100.0, 25.0]])


@pytest.mark.parametrize(
    ("matrix", "sizes", "message"),
    [
        ([[1.0, 2.0]], [1, 1], "one row and one column per task"),
        ([], [], "one row and one column per task"),
        (np.array(MATRIX).T, SIZES, "above the diagonal"),
        ([[101.0]], [1], "percentages"),
        ([[-1.0]], [1], "percentages"),
        (MATRIX, [50, 10], "3 tasks need 3 numbers"),
        (MATRIX, [50, 10, 0], "at least 1"),
        (MATRIX, [50, 10, 2.5], "whole number"),
    ],
)
def test_wrong_matrices_are_refused(matrix: object, sizes: list[int], message: str) -> None:
    with pytest.raises(EfcilError, match=message):
        results(matrix, sizes, matrix)  # type: ignore[arg-type]


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(EfcilError, match="per task"):
        accuracy_rows([1, 2], [3])
    with pytest.raises(EfcilError, match="between 0 and"):
        accuracy_rows([4], [3])

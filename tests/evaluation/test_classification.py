"""Answers of a classifier, compared with scikit-learn and with what can be counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics

from efcil.evaluation import classification
from efcil.evaluation.classification import Confusion
from efcil.evaluation.metrics import MetricsError


@pytest.fixture(params=range(5))
def drawn(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, answers and probabilities of 7 classes, of which one has no images, and in some draws no answers."""
    generator = np.random.default_rng(request.param)
    labels = generator.choice([0, 1, 2, 3, 5, 6], size=60, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05])
    scores = generator.normal(size=(60, 7)) + 1.5 * np.eye(7)[labels]
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return labels, probabilities.argmax(axis=1), probabilities


def test_classes_agree_with_scikit_learn(drawn: tuple[np.ndarray, ...]) -> None:
    labels, answers, _ = drawn
    confusion = Confusion.of(labels, answers, 7)
    wanted_matrix = metrics.confusion_matrix(labels, answers, labels=range(7))
    np.testing.assert_array_equal(confusion.matrix(), wanted_matrix)
    np.testing.assert_array_equal(confusion.matrix([5, 0]), wanted_matrix[np.ix_([5, 0], [5, 0])])
    np.testing.assert_array_equal(confusion.answered, wanted_matrix.sum(axis=0))
    wanted = metrics.precision_recall_fscore_support(labels, answers, labels=range(7), zero_division=np.nan)
    np.testing.assert_allclose(classification.precision(confusion), wanted[0])
    np.testing.assert_allclose(classification.recall(confusion), wanted[1])
    np.testing.assert_allclose(classification.f1(confusion), wanted[2])
    np.testing.assert_array_equal(confusion.images, wanted[3])


def test_means_agree_with_scikit_learn(drawn: tuple[np.ndarray, ...]) -> None:
    labels, answers, _ = drawn
    confusion = Confusion.of(labels, answers, 7)
    assert classification.accuracy(confusion) == metrics.accuracy_score(labels, answers)
    # A class without images is answered sometimes, which scikit-learn says in a warning.
    with pytest.warns(UserWarning, match="y_pred contains") if 4 in answers else _nothing():
        balanced = metrics.balanced_accuracy_score(labels, answers)
    assert classification.mean_over_present(classification.recall(confusion), confusion) == pytest.approx(balanced)
    present = np.unique(labels)
    wanted = metrics.f1_score(labels, answers, labels=present, average="macro", zero_division=0)
    assert classification.mean_over_present(classification.f1(confusion), confusion) == pytest.approx(wanted)
    wanted = metrics.precision_score(labels, answers, labels=present, average="macro", zero_division=0)
    assert classification.mean_over_present(classification.precision(confusion), confusion) == pytest.approx(wanted)


def _nothing() -> object:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_ranks_agree_with_scikit_learn(drawn: tuple[np.ndarray, ...], k: int) -> None:
    labels, answers, probabilities = drawn
    ranks = classification.ranks(probabilities, labels)
    assert (ranks < k).mean() == metrics.top_k_accuracy_score(labels, probabilities, k=k, labels=range(7))
    np.testing.assert_array_equal(ranks == 0, answers == labels)


def test_equal_probabilities_are_sorted_as_the_answers_are() -> None:
    same = np.full((3, 3), 1 / 3)
    assert classification.ranks(same, [0, 1, 2]).tolist() == [0, 1, 2]
    assert same.argmax(axis=1).tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_auroc_agrees_with_scikit_learn(seed: int) -> None:
    generator = np.random.default_rng(seed)
    known, unknown = generator.integers(2, 12, 40) / 12, generator.integers(0, 10, 25) / 12  # with many ties
    wanted = metrics.roc_auc_score(np.repeat([1, 0], [40, 25]), np.concatenate([known, unknown]))
    assert classification.auroc(known, unknown) == pytest.approx(wanted)


def test_auroc_of_nothing_and_of_no_number() -> None:
    assert classification.auroc([], [0.5]) is None
    assert classification.auroc([0.5], []) is None
    assert classification.auroc([1.0], [0.0]) == 1.0
    assert classification.auroc([0.5], [0.5]) == 0.5
    with pytest.raises(MetricsError, match="not a finite number"):
        classification.auroc([math.nan], [0.5])


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (5, 10), (79, 110), (1, 3), (9_999, 10_000)])
def test_wilson_agrees_with_scipy(correct: int, total: int) -> None:
    from scipy.stats import binomtest

    wanted = binomtest(correct, total).proportion_ci(0.95, method="wilson")
    assert classification.wilson(correct, total) == pytest.approx((wanted.low, wanted.high), abs=1e-7)


def test_wilson_of_one_image_and_of_none() -> None:
    assert classification.wilson(0, 0) is None
    low, high = classification.wilson(1, 1) or (0, 0)
    assert (0.2 < low < 0.21, high) == (True, 1.0)
    with pytest.raises(MetricsError, match="2 of 1 is not a share"):
        classification.wilson(2, 1)


def test_calibration_by_hand() -> None:
    found = classification.calibration([0.95, 0.85, 0.9, 0.31, 0.1, 1.0], [True, False, True, False, True, True])
    assert found is not None
    assert found.mean_confidence == pytest.approx(4.11 / 6)
    counts = [each.images for each in found.bins]
    # The upper end belongs to a bin: 0.9 lies in 0.8 to 0.9, and 0.1 in 0 to 0.1.
    assert counts == [1, 0, 0, 1, 0, 0, 0, 0, 2, 2]
    ends = [(each.low, each.high) for each in found.bins]
    assert ends == [(place / 10, (place + 1) / 10) for place in range(10)]
    assert (found.bins[8].accuracy, found.bins[8].confidence) == (0.5, pytest.approx(0.875))
    assert found.bins[1].accuracy is None
    assert found.bins[1].confidence is None
    # |0.1 - 1| + |0.31 - 0| + 2 |0.875 - 0.5| + 2 |0.975 - 1|
    assert found.expected_error == pytest.approx((0.9 + 0.31 + 0.75 + 0.05) / 6)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_agrees_with_scikit_learn(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sure, right = generator.uniform(0.001, 1, 200), generator.uniform(size=200) < 0.6
    from sklearn.calibration import calibration_curve

    share, mean = calibration_curve(right, sure, n_bins=10, strategy="uniform")
    found = classification.calibration(sure, right)
    assert found is not None
    assert [each.accuracy for each in found.bins if each.images] == pytest.approx(share.tolist())
    assert [each.confidence for each in found.bins if each.images] == pytest.approx(mean.tolist())


def test_calibration_of_nothing_and_of_no_probabilities() -> None:
    assert classification.calibration([], []) is None
    for wrong in (1.2, -0.1, math.nan):
        with pytest.raises(MetricsError, match="outside 0 to 1"):
            classification.calibration([wrong], [True])
    with pytest.raises(MetricsError, match="do not fit"):
        classification.calibration([0.5], [True, False])


def test_confusions_are_sorted() -> None:
    labels, answers = np.repeat([0, 0, 0, 1, 2], [5, 1, 3, 4, 2]), np.repeat([0, 1, 2, 1, 0], [5, 1, 3, 4, 2])
    confusion = Confusion.of(labels, answers, 3)
    assert classification.most_confused(confusion) == [(0, 2, 3), (2, 0, 2), (0, 1, 1)]


def test_very_many_classes_take_no_matrix() -> None:
    classes = 1_000_000  # a matrix of these would take 8 TB
    confusion = Confusion.of([3, classes - 1, 3, 3], [3, 3, 7, 7], classes)
    assert confusion.pairs.tolist() == [[3, 3, 1], [3, 7, 2], [classes - 1, 3, 1]]
    assert classification.accuracy(confusion) == 1 / 4
    assert classification.mean_over_present(classification.recall(confusion), confusion) == pytest.approx(1 / 6)
    assert classification.most_confused(confusion) == [(3, 7, 2), (classes - 1, 3, 1)]


def test_nothing_was_counted() -> None:
    confusion = Confusion.of([], [], 3)
    assert confusion.matrix().tolist() == [[0] * 3] * 3
    assert classification.accuracy(confusion) is None
    assert classification.mean_over_present(classification.recall(confusion), confusion) is None
    assert np.isnan(classification.precision(confusion)).all()


@pytest.mark.parametrize(("labels", "answers"), [([3], [0]), ([0], [-1]), ([0, 1], [0])])
def test_labels_that_are_none(labels: list[int], answers: list[int]) -> None:
    with pytest.raises(MetricsError):
        Confusion.of(labels, answers, 3)

"""Temperatures: found where they are known, poolable, and harmless where there is nothing to learn from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from efcil.core import calibration


def drawn(temperature: float, count: int = 4000, classes: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores whose softmax at `temperature` is the true distribution of the labels."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(0, 2 * temperature, (count, classes))
    chances = calibration.softmax(scores, temperature)
    labels = (chances.cumsum(axis=1) > draw.random(count)[:, None]).argmax(axis=1)
    return scores, labels


def found(*parts: tuple[np.ndarray, np.ndarray]) -> float:
    known = [calibration.likelihood(*part) for part in parts]
    return calibration.temperature([each for each in known if each is not None])


def test_softmax_by_hand() -> None:
    scores = [[1.0, 2.0, 4.0], [10.0, -3.0, 0.0]]
    for temperature, found in (
        (1.0, calibration.softmax(np.array(scores))),
        (2.5, calibration.softmax(np.array(scores), 2.5)),
    ):
        for row, chances in zip(scores, found, strict=True):
            powers = [math.exp(score / temperature) for score in row]
            assert chances == pytest.approx([power / sum(powers) for power in powers])


def test_the_curve_is_minus_the_log_likelihood_of_the_true_class_and_in_part_of_the_best_wrong_one() -> None:
    scores = [2.0, 3.0, -1.0]
    known = calibration.likelihood(np.array([scores]), np.array([0]), doubt=0.25)
    assert known is not None
    assert known.images == 1
    for logarithm, cost in zip(calibration.GRID, known.curve, strict=True):
        scaled = [score / math.exp(logarithm) for score in scores]
        total = max(scaled) + math.log(sum(math.exp(each - max(scaled)) for each in scaled))
        assert cost == pytest.approx(0.8 * (total - scaled[0]) + 0.2 * (total - scaled[1]), rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("best", [-9.4, 0.3, 11.4])
def test_between_the_temperatures_that_are_compared_the_parabola_is_exact(best: float) -> None:
    part = calibration.Likelihood(1, tuple((logarithm - best) ** 2 for logarithm in calibration.GRID))
    assert calibration.temperature([part]) == pytest.approx(math.exp(best))


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 30.0, 5000.0])
def test_the_true_temperature_is_found(temperature: float) -> None:
    assert found(drawn(temperature)) == pytest.approx(temperature, rel=0.1)


def test_sets_of_images_add_up_to_one_set() -> None:
    scores, labels = drawn(3.0, 600)
    together = found((scores, labels))
    apart = found((scores[:200], labels[:200]), (scores[200:], labels[200:]))
    assert apart == pytest.approx(together, rel=0.02)


def test_weights_say_how_much_a_set_counts() -> None:
    cold, hot = (calibration.likelihood(*drawn(t, 500)) for t in (1.0, 20.0))
    assert cold is not None
    assert hot is not None
    assert calibration.temperature([cold, hot], [1.0, 0.0]) == calibration.temperature([cold])
    assert calibration.temperature([cold], [1.0]) < calibration.temperature([cold, hot], [1.0, 1.0])


def test_images_that_are_all_right_do_not_make_the_model_certain() -> None:
    scores = np.array([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0], [0.0, 5.0]])
    sure = calibration.softmax(scores, found((scores, scores.argmax(axis=1)))).max()
    assert 0.9 < sure < 0.9999


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        (np.zeros((0, 3)), np.zeros(0, int)),
        (np.ones((4, 1)), np.zeros(4, int)),
        (np.ones((4, 3)), np.arange(4) % 3),
        (np.full((4, 3), np.nan), np.arange(4) % 3),
    ],
)
def test_where_nothing_can_be_learned_the_temperature_is_one(scores: np.ndarray, labels: np.ndarray) -> None:
    assert found((scores, labels)) == 1.0


def test_softmax_of_huge_scores_is_finite_and_sums_to_one() -> None:
    chances = calibration.softmax(np.array([[-1e30, 0.0, 1e30], [1e8, 1e8, -1e8]], np.float32), 0.01)
    assert chances.dtype == np.float64
    assert chances.sum(axis=1).tolist() == [1.0, 1.0]
    assert chances[1, 0] == 0.5


def test_the_curve_is_short_and_finite() -> None:
    known = calibration.likelihood(*drawn(1e-3, 50))
    assert known is not None
    assert len(known.curve) == len(calibration.GRID) < 50
    assert all(math.isfinite(each) and each >= 0 for each in known.curve)

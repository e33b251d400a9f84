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

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from efcil.data.augment import Normalisation
from efcil.data.scenario import make_scenario
from efcil.engine import evaluate as evaluate_module
from efcil.engine.evaluate import TestImages, evaluate
from efcil.methods.base import Method
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork


class Oracle(Method):
    """Scores images by what it finds written in their first pixels: a score per class seen."""

    def __init__(self, seen: int) -> None:
        super().__init__(IncrementalNetwork(make_backbone("slim", 0)))
        self.seen = seen
        self.lengths: list[int] = []

    def scores(self, images: Tensor) -> Tensor:
        self.lengths.append(len(images))
        return images[:, 0].flatten(1)[:, : self.seen]


class Constant(Oracle):
    """Gives every image the same answer."""

    def scores(self, images: Tensor) -> Tensor:
        return torch.eye(1, self.seen).roll(7).expand(len(images), -1)


def make(labels: np.ndarray) -> tuple[TestImages, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 255, (len(labels), 4, 4, 3), dtype=np.uint8)
    # With this normalisation, input is pixel value / 255.
    identity = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    images = TestImages(pixels, labels, normalisation=identity, device=torch.device("cpu"))
    return images, pixels[..., 0].reshape(len(labels), -1)


def pairs(table: np.ndarray) -> list[list[int]]:
    """What occurs, as the rows (class, answer, how often)."""
    return [[int(i), int(j), int(table[i, j])] for i, j in np.argwhere(table)]


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("task", [0, 1, 2])
def test_accuracies_are_those_of_the_metrics(task: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "LARGEST_CHUNK", chunk)
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 9))
    scenario = make_scenario("custom", 10, order=range(10), tasks=3)
    sizes = scenario.task_sizes[: task + 1]
    seen = sum(sizes)
    images, scores = make(labels)
    oracle = Oracle(seen)
    answers = evaluate(oracle, images, scenario, task)
    agnostic, aware = answers.agnostic, answers.aware
    chosen = labels < seen
    values, truth = scores[chosen][:, :seen], labels[chosen]
    ends = np.cumsum(sizes)
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        of_task = (truth >= start) & (truth < end)
        rows, right = values[of_task], truth[of_task]
        assert agnostic[number] == pytest.approx(100 * (rows.argmax(axis=1) == right).mean())
        assert aware[number] == pytest.approx(100 * (start + rows[:, start:end].argmax(axis=1) == right).mean())
    expected = np.zeros((seen, seen), dtype=np.int64)
    np.add.at(expected, (truth, values.argmax(axis=1)), 1)
    assert answers.confusion == pairs(expected)
    assert answers.images == [9] * seen
    assert sum(oracle.lengths) == chosen.sum(), "images of classes to come are not looked at"
    assert max(oracle.lengths) <= chunk


def test_very_many_classes_need_no_table_of_all_pairs() -> None:
    """A table of 200,000 x 200,000 classes, 320 GB, would not fit."""
    classes = 200_000
    scenario = make_scenario("custom", classes, order=range(classes), tasks=2)
    images, _ = make(np.array([1, 7, classes - 1]))
    answers = evaluate(Constant(classes), images, scenario, 1)
    assert answers.confusion == [[1, 7, 1], [7, 7, 1], [classes - 1, 7, 1]]
    assert answers.agnostic == [50.0, 0.0]


@pytest.mark.parametrize("size", [1.0, 20.0])
def test_two_views_are_the_mean_of_the_probabilities(size: float) -> None:
    """By hand; also with scores so far apart that the best probabilities of two views are equal in single precision."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), 25))
    scenario = make_scenario("custom", 4, order=range(4), tasks=2)
    images, _ = make(labels)
    oracle = Oracle(4)
    plain = oracle.scores
    # Unequal factors: else the two views, which have the same four numbers, would give equal probabilities.
    factors = size * torch.tensor([1.0, 0.7, 0.9, 0.8])
    oracle.scores = lambda x: factors * plain(x)  # type: ignore[method-assign]
    pixels = images.images.double().numpy()[:, 0] / 255  # in the order of the classes
    mean = np.zeros((100, 4))
    for view in (pixels, pixels[:, :, ::-1]):
        scores = factors.double().numpy() * view.reshape(100, -1)[:, :4]
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        mean += odds / odds.sum(axis=1, keepdims=True) / 2
    found = evaluate(oracle, images, scenario, 1, views=2)
    truth = np.sort(labels)
    expected = np.zeros((4, 4), dtype=np.int64)
    np.add.at(expected, (truth, mean.argmax(axis=1)), 1)
    assert found.confusion == pairs(expected)
    assert found.confusion != evaluate(oracle, images, scenario, 1).confusion


def test_a_task_without_test_images_has_no_accuracy() -> None:
    scenario = make_scenario("custom", 4, order=range(4), tasks=2)
    images, _ = make(np.array([2, 3, 3]))
    answers = evaluate(Oracle(4), images, scenario, 1)
    agnostic, aware = answers.agnostic, answers.aware
    assert answers.images == [0, 0, 1, 2]
    assert math.isnan(agnostic[0])
    assert math.isnan(aware[0])
    assert 0 <= agnostic[1] <= aware[1] <= 100

"""Accuracy after a task, on the test images of every task seen, with and without the task known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from efcil.activity import doing, doing_in_pieces, next_piece
from efcil.core import classifiers
from efcil.data.augment import Normalisation
from efcil.data.deferred import DeferredImages
from efcil.data.scenario import Scenario
from efcil.data.store import resident
from efcil.data.tiers import Keeping
from efcil.evaluation.metrics import accuracy_rows
from efcil.methods.base import Method, Traits

LARGEST_CHUNK = 2048
CHUNK_BYTES = 1 << 28


@dataclass(frozen=True, eq=False)
class Answers:
    """What an evaluation found: accuracies (percent) on the tasks so far, and how often which class was answered.

    `agnostic` is among all seen classes, `aware` among those of the true task. `confusion` has (true class, answer
    among all seen classes, images) for every pair that occurs, in order: of 10,000 classes, a matrix would take 800 MB.
    `images` (C) are the test images of each class, and `right` (C) those with the right answer: the class, or any class
    with the same answer where classes share one.
    """

    agnostic: list[float]
    aware: list[float]
    confusion: list[list[int]]
    images: list[int]
    right: list[int]


class TestImages:
    """All test images as one uint8 tensor, sorted by label: images of seen classes come first.

    They are on the device, or where there is room for them (`kept`).
    """

    __test__ = False  # pytest must not collect it as a test

    def __init__(
        self,
        images: np.ndarray | DeferredImages,
        labels: np.ndarray,
        *,
        normalisation: Normalisation,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        keeping: Keeping | None = None,
    ) -> None:
        order = np.argsort(labels, kind="stable")
        sorted_labels = np.asarray(labels, dtype=np.int64)[order]
        self.images, self.kept = resident(images, order, device, keeping)
        self.labels = torch.from_numpy(sorted_labels).to(device)
        self.normalisation = normalisation
        self.dtype = dtype
        self._sorted = sorted_labels

    def count(self, classes: int) -> int:
        """Return how many images the first `classes` classes have."""
        return int(np.searchsorted(self._sorted, classes))

    def chunk_size(self) -> int:
        """Return how many images are scored per batch; it depends only on the images."""
        pixels = 4 * 3 * self.images.shape[-1] ** 2
        return max(1, min(len(self.labels), CHUNK_BYTES // pixels, LARGEST_CHUNK))

    def chunk(self, start: int, stop: int) -> Tensor:
        """Return the network input for the images from `start` to `stop`.

        On CUDA it always has the full length, padded with the last image: cuDNN would tune for every new shape.
        """
        device = self.labels.device
        if device.type == "cuda":
            rows = torch.arange(start, start + self.chunk_size(), device=self.images.device).clamp_(max=stop - 1)
            return self.normalisation(self.images[rows].to(device), self.dtype)
        return self.normalisation(self.images[start:stop].to(device), self.dtype)


def used_classifier(about: Traits, classifier: str) -> str:
    """Return the classifier that is used for a method where `classifier` is asked for: `auto` chooses one."""
    if classifier != classifiers.AUTO:
        return classifier
    # A method with its own way to classify keeps it.
    return classifiers.automatic(about.keeps) if about.decides_by_heads else classifiers.OWN


@torch.no_grad()
def scorer(method: Method, classifier: str) -> Callable[[Tensor], Tensor]:
    """Return the function from normalised images to scores for the classifier called `classifier`."""
    keeps = method.about.keeps
    classifier = used_classifier(method.about, classifier)
    if classifier in (classifiers.OWN, classifiers.ALL):
        return method.scores
    classifiers.check(classifier, method.name, keeps)
    if classifier == classifiers.HEADS:
        return lambda images: method.network.logits(method.network.features(images)) / method.head_temperature
    statistics = method.statistics()
    assert statistics is not None
    if classifiers.HEADS in keeps:
        statistics = replace(statistics, heads=method.network.head_weight(), head_scale=method.network.cosine_scale)
    built = classifiers.CLASSIFIERS[classifier][1](statistics)
    return lambda images: built(method.embed(images))


def mirrored(answer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function from images to the logarithm of their mean probability and that of their mirror images.

    Probabilities are the softmax of the scores that `answer` gives, in float64: two views may both be almost certain.
    """

    def both(images: Tensor) -> Tensor:
        views = [answer(each).double().log_softmax(dim=1) for each in (images, images.flip(3))]
        return torch.logaddexp(*views) - math.log(2.0)

    return both


@torch.no_grad()
def evaluate(
    method: Method,
    images: TestImages,
    scenario: Scenario,
    task: int,
    classifier: str = classifiers.OWN,
    views: int = 1,
) -> Answers:
    """Test a method on the images of the tasks 0..task, in one pass; with two `views`, also on their mirror images.

    A task without test images has NaN. Answers are counted on the device, and only the counts are copied to the host.
    Where classes share an answer (`scenario.answers`), it is that of the class with the highest score.
    """
    answer = scorer(method, classifier)
    if views > 1:
        answer = mirrored(answer)
    sizes = scenario.task_sizes[: task + 1]
    seen = sum(sizes)
    device = images.labels.device
    task_of_class = torch.repeat_interleave(torch.tensor(sizes)).to(device)
    count = images.count(seen)
    predicted = torch.zeros(2, count, dtype=torch.int64, device=device)
    step = images.chunk_size()
    with doing("testing"), doing_in_pieces("images", count, step) as work:
        for start in range(0, count, step):
            next_piece()
            work.done = start
            stop = min(start + step, count)
            scores = answer(images.chunk(start, stop))[: stop - start]
            labels = images.labels[start:stop]
            elsewhere = task_of_class[labels][:, None] != task_of_class[None, :]
            predicted[0, start:stop] = scores.argmax(dim=1)
            predicted[1, start:stop] = scores.masked_fill(elsewhere, -torch.inf).argmax(dim=1)
    labels = images.labels[:count]
    pairs, often = torch.unique(labels * seen + predicted[0], return_counts=True)
    confusion = torch.stack([pairs // seen, pairs % seen, often], dim=1).tolist()
    answers = torch.tensor(scenario.answers or range(seen), device=device)
    right = answers[predicted] == answers[labels]
    # Those that are wrong are counted behind the last class.
    counted = [labels, *(torch.where(each, labels, seen) for each in right)]
    counts = torch.stack([torch.bincount(each, minlength=seen + 1)[:seen] for each in counted]).cpu().numpy()
    starts = np.cumsum([0, *sizes[:-1]])
    of_task = np.add.reduceat(counts, starts, axis=1)
    agnostic_row, aware_row = accuracy_rows(of_task[1:], of_task[0]).tolist()
    return Answers(agnostic_row, aware_row, confusion, counts[0].tolist(), counts[1].tolist())

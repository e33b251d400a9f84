"""A short stream of digits whose first task is trained once and shared: what methods are checked and tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.scenario import class_order, make_scenario
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.store import TaskImages
from efcil.engine import lifecycle
from efcil.engine.execution import Execution
from efcil.engine.feed import Feed
from efcil.engine.lifecycle import Blueprint
from efcil.methods import get
from efcil.methods.base import Batch, Method, Task
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork
from efcil.presets import load_preset
from efcil.settings import Recipe
from efcil.testing.compare import State, clone

PRESET, NETWORK, AUGMENTATION = "digits", "slim", "shift"
BATCH = 32
FIRST = Recipe(learning_rate=1e-3, epochs=6, batch_size=BATCH, rotations=True)
LATER = Recipe(learning_rate=1e-3, epochs=8, batch_size=BATCH, schedule="steps", milestones=(4, 7))
#: For checks: unequal tasks, one of a single class, batches that end with a short one, learned in a second.
SIZES = (4, 1, 3)
SHORT = Recipe(learning_rate=1e-3, epochs=2, batch_size=16)
PLAIN = Execution(torch.device("cpu"), half=False, fused=False, captured=False)
FUSED = replace(PLAIN, fused=True)


def blueprint(method: str | type[Method], settings: Any = None, execution: Execution = PLAIN) -> Blueprint:
    """Return what a method, by name or as a class, is built from; its default settings where none are given."""
    cls = get(method) if isinstance(method, str) else method
    return Blueprint(cls, cls.Settings() if settings is None else settings, NETWORK, 0, execution)


class _FirstBlueprint(Blueprint):
    """What trains the first task of a stream, from the initial weights that frozen accuracies were measured with."""

    def empty_network(self) -> IncrementalNetwork:
        return IncrementalNetwork(make_backbone(str(self.network), self.seed))


def fitting(method: Method, recipe: Recipe) -> Recipe:
    """Return the recipe, with what its family of methods and its settings say of BatchNorm and gradient clipping."""
    preset = method.recipe(method.settings, load_preset(PRESET).later(method.about.family))
    return replace(recipe, normalisation=preset.normalisation, gradient_clip=preset.gradient_clip)


@dataclass
class Stream:
    """Tasks of digits. `start` gives a method that has just finished the first one."""

    tasks: list[Task]
    pixels: list[tuple[np.ndarray, np.ndarray]]
    normalisation: Normalisation
    test_images: Tensor
    test_labels: Tensor
    network_state: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = [self.images(index) for index in range(len(self.tasks))]

    def images(self, index: int, execution: Execution = PLAIN) -> TaskImages:
        """Return the training images of a task, made anew."""
        images, labels = self.pixels[index]
        return TaskImages(
            images,
            labels,
            augmentation=make_augmentation(AUGMENTATION),
            normalisation=self.normalisation,
            device=execution.device,
            seed=0,
            name=f"task{index}",
            dtype=execution.dtype,
        )

    def network(self) -> IncrementalNetwork:
        """Return the network as the first task left it."""
        return self.make("finetune").network

    def make(self, method: str | type[Method], **settings: Any) -> Method:
        """Return the method as it is before the end of the first task."""
        plan = blueprint(method)
        return replace(plan, settings=replace(plan.settings, **settings)).around(self.network_state)

    def start(self, method: str | type[Method], **settings: Any) -> Method:
        """Return the method after the first task."""
        made = self.make(method, **settings)
        self.end(made, 0)
        return made

    def end(self, method: Method, index: int) -> None:
        """End task `index` as the engine does."""
        lifecycle.end(method, self.tasks[index], self.data[index])

    def train(
        self, method: Method, index: int, recipe: Recipe = LATER, execution: Execution = PLAIN
    ) -> list[dict[str, float]]:
        """Train task `index` up to, but not including, its end; return the loss terms of every epoch."""
        execution.equip(method)
        recipe, terms = fitting(method, recipe), []
        trainer = lifecycle.begin_later(method, self.tasks[index], self.data[index], recipe, execution)
        trainer.run(on_epoch=lambda report: terms.append(report.terms))
        method.eval()
        return terms

    def learn(self, method: Method, last: int, recipe: Recipe = LATER) -> Method:
        """Learn the tasks after the first, up to and including `last`."""
        plan = blueprint(type(method), method.settings)
        for task, data in list(zip(self.tasks, self.data, strict=True))[1 : last + 1]:
            lifecycle.learn_task(plan, method, task, data, fitting(method, recipe))
        return method

    def batch(self, method: Method, index: int, step: int = 0) -> Batch:
        """Return the batch that step `step` of task `index` sees; the method must have begun that task."""
        method.training_mode(fitting(method, LATER))
        feed = Feed(method, self.data[index], self.tasks[index], self.tasks[index].batch_size)
        feed.load(0, 0)
        return feed.batch(step, feed.batch_length(step))

    def scores(self, method: Method, seen: int) -> Tensor:
        """Return the scores of the test images of the first `seen` classes."""
        return method.scores(self.test_images[self.test_labels < seen])

    def accuracy(self, method: Method, last: int) -> float:
        """Return the accuracy over all classes seen by the end of task `last`."""
        seen = self.tasks[last].seen
        labels = self.test_labels[self.test_labels < seen]
        return float((self.scores(method, seen).argmax(dim=1) == labels).float().mean())


def make_stream(
    sizes: Sequence[int], *, per_class: int | None = None, batch_size: int = BATCH, first: Recipe = FIRST
) -> Stream:
    """Return tasks of so many digits each; with `per_class`, class c has the first per_class + c of its images."""
    dataset = load_dataset("digits", None, SourceOptions())
    scenario = make_scenario("cs5", 10, order=class_order("efc", 10, 0))
    train, test = scenario.relabel(dataset.train.labels), scenario.relabel(dataset.test.labels)
    normalisation = Normalisation(dataset.mean, dataset.std)
    tasks, pixels = [], []
    for index, count in enumerate(sizes):
        start = sum(sizes[:index])
        rows = [
            np.flatnonzero(train == label)[: None if per_class is None else per_class + label]
            for label in range(start, start + count)
        ]
        chosen = np.sort(np.concatenate(rows))
        tasks.append(Task(index, start, count, 0, batch_size))
        pixels.append((np.asarray(dataset.train.images[chosen]), train[chosen]))
    images = normalisation(torch.from_numpy(np.array(dataset.test.images)).permute(0, 3, 1, 2), torch.float32)
    stream = Stream(tasks, pixels, normalisation, images, torch.from_numpy(np.array(test)))
    recipe = replace(first, batch_size=batch_size)
    first_blueprint = _FirstBlueprint(get("finetune"), None, NETWORK, 0, PLAIN)
    trainer = lifecycle.begin_first(first_blueprint, tasks[0], stream.data[0], recipe)
    trainer.run()
    stream.network_state = clone(trainer.learner.network.state_dict())
    return stream


@cache
def short_stream(per_class: int = 21) -> Stream:
    """Return three tasks small enough to learn in a second."""
    return make_stream(SIZES, per_class=per_class, batch_size=SHORT.batch_size, first=replace(FIRST, epochs=3))

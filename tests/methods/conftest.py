"""A short stream of digits and a slim network, whose first task is trained once and shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.scenario import class_order, make_scenario
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.store import TaskImages
from efcil.engine.feed import Feed
from efcil.engine.first_task import FirstTask
from efcil.engine.trainer import Execution, Trainer
from efcil.methods import get
from efcil.methods.base import Batch, Method, Task
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import make_backbone
from efcil.settings import Recipe

BATCH = 32
FIRST = Recipe(learning_rate=1e-3, epochs=6, batch_size=BATCH, rotations=True)
LATER = Recipe(learning_rate=1e-3, epochs=8, batch_size=BATCH, schedule="steps", milestones=(4, 7))
PLAIN = Execution(torch.device("cpu"), half=False, fused=False, captured=False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Stream:
    """Five tasks of two digits each. `start` gives a method that has just finished the first one."""

    tasks: list[Task]
    data: list[TaskImages]
    test_images: Tensor
    test_labels: Tensor
    network_state: dict[str, Tensor] = field(default_factory=dict)

    def network(self) -> IncrementalNetwork:
        network = IncrementalNetwork(make_backbone("slim", 0))
        network.grow_to([self.tasks[0].classes])
        network.load_state_dict(self.network_state)
        return network.eval()

    def make(self, name: str, **settings: Any) -> Method:
        cls = get(name)
        return cls(self.network(), replace(cls.Settings(), **settings))

    def start(self, name: str, **settings: Any) -> Method:
        method = self.make(name, **settings)
        method.end_task(self.tasks[0], self.data[0])
        return method

    def train(self, method: Method, index: int, recipe: Recipe = LATER, execution: Execution = PLAIN) -> dict[str, float]:
        """Train task `index` up to, but not including, its end; return the loss terms of the last epoch."""
        method.begin_task(self.tasks[index])
        execution.equip(method)
        reports: list[dict[str, float]] = []
        trainer = Trainer(method, self.data[index], self.tasks[index], recipe, execution)
        trainer.run(on_epoch=lambda report: reports.append(report.terms))
        method.eval()
        return reports[-1]

    def learn(self, method: Method, last: int, recipe: Recipe = LATER) -> Method:
        """Go through the tasks after the first, up to and including `last`."""
        for index in range(1, last + 1):
            self.train(method, index, recipe)
            method.end_task(self.tasks[index], self.data[index])
        return method

    def batch(self, method: Method, index: int, step: int = 0) -> Batch:
        """The batch that step `step` of task `index` sees; the method must have begun that task."""
        method.training_mode()
        feed = Feed(method, self.data[index], self.tasks[index], BATCH)
        feed.load(0, 0)
        return feed.batch(step, feed.batch_length(step))

    def scores(self, method: Method, seen: int) -> Tensor:
        return method.scores(self.test_images[self.test_labels < seen])

    def accuracy(self, method: Method, last: int) -> float:
        """Accuracy over all classes seen by the end of task `last`."""
        seen = self.tasks[last].seen
        labels = self.test_labels[self.test_labels < seen]
        return float((self.scores(method, seen).argmax(dim=1) == labels).float().mean())


@pytest.fixture(scope="session")
def stream(_one_thread: None) -> Stream:
    dataset = load_dataset("digits", None, SourceOptions())
    scenario = make_scenario("cs5", 10, order=class_order("efc", 10, 0))
    train, test = scenario.relabel(dataset.train.labels), scenario.relabel(dataset.test.labels)
    normalisation = Normalisation(dataset.mean, dataset.std)
    tasks, data = [], []
    for index, classes in enumerate(scenario.tasks):
        chosen = np.isin(train, classes)
        tasks.append(Task(index, classes[0], len(classes), 0, BATCH))
        data.append(
            TaskImages(
                dataset.train.images[chosen],
                train[chosen],
                augmentation=make_augmentation("shift"),
                normalisation=normalisation,
                device=torch.device("cpu"),
                seed=0,
                name=f"task{index}",
            )
        )
    images = normalisation(torch.from_numpy(np.array(dataset.test.images)).permute(0, 3, 1, 2), torch.float32)
    network = IncrementalNetwork(make_backbone("slim", 0))
    first = FirstTask(network, tasks[0], rotations=True)
    Trainer(first, data[0], tasks[0], FIRST, PLAIN).run()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    return Stream(tasks, data, images, torch.from_numpy(np.array(test)), state)


@pytest.fixture(scope="session")
def finetune_accuracy(stream: Stream) -> float:
    """Accuracy of fine-tuning after three tasks, which methods against forgetting must beat."""
    return stream.accuracy(stream.learn(stream.start("finetune"), 2), 2)


def check_round_trip(stream: Stream, method: Method, name: str, **settings: Any) -> None:
    """A fresh method that loads the state predicts the same, and its state is the same."""
    state = {key: value.clone() for key, value in method.state_dict().items()}
    # Saved files list their tensors by name, so a method must not depend on the order.
    twin = stream.make(name, **settings)
    twin.load_tensors(dict(sorted(state.items())))
    twin.eval()
    seen = sum(method.network.head_sizes)
    assert torch.equal(stream.scores(twin, seen), stream.scores(method, seen))
    assert twin.state_dict().keys() == state.keys()
    for key, value in twin.state_dict().items():
        assert torch.equal(value, state[key]), key

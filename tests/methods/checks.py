"""What every method is tested with: short streams of digits, slim networks whose first task is shared, and checks."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor, nn

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.scenario import class_order, make_scenario
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.store import TaskImages
from efcil.engine.checkpoint import restore_training, training_tensors
from efcil.engine.feed import Feed
from efcil.engine.first_task import FirstTask
from efcil.engine.trainer import Execution, Position, Trainer
from efcil.methods import get
from efcil.methods.base import Batch, Method, Task
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import make_backbone
from efcil.presets import load_preset
from efcil.settings import Recipe

BATCH = 32
FIRST = Recipe(learning_rate=1e-3, epochs=6, batch_size=BATCH, rotations=True)
LATER = Recipe(learning_rate=1e-3, epochs=8, batch_size=BATCH, schedule="steps", milestones=(4, 7))
PLAIN = Execution(torch.device("cpu"), half=False, fused=False, captured=False)
FUSED = replace(PLAIN, fused=True)

State = dict[str, Tensor]


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
        """The training images of a task, made anew."""
        images, labels = self.pixels[index]
        return TaskImages(
            images,
            labels,
            augmentation=make_augmentation("shift"),
            normalisation=self.normalisation,
            device=execution.device,
            seed=0,
            name=f"task{index}",
            dtype=execution.dtype,
        )

    def network(self) -> IncrementalNetwork:
        """The network as the first task left it."""
        network = empty_network()
        network.grow_to([self.tasks[0].classes])
        network.load_state_dict(self.network_state)
        return network.eval()

    def make(self, name: str, **settings: Any) -> Method:
        """The method as it is before the end of the first task."""
        cls = get(name)
        return cls(self.network(), replace(cls.Settings(), **settings))

    def start(self, name: str, **settings: Any) -> Method:
        """The method after the first task."""
        method = self.make(name, **settings)
        self.end(method, 0)
        return method

    def end(self, method: Method, index: int) -> None:
        """End task `index` as the engine does."""
        with torch.no_grad():
            method.end_task(self.tasks[index], self.data[index])

    def train(
        self, method: Method, index: int, recipe: Recipe = LATER, execution: Execution = PLAIN
    ) -> list[dict[str, float]]:
        """Train task `index` up to, but not including, its end; return the loss terms of every epoch."""
        execution.equip(method)
        method.begin_task(self.tasks[index])
        reports: list[dict[str, float]] = []
        trainer = Trainer(method, self.data[index], self.tasks[index], fitting(method, recipe), execution)
        trainer.run(on_epoch=lambda report: reports.append(report.terms))
        method.eval()
        return reports

    def learn(self, method: Method, last: int, recipe: Recipe = LATER) -> Method:
        """Go through the tasks after the first, up to and including `last`."""
        for index in range(1, last + 1):
            self.train(method, index, recipe)
            self.end(method, index)
        return method

    def batch(self, method: Method, index: int, step: int = 0) -> Batch:
        """The batch that step `step` of task `index` sees; the method must have begun that task."""
        method.training_mode(fitting(method, LATER))
        feed = Feed(method, self.data[index], self.tasks[index], self.tasks[index].batch_size)
        feed.load(0, 0)
        return feed.batch(step, feed.batch_length(step))

    def scores(self, method: Method, seen: int) -> Tensor:
        """Scores of the test images of the first `seen` classes."""
        return method.scores(self.test_images[self.test_labels < seen])

    def accuracy(self, method: Method, last: int) -> float:
        """Accuracy over all classes seen by the end of task `last`."""
        seen = self.tasks[last].seen
        labels = self.test_labels[self.test_labels < seen]
        return float((self.scores(method, seen).argmax(dim=1) == labels).float().mean())


def fitting(method: Method, recipe: Recipe) -> Recipe:
    """The recipe, with what its family of methods and its settings say of BatchNorm and of gradient clipping."""
    preset = method.recipe(method.settings, load_preset("digits").later(method.about.family))
    return replace(recipe, normalisation=preset.normalisation, gradient_clip=preset.gradient_clip)


def empty_network() -> IncrementalNetwork:
    """A slim network without heads."""
    return IncrementalNetwork(make_backbone("slim", 0))


def make_stream(
    sizes: Sequence[int], *, per_class: int | None = None, batch_size: int = BATCH, first: Recipe = FIRST
) -> Stream:
    """Tasks with these numbers of digits; with `per_class`, class c has the first per_class + c of its images."""
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
    network = empty_network()
    learner = FirstTask(network, tasks[0], rotations=first.rotations)
    Trainer(learner, stream.data[0], tasks[0], replace(first, batch_size=batch_size), PLAIN).run()
    stream.network_state = clone(network.state_dict())
    return stream


# -- one short run per method, looked at by many checks --------------------------------------------------------------

#: Unequal tasks, one of a single class, batches that end with a short one.
SIZES = (4, 1, 3)
SHORT = Recipe(learning_rate=1e-3, epochs=2, batch_size=16)
#: Settings that shorten what a method does when a task has ended; nothing that the checks look at depends on them.
QUICK: dict[str, dict[str, Any]] = {
    "adagauss": {"adapter": "mlp", "adapter_epochs": 3, "adapter_samples": 200, "width": 64},
    "efc++": {"rebalance_epochs": 5},
    "ldc": {"map_epochs": 3},
}


@dataclass
class TaskRecord:
    """What a method was like around one task: BatchNorm when it began, and the rest when it had ended."""

    normalisation_before: State
    normalisation_after: State
    terms: list[dict[str, float]]
    state: State
    scores: Tensor
    images_gone: bool


@cache
def short_stream(per_class: int = 21) -> Stream:
    """Three tasks small enough to learn in a second."""
    return make_stream(SIZES, per_class=per_class, batch_size=SHORT.batch_size, first=replace(FIRST, epochs=3))


@cache
def history(name: str) -> tuple[Method, list[TaskRecord]]:
    """One run of a method through the short stream; made once for all checks, which must not change it."""
    stream = short_stream()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run(stream, quick(stream, name), 0)


def quick(stream: Stream, name: str) -> Method:
    """The method before the end of the first task, with the settings that all checks use."""
    return stream.make(name, **QUICK.get(name, {}))


def run(stream: Stream, method: Method, first: int, recipe: Recipe = SHORT) -> tuple[Method, list[TaskRecord]]:
    """Go through the tasks from `first` on, as the engine does, and write down what happens."""
    records = []
    for index in range(first, len(stream.tasks)):
        task, data = stream.tasks[index], stream.images(index)
        terms: list[dict[str, float]] = []
        before = normalisation_state(method)
        if index > 0:
            method.begin_task(task)
            before = normalisation_state(method)
            Trainer(method, data, task, fitting(method, recipe), PLAIN).run(
                on_epoch=lambda report, to=terms: to.append(report.terms)
            )
        method.eval()
        with torch.no_grad():
            method.end_task(task, data)
        watch = weakref.ref(data)
        del data
        if watch() is not None:  # perhaps only a cycle that has not been collected yet
            gc.collect()
        state, scores = clone(method.state_dict()), stream.scores(method, task.seen)
        records.append(TaskRecord(before, normalisation_state(method), terms, state, scores, watch() is None))
    return method, records


def clone(state: State) -> State:
    """A copy that later training does not change."""
    return {name: value.detach().clone() for name, value in state.items()}


def normalisation_state(method: Method) -> State:
    """Scale, shift and statistics of every BatchNorm layer of the backbone, by name."""
    modules = method.network.backbone.named_modules()
    layers = [(name, layer) for name, layer in modules if isinstance(layer, nn.BatchNorm2d)]
    return clone({f"{name}.{key}": value for name, layer in layers for key, value in layer.state_dict().items()})


def reload(name: str, state: State, **settings: Any) -> Method:
    """A fresh method with a saved state, written and read as checkpoints are."""
    cls = get(name)
    method = cls(empty_network(), replace(cls.Settings(), **(settings or QUICK.get(name, {}))))
    method.load_tensors(parse_tensors(serialise_tensors({key: value.contiguous() for key, value in state.items()})))
    method.eval()
    return method


def resumed(stream: Stream, method: Method, twin: Method, index: int, steps: int, recipe: Recipe = SHORT) -> Method:
    """Train task `index` with `method` for some steps, go on with `twin`, and return that after the task's end."""

    class Stop(Exception):
        pass

    class Keeper:
        taken = 0

        def due(self) -> bool:
            Keeper.taken += 1
            return Keeper.taken == steps

        def save(self, trainer: Trainer, position: Position) -> None:
            self.tensors, self.position = clone(training_tensors(trainer)), position
            raise Stop

    task, data, keeper = stream.tasks[index], stream.images(index), Keeper()
    method.begin_task(task)
    with contextlib.suppress(Stop):
        Trainer(method, data, task, fitting(method, recipe), PLAIN).run(keeper=keeper)
    twin.begin_task(task)
    trainer = Trainer(twin, data, task, fitting(twin, recipe), PLAIN)
    restore_training(trainer, keeper.tensors)
    trainer.run(keeper.position)
    twin.eval()
    with torch.no_grad():
        twin.end_task(task, data)
    return twin


# -- comparing -------------------------------------------------------------------------------------------------------


def assert_equal(first: State, second: State) -> None:
    """Both states have the same tensors, bit for bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"


def check_round_trip(stream: Stream, method: Method, name: str, **settings: Any) -> None:
    """A fresh method that loads the state predicts the same, and its state is the same."""
    state = clone(method.state_dict())
    twin = reload(name, state, **settings)
    seen = sum(method.network.head_sizes)
    assert torch.equal(stream.scores(twin, seen), stream.scores(method, seen))
    assert_equal(clone(twin.state_dict()), state)


def kept_tensors(method: Method) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a method holds: its saved state and whatever its modules have as plain attributes."""
    yield from method.state_dict().items()
    for name, module in method.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") or isinstance(value, Tensor | list | dict):
                yield from _tensors(f"{name}.{key}", value)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key}]", item)
    elif isinstance(value, nn.Module):  # a teacher that is kept out of the state
        for key, item in value.state_dict().items():
            yield f"{name}.{key}", item


def longest_run(values: Tensor, allowed: Tensor) -> int:
    """Length of the longest run of consecutive `values` that all occur in `allowed`, constant runs left out."""
    inside = torch.isin(values.flatten(), allowed)
    longest, start = 0, 0
    for end in [*torch.nonzero(~inside).flatten().tolist(), len(inside)]:
        if end - start > longest and len(values.flatten()[start:end].unique()) > 2:
            longest = end - start
        start = end + 1
    return longest

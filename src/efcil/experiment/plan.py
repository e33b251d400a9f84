"""What a run will do, fixed before it starts: data, tasks, recipes, folder, device and numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from efcil import methods, ranks
from efcil.data.ahead import OFF, Ahead, has_room, most_bytes, still_has_room
from efcil.data.augment import Augmentation, Normalisation, make_augmentation
from efcil.data.deferred import DeferredImages
from efcil.data.domains import MERGING, SEPARATOR, need_domains
from efcil.data.images import Dataset
from efcil.data.scenario import Scenario, class_order, domain_scenario, make_scenario
from efcil.data.store import TaskImages
from efcil.data.tiers import Keeping, Kept
from efcil.data.whole import task_images
from efcil.engine import hardware
from efcil.engine.evaluate import TestImages
from efcil.engine.lifecycle import Blueprint
from efcil.engine.trainer import Execution
from efcil.errors import DataError, some
from efcil.experiment import shared_tasks
from efcil.experiment.summary import source_digest
from efcil.experiment.unwritten import UnwrittenFolder
from efcil.methods.base import Task, Traits
from efcil.model.card import made_with
from efcil.network import backbones
from efcil.network.backbones import Backbone
from efcil.resolution import Resolved, chosen_answers, chosen_class_order, identity, resolve
from efcil.runfolder import RunFolder, locate
from efcil.settings import Recipe, Settings
from efcil.settings.benchmark import DOMAINS, MERGED

_MEGABYTE = 1 << 20


def make_run_scenario(settings: Settings, dataset: Dataset) -> Scenario:
    """Return the class order and the tasks that the settings ask for, and which classes have the same answer."""
    names = dataset.class_names
    scenario = _cut_into_tasks(settings, dataset)
    if chosen_answers(settings) != MERGED:
        return scenario
    answers = need_domains(names, dataset.name, MERGING).answers
    return replace(scenario, answers=tuple(answers[original] for original in scenario.order))


def _cut_into_tasks(settings: Settings, dataset: Dataset) -> Scenario:
    names, classes, seed = dataset.class_names, dataset.number_of_classes, settings.effective_class_seed
    if settings.scenario == DOMAINS:
        return domain_scenario(chosen_class_order(settings), seed, names, dataset.name)
    order = class_order(chosen_class_order(settings), classes, seed, names)
    return make_scenario(
        settings.scenario,
        classes,
        order=order,
        tasks=settings.tasks,
        first_task_classes=settings.first_task_classes,
        task_sizes=settings.sizes,
        dataset=dataset.name,
    )


def _refuse_empty_classes(dataset: Dataset) -> None:
    """Refuse classes without training images: methods would fail at the end of their task, after hours perhaps."""
    empty = np.flatnonzero(dataset.train.class_counts(dataset.number_of_classes) == 0)
    if len(empty):
        names = some([dataset.class_names[label] for label in empty])
        raise DataError(
            f"{dataset.name} has classes without training images: {names}. Add some, or leave these classes out."
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """One run before it starts. `fingerprint` is the digest of the training images."""

    settings: Settings
    output: Path
    dataset: Dataset
    fingerprint: str
    resolved: Resolved
    scenario: Scenario
    execution: Execution

    @classmethod
    def make(cls, settings: Settings, output: Path, dataset: Dataset, fingerprint: str | None = None) -> Plan:
        """Return the plan for these settings and images."""
        _refuse_empty_classes(dataset)
        return cls(
            settings,
            output,
            dataset,
            fingerprint or shared_tasks.fingerprint(dataset),
            resolve(settings, dataset.image_size),
            make_run_scenario(settings, dataset),
            hardware.choose_execution(settings),
        )

    # -- what it belongs to --------------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> RunFolder:
        """Where the run is written: by the first process, if there are several."""
        found = locate(self.output, self.settings)
        return found if ranks.first() else UnwrittenFolder(found.path)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the result, as settings.yaml records it."""
        return identity(self.settings)

    @cached_property
    def data(self) -> str:
        """Digest of all images, including the test images."""
        return shared_tasks.data_digest(self.dataset, self.fingerprint)

    @cached_property
    def own_method(self) -> str | None:
        """Digest of the file of a user's own method; the methods of efcil change with its version."""
        return None if self.settings.method in methods.bundled() else source_digest(self.settings.method)

    @cached_property
    def made_with(self) -> dict[str, Any]:
        """Versions, device, precision, threads and processes that decide the bits of the result."""
        return made_with(self.execution, self.settings.deterministic) | hardware.sharing()

    @property
    def provenance(self) -> dict[str, Any]:
        """What a task is learned with: how it is computed, and which file of a method that is the user's own."""
        return self.made_with | ({} if self.own_method is None else {"method": self.own_method[:16]})

    @cached_property
    def class_names(self) -> list[str]:
        """Names of all classes, in the class order."""
        return [self.dataset.class_names[original] for original in self.scenario.order]

    @cached_property
    def answers(self) -> list[str] | None:
        """Names of the answers of all classes, in the class order; None if every class is an answer of its own."""
        if self.scenario.answers is None:
            return None
        return [name.rpartition(SEPARATOR)[2] for name in self.class_names]

    # -- tasks ---------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.scenario.number_of_tasks

    @cached_property
    def blueprint(self) -> Blueprint:
        """How the method is built."""
        method = methods.get(self.settings.method)
        return Blueprint(method, self.resolved.method, self.backbone, self.settings.seed, self.execution)

    @cached_property
    def backbone(self) -> Backbone:
        """The backbone; a pre-trained one sees small images enlarged to the size it knows."""
        assert self.resolved.network is not None
        found = backbones.locate(self.resolved.network, self.settings.weights, self.settings.input_size)
        size = self.dataset.image_size
        if found.weights is not None and found.input_size is None and size < found.weights.view.size:
            found = replace(found, input_size=found.weights.view.size)
        found.refuse_images(found.input_size or size)
        return found

    @property
    def traits(self) -> Traits:
        """Properties of the method with these settings."""
        return self.blueprint.method.traits(self.resolved.method)

    @property
    def joint(self) -> bool:
        """Whether every training starts from scratch with the images of all classes seen."""
        return self.traits.images == "all"

    def recipe(self, index: int) -> Recipe:
        """Return how task `index` is optimised."""
        if self.joint:
            return self.blueprint.method.recipe(self.resolved.method, self.resolved.first_task)
        return self.resolved.first_task if index == 0 else self.resolved.later

    def is_measured(self, index: int) -> bool:
        """Return whether task `index` is trained and tested; joint training may be limited to the last task."""
        return self.traits.trained_after == "every" or index == self.tasks - 1

    def from_scratch(self, index: int) -> bool:
        """Return whether training for task `index` starts with an untrained network."""
        return index == 0 or self.joint

    def later_tasks(self, index: int) -> list[int]:
        """Return the tasks after task `index` that are trained and tested."""
        return [task for task in range(index + 1, self.tasks) if self.is_measured(task)]

    def later_epochs(self, index: int) -> float:
        """Return how much there is to train after task `index`, in epochs of that task: they differ in images."""
        trained = [task for task in self.later_tasks(index) if self.joint or self.traits.trains_later]
        work = sum(self.recipe(task).epochs * self._number_of_images(task) for task in trained)
        return work / max(self._number_of_images(index), 1)

    def _number_of_images(self, index: int) -> int:
        task = self.task(index)
        return int(self._images_of_classes[task.first_class : task.seen].sum())

    @cached_property
    def _images_of_classes(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=self.scenario.number_of_classes)

    def task(self, index: int) -> Task:
        """Return which classes are trained for task `index`: its own, or all so far if training is joint."""
        seed, batch_size = self.settings.seed, self.recipe(index).batch_size
        if self.from_scratch(index):
            return Task(0, 0, sum(self.scenario.task_sizes[: index + 1]), seed, batch_size)
        positions = self.scenario.tasks[index]
        return Task(index, positions[0], len(positions), seed, batch_size)

    def memory_outlook(self) -> str | None:
        """Return what the method will keep of all classes, in a sentence, if that is much; None if it is not."""
        memory = self.blueprint.method.remembers(self.resolved.method, self.backbone.feature_size)
        return None if memory is None else memory.outlook(self.scenario.number_of_classes)

    def faster_in_bf16(self) -> bool:
        """Return whether a CPU computes in fp32 what it computes faster in bf16: convolutions of a large ResNet."""
        plain = self.execution.device.type == "cpu" and not self.execution.half and self.settings.precision == "auto"
        return plain and self.backbone.name.startswith("resnet") and hardware.processor_multiplies_bf16()

    # -- images --------------------------------------------------------------------------------------------------

    @cached_property
    def normalisation(self) -> Normalisation:
        """How pixels become network input: as pre-trained weights expect it, or as the dataset says."""
        weights = self.backbone.weights
        if weights is not None:
            return Normalisation(weights.view.mean, weights.view.std)
        return Normalisation(self.dataset.mean, self.dataset.std)

    @cached_property
    def labels(self) -> np.ndarray:
        """Labels of the training images, as positions in the class order."""
        return self.scenario.relabel(self.dataset.train.labels)

    def rows(self, task: Task) -> np.ndarray:
        """Return which training images are those of a task."""
        return np.flatnonzero((self.labels >= task.first_class) & (self.labels < task.seen))

    def images(self, task: Task, ahead: Ahead | None = None) -> TaskImages:
        """Return the training images of a task, for the device; `ahead` has decoded some of them, perhaps."""
        chosen = self.rows(task)
        if len(chosen) == 0:  # a domain may have none, though each of its classes has some elsewhere
            raise DataError(f"Task {task.index + 1} of {self.dataset.name} has no training image. Check its classes.")
        images = self.dataset.train.images
        return task_images(
            images if ahead is None or not isinstance(images, DeferredImages) else replace(images, ahead=ahead),
            self.labels,
            augmentation=self.augmentation,
            normalisation=self.normalisation,
            device=self.execution.device,
            seed=task.seed,
            name=f"task{task.index}",
            dtype=self.execution.dtype,
            rows=chosen,
            keeping=self.keeping,
        )

    @property
    def augmentation(self) -> Augmentation:
        """How training images are changed at random."""
        assert self.resolved.augmentation is not None
        return make_augmentation(self.resolved.augmentation)

    @property
    def keeping(self) -> Keeping:
        """Where the images of tasks may be kept."""
        return Keeping(self.settings.keep_images)

    def ahead(self, index: int, kept: Kept) -> Ahead | None:
        """Return the images of the task after task `index`, whose own images are `kept`, to be decoded meanwhile.

        None if that is not wanted, if the dataset is decoded already, in the last task, and if memory has no room.
        """
        images, later, keeping = self.dataset.train.images, self.later_tasks(index), self.keeping
        if self.settings.prefetch == OFF or not isinstance(images, DeferredImages) or not later:
            return None
        most = most_bytes(kept, max(self._number_of_images(task) for task in later))
        if most == 0 or not has_room(keeping, kept, most):
            return None
        _, chosen = images[self.rows(self.task(later[0]))].share()
        own = most // len(ranks.mates())
        return Ahead(chosen, self.augmentation.cuts_whole, own, lambda: still_has_room(keeping, most))

    def test_images(self) -> TestImages:
        """Return all test images, for the device; most of its memory is left to those of the tasks."""
        test = self.dataset.test
        return TestImages(
            test.images,
            self.scenario.relabel(test.labels),
            normalisation=self.normalisation,
            device=self.execution.device,
            dtype=self.execution.dtype,
            keeping=Keeping(self.settings.keep_images, spare=0.75),
        )

    # -- the shared first task, and the disk -----------------------------------------------------------------------

    @cached_property
    def store(self) -> shared_tasks.SharedTaskStore:
        """Where first tasks are shared with other runs."""
        return shared_tasks.SharedTaskStore(self.output)

    def scratch_description(self, index: int) -> Mapping[str, Any]:
        """Return everything that decides the network that training from scratch for task `index` gives."""
        assert self.resolved.augmentation is not None
        return shared_tasks.describe(
            self.fingerprint,
            self.scenario.order[: self.task(index).classes],
            self.backbone.description,
            self.resolved.augmentation,
            self.recipe(index),
            self.settings.seed,
            self.made_with,
        )

    def first_training(self) -> str:
        """Return the key of the first training: the first task, or all classes together."""
        index = next(index for index in range(self.tasks) if self.is_measured(index))
        return shared_tasks.digest(self.scratch_description(index))

    def needed_bytes(self) -> int:
        """Return about how many bytes the checkpoints of the first task need while old and new ones exist together."""
        network = self.backbone.bytes()
        # The network in the model folder and among the shared first tasks, and a checkpoint with two moments.
        return 2 * (network + network + 3 * network) + 4 * _MEGABYTE

"""ADC: class means carried along by the drift of images that an attack has turned into old classes, on top of LwF."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core import classifiers, gaussians
from efcil.core.classifiers import Classifier
from efcil.data.store import TaskImages
from efcil.methods.attacked import Neighbours
from efcil.methods.base import Method, Task
from efcil.methods.built import BuiltClassifier
from efcil.methods.lwf import LearningWithoutForgetting
from efcil.methods.memory import ClassMemory
from efcil.settings import option


class AdversarialDriftCompensation(BuiltClassifier, LearningWithoutForgetting):
    """Trains as LwF does and classifies by the nearest mean; attacked images show how the mean of a class has moved."""

    name = "adc"
    summary = "LwF with nearest class means, moved along with images that an attack has turned into old classes"
    family = "transport"

    @dataclass(frozen=True)
    class Settings(LearningWithoutForgetting.Settings):
        """The settings of LwF, and those of the attack, with the values of its authors for CIFAR-100."""

        weight: float = option(10.0, "Weight of the distillation (ADC).", minimum=0)
        temperature: float = option(2.0, "Temperature of the distillation (ADC).", minimum=1e-3)
        smoothing: float = option(0.0, "Probability mass spread over the student's old classes (ADC: none).", minimum=0)
        train_normalisation: bool = option(True, "Keep training BatchNorm after the first task (ADC).")
        images: int = option(
            100,
            "Current images, the nearest to an old class, that its drift is measured on after the task (ADC).",
            minimum=1,
        )
        attack_steps: int = option(
            3, "Steps of the attack on these (ADC); 0 measures the drift on them as they are.", minimum=0
        )
        attack_length: float = option(
            2.5,
            "Length of such a step, as the root mean square over the images of a class. ADC's 25 is for 100 images "
            "together.",
            minimum=0,
            unless=("attack_steps", 0),
        )

    settings: Settings

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """The mean of every class."""
        return ClassMemory(size, why="are compared with features, are what an attack aims at, and follow the drift")

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, then grow a head; old heads keep training."""
        self.keep_teacher()
        Method.begin_task(self, task)

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means along, then add the new classes' means, of plain images."""
        if task.index > 0 and len(self.memory.means):
            self.memory.move(self._moved_means(data))
        features, labels = gaussians.collect(self.network.features, data.plain())
        self.memory.add(features, labels, range(task.first_class, task.seen))
        super().end_task(task, data)
        self.restored()

    def _moved_means(self, data: TaskImages) -> Tensor:
        """Return the old means, each moved by the mean shift of its own images."""
        means, settings = self.memory.means, self.settings
        near = Neighbours(self.old_network, data, data.view("drift", training=True), means, settings.images)
        lengths = [settings.attack_length] * settings.attack_steps
        return torch.stack([mean + self._shift(near, number, lengths) for number, mean in enumerate(means)])

    def _shift(self, near: Neighbours, number: int, lengths: list[float]) -> Tensor:
        """Return the mean shift, from old to new features, of the attacked images that got to the class.

        If none did, it is that of the images before the attack.
        """
        made = near.attacked(number, lengths, group=len(near.rows[number]))
        before = self.old_network.features(made)
        there = near.arrived(before, number)
        if not bool(there.any()):
            made = near.images(number)
            before, there = self.old_network.features(made), torch.ones_like(there)
        shifts = self.network.features(made) - before
        return shifts[there].double().mean(dim=0).to(self.memory.means.dtype)

    def build(self) -> Classifier:
        """Minus the squared distance to every class mean, between vectors of unit length."""
        return classifiers.nearest_mean(self.memory.statistics(), normalise=True)

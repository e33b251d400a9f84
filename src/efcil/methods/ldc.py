"""LDC: class means carried along by a learned linear map, on top of LwF."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core import classifiers, gaussians, transport
from efcil.data.store import VIEWS, TaskImages
from efcil.methods.base import Task
from efcil.methods.lwf import LearningWithoutForgetting
from efcil.methods.memory import ClassMemory
from efcil.settings import option


class LearnableDriftCompensation(LearningWithoutForgetting):
    """Trains as LwF does and classifies by the nearest mean; a linear map, learned after each task, moves means."""

    name = "ldc"
    summary = "LwF with nearest class means, carried from task to task by a learned linear map"
    family = "transport"

    @dataclass(frozen=True)
    class Settings(LearningWithoutForgetting.Settings):
        """The settings of LwF, and those of the map."""

        views: str = option(
            "plain",
            "Images that class means are computed from: plain (LDC) or augmented.",
            choices=VIEWS,
            before="augmented",
        )
        map: str = option(
            "learned",
            "How the map is found: learned (Adam, LDC) or ridge (closed form, towards the identity).",
            choices=("learned", "ridge"),
        )
        map_epochs: int = option(
            20,
            "Epochs in which the map is learned, each with new augmented views (LDC).",
            minimum=1,
            needs=("map", "learned"),
        )
        map_learning_rate: float = option(
            1e-3, "Learning rate of the map (LDC, Adam).", minimum=0, needs=("map", "learned")
        )
        map_batch_size: int = option(
            128, "Features in a step of learning the map.", minimum=1, needs=("map", "learned")
        )
        map_ridge: float = option(
            0.01,
            "Ridge of the map towards the identity, in mean variances of a feature.",
            minimum=0,
            needs=("map", "ridge"),
        )
        normalise: bool = option(True, "Compare features and means of unit length.")

    settings: Settings

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """The mean of every class."""
        return ClassMemory(size, why="are compared with features, and carried over by a linear map")

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Carry the old means over, then add the new classes' means."""
        if task.index > 0:
            self.memory.carry(self._fit_map(data))
        features, labels = gaussians.collect(self.network.features, data.seen(self.settings.views))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        super().end_task(task, data)

    def _fit_map(self, data: TaskImages) -> transport.AffineMap:
        settings = self.settings
        if settings.map == "ridge":
            return transport.ridge_map(*self.before_and_after(data), settings.map_ridge)
        return transport.learned_map(
            (self.before_and_after(data, epoch) for epoch in range(settings.map_epochs)),
            self.network.feature_size,
            learning_rate=settings.map_learning_rate,
            batch_size=settings.map_batch_size,
            device=self.memory.means.device,
        )

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Minus the squared distance to every class mean."""
        nearest = classifiers.nearest_mean(self.memory.statistics(), self.settings.normalise)
        return nearest(self.network.features(images))

"""Semantic drift compensation: nearest class means that follow the drift, on top of another way of training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import drift, gaussians
from efcil.core.classifiers import nearest_mean
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Method, ParameterGroup, Plan, Task, Terms, Traits
from efcil.methods.efc import ElasticFeatureConsolidation
from efcil.methods.finetune import FineTune
from efcil.methods.lwf import LearningWithoutForgetting
from efcil.methods.memory import ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe, option

_BASES: dict[str, type[Method]] = {
    "finetune": FineTune,
    "lwf": LearningWithoutForgetting,
    "efc": ElasticFeatureConsolidation,
}


class SemanticDriftCompensation(Method):
    """Trains as its base method does, and classifies by the nearest class mean, old means moved along the drift."""

    name = "sdc"
    summary = "nearest class means that follow the feature drift, on top of fine-tuning, LwF or EFC"
    family = "scheduled"

    @dataclass(frozen=True)
    class Settings:
        """How the network is trained, and how means are moved and compared."""

        base: str = option("lwf", "Method that trains the network, with its default settings.", choices=tuple(_BASES))
        sigma: float = option(
            0.2,
            "Width of the kernel that weighs drift vectors (SDC: 0.2 to 0.3, unit features).",
            minimum=1e-6,
            needs=("update", True),
        )
        normalise: bool = option(
            True, "Scale features to unit length for means, drift and distances (SDC); sigma is in their unit."
        )
        update: bool = option(True, "Move old means along the drift; off: plain nearest class means.")
        train_normalisation: bool = option(
            False,
            "Keep training BatchNorm after the first task (SDC's code does not); EFC never does.",
            needs=("base", ("finetune", "lwf")),
        )

    settings: Settings

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        base = _BASES[self.settings.base](network)
        # The network is stored here; as a submodule of the base too, it would be saved twice.
        del base._modules["network"]
        object.__setattr__(base, "network", network)
        self.base = base

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """The mean of every class."""
        return ClassMemory(size, why="are compared with features, and follow the drift")

    @classmethod
    def traits(cls, settings: Settings) -> Traits:
        """Later tasks follow the recipe of the base."""
        base = _BASES[settings.base]
        return replace(super().traits(settings), family=base.family, smooths_labels=base.smooths_labels)

    @classmethod
    def recipe(cls, settings: Settings, preset: Recipe) -> Recipe:
        """As the settings have BatchNorm, except that EFC's is always the preset's."""
        return preset if settings.base == "efc" else super().recipe(settings, preset)

    # -- training, which the base does ---------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network, to measure the drift; the base does the rest."""
        self.keep_teacher()
        self.base.begin_task(task)

    def training_mode(self, recipe: Recipe) -> None:
        """As the base has it."""
        self.base.training_mode(recipe)

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """As the base has them."""
        return self.base.parameter_groups(recipe)

    def previous_images(self, task: Task) -> int:
        """As the base has it."""
        return self.base.previous_images(task)

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """As the base has it."""
        return self.base.frozen(images)

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """As the base has it."""
        return self.base.draw(plan, generator)

    def loss(self, batch: Batch) -> Terms:
        """As the base has it."""
        return self.base.loss(batch)

    def importance_matrix(self) -> Tensor | None:
        """As the base has it."""
        return self.base.importance_matrix()

    def restored(self) -> None:
        """Let the base rebuild what it derives."""
        self.base.restored()

    # -- means ---------------------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means by the drift of images near them, then add the new classes' means."""
        if task.index > 0 and self.settings.update:
            self._follow_drift(data)
        features, labels = gaussians.collect(self.embed, data.augmented("prototypes"))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.teacher = None
        self.base.end_task(task, data)

    def _follow_drift(self, data: TaskImages) -> None:
        before, after = map(self._scaled, self.before_and_after(data))
        weights = drift.euclidean_weights(before, self.memory.means, self.settings.sigma)
        self.memory.move(drift.move(self.memory.means, weights, after - before))

    def _scaled(self, features: Tensor) -> Tensor:
        return functional.normalize(features, dim=1) if self.settings.normalise else features

    def embed(self, images: Tensor) -> Tensor:
        """Return the features that class means average: of unit length unless the settings say otherwise."""
        return self._scaled(self.network.features(images))

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Return the negated squared distance of every image to every class mean."""
        return nearest_mean(self.memory.statistics())(self.embed(images))

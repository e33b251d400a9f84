"""Semantic drift compensation: nearest class means that follow the drift, on top of another way of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import drift, gaussians, prototypes
from efcil.core.classifiers import ClassStatistics, nearest_mean
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Method, ParameterGroup, Plan, Task, Terms
from efcil.methods.efc import ElasticFeatureConsolidation
from efcil.methods.finetune import FineTune
from efcil.methods.lwf import LearningWithoutForgetting
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
    keeps = ("heads", "means")

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
            "Let BatchNorm go on learning after the first task (SDC's code does not); EFC never does.",
            needs=("base", ("finetune", "lwf")),
        )

    settings: Settings
    means: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        base = _BASES[self.settings.base](network)
        if self.settings.base != "efc":
            base.trains_normalisation = self.settings.train_normalisation
        self.trains_normalisation = base.trains_normalisation
        # The network is ours; as a submodule of the base too it would be saved twice.
        del base._modules["network"]
        object.__setattr__(base, "network", network)
        self.base = base
        self.register_buffer("means", torch.zeros(0, network.feature_size))

    @classmethod
    def recipe_family(cls, settings: Settings) -> str:
        """Return which of the preset's recipes later tasks follow: that of the base."""
        return _BASES[settings.base].family

    # -- training is the base's affair ---------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep the network as it is, to measure the drift against; the base does the rest."""
        self.keep_teacher()
        self.base.begin_task(task)

    def training_mode(self) -> None:
        """As the base has it."""
        self.base.training_mode()

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

    def restored(self) -> None:
        """Let the base rebuild what it derives."""
        self.base.restored()

    # -- means ---------------------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means by the drift of images near them, then add the new classes' means."""
        if task.index > 0 and self.settings.update:
            self._follow_drift(data)
        features, labels = gaussians.collect(self.embed, data.augmented("prototypes"))
        means, _ = prototypes.class_statistics(features, labels, range(task.first_class, task.seen))
        self.means = torch.cat([self.means, means.to(self.means)])
        self.teacher = None
        self.base.end_task(task, data)

    def _follow_drift(self, data: TaskImages) -> None:
        before, after = map(self._scaled, self.before_and_after(data))
        weights = drift.euclidean_weights(before, self.means, self.settings.sigma)
        self.means = drift.move(self.means, weights, after - before)

    def _scaled(self, features: Tensor) -> Tensor:
        return functional.normalize(features, dim=1) if self.settings.normalise else features

    def embed(self, images: Tensor) -> Tensor:
        """Return the features that means are means of: of unit length unless the settings say otherwise."""
        return self._scaled(self.network.features(images))

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Return the negated squared distance of every image to every class mean."""
        return nearest_mean(ClassStatistics(self.means))(self.embed(images))

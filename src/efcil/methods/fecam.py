"""FeCAM: a frozen backbone and Mahalanobis distances to classes, each with a covariance of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core import classifiers, gaussians
from efcil.core.classifiers import Classifier
from efcil.data.store import TaskImages
from efcil.methods.base import Task
from efcil.methods.frozen import FrozenBackbone
from efcil.methods.memory import ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option


class CovarianceMetric(FrozenBackbone):
    """Classifies by the Mahalanobis distance to class means, with shrunk and normalised class covariances."""

    name = "fecam"
    summary = "frozen backbone, Mahalanobis distance to every class with its own shrunk, normalised covariance"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of FeCAM, with the values of its authors' code."""

        tukey: float = option(
            0.5, "Power that features are raised to, which makes them more Gaussian; 1 leaves them.", minimum=0.01
        )
        shrink_diagonal: float = option(
            3.0,
            "Mean variances added to every variance of a covariance. The authors' code adds 1, then 1 again to the "
            "result, which is 3 in total.",
            minimum=0,
        )
        shrink_rest: float = option(
            3.0, "Mean covariances added to every entry off its diagonal; as for the diagonal.", minimum=0
        )
        normalise: bool = option(
            True, "Turn covariances into correlations, so that classes' distances compare; features get unit length."
        )
        covariance: str = option(
            "class", "Covariances kept: one per class, or one for all (the average).", choices=("class", "common")
        )

    settings: Settings

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self._classifier: Classifier | None = None

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Every class as a Gaussian."""
        return ClassMemory(size, why="are compared with features", covariances=settings.covariance, table=True)

    def embed(self, images: Tensor) -> Tensor:
        """Features after Tukey's transformation; those of some backbones may be negative, and keep their sign."""
        features = self.network.features(images)
        return features.sign() * features.abs().pow(self.settings.tukey)

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Store the mean and covariance of every new class, from its images without augmentation."""
        features, labels = gaussians.collect(self.embed, data.plain())
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.restored()

    def restored(self) -> None:
        """Discard the classifier; it is built again when it is needed."""
        self._classifier = None

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Minus the squared distance to every class."""
        if self._classifier is None:
            settings = self.settings
            self._classifier = classifiers.mahalanobis(
                self.memory.statistics(), settings.shrink_diagonal, settings.shrink_rest, settings.normalise
            )
        return self._classifier(self.embed(images))

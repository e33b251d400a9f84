"""DPCR: means and second moments carried by a ridge map and a projection per class; a ridge classifier, on LwF."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core import gaussians, transport
from efcil.core.classifiers import ridge_weight
from efcil.data.store import VIEWS, TaskImages
from efcil.methods.base import Task
from efcil.methods.lwf import LearningWithoutForgetting
from efcil.methods.memory import MOMENTS, ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option


class DualProjection(LearningWithoutForgetting):
    """Trains as LwF does; afterwards a ridge regression over all classes is rebuilt from their carried moments."""

    name = "dpcr"
    summary = "LwF with a ridge classifier rebuilt from class moments that a ridge map and class projections carry"
    family = "transport"

    @dataclass(frozen=True)
    class Settings(LearningWithoutForgetting.Settings):
        """The settings of LwF, and those of the map and of the classifier."""

        views: str = option(
            "plain",
            "Images that class moments are computed from: plain (usual in DPCR's framework) or augmented.",
            choices=VIEWS,
            before="augmented",
        )
        map_ridge: float = option(
            0.01,
            "Pull of the map from old to new features towards the identity, in mean squares of a feature (DPCR: 1e-9, "
            "which needs many more images in a task than there are features).",
            minimum=0,
        )
        projection: bool = option(
            True,
            "Keep what is carried inside the span of the class's old features (DPCR's category-wise projection).",
        )
        projection_threshold: float = option(
            0.0,
            "Share of the largest eigenvalue above which a direction belongs to that span; 0: all but the features "
            "that no image of the class has (DPCR's code, which keeps what is not exactly zero).",
            minimum=0,
            needs=("projection", True),
        )
        ridge: float = option(
            200.0, "Penalty of the classifier (DPCR: 200 for CIFAR-100, 2000 for larger images).", minimum=0
        )

    settings: Settings
    classifier: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.keep(
            "classifier",
            torch.zeros(0, network.feature_size),
            why="weights of a classifier solved from class statistics",
            title="solved classifier",
            recovery="A function of the class statistics. No image can be recovered from it.",
        )

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Mean, second moment and number of images of every class."""
        return ClassMemory(size, why="solve for a classifier, and are carried over", covariances=MOMENTS, counts=True)

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Carry the old classes' moments over, add those of the new classes, and rebuild the classifier."""
        if task.index > 0:
            self._carry(data)
        features, labels = gaussians.collect(self.network.features, data.seen(self.settings.views))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.classes_changed()
        super().end_task(task, data)

    def classes_changed(self) -> None:
        """Rebuild the classifier from the moments of all classes."""
        memory = self.memory
        gram = torch.einsum("c,cij->ij", memory.counts.double(), memory.moments.double())
        # Sums of a class's features are its mean times its count, and a factor per class makes no difference here.
        self.classifier = ridge_weight(gram, memory.means.double(), self.settings.ridge).to(memory.means)

    def _carry(self, data: TaskImages) -> None:
        before, after = self.before_and_after(data)
        matrix = transport.ridge_map(before, after, self.settings.map_ridge, intercept=False).matrix
        pairs = zip(self.memory.means.double(), self.memory.moments.double(), strict=True)
        for number, (mean, moment) in enumerate(pairs):
            own = span(moment, self.settings.projection_threshold) @ matrix if self.settings.projection else matrix
            self.memory.replace(number, own @ mean, own @ moment @ own.T)

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """The outputs of the ridge regression, with the weights of every class scaled to unit length."""
        return self.network.features(images) @ self.classifier.T


def span(moment: Tensor, threshold: float) -> Tensor:
    """The projection (n, n) onto the features that are not always zero, less the directions of small eigenvalues.

    It keeps those with more than the share `threshold` of the largest eigenvalue of the second moment. At 0 eigenvalues
    are not checked: with fewer images than features, it is chance which zero eigenvalues come out positive.
    """
    if threshold == 0:
        return torch.diag((moment.diagonal() > 0).to(moment))
    values, vectors = torch.linalg.eigh(moment)
    kept = vectors * (values > threshold * values[-1])
    return kept @ kept.T

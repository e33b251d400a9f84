"""LDA: a frozen backbone, class means, and one covariance that all images share. The choice for few images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from efcil.core import discriminant
from efcil.core.classifiers import Classifier
from efcil.data.store import TaskImages
from efcil.methods.base import Traits
from efcil.methods.frozen import FrozenStatistics
from efcil.methods.memory import POOLED, ClassMemory
from efcil.settings import option

_RULES = {"cosine": discriminant.cosine, "bayes": discriminant.bayes}


class SharedDiscriminant(FrozenStatistics):
    """Classifies linearly, after whitening with the shrunk covariance of all images about the means of their classes.

    What it stores, and so its answers, depends neither on the order of the classes nor on their grouping into tasks.
    """

    name = "lda"
    summary = "frozen backbone, linear discriminant analysis with one shrunk covariance and equal priors"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters; docs/own-images-study.md says how the defaults were chosen."""

        power: float = option(
            0.5, "Power that features are raised to, which makes them more Gaussian; 1 leaves them.", minimum=0.01
        )
        normalise: bool = option(True, "Give features unit length.")
        prior: float = option(
            1.0,
            "How much the covariance is shrunk: as if a spherical one had been seen in so many images per feature.",
            minimum=0,
        )
        rule: str = option(
            "cosine",
            "How classes are compared: cosine is by direction from the centre of the classes, which is better with few "
            "images or with classes of unequal size; bayes is by density.",
            choices=tuple(_RULES),
        )

    settings: Settings

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Means and numbers of images of classes, and one covariance."""
        return ClassMemory(size, why="are compared with features", covariances=POOLED, counts=True)

    @classmethod
    def traits(cls, settings: Any) -> Traits:
        """More images of known classes are added exactly."""
        return replace(super().traits(settings), learns_more=True)

    def embed(self, images: Tensor) -> Tensor:
        """Features after the power, which keeps their sign, and of unit length."""
        features = self.network.features(images)
        features = features.sign() * features.abs().pow(self.settings.power)
        return functional.normalize(features, dim=1) if self.settings.normalise else features

    def measured_views(self, data: TaskImages) -> Iterator[tuple[Tensor, Tensor]]:
        """Plain images: augmented views did not help."""
        return data.plain()

    def build(self) -> Classifier:
        """How well the classes fit, by the rule that the settings name."""
        memory = self.memory
        classes = discriminant.SharedGaussians(memory.means, memory.covariances[0], int(memory.freedom), memory.counts)
        return _RULES[self.settings.rule](classes, self.settings.prior)

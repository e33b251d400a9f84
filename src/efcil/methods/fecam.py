"""FeCAM: a frozen backbone and Mahalanobis distances to classes, each with a covariance of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from efcil.core import classifiers
from efcil.core.classifiers import Classifier
from efcil.methods.frozen import FrozenStatistics
from efcil.methods.memory import ClassMemory
from efcil.settings import option


class CovarianceMetric(FrozenStatistics):
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

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Every class as a Gaussian."""
        return ClassMemory(size, why="are compared with features", covariances=settings.covariance, table=True)

    def embed(self, images: Tensor) -> Tensor:
        """Features after Tukey's transformation; those of some backbones may be negative, and keep their sign."""
        features = self.network.features(images)
        return features.sign() * features.abs().pow(self.settings.tukey)

    def build(self) -> Classifier:
        """Minus the squared distance to every class."""
        settings = self.settings
        return classifiers.mahalanobis(
            self.memory.statistics(), settings.shrink_diagonal, settings.shrink_rest, settings.normalise
        )

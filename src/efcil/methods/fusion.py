"""Fusion-style rehearsal, reconstructed: PASS whose class means follow two estimates of their drift.

The method of Toldo and Ozay (CVPR 2022) was published without code, and not all of it is known to us. This follows the
known part: two small linear models, one of feature drift and one of how old classes relate to new ones, each predict
where an old class mean is now, and both predictions together are rehearsed. How they are fitted and combined is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from efcil.core import gaussians, prototypes, transport
from efcil.data.store import TaskImages
from efcil.methods.base import Task
from efcil.methods.pass_ import PrototypeAugmentation
from efcil.settings import option


class DriftFusion(PrototypeAugmentation):
    """Trains as PASS does; after each task, class means move to a mix of two predictions of where they are now."""

    name = "fusion"
    summary = "PASS with means that follow feature drift and semantic drift (reconstruction, not the authors' method)"

    @dataclass(frozen=True)
    class Settings(PrototypeAugmentation.Settings):
        """The settings of PASS, and how the two predictions are made and mixed; these are our choices."""

        feature_share: float = option(
            0.5,
            "Share of the prediction from feature drift, a ridge map from old to new features of the current images; "
            "the rest is that from the old classes' relation to the new ones.",
            minimum=0,
            maximum=1,
        )
        feature_ridge: float = option(
            0.01, "Ridge of the feature drift map towards the identity, in mean variances of a feature.", minimum=0
        )
        semantic_ridge: float = option(
            0.01, "Ridge of the relation to the new classes towards their plain average.", minimum=1e-9
        )

    settings: Settings

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means, then store the new classes' as PASS does."""
        if task.index > 0:
            self._follow_drift(task, data)
        super().end_task(task, data)

    def _follow_drift(self, task: Task, data: TaskImages) -> None:
        teacher, settings, memory = self.old_network, self.settings, self.memory
        new = range(task.first_class, task.seen)
        both, labels = gaussians.collect(
            lambda images: torch.stack([teacher.features(images), self.network.features(images)], dim=1),
            data.augmented("drift"),
        )
        before, after = both.unbind(dim=1)
        by_features = transport.ridge_map(before, after, settings.feature_ridge).points(memory.means)
        old_means, new_means = (prototypes.class_statistics(side, labels, new)[0] for side in (before, after))
        by_relation = transport.relational_update(memory.means, old_means, new_means, settings.semantic_ridge)
        memory.move(torch.lerp(by_relation, by_features, settings.feature_share))

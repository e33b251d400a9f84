"""Base of methods that freeze the backbone after the first task: nothing is trained by gradient after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from efcil.core import gaussians
from efcil.data.store import TaskImages
from efcil.methods.base import Method, ParameterGroup, Task, Traits
from efcil.methods.built import BuiltClassifier
from efcil.settings import Recipe


class FrozenBackbone(Method):
    """Learns later classes only in `end_task`, from features that no longer change."""

    @classmethod
    def traits(cls, settings: Any) -> Traits:
        """Heads are not trained, so no classifier can be built on them."""
        known = super().traits(settings)
        keeps = tuple(each for each in known.keeps if each != "heads")
        return replace(known, keeps=keeps, trains_later=False)

    def begin_task(self, task: Task) -> None:
        """Grow a head, so that the network knows its classes; nothing trains."""
        super().begin_task(task)
        self.network.requires_grad_(False)

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Nothing for the optimiser."""
        return []


class FrozenStatistics(BuiltClassifier, FrozenBackbone):
    """Stores statistics of plain images' features, and classifies by what `build` makes of them."""

    cosine_heads = True

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Store the statistics of the new classes, from their images without augmentation."""
        features, labels = gaussians.collect(self.embed, data.plain())
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.restored()

"""Base of methods that freeze the backbone after the first task: nothing is trained by gradient after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from efcil.methods.base import Method, ParameterGroup, Task, Traits
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

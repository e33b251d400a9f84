"""What methods share whose backbone is that of the first task for ever: nothing is trained by gradient after it."""

from __future__ import annotations

from efcil.methods.base import Method, ParameterGroup, Task
from efcil.settings import Recipe


class FrozenBackbone(Method):
    """Learns later classes in `end_task` alone, from features that no longer change."""

    trains_normalisation = False

    def begin_task(self, task: Task) -> None:
        """Grow a head, so that the network knows its classes; nothing trains."""
        super().begin_task(task)
        self.network.requires_grad_(False)

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Nothing for the optimiser."""
        return []

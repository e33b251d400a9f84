"""Joint training: the upper bound. All classes together, which exemplar-free learning is not allowed to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from efcil.methods.base import Method, Traits
from efcil.settings import Recipe, option


class Joint(Method):
    """Trains on the images of all classes seen so far, from scratch, with the first task's recipe.

    This class needs no code: the engine trains a "first task" that holds every class. With `when=last` this
    happens once, after the last task, and accuracies after earlier tasks are not measured; with `when=every` it
    happens after every task.
    """

    cosine_heads = True
    name = "joint"
    summary = "one training on all classes with the first task's recipe (upper bound, keeps all images)"

    @dataclass(frozen=True)
    class Settings:
        """When to train, and how."""

        when: str = option(
            "last", "Train once, on all classes (last), or again after every task (every).", choices=("last", "every")
        )
        rotations: bool = option(True, "Use the rotation classes of the first-task recipe.")

    @classmethod
    def traits(cls, settings: Settings) -> Traits:
        """All images, by the first task's recipe, when the settings say."""
        after: Literal["every", "last"] = "every" if settings.when == "every" else "last"
        return replace(super().traits(settings), images="all", trains_later=False, trained_after=after)

    @classmethod
    def recipe(cls, settings: Settings, preset: Recipe) -> Recipe:
        """The preset's; rotated classes only if the settings also want them."""
        return replace(preset, rotations=preset.rotations and settings.rotations)

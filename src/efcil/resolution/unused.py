"""Overrides without effect, such as milestones of a schedule that has none: reported, not silently accepted.

Only values that the user has just typed are refused. Presets and the records of earlier runs are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from efcil.errors import Mistakes, SettingsError
from efcil.resolution.resolve import resolve
from efcil.settings.options import options, show
from efcil.settings.recipe import Recipe
from efcil.settings.training import TrainingSettings

Given = TypeVar("Given", bound=TrainingSettings)
#: What recipes may add to a loss, by how the names of its settings begin.
_EXTRA_TERMS = {"rotation": "rotated classes", "mixing": "mixed classes", "contrast": "contrastive term"}


def refuse_unused(runs: Sequence[TrainingSettings], names: Collection[str]) -> None:
    """Raise if one of the overrides called `names` has no effect in any of the runs."""
    found = Mistakes()
    for name in sorted(names):
        reasons = [unused_overrides(run).get(name) for run in runs if name in run.overrides]
        if reasons and all(reasons):
            found.add(SettingsError(f"Setting {name!r} has no effect: {reasons[0]}, or leave it out."))
    found.refuse()


def without_unused(settings: Given, names: Collection[str] | None = None) -> Given:
    """Return the same run without those of its overrides (called `names`, if given) that have no effect in it."""
    unused = [name for name in unused_overrides(settings) if names is None or name in names]
    return replace(
        settings, overrides={name: value for name, value in settings.overrides.items() if name not in unused}
    )


def unused_overrides(settings: TrainingSettings) -> dict[str, str]:
    """Return the overrides of a run that have no effect, each with the reason and what to do."""
    resolved = resolve(settings)
    found = {}
    for name in settings.overrides:
        stage, dot, field = name.partition(".")
        reason = (
            _reason(settings.method, resolved.method, stage, field, getattr(resolved, stage))
            if dot
            else _unneeded(resolved.method, name)
        )
        if reason is not None:
            without = {key: value for key, value in settings.overrides.items() if key != name}
            # Repeating the default is allowed.
            if resolve(replace(settings, overrides=without)) != resolved:
                found[name] = reason
    return found


def _unneeded(method: Any, name: str) -> str | None:
    """Return why a setting of a method has no effect with the method's other settings."""
    known = options(type(method))[name]
    if known.needs is not None:
        other, values = known.needs
        if getattr(method, other, values[0]) not in values:
            return f"it is for {' or '.join(f'{other}={show(value)}' for value in values)}. Set that too"
    if known.unless is not None:
        other, value = known.unless
        if getattr(method, other, None) == value:
            return f"it is not for {other}={show(value)}. Change that too"
    return None


def _reason(method: str, own: Any, stage: str, field: str, recipe: Recipe) -> str | None:
    from efcil import methods

    if stage == "later" and not methods.get(method).traits(own).trains_later:
        return f"{method} trains its network only by the recipe of the first task. Change first_task.{field}"
    if stage == "later" and field in ("head", "head_scale"):
        return f"the first task makes the heads of all tasks what they are. Change first_task.{field}"
    if field == "head_scale" and recipe.head != "cosine":
        return f"the heads are {recipe.head}, which have no scale. Set {stage}.head=cosine too"
    extra = next((what for name, what in _EXTRA_TERMS.items() if field.startswith(name)), None)
    if stage == "later" and extra is not None and not methods.get(method).extra_terms:
        return f"later tasks of {method} take no {extra} from the recipe. Change first_task.{field}"
    if field == "contrast_temperature" and not recipe.contrast:
        return f"there is no contrastive term. Set {stage}.contrast=0.5 too"
    if field == "mixing_weight" and not recipe.mixing:
        return f"there are no mixed classes. Set {stage}.mixing=1 too"
    if field == "rotation_weight" and not recipe.rotations:
        return f"there are no rotated classes. Set {stage}.rotations=true too"
    if stage == "later" and field == "label_smoothing" and not methods.get(method).traits(own).smooths_labels:
        return f"the loss of {method} has no smoothed labels. Change first_task.label_smoothing"
    if field in ("milestones", "decay") and recipe.schedule != "steps":
        return f"the schedule is {recipe.schedule}, which has no milestones. Set {stage}.schedule=steps too"
    if field == "milestones" and recipe.milestones and recipe.milestones[-1] >= recipe.epochs:
        return f"there are {recipe.epochs} epochs, and none after epoch {recipe.milestones[-1]}. Choose earlier ones"
    if field == "decay" and not recipe.milestones:
        return f"there are no milestones. Set {stage}.milestones too"
    if field == "momentum" and recipe.optimiser == "adam":
        return f"the optimiser is adam, which ignores it. Set {stage}.optimiser=sgd too"
    return None

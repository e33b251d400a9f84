"""Resolving settings: the preset and the method's defaults are filled in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from efcil import presets
from efcil.errors import ABBREVIATIONS, SettingsError, unknown
from efcil.settings.benchmark import MODERN, Settings
from efcil.settings.options import Option, method_settings, options
from efcil.settings.recipe import STAGES, Recipe
from efcil.settings.training import TrainingSettings

if TYPE_CHECKING:
    from efcil.methods import Method  # needs torch, which help texts do not need

# A run resolves the same settings many times (for its label, identity and record), a grid a few hundred others.
_MOST_KEPT = 1000
_kept: dict[tuple[Any, ...], Resolved] = {}


@dataclass(frozen=True)
class Resolved:
    """Settings with nothing left open, except values that a preset chooses by the size of images not yet loaded."""

    network: str | None
    augmentation: str | None
    first_task: Recipe
    later: Recipe
    method: Any


def resolve(settings: TrainingSettings, image_size: int | None = None) -> Resolved:
    """Fill in preset and method defaults. Results are cached.

    `image_size` is the size the loaded images have. Without it, a preset that chooses by size leaves network and
    augmentation at None unless the settings name them or the size.
    """
    from efcil import methods

    cls = methods.get(settings.method)
    preset = presets.load_preset(settings.preset)
    # The text distinguishes 1, True and "1", which are equal or mean the same for some settings and not for others.
    key = (cls, preset, image_size, repr(settings))
    resolved = _kept.get(key)
    if resolved is None:
        resolved = _resolve(settings, cls, preset, image_size)
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = resolved
    # A user's own method may change its settings; those of another run must not change with them.
    return replace(resolved, method=copy.copy(resolved.method))


def _resolve(settings: TrainingSettings, cls: type[Method], preset: presets.Preset, image_size: int | None) -> Resolved:
    own, stages = split_overrides(settings)
    _refuse_misplaced(own, cls, options(type(settings)))
    size = settings.image_size if image_size is None else image_size
    network = settings.network or preset.network(size)
    recipes_from = _recipes_from(preset, network, settings.weights)
    in_presets = {**preset.methods.get(settings.method, {}), **recipes_from.methods.get(settings.method, {})}
    method = method_settings(cls, {**in_presets, **own})
    family = cls.traits(method).family
    first, later = recipes_from.first_task, recipes_from.later(family)
    changes = _recipe_changes(settings, cls, recipes_from)
    if changes is not None:
        first, later = changes.of_first_task(first), changes.of_later(later, family)
    later = cls.recipe(method, later)
    if recipes_from.pretrained and not cls.traits(method).trains_later:
        first = replace(first, epochs=0)  # the method leaves the network as it is, and this one is trained already
    first_epochs = settings.epochs if settings.first_task_epochs is None else settings.first_task_epochs
    recipes = {
        "first_task": _adjust(first, first_epochs, settings.batch_size, stages["first_task"], "first_task"),
        "later": _adjust(later, settings.epochs, settings.batch_size, stages["later"], "later"),
    }
    _refuse_heads(cls, recipes["first_task"])
    return Resolved(
        network=network,
        augmentation=settings.augmentation or (preset.augmentation(size) if changes is None else changes.augmentation),
        method=method,
        **recipes,
    )


def _refuse_heads(cls: type[Method], first: Recipe) -> None:
    """Raise if the heads are not of a kind that the method can train."""
    from efcil import methods

    if first.head == "cosine" and not cls.cosine_heads:
        others = ", ".join(name for name, each in methods.bundled().items() if each.cosine_heads)
        raise SettingsError(
            f"Method {cls.name!r} is written for linear heads, and first_task.head is cosine. Set "
            f"first_task.head=linear, or use a method that takes both: {others}. One of your own that computes scores "
            "only with self.network.logits says so by `cosine_heads = True`."
        )


def _recipe_changes(
    settings: TrainingSettings, cls: type[Method], preset: presets.Preset
) -> presets.RecipeChanges | None:
    """Return what changes the recipe of the method's family; None if nothing does.

    It is the preset's second recipe if that is asked for or usual for the method, or else the method's own.
    """
    asked = settings.recipe if isinstance(settings, Settings) else None
    if asked == MODERN and preset.modern is None:
        have = [name for name in presets.presets() if presets.load_preset(name).modern is not None]
        raise SettingsError(
            f"The preset {preset.dataset} has no recipe {MODERN!r}; {', '.join(have)} have one. Leave out --recipe, or "
            "set its values with --set first_task.NAME=VALUE later.NAME=VALUE."
        )
    return preset.modern if (asked or cls.usual_recipe) == MODERN else preset.own.get(cls.name)


def _recipes_from(preset: presets.Preset, network: str | None, weights: str | None) -> presets.Preset:
    """Return the preset whose recipes apply: a pre-trained network is adapted gently, whatever the dataset."""
    from efcil.network.backbones import is_pretrained

    return presets.load_preset(presets.PRETRAINED) if is_pretrained(network, weights) else preset


def _refuse_misplaced(overrides: Mapping[str, Any], cls: type, known: Mapping[str, Option]) -> None:
    """Raise if a value of a recipe, or one of the settings `known`, is given as a setting of the method."""
    for name in overrides:
        if name in options(getattr(cls, "Settings", Recipe)):
            continue
        if name in STAGES:
            raise SettingsError(f"{name!r} is a recipe. Set one of its values, such as {name}.epochs.")
        if name in known and name not in options(Recipe):
            raise SettingsError(
                f"{name!r} is not a setting of a method. Give it as {known[name].flags}, or by its name in a file."
            )
        whole = ABBREVIATIONS.get(name, name)
        if whole in options(Recipe):
            both = f", or {known[name].flags} for both" if name in known else ""
            raise SettingsError(
                f"{whole!r} is part of a recipe: first_task.{whole} is for the first task, later.{whole} for the others"
                f"{both}."
            )


def split_overrides(settings: TrainingSettings) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Separate the method's own settings from those of the recipes (`first_task.` and `later.`)."""
    own: dict[str, Any] = {}
    stages: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for name, value in settings.overrides.items():
        stage, dot, field = name.partition(".")
        if not dot:
            own[name] = value
        elif stage in stages:
            stages[stage][field] = value
        else:
            raise unknown("group of settings", stage, STAGES)
    return own, stages


def _adjust(
    recipe: Recipe, epochs: int | None, batch_size: int | None, overrides: Mapping[str, Any], stage: str
) -> Recipe:
    known = options(Recipe)
    checked: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in known:
            raise unknown(f"setting of {stage}", name, known)
        checked[name] = replace(known[name], name=f"{stage}.{name}").check(value)
    epochs = checked.pop("epochs", epochs)
    if epochs is not None:
        recipe = recipe.with_epochs(epochs)
    if batch_size is not None:
        recipe = replace(recipe, batch_size=batch_size)
    return replace(recipe, **checked)


def typed_overrides(settings: TrainingSettings, resolved: Resolved) -> dict[str, Any]:
    """Return the overrides converted to their types: `"5"` for a number is 5.0."""

    def value(name: str) -> Any:
        stage, dot, field = name.partition(".")
        return getattr(getattr(resolved, stage), field) if dot else getattr(resolved.method, name)

    return {name: value(name) for name in settings.overrides}

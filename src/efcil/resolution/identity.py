"""The identity of a run: everything that determines its result, as plain values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from efcil import presets
from efcil.errors import SettingsError
from efcil.resolution.data import (
    CHOICES,
    chosen_answers,
    chosen_class_order,
    chosen_images_per_class,
    content_identity,
)
from efcil.resolution.naming import scenario_name, weights_identity
from efcil.resolution.resolve import resolve
from efcil.settings.benchmark import MERGED, NAMED_CLASS_ORDERS, SEPARATE, Settings
from efcil.settings.options import completed, method_settings, options, show
from efcil.settings.recipe import STAGES, Recipe


def identity(settings: Settings) -> dict[str, Any]:
    """Return everything that determines the result of a run, as plain values: equal identities are the same run."""
    resolved, preset = resolve(settings), presets.load_preset(settings.preset)
    by_name = {
        "method": settings.method,
        "dataset": settings.dataset,
        "scenario": scenario_name(settings),
        "seed": settings.seed,
        "class_seed": settings.effective_class_seed,
        "class_order": class_order_identity(chosen_class_order(settings)),
        "held_out": settings.held_out,
        "image_size": settings.image_size,
        "network": resolved.network,
        "augmentation": resolved.augmentation,
        "precision": settings.precision,
        "path": settings.path,
        "deterministic": settings.deterministic,
    }
    for name in CHOICES:
        if (value := getattr(settings, name)) is not None:
            by_name[name] = content_identity(value) if name == "class_list" else value
    if (images := chosen_images_per_class(settings)) != "all":
        by_name["images_per_class"] = images
    if (answers := chosen_answers(settings)) == MERGED or (answers is not None and preset.named_by_data):
        by_name["answers"] = answers
    if settings.weights is not None:
        by_name["weights"] = weights_identity(settings.weights)
    if settings.input_size is not None:
        by_name["input_size"] = settings.input_size
    if settings.classifier != options(Settings)["classifier"].default:
        by_name["classifier"] = settings.classifier
    if settings.test_views != 1:
        by_name["test_views"] = settings.test_views
    if preset.named_by_data and settings.data is not None:
        by_name["data"] = str(Path(settings.data).expanduser().absolute())
    for stage in STAGES:
        by_name[stage] = _as_plain(getattr(resolved, stage))
    by_name["method_settings"] = _as_plain(resolved.method)
    return by_name


def _as_plain(instance: Any) -> dict[str, Any]:
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def class_order_identity(class_order: str) -> str:
    """Return what identifies a class order: its name, or a digest of the content of its file."""
    if class_order in NAMED_CLASS_ORDERS:
        return class_order
    return content_identity(class_order)


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences between two identities: dotted name -> (stored, wanted)."""
    old, new = flatten(_completed(stored)), flatten(_completed(wanted))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity, with the settings added that did not exist when it was written."""
    from efcil import methods

    known: dict[str, type] = dict.fromkeys(STAGES, Recipe)
    with contextlib.suppress(SettingsError):  # a method that no longer exists: nothing can be added
        known["method_settings"] = methods.get(str(stored.get("method")))
    parts = {name: completed(cls, stored[name]) for name, cls in known.items() if isinstance(stored.get(name), Mapping)}
    if "later" in parts and "method_settings" in parts:
        with contextlib.suppress(SettingsError):
            implied = recipe_as_implied(str(stored["method"]), str(stored["dataset"]), parts["method_settings"])
            parts["later"] |= {name: value for name, value in implied.items() if name not in stored["later"]}
    return {**stored, **parts}


def recipe_as_implied(method: str, preset: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of these fields of the later recipe for records from before the fields existed.

    Methods chose them then; now methods and the families of presets do. `values` are the method's settings.
    """
    from efcil import methods
    from efcil.presets import load_preset

    cls = methods.get(method)
    own = method_settings(cls, values)
    recipe = cls.recipe(own, load_preset(preset).later(cls.traits(own).family))
    return {"gradient_clip": recipe.gradient_clip, "normalisation": recipe.normalisation}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def pin(settings: Settings, stored: Mapping[str, Any], source: Path) -> Settings:
    """Return settings that give the identity `stored`, even if presets and defaults have changed since."""
    fields: dict[str, Any] = {}
    overrides = dict(settings.overrides)
    for name, (old, _) in differences(stored, identity(settings)).items():
        group, _, field = name.partition(".")
        if group in STAGES:
            overrides[name] = old
        elif group == "method_settings":
            overrides[field] = old
        elif name in ("network", "augmentation"):
            fields[name] = old
        elif name == "class_order" and settings.class_order is None and old in NAMED_CLASS_ORDERS:
            fields[name] = old  # the preset's at that time
        elif name == "answers" and settings.answers in (None, old or SEPARATE):
            fields[name] = old or SEPARATE
        elif name != "data":
            raise SettingsError(
                f"{source}: {name} was {show(old)} when this was written, but its settings no longer give that value. "
                "Restore the class order file it names, or remove the part called 'resolved'."
            )
    return replace(settings, **fields, overrides=overrides)

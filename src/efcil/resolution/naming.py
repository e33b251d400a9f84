"""Names of runs in folders and tables.

A name depends on the resolved settings, not on how they were written: `--epochs 100` is the plain run if the preset
says 100.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from efcil import presets
from efcil.resolution.data import CHOICES, content_identity
from efcil.resolution.resolve import resolve, typed_overrides
from efcil.settings.benchmark import CUSTOM, NAMED_CLASS_ORDERS, SEPARATE, Settings, custom_name
from efcil.settings.options import options, show

LONGEST_LABEL = 80
_FROM_PRESET = ("network", "augmentation", "epochs", "first_task_epochs", "batch_size", "recipe")


def scenario_name(settings: Settings) -> str:
    """Return the scenario's name in folders and tables, such as `cs10`, `custom-7-first-20` or `custom-of-50-5x10`."""
    if settings.scenario != CUSTOM:
        return settings.scenario
    return custom_name(settings.tasks, settings.first_task_classes, settings.sizes)


def label(settings: Settings, *, whole: bool = False) -> str:
    """Return the method's name in folders and tables: the plain name, plus everything that differs from the preset.

    Dataset, scenario and seed have their own places and do not appear; nor do settings that only say where or how
    safely a run is computed. (With `auto`, the device determines the precision: the report notes such seeds.)
    A name too long for a folder is shortened and ends in a digest, unless the `whole` name is asked for.
    """
    settings = _simplify(settings)
    defaults = {name: known.default for name, known in options(Settings).items()}
    parts = [f"{name}={show(value)}" for name, value in sorted(settings.overrides.items())]
    if presets.load_preset(settings.preset).named_by_data and settings.data is not None:
        parts.append(f"data={Path(settings.data).name}")
    if settings.weights is not None:
        parts.append(f"weights={Path(settings.weights).stem}{_digits(weights_identity(settings.weights))}")
    names = ("class_order", "class_seed", "held_out", "image_size", "input_size", "classifier", "test_views")
    for name in (*names, *_FROM_PRESET, "images_per_class", "answers", *CHOICES):
        value = getattr(settings, name)
        if value != defaults[name]:
            is_file = name == "class_order" and value not in NAMED_CLASS_ORDERS
            if name == "class_list":
                parts.append(f"{name}={Path(value).stem}{_digits(content_identity(value))}")
            else:
                parts.append(f"{name}={Path(value).stem if is_file else show(value)}")
    for name in ("precision", "path", "deterministic"):
        if getattr(settings, name) != defaults[name]:
            parts.append(f"{name}={show(getattr(settings, name))}")
    text = "+".join([settings.method, *map(_for_folders, parts)])
    if whole or len(text) <= LONGEST_LABEL:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return text[: LONGEST_LABEL - 9].rstrip("+=,.-") + "-" + digest


def weights_identity(weights: str) -> str:
    """Return what identifies a setting of weights: a digest of the file's content, or the word `none`."""
    path = Path(weights).expanduser()
    if not path.is_file():
        return weights
    from efcil.network.weights import digest  # files of weights are large; their digests are kept

    return f"sha256:{digest(path)}"


def _digits(identity: str) -> str:
    """Return the first digits of a digest, after a hyphen: files of different folders may share a name."""
    return f"-{identity.removeprefix('sha256:')[:8]}" if identity.startswith("sha256:") else ""


def _for_folders(part: str) -> str:
    """Return part of a label in characters that any folder's name may have; if any are lost, a digest is added.

    Spaces become hyphens without a digest, and the exponents of large numbers lose their plus: 1e+06 is 1e06.
    """
    part = re.sub(r"(?<=\de)\+(?=\d)", "", re.sub(r"\s+", "-", part))
    plain = re.sub(r"[^\w.=,-]+", "-", part, flags=re.ASCII)
    return plain if plain == part else f"{plain}-{hashlib.sha256(part.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _simplify(settings: Settings) -> Settings:
    """Drop, one after the other, the settings that repeat a default or the preset."""
    target = resolve(settings)
    typed = typed_overrides(settings, target)
    settings = replace(settings, overrides=typed)
    for name in typed:
        without = replace(settings, overrides={k: v for k, v in settings.overrides.items() if k != name})
        if resolve(without) == target:
            settings = without
    preset = presets.load_preset(settings.preset)
    if settings.class_order == preset.class_order:
        settings = replace(settings, class_order=None)
    if settings.images_per_class == preset.images_per_class:
        settings = replace(settings, images_per_class=None)
    # A folder's classes depend on whether answers are given at all: either of them says that it has domains.
    if settings.answers == (preset.answers or (None if preset.named_by_data else SEPARATE)):
        settings = replace(settings, answers=None)
    for name in (name for name in _FROM_PRESET if getattr(settings, name) is not None):
        open_again: dict[str, Any] = {name: None}
        without = replace(settings, **open_again)
        if resolve(without) == target:
            settings = without
    return settings

"""Checks every name in settings, before anything is trained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from efcil.errors import SettingsError, unknown
from efcil.resolution.data import chosen_class_order, source_options
from efcil.resolution.resolve import resolve, typed_overrides
from efcil.settings.benchmark import NAMED_CLASS_ORDERS, Settings
from efcil.settings.training import TrainingSettings

Given = TypeVar("Given", bound=TrainingSettings)


def validate(settings: Settings) -> Settings:
    """Check every name in the settings of a run; return them with the overrides converted to their types."""
    from efcil.data.scenario import SCENARIOS
    from efcil.data.sources import find_source

    source = find_source(settings.dataset)
    if settings.scenario not in SCENARIOS:
        raise unknown("scenario", settings.scenario, SCENARIOS)
    data = None if settings.data is None else Path(settings.data).expanduser()
    source.check(data, source_options(settings))
    order = chosen_class_order(settings)
    if order not in NAMED_CLASS_ORDERS and not Path(order).expanduser().is_file():
        problem = unknown("class order", order, NAMED_CLASS_ORDERS)
        raise SettingsError(f"{problem} It is not a file either.")
    return validate_training(settings)


def validate_training(settings: Given) -> Given:
    """Check every name in the settings of a model; return them with the overrides converted to their types."""
    from efcil import methods
    from efcil.core import classifiers
    from efcil.data.augment import AUGMENTATIONS
    from efcil.network import backbones

    if settings.network is not None:
        backbones.check_name(settings.network)
    elif settings.weights not in (None, backbones.NONE):
        raise SettingsError("Weights are those of a certain network: name it with --network, too.")
    if settings.augmentation is not None and settings.augmentation not in AUGMENTATIONS:
        raise unknown("augmentation", settings.augmentation, AUGMENTATIONS)
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", settings.device):
        raise unknown("device", settings.device, ("auto", "cpu", "cuda", "cuda:0"))
    resolved = resolve(settings)
    keeps = methods.get(settings.method).traits(resolved.method).keeps
    classifiers.check(settings.classifier, settings.method, keeps)
    return replace(settings, overrides=typed_overrides(settings, resolved))

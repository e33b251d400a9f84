"""Checks every name in settings, before anything is trained."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from efcil.errors import EfcilError, Mistakes, SettingsError, unknown
from efcil.resolution.data import source_options
from efcil.resolution.resolve import Resolved, resolve, typed_overrides
from efcil.settings.benchmark import NAMED_CLASS_ORDERS, Settings
from efcil.settings.training import TrainingSettings

Given = TypeVar("Given", bound=TrainingSettings)


def validate(settings: Settings) -> Settings:
    """Check every name in the settings of a run; return them with the overrides converted to their types."""
    from efcil import methods
    from efcil.data.scenario import SCENARIOS
    from efcil.data.sources import find_source

    found = Mistakes()
    source = None
    with found.caught():
        source = find_source(settings.dataset)
        source.check(None if settings.data is None else Path(settings.data).expanduser(), source_options(settings))
    with found.caught():
        if settings.scenario not in SCENARIOS:
            raise SettingsError(
                f"{unknown('scenario', settings.scenario, SCENARIOS)} Any other one is described by --tasks (with "
                "--first-task-classes) or --task-sizes."
            )
    with found.caught():
        order = settings.class_order
        if order is not None and order not in NAMED_CLASS_ORDERS and not Path(order).expanduser().is_file():
            problem = unknown("class order", order, NAMED_CLASS_ORDERS)
            raise SettingsError(f"{problem} It is not a file either.")
    if source is None:
        with found.caught():
            methods.get(settings.method)
        found.refuse()  # without a dataset there are no defaults to complete the rest with
    checked = settings
    with found.caught():
        checked = validate_training(settings)
    found.refuse()
    return checked


def validate_training(settings: Given) -> Given:
    """Check every name in the settings of a model; return them with the overrides converted to their types."""
    from efcil import methods
    from efcil.core import classifiers
    from efcil.data.augment import AUGMENTATIONS
    from efcil.network import backbones

    found = Mistakes()
    with found.caught():
        if settings.network is not None:
            backbones.check_name(settings.network)
        elif settings.weights not in (None, backbones.NONE):
            raise SettingsError("Weights are those of a certain network: name it with --network, too.")
    with found.caught():
        if settings.augmentation is not None and settings.augmentation not in AUGMENTATIONS:
            raise unknown("augmentation", settings.augmentation, AUGMENTATIONS)
    with found.caught():
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", settings.device):
            raise unknown("device", settings.device, ("auto", "cpu", "cuda", "cuda:0"))
    if found:
        settings = replace(settings, network=None, weights=None, augmentation=None)  # what is wrong is known
    with found.caught():
        resolved = _resolved(settings)
        keeps = methods.get(settings.method).traits(resolved.method).keeps
        classifiers.check(settings.classifier, settings.method, keeps)
    found.refuse()
    return replace(settings, overrides=typed_overrides(settings, resolved))


def _resolved(settings: TrainingSettings) -> Resolved:
    """Return what the settings come to; where overrides are wrong, the error names each of them."""
    try:
        return resolve(settings)
    except EfcilError as error:
        found = Mistakes()
        for name, value in settings.overrides.items():
            with found.caught():
                resolve(replace(settings, overrides={name: value}))
        if str(error) not in map(str, found.errors):
            found.add(error)
        found.refuse()
        raise

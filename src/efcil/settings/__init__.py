"""The settings of a model or a run. One typed definition gives the flags, the YAML files and the documentation.

Nothing here knows of methods, presets or datasets: `efcil.resolution` resolves settings.
"""

from __future__ import annotations

from efcil.settings.benchmark import NAMED_CLASS_ORDERS, Settings
from efcil.settings.options import Option, coerce, completed, method_settings, option, options
from efcil.settings.recipe import STAGES, Recipe
from efcil.settings.training import TrainingSettings

__all__ = [
    "NAMED_CLASS_ORDERS",
    "STAGES",
    "Option",
    "Recipe",
    "Settings",
    "TrainingSettings",
    "coerce",
    "completed",
    "method_settings",
    "option",
    "options",
]

"""What a run or a model is described by. One typed definition gives the flags, the YAML files and the documentation.

Nothing here knows of methods, presets or datasets: what settings come to is the business of `efcil.resolution`.
"""

from __future__ import annotations

from efcil.settings.benchmark import NAMED_CLASS_ORDERS, Recipe, Settings
from efcil.settings.options import Option, coerce, completed, method_settings, option, options

__all__ = [
    "NAMED_CLASS_ORDERS",
    "Option",
    "Recipe",
    "Settings",
    "coerce",
    "completed",
    "method_settings",
    "option",
    "options",
]

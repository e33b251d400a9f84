"""What a run is. One typed definition gives the flags, the YAML files and the documentation."""

from __future__ import annotations

from efcil.settings.grid import GRID_FIELDS, expand, load_config, read_config, to_yaml
from efcil.settings.model import NAMED_CLASS_ORDERS, Recipe, Settings
from efcil.settings.options import Option, coerce, completed, method_settings, option, options
from efcil.settings.resolution import Resolved, identity, label, resolve, scenario_name, validate

__all__ = [
    "GRID_FIELDS",
    "NAMED_CLASS_ORDERS",
    "Option",
    "Recipe",
    "Resolved",
    "Settings",
    "coerce",
    "completed",
    "documentation",
    "expand",
    "identity",
    "label",
    "load_config",
    "method_settings",
    "option",
    "options",
    "read_config",
    "resolve",
    "scenario_name",
    "to_yaml",
    "validate",
]


def documentation() -> str:
    """Return the text of docs/settings.md, made from the definitions."""
    from efcil.settings.documentation import documentation as write

    return write()

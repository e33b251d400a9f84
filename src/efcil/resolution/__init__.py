"""What settings come to: defaults filled in, names checked, folders named, runs told apart, YAML read and written."""

from __future__ import annotations

from efcil.resolution.config import GRID_FIELDS, expand, load_config, read_config, to_yaml
from efcil.resolution.resolve import Resolved, identity, label, resolve, scenario_name, validate

__all__ = [
    "GRID_FIELDS",
    "Resolved",
    "expand",
    "identity",
    "label",
    "load_config",
    "read_config",
    "resolve",
    "scenario_name",
    "to_yaml",
    "validate",
]

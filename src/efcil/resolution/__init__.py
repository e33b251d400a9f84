"""Resolving settings: defaults filled in, names checked, runs named and identified, YAML read and written."""

from __future__ import annotations

from efcil.resolution.config import GRID_FIELDS, expand, load_config, read_config, to_yaml
from efcil.resolution.data import chosen_answers, chosen_class_order, load_images, source_options
from efcil.resolution.identity import differences, identity, pin
from efcil.resolution.naming import label, scenario_name
from efcil.resolution.resolve import Resolved, resolve, split_overrides
from efcil.resolution.validation import validate, validate_training

__all__ = [
    "GRID_FIELDS",
    "Resolved",
    "chosen_answers",
    "chosen_class_order",
    "differences",
    "expand",
    "identity",
    "label",
    "load_config",
    "load_images",
    "pin",
    "read_config",
    "resolve",
    "scenario_name",
    "source_options",
    "split_overrides",
    "to_yaml",
    "validate",
    "validate_training",
]

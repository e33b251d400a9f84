"""The studies of the EFC paper: which runs its tables and figures need, how long they take, and what they show."""

from __future__ import annotations

from efcil.studies.study import Cell, Reading, Study, Variant, load, names

__all__ = ["Cell", "Reading", "Study", "Variant", "load", "names"]

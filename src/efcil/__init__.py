"""Exemplar-free class-incremental learning: Elastic Feature Consolidation and the methods it is compared with."""

from __future__ import annotations

__version__ = "0.1.0"

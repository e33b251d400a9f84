"""Models of one's own images: learned visit by visit, kept in a folder, used, exported and audited."""

from __future__ import annotations

from efcil.model.card import Card, LearnedClass, ModelError, Visit
from efcil.model.in_memory import Model

__all__ = ["Card", "LearnedClass", "Model", "ModelError", "Visit"]

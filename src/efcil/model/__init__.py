"""Models of a user's own images: learned task by task, stored in a folder, used, exported and audited."""

from __future__ import annotations

from efcil.model.card import Card, LearnedClass, ModelError, Visit
from efcil.model.in_memory import Model

__all__ = ["Card", "LearnedClass", "Model", "ModelError", "Visit"]

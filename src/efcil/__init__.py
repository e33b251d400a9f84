"""Exemplar-free class-incremental learning: Elastic Feature Consolidation and the methods it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efcil.classifier import IncrementalClassifier

__version__ = "0.3.0"
__all__ = ["IncrementalClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on demand: it needs torch, and without it the command line reports mistakes faster.
    if name == "IncrementalClassifier":
        from efcil.classifier import IncrementalClassifier

        return IncrementalClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Watching runs from outside: what their folders say, without the training process and without torch."""

from __future__ import annotations

from efcil.watching.planned import planned
from efcil.watching.reading import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, Seen, Watched, Watcher

__all__ = ["FAILED", "FINISHED", "INTERRUPTED", "RUNNING", "WAITING", "Seen", "Watched", "Watcher", "planned"]

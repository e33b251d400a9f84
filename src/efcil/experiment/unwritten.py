"""The folder of a run as all its processes but the first one see it: they write nothing."""

from __future__ import annotations

from typing import Any

from efcil.runfolder import RunFolder


class UnwrittenFolder(RunFolder):
    """Leaves all writing to the first process of a run."""

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read nothing: only the first process uses what is there."""
        return []

    def append_metrics(self, values: Any) -> None:
        """Write nothing."""

    def truncate_metrics(self, keep: Any) -> None:
        """Write nothing."""

    def write_accuracy(self, agnostic: Any, aware: Any, task_sizes: Any) -> None:
        """Write nothing."""

    def write_probes(self, measured: Any, names: Any) -> None:
        """Write nothing."""

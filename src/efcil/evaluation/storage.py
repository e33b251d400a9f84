"""What finished runs store, read from their summaries: for accuracy against bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTES_OF_A_WEIGHT = 4


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that a method keeps between tasks: its network with all heads, and everything besides."""

    network: int
    statistics: int

    @property
    def total(self) -> int:
        """Network and statistics together."""
        return self.network + self.statistics


@dataclass(frozen=True)
class StoragePoint:
    """A run in a plot of accuracy (percent, NaN if not measured) against bytes."""

    label: str
    seed: int
    stored: StoredBytes
    accuracy: float


def stored_bytes(summary: Mapping[str, Any]) -> StoredBytes | None:
    """Return what the run of a summary stores, None if its summary does not say.

    Summaries of earlier versions have the parameters of the network alone; those count four bytes each, so that the
    statistics of BatchNorm are missing: less than a tenth of a percent of a ResNet-18.
    """
    stored = summary.get("stored")
    if not isinstance(stored, Mapping):
        return None
    network, parameters = stored.get("network"), _count(summary.get("parameters"))
    own = _count(network.get("bytes")) if isinstance(network, Mapping) else None
    if own is None and parameters is not None:
        own = _BYTES_OF_A_WEIGHT * parameters
    besides = _count(stored.get("bytes"))
    return None if own is None or besides is None else StoredBytes(own, besides)


def accuracy_against_bytes(summaries: Iterable[Mapping[str, Any]], metric: str = "A_inc") -> list[StoragePoint]:
    """Return a point for every summary that says what its run stores, in the order given."""
    points = []
    for summary in summaries:
        stored, value = stored_bytes(summary), summary.get(metric)
        if stored is not None:
            accuracy = float(value) if isinstance(value, int | float) else math.nan
            points.append(StoragePoint(str(summary["label"]), int(summary["seed"]), stored, accuracy))
    return points


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

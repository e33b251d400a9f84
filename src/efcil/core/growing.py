"""Rows that come piece by piece, in one tensor.

Many small tensors, each made between the activations of two batches and kept, leave holes in the memory of a CPU that
the next activations do not fit into: a process then takes twice the memory it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingRows:
    """A tensor (count, ...) that rows are added to; its memory doubles when it is full."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add rows (n, ...) at the end."""
        stop = self.count + len(rows)
        if self._rows is None:
            self._rows = rows.new_empty(max(1, len(rows)), *rows.shape[1:])
        while len(self._rows) < stop:
            self._rows = torch.cat([self._rows, torch.empty_like(self._rows)])
        self._rows[self.count : stop] = rows
        self.count = stop

    @property
    def tensor(self) -> Tensor:
        """All rows so far."""
        assert self._rows is not None, "no rows were added"
        return self._rows[: self.count]

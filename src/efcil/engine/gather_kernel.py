"""The parts of one step's batch, copied out of a block by one Triton kernel. See engine/feed.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
WORD = 4


class Part(NamedTuple):
    """Rows of a block that a step reads, from row `place * stride + first` on, and where they are copied to.

    The rows of `target` are laid out as those of `source`, one after the other.
    """

    source: Tensor
    target: Tensor
    stride: int
    first: int

    def in_words(self) -> bool:
        """Return whether the rows can be copied as whole words."""
        one = self.source[0].numel()
        aligned = all(x.data_ptr() % WORD == 0 for x in (self.source, self.target))
        return aligned and self.source.stride(0) == one and one * self.source.element_size() % WORD == 0

    def numbers(self) -> list[int]:
        """Return addresses, and lengths in words: of a step, before the first row, and of all rows."""
        words = self.source[0].numel() * self.source.element_size() // WORD
        lengths = [self.stride * words, self.first * words, len(self.target) * words]
        return [self.source.data_ptr(), self.target.data_ptr(), *lengths]

    def copy(self, place: Tensor) -> None:
        """Copy the rows with PyTorch's operations."""
        rows = torch.arange(self.first, self.first + len(self.target), device=place.device) + place * self.stride
        self.target.copy_(self.source.index_select(0, rows))


@triton.jit
def _gather(table, place, BLOCK: tl.constexpr):
    row = table + tl.program_id(1) * 5
    count = tl.load(row + 4)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    source = tl.load(row).to(tl.pointer_type(tl.int32))
    target = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    start = tl.load(place) * tl.load(row + 2) + tl.load(row + 3)
    tl.store(target + offset, tl.load(source + start + offset, inside), inside)


class Gathering:
    """Copies parts of a block, always from and to the same memory, for the step whose number is on the device."""

    def __init__(self, parts: list[Part]) -> None:
        self.odd = [part for part in parts if not part.in_words()]
        self.parts = [part for part in parts if part.in_words()]
        numbers = [part.numbers() for part in self.parts]
        self.table = torch.tensor(numbers, dtype=torch.int64).to(parts[0].source.device)
        self.grid = (triton.cdiv(max((row[4] for row in numbers), default=0), _BLOCK), len(numbers))

    def run(self, place: Tensor) -> None:
        """Copy the parts of step `place`, a tensor of one int64."""
        if self.parts:
            _gather[self.grid](self.table, place, _BLOCK, num_warps=4)
        for part in self.odd:
            part.copy(place)

"""Images that are decoded when a task needs them, not before: datasets whose decoded images would fill a disk.

Only the current task is ever decoded. Two views of an image can be had. `np.asarray(images)` gives the test view: the
shorter side resized to 8/7 of the size of the input (256 for 224) and a square cut out of the centre. `whole()` gives
the whole images, from which random crops are cut; only those with a shorter side beyond a bound are shrunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from efcil import ranks
from efcil.activity import between_pieces, doing
from efcil.data.ahead import Ahead, chunks
from efcil.data.decode import Bound, Encoded, Fit, decode_into

#: Whole images decoded together before they are handed on, so that few of them are in memory twice.
PIECE_IMAGES = 1024
#: Most photographs of ImageNet are smaller (their usual shape is 500 x 375), so that they stay as they are.
STORED_SIDE = 512


class Supply(Protocol):
    """Compressed images, read in the order in which that is fast."""

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[Encoded]]]:
        """Yield the images called `rows` in pieces: the places in `rows` of some of them, and their contents."""


@dataclass(frozen=True)
class FileSupply:
    """Images that are single files."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[Encoded]]]:
        """Yield the files in pieces; they are opened by whoever decodes them."""
        for start in range(0, len(rows), PIECE_IMAGES):
            places = np.arange(start, min(start + PIECE_IMAGES, len(rows)))
            yield places, [Encoded(self.paths[row], str(self.paths[row])) for row in rows[places]]


@dataclass(frozen=True)
class Shapes:
    """What decoded images look like: the side of the input, and the largest shorter side of whole images."""

    size: int
    stored_side: int = STORED_SIDE
    enlarge: bool = False  # whole images that are smaller are enlarged to that

    @property
    def short_side(self) -> int:
        """The shorter side from which the test view is cut: 256 for 224."""
        return round(self.size * 256 / 224)

    @property
    def view(self) -> Fit:
        """How the test view is decoded."""
        return Fit(self.size, resize=True, short_side=self.short_side)


@dataclass(frozen=True, eq=False)
class DeferredImages:
    """Images of a dataset that look like a uint8 array of N x size x size x 3, but are decoded when they are read.

    A number gives one decoded image; a list of rows or a mask gives the same kind of object for fewer images. Where
    `ahead` is decoding the very images that are asked for, they are taken from there.
    """

    supply: Supply
    shapes: Shapes
    rows: np.ndarray
    workers: int | None = field(default=None, repr=False)
    ahead: Ahead | None = field(default=None, repr=False)

    @classmethod
    def of(cls, supply: Supply, shapes: Shapes, workers: int | None = None) -> DeferredImages:
        """Return all images of a supply."""
        return cls(supply, shapes, np.arange(len(supply)), workers)

    @property
    def dtype(self) -> np.dtype:
        """The type of the pixels."""
        return np.dtype(np.uint8)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the decoded test views."""
        return len(self.rows), self.shapes.size, self.shapes.size, 3

    @cached_property
    def description(self) -> str:
        """What distinguishes these images from squares of the same size."""
        return f"whole images, shorter side {'' if self.shapes.enlarge else 'at most '}{self.shapes.stored_side}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            return np.asarray(self[[int(index)]])[0]
        if isinstance(index, list):
            index = np.asarray(index, np.int64)
        return replace(self, rows=self.rows[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Decode the test views."""
        found = np.empty(self.shape, np.uint8)
        for places, piece in self.views():
            found[places] = piece
        return found if dtype is None else found.astype(dtype, copy=False)

    def share(self) -> tuple[np.ndarray, DeferredImages]:
        """Return the images that this process decodes for its machine, on its part of the cores, and their places.

        Neighbours in the dataset stay together: those that are stored together are read once.
        """
        size = len(ranks.mates())
        if size == 1:
            return np.arange(len(self)), self
        mine = np.sort(np.argsort(self.rows, kind="stable")[ranks.part(len(self))])
        return mine, replace(self[mine], workers=max(1, (self.workers or os.cpu_count() or 1) // size))

    def views(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the test views in pieces: the places of some of them, and their pixels (count x size x size x 3)."""
        return self._pieces(whole=False)

    def whole(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yield the whole images in pieces: the places of some of them, and their pixels (height x width x 3 each)."""
        return self._pieces(whole=True)

    def decoded(self, encoded: Sequence[Encoded], whole: bool) -> Any:
        """Return the pixels of some images: a list of whole ones, or an array of test views."""
        # Processes end together: not here, where each has its own number of pieces (together.py).
        with between_pieces(None) if ranks.several() else nullcontext():
            return self._decoded(encoded, whole)

    def _decoded(self, encoded: Sequence[Encoded], whole: bool) -> Any:
        if whole:
            pixels = [np.empty(0, np.uint8)] * len(encoded)
            decode_into(pixels, encoded, Bound(self.shapes.stored_side, self.shapes.enlarge), self.workers)
            return pixels
        piece = np.empty((len(encoded), *self.shape[1:]), np.uint8)
        decode_into(piece, encoded, self.shapes.view, self.workers)
        return piece

    @property
    def held(self) -> int:
        """The bytes of images that are decoded already and wait in host memory."""
        return 0 if self.ahead is None else self.ahead.held

    def _pieces(self, whole: bool) -> Iterator[tuple[np.ndarray, Any]]:
        with doing("images", len(self)) as work:
            if self.ahead is not None and self.ahead.serves(self, whole):
                found = self.ahead.pieces()
            else:
                read = self.supply.read(self.rows)
                # Processes wait for each other after every piece.
                read = chunks(read) if ranks.several() else read
                found = ((places, self.decoded(some, whole)) for places, some in read)
            for places, pixels in found:
                work.done += len(places)
                yield places, pixels

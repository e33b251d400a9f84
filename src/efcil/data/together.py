"""Images that the processes of one machine bring together: each brings its part, and all have all of them.

They work in rounds. In a round every process decodes one piece and says how large it is. Then all know the place of
each piece, and whether one of them has failed or was asked to stop: they end together, and the first one says why. A
single process does the same, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from efcil import ranks
from efcil.activity import next_piece
from efcil.errors import DataError

Pixels = TypeVar("Pixels", np.ndarray, list[np.ndarray])
Places = TypeVar("Places")


def bring(
    pieces: Iterator[tuple[Places, Pixels]],
    keep: Callable[[Places, Pixels, int], None],
    reserve: Callable[[Sequence[int], Sequence[int]], int] = lambda images, sizes: 0,
) -> None:
    """Keep all pieces of this process: their places, their images, and what `reserve` has returned for them.

    `reserve` gets the images and bytes of the pieces of all processes, in all of them, in every round. When this
    returns, all processes have kept all of theirs.
    """
    waiting: tuple[Places, Pixels, int] | None = None
    while True:
        next_piece()
        error: DataError | None = None
        piece: tuple[Places, Pixels] | None = None
        try:
            if waiting is not None:
                keep(*waiting)
            waiting = None  # frees its images
            piece = next(pieces, None)
        except DataError as failure:
            error = failure
        # Fewer images than none: it has failed.
        own = [-1, 0] if error is not None else [0, 0] if piece is None else [len(piece[1]), size_of(piece[1])]
        images, sizes = ranks.gather(torch.tensor(own)).T.tolist()
        if min(images) < 0:
            ranks.fail_together(error)
        if max(images) == 0:
            return
        start = reserve(images, sizes)
        waiting = None if piece is None else (piece[0], piece[1], start)


def size_of(pixels: np.ndarray | list[np.ndarray]) -> int:
    """Return the bytes of some images: one array, or one for each."""
    return sum(each.nbytes for each in pixels) if isinstance(pixels, list) else int(pixels.nbytes)

"""Images of the next task, decoded by threads while the present task trains.

What is decoded is what would be decoded later, in the same order: results do not depend on it. The images wait in host
memory, within a bound that is known before; what does not fit, or is not ready, is decoded when the task begins. Of
several processes on a machine, each decodes its part.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event, Thread, get_native_id
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from efcil import ranks
from efcil.data.decode import Encoded
from efcil.data.tiers import DISK, SPARE, Keeping, Kept, gibibytes
from efcil.data.together import size_of

if TYPE_CHECKING:
    from efcil.data.deferred import DeferredImages

OFF = "off"
#: Images decoded between two looks at whether to stop: few, as the next task, or the end of the run, waits for them.
CHUNK_IMAGES = 256
#: How many times as large the images of the next task may be, each, as those of the present one.
MARGIN = 1.25
#: One thread for so many cores: they take the lock of the interpreter from training, which must start the GPU's work.
SHARE_OF_CORES = 8
_NICENESS = 10

Chunk = tuple[np.ndarray, list[Encoded]]


def chunks(pieces: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield what a supply reads in smaller pieces, in the same order."""
    for places, encoded in pieces:
        for start in range(0, len(places), CHUNK_IMAGES):
            yield places[start : start + CHUNK_IMAGES], encoded[start : start + CHUNK_IMAGES]


def most_bytes(kept: Kept, count: int) -> int:
    """Return the bytes that `count` images of the next task may take, from those of the present one."""
    return int(MARGIN * kept.bytes * count / max(kept.count, 1))


def has_room(keeping: Keeping, kept: Kept, most: int) -> bool:
    """Return whether the host has room for images of the next task beside all that is there."""
    if kept.tier == DISK:  # not even those of this task fit in memory
        return False
    free = keeping.measure(kept.device).host
    # They are in memory twice for a moment, when they are put where they are kept.
    return free is None or 2 * most <= (1 - SPARE) * free


def still_has_room(keeping: Keeping, most: int) -> bool:
    """Return whether decoding may continue: other programs, or other runs, may have taken the memory meanwhile."""
    free = keeping.measure(torch.device("cpu")).host  # asks no GPU, whose work may be being captured
    return free is None or most <= free


def sentence(most: int) -> str:
    """Return one line for the user: `most` is the bound of every process."""
    return (
        "While a task trains, the images of the next one are decoded. They take at most "
        f"{gibibytes(most * ranks.place().local_size)} of host memory on top."
    )


@dataclass(eq=False)
class Ahead:
    """The decoded images of a task that comes later: `most` bytes of them at most, whole ones or test views.

    `room` is asked again and again; if it says no, the rest is left for later.
    """

    images: DeferredImages
    whole: bool
    most: int
    room: Callable[[], bool] = lambda: True
    _bytes: int = field(default=0, init=False)
    _decoded: deque[tuple[np.ndarray, Any]] = field(default_factory=deque, init=False)
    _again: Chunk | None = field(default=None, init=False)
    _error: Exception | None = field(default=None, init=False)
    _stop: Event = field(default_factory=Event, init=False)

    def __post_init__(self) -> None:
        self._chunks = chunks(self.images.supply.read(self.images.rows))
        self._thread = Thread(target=self._work, name="efcil-ahead", daemon=True)

    def start(self) -> Ahead:
        """Begin to decode."""
        self._thread.start()
        return self

    @property
    def held(self) -> int:
        """The bytes that decoded images take now."""
        return self._bytes

    def serves(self, images: DeferredImages, whole: bool) -> bool:
        """Return whether these very images are being decoded."""
        mine = self.images
        return (
            self.whole is whole
            and mine.supply is images.supply
            and mine.shapes == images.shapes
            and np.array_equal(mine.rows, images.rows)
        )

    def pieces(self) -> Iterator[tuple[np.ndarray, Any]]:
        """Stop the threads; yield what is decoded, which is then forgotten, and decode the rest."""
        self._finish()
        while self._decoded:
            places, pixels = self._decoded.popleft()
            self._bytes -= size_of(pixels)
            yield places, pixels
        if self._error is not None:
            raise self._error
        if self._again is not None:  # an error is then the one that it would be without all this
            places, encoded = self._again
            yield places, self.images.decoded(encoded, self.whole)
        for places, encoded in self._chunks:
            yield places, self.images.decoded(encoded, self.whole)

    def cancel(self) -> None:
        """Stop the threads and forget everything."""
        self._finish()
        self._decoded.clear()
        self._bytes = 0

    def wait(self) -> None:
        """Wait until all is decoded, or as much as there is room for."""
        self._thread.join()

    def _finish(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        _step_back()
        few = replace(self.images, workers=fewer(self.images.workers))
        largest = 0
        while not self._stop.is_set() and self._bytes + largest <= self.most and self.room():
            try:
                chunk = next(self._chunks, None)
            except Exception as error:
                self._error = error
                return
            if chunk is None:
                return
            try:
                pixels = few.decoded(chunk[1], self.whole)
                size = size_of(pixels)
            except Exception:
                size = self.most + 1
            if self._bytes + size > self.most:
                self._again = chunk
                return
            self._decoded.append((chunk[0], pixels))
            self._bytes += size
            largest = max(largest, size)


def fewer(workers: int | None) -> int:
    """Return with how many threads to decode beside training."""
    cores = (os.cpu_count() or 1) // ranks.place().local_size
    return max(1, min(workers or sys.maxsize, cores // SHARE_OF_CORES))


def _step_back() -> None:
    """Let training go first where both want a processor core; threads that this one starts do the same."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)

"""One worker that scores what waits: requests that come at the same time share a batch.

A network in evaluation mode treats every image by itself, so that an answer does not depend on its neighbours but for
the rounding of sums. Every request gets the rows of its own images, and the model that gave them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from efcil.serve.answering import Scored, score
from efcil.serve.keeper import Loaded
from efcil.serve.metrics import Metrics
from efcil.serve.refusal import Refused


class Outdated(Exception):
    """The images were prepared for a model that sees another size; they must be prepared again."""


@dataclass(frozen=True)
class Answered:
    """The rows of one request, and the model that gave them."""

    loaded: Loaded
    scored: Scored


@dataclass(frozen=True)
class _Waiting:
    pixels: np.ndarray
    answer: Future[Answered]


class Batcher:
    """Scores images in a thread of its own. The model is chosen anew for every batch, and never within one."""

    def __init__(self, current: Callable[[], Loaded | None], most: int, metrics: Metrics) -> None:
        self._current = current
        self._most = most
        self._metrics = metrics
        self._queue: deque[_Waiting] = deque()
        self._images = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="efcil-scores", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many images wait."""
        return self._images

    def submit(self, pixels: np.ndarray) -> Future[Answered]:
        """Let images wait for their batch; raise where too many wait already."""
        entry = _Waiting(pixels, Future())
        with self._changed:
            if self._closed:
                raise Refused(503, "The server is stopping.")
            if self._images and self._images + len(pixels) > self._most:
                raise Refused(
                    503,
                    f"{self._images} images wait to be scored already. Ask again in a moment.",
                    {"Retry-After": "1"},
                )
            self._queue.append(entry)
            self._images += len(pixels)
            self._changed.notify()
        return entry.answer

    def close(self) -> None:
        """Score what waits, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                loaded = self._current()
                batch = self._taken(1 if loaded is None else loaded.model.piece)
            self._answer(loaded, [each for each in batch if each.answer.set_running_or_notify_cancel()])

    def _taken(self, most: int) -> list[_Waiting]:
        """Take what fits into a piece from the queue, at least one request."""
        batch = [self._queue.popleft()]
        count = len(batch[0].pixels)
        while self._queue and count + len(self._queue[0].pixels) <= most:
            batch.append(self._queue.popleft())
            count += len(batch[-1].pixels)
        self._images -= count
        return batch

    def _answer(self, loaded: Loaded | None, batch: list[_Waiting]) -> None:
        size = None if loaded is None else loaded.model.card.image_size
        fitting = [each for each in batch if each.pixels.shape[1] == size]
        for each in batch:
            if each.pixels.shape[1] != size:
                each.answer.set_exception(Outdated())
        if loaded is None or not fitting:
            return
        try:
            self._score(loaded, fitting)
        except Exception as error:  # whatever happens to a batch, the worker must answer the next one
            for each in fitting:
                each.answer.set_exception(error)

    def _score(self, loaded: Loaded, batch: list[_Waiting]) -> None:
        start = time.perf_counter()
        scored = score(loaded.model, np.concatenate([each.pixels for each in batch]))
        self._metrics.prediction.add(time.perf_counter() - start)
        self._metrics.batch.add(len(scored.probabilities))
        self._metrics.images.add(len(scored.probabilities))
        place = 0
        for each in batch:
            stop = place + len(each.pixels)
            each.answer.set_result(Answered(loaded, scored.part(place, stop)))
            place = stop
